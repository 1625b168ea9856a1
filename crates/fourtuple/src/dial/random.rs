//! One random number generator per thread, with a new seed in each forked process: two processes with one seed would draw the same
//! ports.

use std::cell::RefCell;

use fourtuple_syscalls::fork;

use crate::ports::Random;

thread_local! {
    static GENERATOR: RefCell<(u32, Random)> = const { RefCell::new((0, Random::with_seed(0))) };
}

/// Calls `use_it` with the generator of this thread.
pub(super) fn with<R>(use_it: impl FnOnce(&mut Random) -> R) -> R {
    GENERATOR.with_borrow_mut(|(seeded_in, generator)| {
        let generation = fork::generation();
        if *seeded_in != generation {
            // Rng::new() hashes the thread, the time and an address. The process id separates parent and child even if both
            // seed in the same nanosecond.
            *generator = Random::with_seed(fastrand::Rng::new().u64(..) ^ u64::from(generation) << 32);
            *seeded_in = generation;
        }
        use_it(generator)
    })
}
