//! Probes for the socket options of this kernel.
//!
//! The release number of a kernel does not tell: 6.1.y has a backport of IP_LOCAL_PORT_RANGE, but not the linear search of 6.8.
//!
//! Example: [`probe`].

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, TryLockError};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::procfs;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{errno_name, netns};

use crate::ports::{PortRange, PortSet};

/// Support for IP_LOCAL_PORT_RANGE (option 51 of SOL_IP).
///
/// Example: [`probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum LocalPortRange {
    /// `setsockopt(IP_LOCAL_PORT_RANGE)` fails with ENOPROTOOPT: before Linux 6.3 without a backport, or refused by a filter.
    Absent,
    /// The kernel searches the window by parity: all ports of one parity, then the rest (Linux 6.3 to 6.7, and 6.1.y).
    Parity,
    /// The kernel searches the window port by port, from a start of either parity (Linux 6.8 and later).
    Linear,
    /// The kernel has the option, but its search could not be probed: the loopback device is down, or connect() finds no port for the
    /// probe, for example because bind() has taken every port of the range. The next call probes again.
    Unproven,
}

impl LocalPortRange {
    /// Returns the name used in records.
    pub fn name(self) -> &'static str {
        match self {
            LocalPortRange::Absent => "absent",
            LocalPortRange::Parity => "parity",
            LocalPortRange::Linear => "linear",
            LocalPortRange::Unproven => "unproven",
        }
    }
}

/// Results of the probe in the calling thread's network namespace.
///
/// Example: [`probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capabilities {
    /// Support for IP_LOCAL_PORT_RANGE.
    pub local_port_range: LocalPortRange,
}

/// A failed probe. A kernel without support is a result, not an error.
///
/// Example: [`probe`].
#[derive(Debug, thiserror::Error)]
#[error("cannot find out what this kernel can do: {call}: {}", errno_name(.error))]
#[non_exhaustive]
pub struct ProbeError {
    /// The call that failed.
    pub call: &'static str,
    /// The error of the call.
    #[source]
    pub error: io::Error,
}

impl From<ProbeError> for io::Error {
    fn from(error: ProbeError) -> io::Error {
        io::Error::new(error.error.kind(), error)
    }
}

/// Probes the kernel, once per network namespace; later calls return the stored result.
///
/// The probe opens up to 40 connections to its own listener on 127.0.0.1 and resets them, so that no TIME_WAIT socket remains.
///
/// # Errors
///
/// [`ProbeError`] if a system call of the probe fails.
///
/// # Examples
///
/// ```
/// use fourtuple::capabilities::{self, LocalPortRange};
///
/// let found = capabilities::probe()?.local_port_range;
/// match found {
///     LocalPortRange::Linear => println!("connect() searches a window port by port"),
///     LocalPortRange::Parity => println!("connect() searches a window by parity"),
///     _ => println!("connect() searches the range of the namespace: {}", found.name()),
/// }
/// # Ok::<(), capabilities::ProbeError>(())
/// ```
pub fn probe() -> Result<Capabilities, ProbeError> {
    static KNOWN: Mutex<Vec<(u64, Capabilities)>> = Mutex::new(Vec::new());
    // Without SO_NETNS_COOKIE (before Linux 5.14) namespaces cannot be distinguished, and no result is stored.
    let Ok(namespace) = netns::identity() else {
        return probe_now();
    };
    // Another thread may have held the lock at fork(): in the child it stays locked, and each call probes.
    let known = || match KNOWN.try_lock() {
        Err(TryLockError::WouldBlock) => None,
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Ok(known) => Some(known),
    };
    let found = known().and_then(|known| known.iter().find(|(id, _)| *id == namespace).copied());
    if let Some((_, capabilities)) = found {
        return Ok(capabilities);
    }
    let capabilities = probe_now()?;
    if capabilities.local_port_range == LocalPortRange::Unproven {
        return Ok(capabilities);
    }
    if let Some(mut known) = known() {
        known.push((namespace, capabilities));
    }
    Ok(capabilities)
}

/// With 16 one of 32,768 processes took a linear search for one by parity.
const PROBES: usize = 40;

fn probe_now() -> Result<Capabilities, ProbeError> {
    let at = |call| move |error| ProbeError { call, error };
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let first = socket::open(Transport::Tcp, loopback, true).map_err(at("socket"))?;
    match option::set_local_port_range(first.as_fd(), 0, u16::MAX).map_err(at("setsockopt"))? {
        Answer::Absent => return Ok(Capabilities { local_port_range: LocalPortRange::Absent }),
        Answer::Done => {}
    }
    Ok(Capabilities { local_port_range: search(true)? })
}

/// Probes how connect() searches for a source port on a socket without options, in the calling thread's network namespace. The probe
/// connects as [`probe`] does; the result is not stored.
///
/// # Errors
///
/// [`ProbeError`]
///
/// # Examples
///
/// ```
/// use fourtuple::capabilities::{self, LocalPortRange};
///
/// let found = capabilities::probe_default_search()?; // Parity on all kernels to date
/// assert_ne!(found, LocalPortRange::Absent); // the search exists without the option
/// # Ok::<(), capabilities::ProbeError>(())
/// ```
pub fn probe_default_search() -> Result<LocalPortRange, ProbeError> {
    search(false)
}

fn search(with_option: bool) -> Result<LocalPortRange, ProbeError> {
    match observe(with_option) {
        Err(error)
            if matches!(
                error.error.kind(),
                io::ErrorKind::NetworkUnreachable
                    | io::ErrorKind::NetworkDown
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::AddrNotAvailable
                    | io::ErrorKind::AddrInUse
            ) =>
        {
            Ok(LocalPortRange::Unproven)
        }
        observed => observed,
    }
}

/// Observes whether connections, with or without IP_LOCAL_PORT_RANGE, get ports of both parities.
///
/// Each connection is reset before the next, so that a range of a few ports is enough. A search by parity takes all ports of one
/// parity first, and a few connections do not exhaust them. A linear search misses one parity in 40 tries with a probability of 2^-39,
/// because its start moves by a random 1 to 8 ports each time.
fn observe(with_option: bool) -> Result<LocalPortRange, ProbeError> {
    let at = |call| move |error| ProbeError { call, error };
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = socket::open(Transport::Tcp, loopback, true).map_err(at("socket"))?;
    bind_anywhere(listener.as_fd()).map_err(at("bind"))?;
    socket::listen(listener.as_fd(), 2 * PROBES as i32).map_err(at("listen"))?;
    let destination = socket::local_address(listener.as_fd()).map_err(at("getsockname"))?;
    let mut seen = [false; 2];
    for _ in 0..PROBES {
        let probe = socket::open(Transport::Tcp, destination, true).map_err(at("socket"))?;
        if with_option {
            let _: Answer =
                option::set_local_port_range(probe.as_fd(), 0, u16::MAX).map_err(at("setsockopt"))?;
        }
        option::set_reset_on_close(probe.as_fd()).map_err(at("setsockopt"))?;
        socket::connect(probe.as_fd(), destination).map_err(at("connect"))?;
        let local = socket::local_address(probe.as_fd()).map_err(at("getsockname"))?;
        seen[usize::from(local.port() & 1)] = true;
        if seen == [true, true] {
            break;
        }
    }
    Ok(match seen {
        [true, true] => LocalPortRange::Linear,
        _ if has_both_parities(destination.port()) => LocalPortRange::Parity,
        _ => LocalPortRange::Unproven,
    })
}

/// Returns whether connect() can choose ports of both parities. The range may have few ports, most of them may be reserved, and the
/// listener of the probe takes one.
fn has_both_parities(listener: u16) -> bool {
    let Ok((range, reserved)) = local_ports() else { return true };
    let has =
        |parity| range.iter().any(|port| port & 1 == parity && port != listener && !reserved.contains(port));
    has(0) && has(1)
}

/// Number of ports outside of the ephemeral range that [`bind_anywhere`] tries.
const OUTSIDE: usize = 64;

/// Binds the listener of the probe on 127.0.0.1. If connections use all ports of the ephemeral range, bind() finds none there, but
/// connect() shares these ports with other destinations: the listener then gets a port next to the range.
fn bind_anywhere(listener: BorrowedFd<'_>) -> io::Result<()> {
    let bind = |port| socket::bind(listener, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let full = match bind(0) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
        bound => return bound,
    };
    let Ok((range, _)) = local_ports() else { return Err(full) };
    let outside = (range.high().saturating_add(1)..=u16::MAX).chain((1..range.low()).rev());
    // Other sockets may use some of them, and ports below 1024 need a permission.
    if outside.take(OUTSIDE).any(|port| bind(port).is_ok()) { Ok(()) } else { Err(full) }
}

/// Returns the ephemeral port range and the reserved ports of the calling thread's network namespace.
///
/// # Errors
///
/// The errors of reading /proc/sys/net/ipv4; [`io::ErrorKind::InvalidData`] if the content is not a range.
///
/// # Examples
///
/// ```
/// let (range, reserved) = fourtuple::capabilities::local_ports()?;
/// let ports = range.len() - reserved.count_in(range);
/// println!("connect() chooses among {ports} ports of {range}");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn local_ports() -> io::Result<(PortRange, PortSet)> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?.parse().map_err(invalid)?;
    let reserved = procfs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
    Ok((range, PortSet::parse_list(&reserved).map_err(invalid)?))
}
