//! Flags for the fields that are set in the settings of a tracing program. The same numbers are in `counting.h`.

pub(crate) const HAS_PROCESS: u32 = 1;
pub(crate) const HAS_NAME: u32 = 2;
pub(crate) const HAS_ADDRESS: u32 = 4;
pub(crate) const HAS_PORT: u32 = 8;
pub(crate) const HAS_CGROUP: u32 = 16;
pub(crate) const HAS_NETWORK: u32 = 32;

/// Returns the flag if its field is set, otherwise 0.
pub(crate) fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}
