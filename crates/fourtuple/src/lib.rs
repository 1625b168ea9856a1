//! Make connections cheap.
#![forbid(unsafe_code)]

pub mod dial;
pub mod ports;
