//! A worker process that is killed. Alone in its program: a child has a copy of every descriptor, so the listeners of
//! tests beside it would not be closed as these expect.
#![allow(unsafe_code)]

mod group;

use fourtuple_testing::in_namespace;

use self::group::{Group, until};

#[test]
fn nobody_notices_that_a_worker_was_killed() {
    in_namespace(|| {
        let Some(mut group) = Group::open("nobody_notices_that_a_worker_was_killed", 3) else { return };
        // SAFETY: the child makes async-signal-safe calls only: stores to atomics, prctl and pause.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: this operation takes a number; whatever becomes of the test, the child goes with it.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) };
            // It has the listener of seat 0, and says that it has something to do.
            let _ = group.busy.seat(0).map(|seat| seat.set_busy(5));
            loop {
                // SAFETY: pause() takes nothing.
                unsafe { libc::pause() };
            }
        }
        group.listeners[0] = None;
        until("the child has spoken", || group.busy.seat(0).unwrap().counters().busy == 5);
        let clients: Vec<_> = (0..30).map(|_| group.connect()).collect();
        let claimed = |seat: usize| group.busy.seat(seat).unwrap().counters().claimed;
        until("the busy one has 5 less", || claimed(0) + claimed(1) + claimed(2) == 30);
        assert!((6..=7).contains(&claimed(0)), "{}", claimed(0));

        // SAFETY: kill() and waitpid() of our own child; the status is not asked for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
        let mut served = Vec::new();
        for _ in &clients {
            let (seat, server) = group.accept_anywhere();
            assert_ne!(seat, 0);
            served.push(server);
        }
        for client in &clients {
            assert!(client.take_error().unwrap().is_none());
            client.set_nonblocking(true).unwrap();
            let error = client.peek(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "alive and silent, not reset");
        }
        assert_eq!(group.shares(20)[0], 0);
        // Its seat is found empty when it is its turn at the latest, and the connection that finds it goes elsewhere.
        for seat in 1..3 {
            group.busy.seat(seat).unwrap().set_busy(100);
        }
        assert_eq!(group.shares(20)[0], 0);
        assert!(!group.busy.seat(0).unwrap().is_taken());
    });
}
