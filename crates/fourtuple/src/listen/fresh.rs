//! The cost of a fresh local connection.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, UnixListener, UnixStream};
use std::process;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Connect, Transport};

use crate::listen::policy::Family;

/// The number of measured connections.
const CONNECTIONS: usize = 64;
/// The timeout of a connection over loopback, which normally completes at once.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Measures connect(2), accept4(2) and two close(2) with a separate listener on 127.0.0.1, ::1 or an abstract address, in the
/// network namespace of the calling thread. Returns the median of 64 connections. One thread suffices, because a connection is
/// established once it is in the accept queue.
///
/// Over TCP the client closes with RST, so that no TIME_WAIT socket remains; FIN would cost slightly more.
pub(crate) fn measure(family: Family) -> io::Result<Duration> {
    let mut times = Vec::with_capacity(CONNECTIONS);
    match family {
        Family::Unix => {
            let name = format!("fourtuple-fresh-{}-{:016x}", process::id(), fastrand::u64(..));
            let address = net::SocketAddr::from_abstract_name(name)?;
            let listener = UnixListener::bind_addr(&address)?;
            for _ in 0..CONNECTIONS {
                times.push(time(listener.as_fd(), || UnixStream::connect_addr(&address).map(OwnedFd::from))?);
            }
        }
        Family::Tcp4 | Family::Tcp6 => {
            let host: IpAddr =
                if family == Family::Tcp4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let listener = TcpListener::bind(SocketAddr::new(host, 0))?;
            let address = listener.local_addr()?;
            for _ in 0..CONNECTIONS {
                times.push(time(listener.as_fd(), || connect(address))?);
            }
        }
    }
    times.sort_unstable();
    Ok(times[CONNECTIONS / 2])
}

fn time(listener: BorrowedFd<'_>, connect: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Duration> {
    let begun = Instant::now();
    let client = connect()?;
    let server = loop {
        match socket::accept(listener) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            accepted => break accepted?,
        }
    };
    drop(client);
    drop(server);
    Ok(begun.elapsed())
}

fn connect(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, address, true)?;
    option::set_reset_on_close(socket.as_fd())?;
    if socket::connect(socket.as_fd(), address)? == Connect::Pending
        && !socket::wait_writable(socket.as_fd(), Some(TIMEOUT))?
    {
        return Err(io::ErrorKind::TimedOut.into());
    }
    option::take_error(socket.as_fd())?.map_or(Ok(socket), Err)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use fourtuple_syscalls::interval_timer::IntervalTimer;
    use fourtuple_testing::accept_queue::full_listener;
    use fourtuple_testing::in_namespace;

    use super::*;

    /// A busy kernel handles the last ACK of a handshake later, so that connect() and accept() wait.
    #[test]
    fn signals_end_no_wait_of_a_measurement() {
        in_namespace(|| {
            let _storm = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
            let before = IntervalTimer::signals();
            let (_listener, full, _queued) = full_listener("127.0.0.1");
            assert_eq!(connect(full).unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert!(IntervalTimer::signals() > before);
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (address, before) = (listener.local_addr().unwrap(), IntervalTimer::signals());
            let client = thread::spawn(move || {
                while IntervalTimer::signals() < before + 20 {
                    thread::sleep(Duration::from_millis(1));
                }
                connect(address)
            });
            time(listener.as_fd(), || Ok(listener.try_clone()?.into())).unwrap();
            client.join().unwrap().unwrap();
        });
    }

    #[test]
    fn every_family_has_a_cost() {
        in_namespace(|| {
            for family in Family::ALL {
                let cost = measure(family).unwrap();
                assert!(
                    cost > Duration::from_nanos(500) && cost < Duration::from_secs(1),
                    "{family}: {cost:?}"
                );
            }
        });
    }
}
