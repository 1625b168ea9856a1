//! A generator of connections that tells the truth about them.
#![forbid(unsafe_code)]

pub mod preflight;
