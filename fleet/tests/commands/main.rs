//! `fourtuple fleet` and `fourtuple agent` with a real nats-server.

mod local;
#[path = "../../../crates/cli/tests/program/mod.rs"]
mod program;
mod runs;
mod security;
