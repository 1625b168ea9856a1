//! Measurements with traffic of our own: [`load`] generates it, [`serve`] answers it, [`lab`] has the experiments on this kernel, and
//! [`compare`] decides which of two commands is better.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod compare;
mod http1;
pub mod lab;
pub mod load;
pub mod serve;
