//! Every policy, with real workers and clients.

mod dispatcher;
mod policies;
mod pool;
mod processes;
mod reload;
mod uring;
