//! Every accept policy with real workers and clients.

mod adopt;
mod dispatcher;
mod drain;
mod errnos;
mod examples;
mod limits;
mod policies;
mod pool;
mod processes;
mod recycle;
mod reload;
#[cfg(feature = "bpf")]
mod soak;
#[cfg(feature = "uring")]
mod uring;
