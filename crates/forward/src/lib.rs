//! Forwards UDP on all cores: data planes that share nothing, and BFD, which watches the link for all of them.
#![forbid(unsafe_code)]

pub mod bfd;
