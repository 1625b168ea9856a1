//! Every policy, with real workers and clients.

mod policies;
mod pool;
mod processes;
mod reload;
