use crate::ports::PortRange;

/// The next attempt of a dial to get a source port.
///
/// Example: [`Strategy`](super::Strategy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// connect() searches the range of the namespace, ports of one parity first, then ports of the other parity.
    Search,
    /// connect() searches this window (IP_LOCAL_PORT_RANGE); since Linux 6.8 port by port.
    Window(PortRange),
    /// bind() to this port with SO_REUSEADDR, then connect().
    Bind(u16),
}
