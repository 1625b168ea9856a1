use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::ports::PortRange;
use fourtuple_syscalls::netns;
use fourtuple_syscalls::resource;
use fourtuple_syscalls::socket::{self, Transport};

use crate::lab::{LabError, start_thread};

/// Descriptors that an experiment needs besides its parked sockets: one batch of dials, listeners, and a reserve.
const DESCRIPTORS: u64 = 512;

/// Prepares this process to run experiments: raises the soft limit on descriptors to the hard limit and, if the process may
/// not create namespaces, moves it into a user namespace of its own first. Must be called before any thread is started.
pub fn prepare_process() -> Result<(), LabError> {
    let limit = resource::raise_descriptor_limit().map_err(LabError::call("getrlimit"))?;
    if limit < DESCRIPTORS {
        return Err(LabError::Descriptors { limit, needed: DESCRIPTORS });
    }
    // Only an attempt shows whether namespaces are permitted: root in a container may lack the privilege, and a user may
    // have it.
    match netns::try_new() {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            netns::become_root_of_new_user_namespace().map_err(LabError::Namespace)
        }
        Err(error) => Err(LabError::Namespace(error)),
    }
}

/// A network namespace of an experiment, which contains only a loopback device that is up.
#[derive(Debug)]
pub struct Namespace {
    // Only a thread that `run` started has this value: it proves that system calls here affect no other namespace.
    _private: (),
}

impl Namespace {
    /// Runs `experiment` on a new thread in a new namespace. The namespace ends with the thread.
    pub fn run<R: Send>(
        experiment: impl FnOnce(&Namespace) -> Result<R, LabError> + Send,
    ) -> Result<R, LabError> {
        thread::scope(|scope| {
            let thread = start_thread(scope, || {
                netns::enter_new().map_err(LabError::Namespace)?;
                experiment(&Namespace { _private: () })
            })?;
            thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
    }

    /// Sets a sysctl by its dotted name.
    pub fn set(&self, name: &str, value: &str) -> Result<(), LabError> {
        fs::write(Path::new("/proc/sys").join(name.replace('.', "/")), value)
            .map_err(|error| LabError::Sysctl { name: name.to_owned(), value: value.to_owned(), error })
    }

    /// Sets the ephemeral range.
    pub fn set_range(&self, range: PortRange) -> Result<(), LabError> {
        self.set("net.ipv4.ip_local_port_range", &format!("{} {}", range.low(), range.high()))
    }

    /// Returns ports for listeners, in ascending order and outside the ephemeral range, so that dialers keep the whole
    /// range.
    pub fn ports_beside(range: PortRange) -> impl Iterator<Item = u16> {
        (1..=u16::MAX).filter(move |port| !range.contains(*port))
    }

    /// Returns the wildcard address, on which servers listen.
    pub fn any_address(family: Family) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// Returns `count` source addresses. IPv6 addresses are added to the loopback device; all of 127/8 exists already.
    pub fn sources(&self, family: Family, count: u32) -> Result<Vec<IpAddr>, LabError> {
        // Sources begin at .2, so that no source equals the destination; no value of the third octet is special on lo.
        (2..count + 2)
            .map(|host| match family {
                Family::V4 => Ok(IpAddr::from(Ipv4Addr::from(0x7f00_0000 + host))),
                Family::V6 => {
                    let address = Ipv6Addr::new(0xfd00, 0x4, 0, 0, 0, 0, (host >> 16) as u16, host as u16);
                    netns::add_loopback_address(address)
                        .and_then(|()| usable(address))
                        .map_err(LabError::call(format!("add {address} to lo")))?;
                    Ok(address.into())
                }
            })
            .collect()
    }

    /// Opens a listener on `port` of every address. Its accept queue is never drained: it holds the server side of all
    /// connections without a descriptor.
    pub fn listen(&self, family: Family, port: u16) -> Result<OwnedFd, LabError> {
        let address = SocketAddr::new(Self::any_address(family), port);
        let what = || LabError::call(format!("listen on {address}"));
        // The kernel limits every backlog to this sysctl.
        self.set("net.core.somaxconn", "4194304")?;
        let listener = socket::open(Transport::Tcp, address, false).map_err(what())?;
        fourtuple_syscalls::option::set_reuse_address(listener.as_fd(), true).map_err(what())?;
        socket::bind(listener.as_fd(), address).map_err(what())?;
        socket::listen(listener.as_fd(), i32::MAX).map_err(what())?;
        Ok(listener)
    }
}

/// Waits until a new address can be bound: a kernel worker enables the address later, even without duplicate address
/// detection (addrconf_dad_work).
fn usable(address: Ipv6Addr) -> io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let local = SocketAddr::from((address, 0));
    let probe = socket::open(Transport::Udp, local, false)?;
    let begun = Instant::now();
    loop {
        match socket::bind(probe.as_fd(), local) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && begun.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// 127.0.0.1
    V4,
    /// ::1
    V6,
}

impl Family {
    pub fn loopback(self) -> IpAddr {
        match self {
            Family::V4 => Ipv4Addr::LOCALHOST.into(),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }

    /// Returns 4 or 6.
    pub fn number(self) -> u8 {
        match self {
            Family::V4 => 4,
            Family::V6 => 6,
        }
    }
}
