//! Calls that fail: every errno of connect(2) with every strategy; kernels that do not list their sockets (the dialers report that they
//! cannot list them, never that there is no socket); systems without threads for a tokio runtime (RLIMIT_NPROC, pids.max).

use std::future::Future;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::dial::{
    BuildError, ConnectError, Connector, DialError, Dialer, Sharing, Strategy, UdpDialer, Uncounted, Unseen,
};
use fourtuple::listen::{AcceptPolicy, ListenError, ListenerGroupBuilder};
use fourtuple_syscalls::seccomp::{self, Facility, FailingCall};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, option};
use fourtuple_testing::{each_in_namespace, in_namespace, listener, print, set_sysctl};
use tokio::runtime::{Builder, Runtime};
use tokio::task;

/// The errors of connect(2), and of the route and the neighbour of its SYN (`ip_route_connect`, `ip_queue_xmit`). EINPROGRESS and EINTR are
/// left out: a connect() with these errors goes on.
const ERRNOS: [Errno; 27] = [
    Errno::EACCES,
    Errno::EPERM,
    Errno::EADDRINUSE,
    Errno::EADDRNOTAVAIL,
    Errno::EAFNOSUPPORT,
    Errno::EAGAIN,
    Errno::EALREADY,
    Errno::EBADF,
    Errno::ECONNREFUSED,
    Errno::ECONNRESET,
    Errno::ECONNABORTED,
    Errno::EFAULT,
    Errno::EINVAL,
    Errno::EISCONN,
    Errno::ENETDOWN,
    Errno::ENETUNREACH,
    Errno::EHOSTDOWN,
    Errno::EHOSTUNREACH,
    Errno::ENONET,
    Errno::ENOBUFS,
    Errno::ENOMEM,
    Errno::ENOPROTOOPT,
    Errno::ENOTSOCK,
    Errno::EOPNOTSUPP,
    Errno::EPROTO,
    Errno::EPROTOTYPE,
    Errno::ETIMEDOUT,
];
const STRATEGIES: [Strategy; 4] =
    [Strategy::KernelDefault, Strategy::FullRange, Strategy::RANDOM_WINDOW, Strategy::SELECT_TEST_REPEAT];
/// The ports of the range.
const PORTS: usize = 4;

fn tcp(dialer: &Dialer, with_tokio: bool) -> Result<Box<dyn AsFd + Send>, DialError> {
    if !with_tokio {
        return dialer.dial().map(|(stream, _)| Box::new(stream) as Box<dyn AsFd + Send>);
    }
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let dialed = runtime.block_on(async { dialer.dial_tokio().await.map(|(stream, _)| stream.into_std()) });
    dialed.map(|stream| Box::new(stream.unwrap()) as Box<dyn AsFd + Send>)
}

/// Calls `dial` on a thread whose connect() fails, then for every port of the range. Returns the row of the matrix.
fn row(
    name: &str,
    of: impl Fn(Errno) -> Errno,
    dial: impl Fn() -> Result<Box<dyn AsFd + Send>, DialError> + Sync,
) -> String {
    let mut row = format!("MATRIX Connect {name}: Returned:");
    for errno in ERRNOS {
        let failing = || {
            seccomp::fail(FailingCall::Connect, errno).unwrap();
            dial().map(drop)
        };
        let error = thread::scope(|scope| scope.spawn(failing).join().unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(of(errno).number()), "{name}, {errno}: {error:?}");
        let held: Vec<_> =
            (0..PORTS).map(|_| dial().unwrap_or_else(|error| panic!("{name}, {errno}: {error}"))).collect();
        // No TIME_WAIT socket may hold the ports.
        held.iter().for_each(|socket| option::set_reset_on_close(socket.as_fd()).unwrap());
        row += &format!(" {errno}");
    }
    row
}

#[test]
fn every_errno_of_connect_is_returned_and_costs_no_port() {
    in_namespace(|| {
        let rows = Mutex::new(Vec::new());
        each_in_namespace(STRATEGIES, |strategy| {
            set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
            let (_listener, destination) = listener("127.0.0.1", 4096);
            for with_tokio in [false, true] {
                let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
                let name = format!("{strategy} {}", if with_tokio { "tokio" } else { "blocking" });
                rows.lock().unwrap().push(row(&name, |errno| errno, || tcp(&dialer, with_tokio)));
            }
        });
        each_in_namespace([Sharing::Exclusive, Sharing::Shared], |sharing| {
            set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
            let destination = SocketAddr::from(([127, 0, 0, 1], 4000));
            let dialer = UdpDialer::new(destination, None, sharing).unwrap();
            // EAGAIN: no free port (`inet_autobind`).
            let of = |errno| if errno == Errno::EAGAIN { Errno::EADDRNOTAVAIL } else { errno };
            let dial = || dialer.dial().map(|(socket, _)| Box::new(socket) as Box<dyn AsFd + Send>);
            rows.lock().unwrap().push(row(&format!("udp {sharing:?}"), of, dial));
        });
        let mut rows = rows.into_inner().unwrap();
        rows.sort();
        rows.iter().for_each(|row| print(row));
    });
}

/// Refuses sock_diag on this thread, and returns the errno. A kernel that lacks only tcp_diag and udp_diag answers ENOENT.
fn without_sock_diag() -> Errno {
    seccomp::refuse(Facility::SocketDiag).unwrap();
    Errno::EPROTONOSUPPORT
}

fn assert_unseen(unseen: Unseen, errno: Errno) {
    assert_eq!(unseen.call, "sock_diag");
    assert_eq!(Errno::new(unseen.errno), errno);
}

fn exhaustion_names_what_cannot_be_seen(errno: Errno) {
    set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
    let (_listener, destination) = listener("127.0.0.1", 64);
    let dialer = Dialer::builder(destination).build().unwrap();
    assert_unseen(dialer.choice().unseen.expect("the ledger was not read"), errno);
    assert!(
        dialer.choice().to_string().ends_with("loaded?)") == (errno == Errno::ENOENT),
        "{}",
        dialer.choice()
    );
    assert_eq!(Errno::of(&dialer.refresh().unwrap_err()), Some(errno));
    let held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
    let error = dialer.dial().unwrap_err();
    let said = error.to_string();
    let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
        panic!("{error:?}")
    };
    assert_unseen(unseen, errno);
    assert!(said.contains("the holders cannot be listed (sock_diag: "), "{said}");
    drop(held);
}

fn a_shared_tuple_is_not_risked(errno: Errno) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let destination = server.local_addr().unwrap();
    // The owner of the 4-tuple has SO_REUSEADDR, so a dialer that does not see it could take over the 4-tuple.
    let owner = socket::open(Transport::Udp, destination, false).unwrap();
    option::set_reuse_address(owner.as_fd(), true).unwrap();
    socket::bind(owner.as_fd(), SocketAddr::from(([127, 0, 0, 1], 20005))).unwrap();
    socket::connect(owner.as_fd(), destination).unwrap();
    let dialer = |sharing| UdpDialer::new(destination, None, sharing).unwrap();
    for shared in [dialer(Sharing::Shared).source_port(20005), dialer(Sharing::Shared)] {
        match shared.dial() {
            Err(DialError::CannotSee { unseen, .. }) => assert_unseen(unseen, errno),
            other => panic!("{other:?}"),
        }
    }
    dialer(Sharing::Exclusive).dial().unwrap();
    let owner = UdpSocket::from(owner);
    server.send_to(b"mine", owner.local_addr().unwrap()).unwrap();
    assert_eq!(owner.recv(&mut [0; 8]).unwrap(), 4);
}

#[test]
fn exhaustion_without_sock_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(without_sock_diag()));
}

#[test]
fn udp_without_sock_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(without_sock_diag()));
}

#[test]
#[ignore = "needs a kernel without tcp_diag: cargo xtask kernels boots one"]
fn exhaustion_without_tcp_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(Errno::ENOENT));
}

#[test]
#[ignore = "needs a kernel without udp_diag: cargo xtask kernels boots one"]
fn udp_without_udp_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(Errno::ENOENT));
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Waits for the future on a thread that cannot start threads.
fn without_threads<T: Send>(runtime: &Runtime, future: impl Future<Output = T> + Send) -> T {
    let refused = || {
        seccomp::refuse(Facility::Threads).unwrap();
        runtime.block_on(future)
    };
    thread::scope(|scope| scope.spawn(refused).join().unwrap())
}

fn assert_no_thread(call: &str, error: &io::Error) {
    assert_eq!((call, Errno::of(error)), ("spawn_blocking", Some(Errno::EAGAIN)));
}

#[test]
fn a_long_search_fails_with_eagain() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
    });
}

#[test]
fn exhaustion_is_reported_without_a_census() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        // Binds to free ports on the thread of the runtime.
        let dialer = Dialer::builder(destination).strategy(Strategy::SELECT_TEST_REPEAT).build().unwrap();
        let _held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
            panic!("{error:?}")
        };
        assert_no_thread(unseen.call, &Errno::new(unseen.errno).into());
    });
}

#[test]
fn builds_udp_dials_and_names_fail_with_eagain() {
    in_namespace(|| {
        let destination = "127.0.0.1:4000".parse().unwrap();
        let error = without_threads(&runtime(), Dialer::builder(destination).build_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let BuildError::Probe(error) = error else { panic!("{error:?}") };
        assert_no_thread(error.call, &error.error);
        let dialer = UdpDialer::new(destination, None, Sharing::Exclusive).unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
        let connector = Connector::builder().build();
        let error = without_threads(&runtime(), connector.connect("localhost", 4000)).unwrap_err();
        let ConnectError::Resolve { error, .. } = error else { panic!("{error:?}") };
        assert_eq!(Errno::of(&error), Some(Errno::EAGAIN));
    });
}

/// The runtime queues the work before it panics.
#[test]
fn a_failed_drain_does_not_begin_later() {
    in_namespace(|| {
        let group =
            ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).policy(AcceptPolicy::Exclusive).open().unwrap();
        let runtime = runtime();
        let error = without_threads(&runtime, group.drain_tokio(Duration::ZERO)).unwrap_err();
        assert!(matches!(error, ListenError::Call { call: "spawn_blocking()", .. }), "{error:?}");
        // This thread can start threads, and the runtime runs its queue in order.
        runtime.block_on(async { task::spawn_blocking(|| ()).await.unwrap() });
        assert!(!group.is_drained());
        runtime.block_on(group.drain_tokio(Duration::ZERO)).unwrap();
        assert!(group.is_drained());
    });
}
