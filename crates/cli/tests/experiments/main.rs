//! Rules as experiments: each fault is made by a real program, `fourtuple doctor` names it, and its cure is tried. The rows are the table of
//! docs/doctor.md, which every experiment compares with what it made. The healthy neighbours of the faults run together, in `soak`.
#![forbid(unsafe_code)]

#[path = "../program/mod.rs"]
mod program;

mod accept;
mod kernel;
mod limits;
mod listeners;
mod ports;
mod services;
mod settings;
mod soak;
mod table;
