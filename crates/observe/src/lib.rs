//! What a host shows. [`host`] reads a network namespace into a snapshot, [`trace`] counts with BPF what happens while it runs,
//! [`doctor`] finds faults in both without a system call, and [`plan`] calculates how long source ports last.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod doctor;
pub mod host;
pub mod plan;
pub mod trace;
