//! A worker process is killed. The test has a binary of its own: a child has a copy of every descriptor, so listeners of other
//! tests in the same process would stay open.
#![allow(unsafe_code)]

mod group;

use fourtuple_testing::in_namespace;

use self::group::{Group, until};

#[test]
fn clients_do_not_notice_a_killed_worker() {
    in_namespace(|| {
        let Some(mut group) = Group::open("clients_do_not_notice_a_killed_worker", 3) else { return };
        // SAFETY: the child makes async-signal-safe calls only: stores to atomics, prctl and pause.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: this operation takes a number. The kernel kills the child when the test ends.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) };
            // The child has the listener of seat 0 and counts itself as busy.
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
        // The program finds the seat empty at its turn at the latest, and sends the connection to another seat.
        for seat in 1..3 {
            group.busy.seat(seat).unwrap().set_busy(100);
        }
        assert_eq!(group.shares(20)[0], 0);
        assert!(!group.busy.seat(0).unwrap().is_taken());
    });
}
