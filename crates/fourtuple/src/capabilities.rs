//! What this kernel can do, found by trying. The release number of a kernel says little: 6.1.y has
//! IP_LOCAL_PORT_RANGE by a backport, but not the linear search that came with it in 6.8.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Mutex;

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{errno_name, netns};

use crate::ports::{PortRange, PortSet};

/// How far this kernel has IP_LOCAL_PORT_RANGE (option 51 of SOL_IP).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LocalPortRange {
    /// ENOPROTOOPT: before 6.3, without a backport, or filtered away.
    Absent,
    /// The window is honoured, but searched as ever: one half of its ports, then the other (6.3 to 6.7, and 6.1.y).
    Parity,
    /// The window is searched one port after the other, from either parity (6.8 and later).
    Linear,
    /// There is the option; how it searches could not be tried, because the loopback device is down
    /// or no port is left for the probe itself. It is tried again at the next call.
    Unproven,
}

impl LocalPortRange {
    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            LocalPortRange::Absent => "absent",
            LocalPortRange::Parity => "parity",
            LocalPortRange::Linear => "linear",
            LocalPortRange::Unproven => "unproven",
        }
    }
}

/// What was found out about the calling thread's network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// IP_LOCAL_PORT_RANGE.
    pub local_port_range: LocalPortRange,
}

/// A probe that could not be made. Never "not supported": that is an answer, not an error.
#[derive(Debug, thiserror::Error)]
#[error("cannot find out what this kernel can do: {call}: {}", errno_name(.error))]
pub struct ProbeError {
    /// The call that failed.
    pub call: &'static str,
    /// How it failed.
    #[source]
    pub error: io::Error,
}

/// Finds out, once per network namespace; later calls there answer from memory.
///
/// The probe makes 16 connections to a listener of its own on 127.0.0.1 and resets them: nothing stays behind.
pub fn probe() -> Result<Capabilities, ProbeError> {
    static KNOWN: Mutex<Vec<(u64, Capabilities)>> = Mutex::new(Vec::new());
    // Where namespaces cannot be told apart (before 5.14) nothing is remembered.
    let Ok(namespace) = netns::identity() else {
        return probe_now();
    };
    let known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((_, capabilities)) = known.iter().find(|(id, _)| *id == namespace) {
        return Ok(*capabilities);
    }
    drop(known);
    let capabilities = probe_now()?;
    if capabilities.local_port_range == LocalPortRange::Unproven {
        return Ok(capabilities);
    }
    KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((namespace, capabilities));
    Ok(capabilities)
}

const PROBES: usize = 16;

fn probe_now() -> Result<Capabilities, ProbeError> {
    let at = |call| move |error| ProbeError { call, error };
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let first = socket::open(Transport::Tcp, loopback, true).map_err(at("socket"))?;
    match option::set_local_port_range(first.as_fd(), 0, u16::MAX).map_err(at("setsockopt"))? {
        Answer::Absent => return Ok(Capabilities { local_port_range: LocalPortRange::Absent }),
        Answer::Done => {}
    }
    match parities() {
        Ok(both) => Ok(Capabilities {
            local_port_range: if both { LocalPortRange::Linear } else { LocalPortRange::Parity },
        }),
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
            Ok(Capabilities { local_port_range: LocalPortRange::Unproven })
        }
        Err(error) => Err(error),
    }
}

/// Whether connections with the option set take ports of both parities while there are plenty of either. Each is reset before
/// the next, so that even a range of a few ports is enough.
///
/// A search by parity exhausts one half first, so on a tuple of its own it never gets to the other; a linear one misses
/// a parity in 16 tries once in 2^15 (its start moves on by 1 to 8 at random).
fn parities() -> Result<bool, ProbeError> {
    let at = |call| move |error| ProbeError { call, error };
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = socket::open(Transport::Tcp, loopback, true).map_err(at("socket"))?;
    socket::bind(listener.as_fd(), loopback).map_err(at("bind"))?;
    socket::listen(listener.as_fd(), 2 * PROBES as i32).map_err(at("listen"))?;
    let destination = socket::local_address(listener.as_fd()).map_err(at("getsockname"))?;
    let mut seen = [false; 2];
    for _ in 0..PROBES {
        let probe = socket::open(Transport::Tcp, destination, true).map_err(at("socket"))?;
        let _: Answer = option::set_local_port_range(probe.as_fd(), 0, u16::MAX).map_err(at("setsockopt"))?;
        option::set_reset_on_close(probe.as_fd()).map_err(at("setsockopt"))?;
        socket::connect(probe.as_fd(), destination).map_err(at("connect"))?;
        let local = socket::local_address(probe.as_fd()).map_err(at("getsockname"))?;
        seen[usize::from(local.port() & 1)] = true;
    }
    Ok(seen == [true, true])
}

/// The ephemeral range of the calling thread's namespace, and the ports that it may not choose by itself.
///
/// # Errors
///
/// Whatever reading /proc/sys/net/ipv4 gives; a content that is no range is [`io::ErrorKind::InvalidData`].
pub fn local_ports() -> io::Result<(PortRange, PortSet)> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?.parse().map_err(invalid)?;
    let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
    Ok((range, PortSet::parse_list(&reserved).map_err(invalid)?))
}
