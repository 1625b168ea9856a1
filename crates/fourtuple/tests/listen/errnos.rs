//! Every errno of accept(2), with every policy: the worker lives, and the event is counted.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, Family, ListenerGroup, ListenerGroupBuilder};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::seccomp::{self, FailingCall};
use fourtuple_testing::{each_in_namespace, in_namespace};

use crate::pool::endpoint;

/// The errors in accept(2), also in its section "Error handling", and errors of other kernels.
const ERRNOS: [Errno; 26] = [
    Errno::EAGAIN,
    Errno::EINTR,
    Errno::ECONNABORTED,
    Errno::ECONNRESET,
    Errno::EPROTO,
    Errno::ENOPROTOOPT,
    Errno::EOPNOTSUPP,
    Errno::ENETDOWN,
    Errno::ENETUNREACH,
    Errno::EHOSTDOWN,
    Errno::EHOSTUNREACH,
    Errno::ENONET,
    Errno::ETIMEDOUT,
    Errno::EMFILE,
    Errno::ENFILE,
    Errno::ENOBUFS,
    Errno::ENOMEM,
    Errno::EPERM,
    Errno::EACCES,
    Errno::ENOSR,
    Errno::ESOCKTNOSUPPORT,
    Errno::EPROTONOSUPPORT,
    Errno::EBADF,
    Errno::EFAULT,
    Errno::ENOTSOCK,
    Errno::ENOSYS,
];
const POLICIES: [AcceptPolicy; 8] = [
    AcceptPolicy::Exclusive,
    AcceptPolicy::Plain,
    AcceptPolicy::Blocking,
    AcceptPolicy::ROTATE,
    AcceptPolicy::SharedOneshot,
    AcceptPolicy::Reuseport,
    AcceptPolicy::ReuseportLeastBusy,
    AcceptPolicy::Dispatcher,
];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    /// EAGAIN and EINTR are no failure: the worker waits.
    Waits,
    Counted,
    Ends,
}

fn expected(errno: Errno) -> Expected {
    match errno {
        Errno::EAGAIN | Errno::EINTR => Expected::Waits,
        Errno::EBADF | Errno::EFAULT | Errno::ENOTSOCK | Errno::ENOSYS => Expected::Ends,
        _ => Expected::Counted,
    }
}

/// The worker's calls fail on a thread with a filter; the same worker then serves the connection on a thread without one.
fn worker(group: &ListenerGroup, errno: Errno) -> Expected {
    let mut acceptor = group.join().unwrap();
    let _client = ready(group);
    let failing = thread::scope(|scope| {
        let acceptor = &mut acceptor;
        let on_thread = scope.spawn(move || {
            seccomp::fail(FailingCall::Accept, errno).unwrap();
            let begun = Instant::now();
            loop {
                match acceptor.next(Some(SHORT)) {
                    Ok(found) => assert!(found.is_none(), "accepted without accept()"),
                    Err(error) => {
                        assert!(error.to_string().contains(&errno.to_string()), "{error}");
                        return Expected::Ends;
                    }
                }
                let stats = acceptor.stats();
                if stats.failed_accepts > 0 {
                    let causes = stats.out_of_process_descriptors
                        + stats.out_of_host_descriptors
                        + stats.out_of_memory
                        + stats.other_failed_accepts;
                    assert_eq!(stats.failed_accepts, causes);
                    return Expected::Counted;
                }
                if expected(errno) == Expected::Waits {
                    return Expected::Waits;
                }
                assert!(begun.elapsed() < LONG, "{errno} is not counted");
            }
        });
        on_thread.join().unwrap()
    });
    if failing != Expected::Ends {
        assert!(acceptor.next(Some(LONG)).unwrap().is_some(), "{errno}: the connection is lost");
    }
    failing
}

fn dispatcher(group: &ListenerGroup, errno: Errno) -> Expected {
    let mut dispatcher = group.dispatcher().unwrap();
    let _client = ready(group);
    let begun = Instant::now();
    let mut failing = Expected::Waits;
    // A run may end before the dispatcher has accepted.
    while failing != expected(errno) {
        assert!(begun.elapsed() < LONG, "{errno}: {failing:?}");
        let stop = AtomicBool::new(false);
        failing = thread::scope(|scope| {
            let (dispatcher, stop) = (&mut dispatcher, &stop);
            let on_thread = scope.spawn(move || {
                seccomp::fail(FailingCall::Accept, errno).unwrap();
                match dispatcher.run(stop) {
                    Ok(()) if dispatcher.stats().failed_accepts > 0 => Expected::Counted,
                    Ok(()) => Expected::Waits,
                    Err(_) => Expected::Ends,
                }
            });
            thread::sleep(SHORT);
            stop.store(true, Ordering::Release);
            on_thread.join().unwrap()
        });
    }
    if failing != Expected::Ends {
        let mut acceptor = group.join().unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let (dispatcher, stop) = (&mut dispatcher, &stop);
            scope.spawn(move || dispatcher.run(stop).unwrap());
            let found = acceptor.next(Some(LONG)).unwrap().is_some();
            stop.store(true, Ordering::Release);
            assert!(found, "{errno}: the connection is lost");
        });
    }
    failing
}

fn ready(group: &ListenerGroup) -> TcpStream {
    let mut client = TcpStream::connect(group.endpoint().inet().unwrap()).unwrap();
    client.write_all(b"?").unwrap();
    client
}

#[test]
fn every_errno_of_accept_leaves_the_worker_alive() {
    in_namespace(|| {
        let rows = Mutex::new(Vec::new());
        each_in_namespace(POLICIES, |policy| {
            let mut row = format!("accept4 {policy}:");
            for errno in ERRNOS {
                let listen = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).policy(policy).seats(1);
                let group = match listen.open() {
                    Ok(group) => group,
                    Err(error) => {
                        row = format!("accept4 {policy}: not possible here: {error}");
                        break;
                    }
                };
                let test = if policy == AcceptPolicy::Dispatcher { dispatcher } else { worker };
                let found = test(&group, errno);
                assert_eq!(found, expected(errno), "{policy}, {errno}");
                row.push_str(&format!(" {errno} {found:?}"));
            }
            rows.lock().unwrap().push(row);
        });
        for row in rows.into_inner().unwrap() {
            eprintln!("{row}");
        }
        eprintln!(
            "accept4 uring-oneshot: not injected, io_uring makes no accept4(2); the same function decides"
        );
    });
}
