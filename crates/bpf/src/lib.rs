//! BPF programs, their prebuilt objects and their loaders: one program per file in C, and its loader in the file of the same name in Rust,
//! or in that of its group (`iterator`, `least_busy`).
//!
//! This crate is internal to `fourtuple`, whose feature `bpf` uses it, and promises no stability: any version may change its API.
//!
//! A build needs no BPF compiler: the objects are in the tree, and `cargo xtask bpf` rebuilds them. Programs and maps belong
//! to the process that loaded them and the kernel frees them with the last descriptor and the last attached socket; nothing is
//! pinned. Loading needs CAP_BPF and CAP_NET_ADMIN in the initial user namespace, tracing CAP_BPF and CAP_PERFMON.
#![allow(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod accept_wait;
mod call;
pub mod connect_search;
mod cpu_map;
mod error;
pub mod failed_calls;
pub mod filter;
pub mod fix_accept;
pub mod fix_ports;
pub mod fix_rotate;
pub mod flame;
mod group_map;
mod iterator;
mod least_busy;
pub mod lock_waits;
mod object;
mod objects;
#[cfg(test)]
mod packet;
mod source_port;
pub mod tracing;
mod xdp;

pub use accept_wait::AcceptWait;
pub use connect_search::ConnectSearch;
pub use cpu_map::CpuMap;
pub use error::BpfError;
pub use failed_calls::FailedCalls;
pub use fix_accept::FixAccept;
pub use fix_ports::FixPorts;
pub use fix_rotate::FixRotate;
pub use group_map::{Chooser, Control, GroupMap};
pub use iterator::{PlainTimeWait, SocketHolder, SocketHolders};
pub use least_busy::{Counters, HandOver, Leaks, LeastBusy, SEATS, Seat};
pub use lock_waits::LockWaits;
pub use objects::Objects;
pub use source_port::SourcePort;
pub use tracing::Tier;
pub use xdp::{Counted, Mode, ModeRequest};
