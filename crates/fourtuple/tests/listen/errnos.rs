//! Every errno of accept(2), epoll_ctl(2), sendmsg(2), recvmsg(2) and of the calls of io_uring, with every policy: the worker lives, and the event is counted.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, DispatcherStats, Family, ListenError, ListenerGroup, SeatStats};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::seccomp::{self, FailingCall};
use fourtuple_testing::{StopOnDrop, each_in_namespace, errnos, in_namespace, print};

use crate::builder;

/// The errors in accept(2), also in its section "Error handling", and errors of other kernels.
const ERRNOS: [Errno; 27] = errnos![
    EAGAIN EINTR ECONNABORTED ECONNRESET EPROTO ENOPROTOOPT EOPNOTSUPP ENETDOWN ENETUNREACH EHOSTDOWN
    EHOSTUNREACH ENONET ETIMEDOUT EMFILE ENFILE ENOBUFS ENOMEM EPERM EACCES ENOSR ESOCKTNOSUPPORT
    EPROTONOSUPPORT EBADF EFAULT EINVAL ENOTSOCK ENOSYS
];
/// The errors of adding to an epoll in epoll_ctl(2).
const WATCH_ERRNOS: [Errno; 8] = errnos![
    ENOSPC ENOMEM EPERM EEXIST ENOENT ELOOP EBADF EINVAL
];
/// The errors of sendmsg(2) and recvmsg(2) on a Unix socket.
const MESSAGE_ERRNOS: [Errno; 19] = errnos![
    EAGAIN EINTR ENOBUFS ENOMEM ETOOMANYREFS EACCES EBADF ECONNREFUSED ECONNRESET EDESTADDRREQ EFAULT EINVAL
    EISCONN EMSGSIZE ENOTCONN ENOTSOCK EOPNOTSUPP EPERM EPIPE
];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(10);

/// Returns the policies whose accept(2) a seccomp filter sees.
fn policies() -> Vec<AcceptPolicy> {
    AcceptPolicy::ALL.into_iter().filter(|policy| *policy != AcceptPolicy::UringOneshot).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    /// EAGAIN and EINTR are not failures: the worker waits.
    Waits,
    Counted,
    Ends,
}

fn expected(call: FailingCall, errno: Errno) -> Expected {
    let of_messages = matches!(call, FailingCall::SendMessage | FailingCall::ReceiveMessage);
    match errno {
        Errno::ENOBUFS | Errno::ENOMEM if of_messages => Expected::Waits,
        Errno::ETOOMANYREFS if call == FailingCall::SendMessage => Expected::Waits,
        Errno::EAGAIN | Errno::EINTR => Expected::Waits,
        Errno::EBADF | Errno::EFAULT | Errno::EINVAL | Errno::ENOTSOCK | Errno::ENOSYS => Expected::Ends,
        // No such error is of a message.
        _ if of_messages => Expected::Ends,
        _ => Expected::Counted,
    }
}

/// The worker's calls fail on a thread with a filter; the same worker then serves a connection on a thread without one.
fn worker(
    group: &ListenerGroup,
    (call, errno): (FailingCall, Errno),
    counted: impl Fn(&SeatStats) -> u64 + Sync,
) -> Expected {
    let mut acceptor = group.join().unwrap();
    let client = ready(group, call);
    let failing = thread::scope(|scope| {
        let (acceptor, counted) = (&mut acceptor, &counted);
        let on_thread = scope.spawn(move || {
            seccomp::fail(call, errno).unwrap();
            let begun = Instant::now();
            loop {
                match acceptor.next(Some(SHORT)) {
                    Ok(found) => assert!(found.is_none(), "{call:?} did not fail"),
                    Err(error) => {
                        assert!(error.to_string().contains(&errno.to_string()), "{error}");
                        return Expected::Ends;
                    }
                }
                if counted(&acceptor.stats()) > 0 {
                    return Expected::Counted;
                }
                if expected(call, errno) == Expected::Waits {
                    return Expected::Waits;
                }
                assert!(begun.elapsed() < LONG, "{errno} is not counted");
            }
        });
        on_thread.join().unwrap()
    });
    if failing != Expected::Ends {
        // A connection that epoll cannot watch was closed.
        let client = if call == FailingCall::AddWatch { ready(group, FailingCall::Accept) } else { client };
        assert!(acceptor.next(Some(LONG)).unwrap().is_some(), "{errno}: the connection is lost");
        drop(client);
    }
    failing
}

/// The dispatcher and a worker make each call on a thread with a filter, then on a thread without one, for the same connection. Messages
/// that stay in the channel have no counter.
fn messages(group: &ListenerGroup, (call, errno): (FailingCall, Errno)) -> Expected {
    let mut dispatcher = group.dispatcher().unwrap();
    // It sends a message.
    let mut acceptor = group.join().unwrap();
    let _client = ready(group, FailingCall::Accept);
    let begun = Instant::now();
    // Once more after the accept, so that it has tried to send.
    let mut turns_left = 2;
    while turns_left > 0 {
        assert!(begun.elapsed() < LONG, "{errno}: nothing is accepted");
        let stop = AtomicBool::new(false);
        let ran = thread::scope(|scope| {
            let (dispatcher, stop) = (&mut dispatcher, &stop);
            let on_thread = scope.spawn(move || {
                seccomp::fail(call, errno).unwrap();
                dispatcher.run(stop)
            });
            thread::sleep(SHORT);
            stop.store(true, Ordering::Release);
            on_thread.join().unwrap()
        });
        if let Err(error) = ran {
            assert!(error.to_string().contains(&errno.to_string()), "{error}");
            return Expected::Ends;
        }
        turns_left -= usize::from(dispatcher.stats().accepts > 0);
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop_on_drop = StopOnDrop(&stop);
        scope.spawn(|| dispatcher.run(&stop).unwrap());
        let failing = || {
            seccomp::fail(call, errno).unwrap();
            // On a slow machine a wait may end before the call.
            loop {
                let found = acceptor.next(Some(SHORT))?;
                let has_made_it = found.is_some() || expected(call, errno) != Expected::Ends;
                if has_made_it || begun.elapsed() > LONG {
                    return Ok::<_, ListenError>(found);
                }
            }
        };
        let found = match thread::scope(|scope| scope.spawn(failing).join().unwrap()) {
            Ok(found) => found.or_else(|| acceptor.next(Some(LONG)).unwrap()),
            Err(error) => {
                assert!(error.to_string().contains(&errno.to_string()), "{error}");
                return Expected::Ends;
            }
        };
        assert!(found.is_some(), "{errno}: the connection is lost");
        Expected::Waits
    })
}

/// Runs `case` for each errno with each policy, and prints a row for each policy.
fn matrix(
    call: FailingCall,
    policies: &[AcceptPolicy],
    errnos: &[Errno],
    case: impl Fn(&ListenerGroup, Errno) -> Expected + Sync,
) {
    let rows = Mutex::new(Vec::new());
    each_in_namespace(policies, |policy| {
        let mut classes = [" Waits:", " Counted:", " Ends:"].map(str::to_owned);
        for errno in errnos {
            let listen = builder(*policy, Family::Tcp4).max_workers(1);
            let group = match listen.open() {
                Ok(group) => group,
                Err(error) => {
                    classes = [format!(" not possible here: {error}"), String::new(), String::new()];
                    break;
                }
            };
            let found = case(&group, *errno);
            assert_eq!(found, expected(call, *errno), "{policy}, {errno}");
            classes[found as usize] += &format!(" {errno}");
        }
        rows.lock().unwrap().push(format!("MATRIX {call:?} {policy}:{}", classes.concat()));
    });
    let mut rows = rows.into_inner().unwrap();
    rows.sort();
    rows.iter().for_each(|row| print(row));
}

/// The dispatcher runs on a thread with a filter until `has_ended`, and then on a thread without one, for the same connection.
fn dispatcher(
    group: &ListenerGroup,
    (call, errno): (FailingCall, Errno),
    counted: impl Fn(&DispatcherStats) -> u64,
) -> Expected {
    let mut dispatcher = group.dispatcher().unwrap();
    let client = ready(group, call);
    let begun = Instant::now();
    let failing = loop {
        assert!(begun.elapsed() < LONG, "{errno} is not counted");
        let stop = AtomicBool::new(false);
        let (before, ran) = thread::scope(|scope| {
            let (dispatcher, stop) = (&mut dispatcher, &stop);
            let before = dispatcher.stats().wakeups;
            let on_thread = scope.spawn(move || {
                seccomp::fail(call, errno).unwrap();
                let ran = dispatcher.run(stop);
                (dispatcher.stats().wakeups > before, ran)
            });
            thread::sleep(SHORT);
            stop.store(true, Ordering::Release);
            on_thread.join().unwrap()
        });
        match ran {
            Err(error) => {
                assert!(error.to_string().contains(&errno.to_string()), "{error}");
                break Expected::Ends;
            }
            Ok(()) if counted(&dispatcher.stats()) > 0 => break Expected::Counted,
            // It has tried, and tries again.
            Ok(()) if before && expected(call, errno) == Expected::Waits => break Expected::Waits,
            Ok(()) => {}
        }
    };
    if failing != Expected::Ends {
        let client = if call == FailingCall::AddWatch { ready(group, FailingCall::Accept) } else { client };
        let mut acceptor = group.join().unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _stop_on_drop = StopOnDrop(&stop);
            scope.spawn(|| dispatcher.run(&stop).unwrap());
            assert!(acceptor.next(Some(LONG)).unwrap().is_some(), "{errno}: the connection is lost");
        });
        drop(client);
    }
    failing
}

/// Connects. A connection without data is watched at once.
fn ready(group: &ListenerGroup, call: FailingCall) -> TcpStream {
    let mut client = TcpStream::connect(group.endpoint().inet().unwrap()).unwrap();
    if call != FailingCall::AddWatch {
        client.write_all(b"?").unwrap();
    }
    client
}

#[test]
fn every_errno_of_accept_leaves_the_worker_alive() {
    in_namespace(|| {
        let call = FailingCall::Accept;
        matrix(call, &policies(), &ERRNOS, |group, errno| match group.policy() {
            AcceptPolicy::Dispatcher => dispatcher(group, (call, errno), |stats| {
                let DispatcherStats { failed_accepts, out_of_process_descriptors, .. } = *stats;
                let others = [stats.out_of_host_descriptors, stats.out_of_memory, stats.other_failed_accepts];
                assert_eq!(failed_accepts, out_of_process_descriptors + others.iter().sum::<u64>());
                failed_accepts
            }),
            _ => worker(group, (call, errno), |stats| {
                let SeatStats { failed_accepts, out_of_process_descriptors, .. } = *stats;
                let others = [stats.out_of_host_descriptors, stats.out_of_memory, stats.other_failed_accepts];
                assert_eq!(failed_accepts, out_of_process_descriptors + others.iter().sum::<u64>());
                failed_accepts
            }),
        });
    });
}

#[test]
fn every_errno_of_epoll_ctl_leaves_the_worker_alive() {
    in_namespace(|| {
        let call = FailingCall::AddWatch;
        // `blocking` has no epoll.
        let policies: Vec<_> =
            policies().into_iter().filter(|policy| *policy != AcceptPolicy::Blocking).collect();
        matrix(call, &policies, &WATCH_ERRNOS, |group, errno| match group.policy() {
            AcceptPolicy::Dispatcher => dispatcher(group, (call, errno), |stats| stats.unwatched),
            _ => worker(group, (call, errno), |stats| stats.unwatched),
        });
    });
}

#[test]
fn every_errno_of_messages_leaves_the_dispatcher_alive() {
    in_namespace(|| {
        for call in [FailingCall::SendMessage, FailingCall::ReceiveMessage] {
            let case = |group: &ListenerGroup, errno| messages(group, (call, errno));
            matrix(call, &[AcceptPolicy::Dispatcher], &MESSAGE_ERRNOS, case);
        }
    });
}

#[test]
fn without_memory_or_descriptors_for_a_ring_the_worker_lives() {
    in_namespace(|| {
        let cases: [(FailingCall, &[Errno]); 2] = [
            (FailingCall::EnterRing, &[Errno::EAGAIN, Errno::ENOMEM]),
            (FailingCall::SetUpRing, &[Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM]),
        ];
        for (call, errnos) in cases {
            let case = |group: &ListenerGroup, errno| {
                worker(group, (call, errno), |stats: &SeatStats| stats.failed_accepts)
            };
            matrix(call, &[AcceptPolicy::UringOneshot], errnos, case);
        }
    });
}

/// With the other policies a worker hands over its listener or its word to the dispatcher in the same way, or has no connection.
#[test]
fn a_worker_that_leaves_returns_what_it_cannot_hand_over() {
    let policies =
        [AcceptPolicy::Exclusive, AcceptPolicy::Plain, AcceptPolicy::ROTATE, AcceptPolicy::UringOneshot];
    each_in_namespace(&policies, |policy| {
        let listen = builder(*policy, Family::Tcp4).max_workers(2);
        // This kernel has no io_uring.
        let Ok(group) = listen.open() else { return assert_eq!(*policy, AcceptPolicy::UringOneshot) };
        let mut acceptor = group.join().unwrap();
        let mut client = ready(&group, FailingCall::Accept);
        let mut connection = acceptor.next(Some(LONG)).unwrap().unwrap();
        assert_eq!(connection.read(&mut [0; 10]).unwrap(), 1);
        acceptor.keep(connection).unwrap();
        let leave = || {
            seccomp::fail(FailingCall::SendMessage, Errno::EIO).unwrap();
            acceptor.leave()
        };
        let report = thread::scope(|scope| scope.spawn(leave).join().unwrap()).unwrap();
        let [kept] = &mut report.kept.into_iter().collect::<Vec<_>>()[..] else { panic!("{policy}: closed") };
        kept.write_all(b"!").unwrap();
        assert_eq!(client.read(&mut [0; 10]).unwrap(), 1, "{policy}");
    });
}
