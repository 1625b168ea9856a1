//! Atomics and shared counters. Models (`--cfg fourtuple_loom`) use the types of loom, which tries every interleaving.

#[cfg(not(all(test, fourtuple_loom)))]
pub(crate) use fourtuple_syscalls::shared::Counters;
#[cfg(not(all(test, fourtuple_loom)))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(test, fourtuple_loom))]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(all(test, fourtuple_loom))]
pub(crate) use model::Counters;

#[cfg(all(test, fourtuple_loom))]
mod model {
    use std::io;

    use super::AtomicU64;

    /// A replacement for memory that processes share, because all threads of loom are in one process.
    #[derive(Debug)]
    pub(crate) struct Counters(Vec<AtomicU64>);

    impl Counters {
        pub(crate) fn new(count: usize) -> io::Result<Counters> {
            Ok(Counters((0..count).map(|_| AtomicU64::new(0)).collect()))
        }

        pub(crate) fn all(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}
