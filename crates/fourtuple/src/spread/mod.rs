//! Which socket of a SO_REUSEPORT group gets a datagram.
//!
//! By default the kernel hashes the 4-tuple, so that packets that all have the same one meet one socket however many there
//! are. A [`Group`] is opened with a [`Spread`] that is attached once, before the first packet can come; what is to be changed
//! under traffic is changed in the table of [`Spread::Map`]. A [`ControlFilter`] keeps control packets from waiting behind data.

mod adopt;
mod classic;
mod control;
mod device;
mod error;
mod group;
mod key;
#[cfg(feature = "bpf")]
mod programs;
#[cfg(not(feature = "bpf"))]
#[path = "programs_absent.rs"]
mod programs;
mod selector;
mod table;

pub use control::{ControlFilter, ControlTextError};
pub use device::{Device, DeviceNameError};
pub use error::SpreadError;
pub use group::{AtDevice, Group};
pub use key::Key;
pub use selector::{Order, Rule, Spread, SpreadTextError};
