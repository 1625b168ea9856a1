//! BPF programs, their prebuilt objects, and what loads them: one program per file, with the same name in C and in Rust.
//!
//! Nobody needs a compiler: the objects are in the tree, and `cargo xtask bpf` builds them anew. Programs and maps belong
//! to whoever loaded them and go with the last descriptor and the last socket that they are attached to; nothing is
//! pinned. Loading needs CAP_BPF and CAP_NET_ADMIN in the initial user namespace, tracing CAP_BPF and CAP_PERFMON.
#![allow(unsafe_code)]

pub mod accept_wait;
mod call;
pub mod connect_search;
mod error;
pub mod flame;
mod hand_over;
mod leaks;
mod least_busy;
pub mod lock_waits;
mod object;
mod objects;
mod shared;
mod tier;
pub mod tracing;

pub use accept_wait::AcceptWait;
pub use connect_search::ConnectSearch;
pub use error::BpfError;
pub use hand_over::HandOver;
pub use leaks::Leaks;
pub use least_busy::{Counters, LeastBusy, SEATS, Seat};
pub use lock_waits::LockWaits;
pub use objects::Objects;
pub use tier::Tier;
