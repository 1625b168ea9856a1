use crate::dial::strategy::step::Step;
use crate::ports::PortRange;

/// Searches a window of all ports once. The kernel clamps the window to the range of the namespace, and searches any window port by
/// port (`inet_sk_get_local_port_range`, Linux 6.8).
pub(super) fn step(tried: u32) -> Option<Step> {
    (tried == 0).then_some(Step::Window(PortRange::ALL))
}
