//! The servers of `serve` over sockets.

mod client;
mod crr;
mod http;
mod other;
