//! Every policy, with real workers and clients.

mod dispatcher;
mod policies;
mod pool;
mod processes;
mod recycle;
mod reload;
mod uring;
