//! Bidirectional Forwarding Detection (RFC 5880, over UDP: RFC 5881), asynchronous mode.
//!
//! A [`Session`] is a state machine without a clock and without a socket; a [`Demultiplexer`] says which session a packet
//! is for. [`Link`](link::Link) is a session that one thread owns: it alone transmits, and data planes hand it what they
//! receive and read its state.

mod demultiplexer;
mod discard;
mod packet;
mod poll_sequence;
mod session;
mod timers;

pub use demultiplexer::Demultiplexer;
pub use discard::{Discard, Discards};
pub use packet::{Diagnostic, LENGTH, Packet, State};
pub use session::{Action, Session, Settings};
pub use timers::{Timers, TimersError};
