//! Bidirectional Forwarding Detection (RFC 5880, over UDP: RFC 5881), asynchronous mode.
//!
//! A [`Session`] is a state machine without a clock or a socket. A [`Demultiplexer`] selects the session for a packet. A
//! [`Link`] runs a session on its own thread: only this thread transmits, and data planes pass received packets to the link and
//! read its state.

mod demultiplexer;
mod discard;
mod error;
mod inbox;
mod link;
mod packet;
mod poll_sequence;
mod port;
mod session;
mod sockets;
mod state;
mod task;
mod timers;

pub use demultiplexer::Demultiplexer;
pub use discard::{Discard, Discards};
pub use error::LinkError;
pub use inbox::Inbox;
pub use link::{Link, LinkSettings, Receive};
pub use packet::{Diagnostic, LENGTH, Packet, State};
pub use port::Port;
pub(crate) use session::SavedState;
pub use session::{Action, Session, Settings};
pub use sockets::PORT;
pub use state::{LinkReport, LinkState};
pub use timers::{Timers, TimersError};
