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

use crate::LabError;

/// Descriptors that an experiment needs at a time: one batch on its way to the parking, listeners, and some air.
const DESCRIPTORS: u64 = 512;

/// Makes this process able to run experiments: raises the soft limit on descriptors to the hard one, and without the right
/// to make namespaces moves it into a user namespace of its own first. Must be called before any thread is started.
pub fn prepare_process() -> Result<(), LabError> {
    let limit = resource::raise_descriptor_limit().map_err(LabError::call("getrlimit"))?;
    if limit < DESCRIPTORS {
        return Err(LabError::Descriptors { limit, needed: DESCRIPTORS });
    }
    // Trying is the only test that holds: root in a container may lack the right, and a user may have it.
    match netns::try_new() {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            netns::become_root_of_new_user_namespace().map_err(LabError::Namespace)
        }
        Err(error) => Err(LabError::Namespace(error)),
    }
}

/// A network namespace of an experiment: loopback is up, and nothing else is there.
#[derive(Debug)]
pub struct Namespace {
    // Only within a thread that `run` started: the proof that calls here touch no other namespace.
    _private: (),
}

impl Namespace {
    /// Runs `experiment` on a thread of its own in a new namespace, which ends with it.
    pub fn run<R: Send>(
        experiment: impl FnOnce(&Namespace) -> Result<R, LabError> + Send,
    ) -> Result<R, LabError> {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                netns::enter_new().map_err(LabError::Namespace)?;
                experiment(&Namespace { _private: () })
            });
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

    /// Ports for listeners, from the low ones up: outside of the range, where they take none from those who dial.
    pub fn ports_beside(range: PortRange) -> impl Iterator<Item = u16> {
        (1..=u16::MAX).filter(move |port| !range.contains(*port))
    }

    /// The address that servers listen on: all of them.
    pub fn any_address(family: Family) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// `count` source addresses; those of IPv6 are added to the loopback device, all of 127/8 is there already.
    pub fn sources(&self, family: Family, count: u32) -> Result<Vec<IpAddr>, LabError> {
        // From .2 on, so that no source is the destination; the third octet skips nothing that is special on lo.
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

    /// A listener on `port` of every address, with an accept queue for all that will ever come: never drained, it holds
    /// the server's side of the connections without a descriptor.
    pub fn listen(&self, family: Family, port: u16) -> Result<OwnedFd, LabError> {
        let address = SocketAddr::new(Self::any_address(family), port);
        let what = || LabError::call(format!("listen on {address}"));
        // The kernel cuts every queue to this.
        self.set("net.core.somaxconn", "4194304")?;
        let listener = socket::open(Transport::Tcp, address, false).map_err(what())?;
        fourtuple_syscalls::option::set_reuse_address(listener.as_fd(), true).map_err(what())?;
        socket::bind(listener.as_fd(), address).map_err(what())?;
        socket::listen(listener.as_fd(), i32::MAX).map_err(what())?;
        Ok(listener)
    }
}

/// Waits until a new address can be bound: a worker of the kernel makes it so, even where no duplicate is looked for
/// (addrconf_dad_work).
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
    /// The loopback address.
    pub fn loopback(self) -> IpAddr {
        match self {
            Family::V4 => Ipv4Addr::LOCALHOST.into(),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }

    /// 4 or 6.
    pub fn number(self) -> u8 {
        match self {
            Family::V4 => 4,
            Family::V6 => 6,
        }
    }
}
