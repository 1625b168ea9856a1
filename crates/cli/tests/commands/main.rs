//! The commands, run as programs. One test program, so that the tests of all commands share the processors.
#![forbid(unsafe_code)]

#[path = "../program/mod.rs"]
mod program;

mod bad_input;
mod compare;
mod doctor;
mod documented_commands;
mod environment;
mod export;
mod fix;
mod fix_accept;
mod fix_accept_shared;
mod fix_clients;
mod fix_namespaces;
mod fix_print;
mod forward;
mod guard;
mod http2;
mod interrupt;
mod kernel;
mod labs;
mod load;
mod records;
mod run_costs;
mod sentences;
mod serve;
mod tables;
mod threads;
mod top;
mod trace;
mod trace_remains;
mod units;
