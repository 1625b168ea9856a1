//! Every accept policy with real workers and clients.

mod dispatcher;
mod drain;
mod examples;
mod limits;
mod policies;
mod pool;
mod processes;
mod recycle;
mod reload;
#[cfg(feature = "bpf")]
mod soak;
mod uring;
