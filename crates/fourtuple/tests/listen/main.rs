//! Every accept policy with real workers and clients.

mod adopt;
mod dispatcher;
mod drain;
mod errnos;
mod limits;
mod policies;
mod pool;
mod processes;
#[cfg(feature = "bpf")]
mod soak;
