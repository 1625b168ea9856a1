//! Make connections cheap: what the Linux kernel does between `socket()` and the first byte, done well.
//!
//! This crate does not resolve names, pool connections, speak a protocol or change a sysctl. It makes the socket calls
//! that a proxy, crawler or load generator should make: [`dial`] opens connections with a source port that is found
//! quickly and failures that say what is wrong; [`ports`] knows ranges, budgets and costs, and has the kernel's port search
//! in memory; [`capabilities`] finds out, by trying, what the kernel can do. Linux only.
#![forbid(unsafe_code)]

pub mod capabilities;
pub mod dial;
pub mod listen;
pub mod ports;
pub mod spread;

// Keeps the code in the README true.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
