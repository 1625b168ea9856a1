//! Every errno of connect(2), with every strategy: the dial returns it, and the dialer loses no port.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::thread;

use fourtuple::dial::{DialError, Dialer, Sharing, Strategy, UdpDialer};
use fourtuple_syscalls::seccomp::{self, FailingCall};
use fourtuple_syscalls::{Errno, option};
use fourtuple_testing::{each_in_namespace, in_namespace, listener, print, set_sysctl};
use tokio::runtime::Builder;

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
                let dialer = Dialer::to(destination).strategy(strategy).build().unwrap();
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
