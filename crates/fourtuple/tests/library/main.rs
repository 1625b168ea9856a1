//! The library in network namespaces. One test program: it builds and runs sooner than one for each file. No test here starts a process:
//! until its exec() a child has copies of the sockets of all tests.
#![forbid(unsafe_code)]

mod accept_axum;
mod accept_tokio;
mod connector;
mod errnos;
mod features;
mod ports;
mod sources;
mod strategies;
mod traps;
mod udp;
mod vectors;
