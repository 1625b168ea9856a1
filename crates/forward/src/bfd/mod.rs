//! Bidirectional Forwarding Detection (RFC 5880, over UDP: RFC 5881), asynchronous mode.
//!
//! A [`Session`] is a state machine without a clock or a socket. A [`Demultiplexer`] selects the session for a packet. A
//! [`Link`] runs a session on its own thread: only this thread transmits, and data planes pass received packets to the link and
//! read its state.

mod link;
mod packet;
mod port;
mod session;

pub use link::{Link, LinkError, LinkReport, LinkSettings, LinkState, Receive};
pub use packet::{Demultiplexer, Diagnostic, Discard, Discards, LENGTH, Packet, State};
pub use port::{Inbox, PORT, Port};
pub(crate) use session::SavedState;
pub use session::{Action, Session, Settings, Timers, TimersError};
