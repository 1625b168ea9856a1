//! Tries cures that findings propose: in a network namespace of its own, with real connections over its loopback device, before and after
//! the cure, and without it again. The examined namespace takes no part.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::Cure;
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::socket::{self, Progress, Transport};

use crate::watch::{Work, apart};

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4_000);
/// Ports of the range that the connections exhaust.
const PORTS: u16 = 8;
const LOW: u16 = 20_000;
const RANGE: &str = "net/ipv4/ip_local_port_range";
const REUSE: &str = "net/ipv4/tcp_tw_reuse";
/// Time after which reuse counts as without effect. The kernel waits for net.ipv4.tcp_tw_reuse_delay (1 s by default, also where it is
/// not a sysctl), in whole seconds before Linux 6.14; on a busy host this thread may stand still for seconds.
const REUSE_TIMEOUT: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(50);
/// Time for a handshake over loopback, which takes seconds where other work keeps the kernel busy. Without a free port connect() fails at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Tries a cure once in the life of this process. `None`: this process may not make a network namespace, or the fault did not appear there.
pub(crate) fn try_cure(cure: Cure) -> Option<bool> {
    static REUSE: OnceLock<Option<bool>> = OnceLock::new();
    static RANGE: OnceLock<Option<bool>> = OnceLock::new();
    let (result, work) = match cure {
        Cure::Reuse => (&REUSE, Work::Reuse),
        Cure::Range => (&RANGE, Work::Range),
    };
    *result.get_or_init(|| apart(work).ok())
}

/// Returns whether net.ipv4.tcp_tw_reuse = 1 gives ports in TIME_WAIT to new connections. Changes the network namespace of this thread,
/// which must be new.
pub(super) fn reuse(has_timestamps: bool) -> Result<bool, String> {
    set("net/ipv4/tcp_timestamps", if has_timestamps { "1" } else { "0" })?;
    // On a busy host a FIN is sent again, and the RST that its answer meets would end the TIME_WAIT socket.
    set("net/ipv4/tcp_rfc1337", "1")?;
    let server = Server::start()?;
    exhaust(&server, |client, accepted| {
        // The client closes first, and has the socket in TIME_WAIT.
        drop(client);
        drop(accepted);
    })?;
    set(REUSE, "1")?;
    let begun = Instant::now();
    let cured = loop {
        match server.connect() {
            Ok(pair) => break Some(pair),
            Err(error) if is_exhausted(&error) && begun.elapsed() < REUSE_TIMEOUT => thread::sleep(INTERVAL),
            Err(error) if is_exhausted(&error) => break None,
            Err(error) => return Err(failed("connect()", &error)),
        }
    };
    // Time alone has not freed the ports.
    set(REUSE, "0")?;
    must_be_exhausted(&server)?;
    Ok(cured.is_some())
}

/// Returns whether a wider range gives ports to new connections. Changes the network namespace of this thread, which must be new.
pub(super) fn range() -> Result<bool, String> {
    let server = Server::start()?;
    let mut open = Vec::new();
    exhaust(&server, |client, accepted| open.push((client, accepted)))?;
    set_range(2 * PORTS)?;
    let cured = match server.connect() {
        Ok(pair) => Some(pair),
        Err(error) if is_exhausted(&error) => None,
        Err(error) => return Err(failed("connect()", &error)),
    };
    set_range(PORTS)?;
    must_be_exhausted(&server)?;
    Ok(cured.is_some())
}

/// A listener in the namespace of the trial.
struct Server(OwnedFd);

impl Server {
    fn start() -> Result<Server, String> {
        set_range(PORTS)?;
        // 2, the default, is 0 for all addresses but loopback.
        set(REUSE, "0")?;
        let listen = || {
            let listener = socket::open(Transport::Tcp, SERVER, false)?;
            socket::bind(listener.as_fd(), SERVER)?;
            socket::listen(listener.as_fd(), i32::from(PORTS)).map(|()| listener)
        };
        listen().map(Server).map_err(|error| failed("listen()", &error))
    }

    /// Returns both ends of a connection.
    fn connect(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let client = socket::open(Transport::Tcp, SERVER, true)?;
        socket::connect(client.as_fd(), SERVER)?;
        match socket::wait_connected(client.as_fd(), Some(CONNECT_TIMEOUT))? {
            Progress::Connected => Ok((client, socket::accept(self.0.as_fd())?)),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Connects until no port is free. `each` gets both ends of each connection.
fn exhaust(server: &Server, mut each: impl FnMut(OwnedFd, OwnedFd)) -> Result<(), String> {
    for _ in 0..PORTS {
        let (client, accepted) = server.connect().map_err(|error| failed("connect()", &error))?;
        each(client, accepted);
    }
    must_be_exhausted(server)
}

fn must_be_exhausted(server: &Server) -> Result<(), String> {
    match server.connect() {
        Err(error) if is_exhausted(&error) => Ok(()),
        Err(error) => Err(failed("connect()", &error)),
        Ok(_) => Err(format!("{PORTS} ports were enough for one more connection")),
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    Errno::of(error) == Some(Errno::EADDRNOTAVAIL)
}

fn set_range(ports: u16) -> Result<(), String> {
    set(RANGE, &format!("{LOW} {}", LOW + ports - 1))
}

fn set(name: &str, value: &str) -> Result<(), String> {
    fs::write(Path::new("/proc/sys").join(name), value).map_err(|error| failed(name, &error))
}

fn failed(what: &str, error: &io::Error) -> String {
    format!("{what}: {}", fourtuple_syscalls::errno_name(error))
}

#[cfg(test)]
mod tests {
    use fourtuple_testing::in_namespace;

    use super::*;

    #[test]
    fn reuse_frees_ports_if_the_peer_has_timestamps() {
        in_namespace(|| assert_eq!(reuse(true), Ok(true)));
        in_namespace(|| assert_eq!(reuse(false), Ok(false)));
    }

    #[test]
    fn a_wider_range_gives_ports() {
        in_namespace(|| assert_eq!(range(), Ok(true)));
    }

    #[test]
    fn a_fault_that_does_not_appear_is_no_result() {
        in_namespace(|| {
            let _server = Server::start().unwrap();
            assert!(range().is_err_and(|reason| reason == "listen(): EADDRINUSE"));
        });
    }
}
