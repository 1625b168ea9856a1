//! Traces programs of a live system through BPF: the port search of connect(), the wait of a connection until accept()
//! returns it, and waits for TCP's locks.
//!
//! The traced programs need no change, the host's settings stay as they are, and the kernel detaches all BPF programs when
//! the tracing process ends.
//!
//! Counting happens in the kernel, and only samples pass the BPF ring buffer. A record has the number of lost samples, and the number of
//! events for which the kernel did not run the program (`recursion_misses`). `survey` runs the traces for `doctor`, and in windows for `top`
//! and `export`; a trace that the host does not permit is absent, with its reason, and the others run.

mod accept;
mod blind_spots;
mod connect;
mod connect_results;
mod ended;
mod error;
mod failed;
mod fill;
mod flame;
mod heat;
mod instrument;
mod lock_class;
mod lock_sums;
mod locks;
mod scope;
mod survey;
mod symbols;
mod tier;
mod times;
mod unix_queues;

pub use accept::{Accept, AcceptProgress, AcceptSession};
pub use connect::{Connect, ConnectProgress, ConnectSession, Protocol};
pub use error::TraceError;
pub use fourtuple_bpf::Tier;
pub use instrument::{Folded, Instrument, Outcome, Progress, Results, Session};
pub use locks::{Locks, LocksProgress, LocksSession};
pub use survey::{Survey, SurveyTimes, Window};
pub use symbols::Symbols;
