//! Tests of the socket selection inside a group, as the kernel performs it.
#![forbid(unsafe_code)]

mod control;
mod group;
#[cfg(feature = "bpf")]
mod map;
#[cfg(feature = "bpf")]
mod packets;
mod wire;
