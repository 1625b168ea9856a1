//! Distribution of datagrams over the sockets of a SO_REUSEPORT group.
//!
//! By default the kernel hashes the 4-tuple, so that all packets with the same 4-tuple reach one socket. A [`UdpGroup`] is opened with
//! a [`Selector`], which is attached before the first packet can arrive. Under traffic, only the table of [`Selector::Map`] changes. A
//! [`ControlFilter`] delivers control packets to a separate socket, so that they do not wait behind data. Example: [`UdpGroup`].
//!
//! A member leaves in three steps, so that no packet is lost: its slots move to other members, the library waits for packets in flight,
//! and the caller reads the receive queue until it is empty.

mod control;
mod error;
mod group;
mod programs;
mod selector;

pub use control::{ControlFilter, ControlFilterParseError};
pub use error::UdpGroupError;
pub use group::{UdpGroup, XdpReport};
pub use selector::{CpuOrder, DeviceName, DeviceNameError, FlowKey, Selector, SelectorParseError, SlotRule};
