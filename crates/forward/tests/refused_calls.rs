//! System calls that the kernel refuses while planes run.

mod kinds;

use std::fs::File;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::{Forward, ForwardError, Link, PlaneKind};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::seccomp::{self, Facility, FailingCall};
use fourtuple_testing::stream::{LONG, socket};
use fourtuple_testing::{in_namespace, print};

/// A lock between the tests: file descriptor numbers are per process.
static ALONE: Mutex<()> = Mutex::new(());

fn forward(kind: PlaneKind, hop: &UdpSocket) -> Forward {
    let link = Link::new("127.0.0.1:0".parse().unwrap(), hop.local_addr().unwrap());
    Forward { kind, ..Forward::new(Link { replies: true, ..link }, 1) }
}

/// Runs the body in its own thread, since a seccomp filter cannot be removed.
fn apart(body: impl FnOnce() + Send + 'static) {
    thread::spawn(body).join().unwrap();
}

/// Replies to a client whose packet arrives at the next hop. Its second packet comes first: a plane closes a client two ticks after its only
/// packet, and this thread may be stalled for longer.
fn reply(client: &UdpSocket, listen: SocketAddr, hop: &UdpSocket) {
    hop.recv_from(&mut [0; 10]).unwrap();
    client.send_to(b"x", listen).unwrap();
    let (_, from) = hop.recv_from(&mut [0; 10]).unwrap();
    hop.send_to(b"y", from).unwrap();
}

#[test]
fn an_unwatched_client_is_dropped_alone() {
    let _alone = ALONE.lock().unwrap();
    in_namespace(|| {
        for kind in kinds::kinds("an_unwatched_client_is_dropped_alone") {
            apart(move || {
                let hop = socket();
                let clients: Vec<_> = (0..60).map(|_| socket()).collect();
                // The kernel assigns the lowest free descriptor number.
                let lower: Vec<_> = (0..40).map(|_| File::open("/dev/null").unwrap()).collect();
                let last = File::open("/dev/null").unwrap();
                seccomp::refuse_watches_from(last.as_fd()).unwrap();
                drop(lower);
                let running = forward(kind, &hop).start().unwrap();
                let listen = running.address(0).unwrap();
                let mut bytes = [0; 10];
                let is_forwarded = |client: &UdpSocket| {
                    let before = running.counts(0).remove(0);
                    client.send_to(b"x", listen).unwrap();
                    let end = Instant::now() + LONG;
                    loop {
                        let counts = running.counts(0).remove(0);
                        let is_dropped = counts.dropped_in_all() > before.dropped_in_all();
                        if is_dropped || counts.sent > before.sent {
                            return !is_dropped;
                        }
                        assert!(Instant::now() < end, "{kind}: {counts:?}");
                        thread::sleep(Duration::from_millis(1));
                    }
                };
                let mut watched = Vec::new();
                for client in &clients {
                    if is_forwarded(client) {
                        // A client that has sent one packet is closed after two ticks: then a later one would get its descriptor.
                        assert!(is_forwarded(client), "{kind}");
                        (0..2).for_each(|_| assert_eq!(hop.recv(&mut bytes).unwrap(), 1, "{kind}"));
                        watched.push(client);
                    }
                }
                assert!((1..60).contains(&watched.len()), "{kind}: {}", watched.len());
                // Existing clients continue to exchange packets with the next hop.
                for client in &watched {
                    client.send_to(b"again", listen).unwrap();
                    let (length, from) = hop.recv_from(&mut bytes).unwrap();
                    hop.send_to(&bytes[..length], from).unwrap();
                    assert_eq!(client.recv(&mut bytes).unwrap(), 5, "{kind}");
                }
                let counts = running.drain().unwrap().remove(0).remove(0);
                let dropped: Vec<_> =
                    counts.dropped.iter().map(|(why, number)| (why.name(), *number)).collect();
                assert_eq!(dropped, [("no-client", 60 - watched.len() as u64)], "{kind}");
                assert_eq!(counts.clients, watched.len() as u64, "{kind}");
            });
        }
    });
}

#[test]
fn a_plane_that_may_not_receive_reports_the_error() {
    let _alone = ALONE.lock().unwrap();
    in_namespace(|| {
        for kind in kinds::kinds("a_plane_that_may_not_receive_reports_the_error") {
            apart(move || {
                seccomp::refuse(Facility::ReceiveMany).unwrap();
                let (client, hop) = (socket(), socket());
                let mut running = forward(kind, &hop).start().unwrap();
                client.send_to(b"x", running.address(0).unwrap()).unwrap();
                if kind == PlaneKind::Uring {
                    // A plane with io_uring calls recvmmsg() for replies only.
                    reply(&client, running.address(0).unwrap(), &hop);
                }
                let end = Instant::now() + LONG;
                let error = loop {
                    match running.check() {
                        Err(error) => break error,
                        Ok(()) => assert!(Instant::now() < end, "{kind}: the plane still runs"),
                    }
                    thread::sleep(Duration::from_millis(1));
                };
                assert!(matches!(error, ForwardError::Plane { plane: 0, .. }), "{kind}: {error}");
                assert!(error.to_string().contains("recvmmsg(): EPERM"), "{kind}: {error}");
            });
        }
    });
}

/// The errors of recvmmsg(2) and sendmmsg(2) on a UDP socket, and the errors of ICMP messages (`icmp_err_convert`, `icmpv6_err_convert`).
const ERRNOS: [Errno; 21] = [
    Errno::EAGAIN,
    Errno::EINTR,
    Errno::ENOBUFS,
    Errno::ENOMEM,
    Errno::EPERM,
    Errno::EACCES,
    Errno::EBADF,
    Errno::ECONNREFUSED,
    Errno::EFAULT,
    Errno::EHOSTDOWN,
    Errno::EHOSTUNREACH,
    Errno::EINVAL,
    Errno::EIO,
    Errno::EMSGSIZE,
    Errno::ENETDOWN,
    Errno::ENETUNREACH,
    Errno::ENONET,
    Errno::ENOPROTOOPT,
    Errno::ENOTSOCK,
    Errno::EOPNOTSUPP,
    Errno::EPROTO,
];

/// The effect of an error on a plane.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Effect {
    Waits,
    Counted,
    Ends,
}

fn effect(kind: PlaneKind, call: FailingCall, errno: Errno) -> Effect {
    seccomp::fail(call, errno).unwrap();
    let (client, hop) = (socket(), socket());
    let mut running = forward(kind, &hop).start().unwrap();
    client.send_to(b"x", running.address(0).unwrap()).unwrap();
    if kind == PlaneKind::Uring && call == FailingCall::ReceiveMessages {
        // A plane with io_uring calls recvmmsg() for replies only.
        reply(&client, running.address(0).unwrap(), &hop);
    }
    let end = Instant::now() + LONG;
    loop {
        if let Err(error) = running.check() {
            assert!(error.to_string().contains(&format!("recvmmsg(): {errno}")), "{kind}: {error}");
            return Effect::Ends;
        }
        let counts = running.counts(0).remove(0);
        // Twice, if it repeats: the first failure has ended nothing.
        if counts.failed_receives >= 2 || counts.dropped_in_all() > 0 {
            running.check().unwrap();
            return Effect::Counted;
        }
        if call == FailingCall::ReceiveMessages && matches!(errno, Errno::EAGAIN | Errno::EINTR) {
            return Effect::Waits;
        }
        assert!(Instant::now() < end, "{kind}, {call:?}, {errno}: {counts:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_errno_leaves_the_plane_alive() {
    let _alone = ALONE.lock().unwrap();
    in_namespace(|| {
        for call in [FailingCall::ReceiveMessages, FailingCall::SendMessages] {
            for kind in kinds::kinds("every_errno_leaves_the_plane_alive") {
                let mut rows = [" Waits:", " Counted:", " Ends:"].map(str::to_owned);
                for errno in ERRNOS {
                    let found = thread::spawn(move || effect(kind, call, errno)).join().unwrap();
                    let expected = match (call, errno) {
                        (FailingCall::SendMessages, _) => Effect::Counted,
                        (_, Errno::EAGAIN | Errno::EINTR) => Effect::Waits,
                        (
                            _,
                            Errno::EPERM | Errno::EBADF | Errno::EFAULT | Errno::EINVAL | Errno::ENOTSOCK,
                        ) => Effect::Ends,
                        _ => Effect::Counted,
                    };
                    assert_eq!(found, expected, "{kind}, {call:?}, {errno}");
                    rows[found as usize] += &format!(" {errno}");
                }
                print(&format!("MATRIX {call:?} forward {kind}:{}", rows.concat()));
            }
        }
    });
}
