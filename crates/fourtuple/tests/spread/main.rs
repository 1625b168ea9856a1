//! Tests of the socket selection inside a group, as the kernel performs it.
#![forbid(unsafe_code)]

mod classic;
mod control;
mod group;
#[cfg(feature = "bpf")]
mod map;
#[cfg(not(feature = "bpf"))]
mod not_built;
#[cfg(feature = "bpf")]
mod packets;
#[cfg(feature = "bpf")]
mod trap;
mod wire;
