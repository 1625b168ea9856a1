//! One generator per thread, seeded anew in a child process: two processes that draw the same ports collide on all.

use std::cell::RefCell;

use fastrand::Rng;
use fourtuple_syscalls::fork;

thread_local! {
    static GENERATOR: RefCell<(u32, Rng)> = const { RefCell::new((0, Rng::with_seed(0))) };
}

/// Lends this thread's generator.
pub(super) fn with<R>(use_it: impl FnOnce(&mut Rng) -> R) -> R {
    GENERATOR.with_borrow_mut(|(seeded_in, generator)| {
        let generation = fork::generation();
        if *seeded_in != generation {
            // Rng::new() hashes the thread, the time and an address; the process id tells parent and child apart even
            // if they get here in the same nanosecond.
            *generator = Rng::with_seed(Rng::new().u64(..) ^ u64::from(generation) << 32);
            *seeded_in = generation;
        }
        use_it(generator)
    })
}
