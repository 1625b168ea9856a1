//! Which socket of a SO_REUSEPORT group gets a datagram.
//!
//! By default the kernel hashes the 4-tuple, so that packets that all have the same one meet one socket however many there
//! are. A [`Group`] is opened with a [`Spread`] that is attached once, before the first packet can come.

mod classic;
mod error;
mod group;
mod selector;

pub use error::SpreadError;
pub use group::Group;
pub use selector::{Key, Spread, SpreadTextError};
