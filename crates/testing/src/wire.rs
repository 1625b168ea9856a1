//! Two network namespaces and a wire (veth) between them, on which packets have checksums.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use fourtuple_syscalls::{device, netns};

/// The end that is in the namespace of the thread that has called [`Wire::open`].
pub const NEAR: &str = "near";
/// The end in the other one.
pub const FAR: &str = "far";
/// Addresses of both, of IPv4 and of IPv6.
pub const NEAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
/// As above.
pub const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
/// As above.
pub const NEAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1));
/// As above.
pub const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2));

/// A wire, whose other end is in a namespace that ends with this value.
#[derive(Debug)]
pub struct Wire {
    namespace: OwnedFd,
}

impl Wire {
    /// Makes both ends and brings them up. Both compute the checksums of what they send, as real cards or `ethtool -K DEV tx
    /// off` do, and as veth alone does not. To be called in a namespace of the test's own; where there is no veth that is a
    /// skip of `test`.
    pub fn open(test: &str) -> Option<Wire> {
        let made = || -> io::Result<Wire> {
            let far = thread::spawn(|| {
                netns::enter_new()?;
                netns::current()
            });
            let wire = Wire { namespace: far.join().expect("the thread does not panic")? };
            device::make_pair(NEAR, FAR, wire.namespace.as_fd())?;
            bring_up(NEAR, NEAR_V4, NEAR_V6)?;
            wire.far_away(|| bring_up(FAR, FAR_V4, FAR_V6))?;
            Ok(wire)
        };
        match made() {
            Ok(wire) => Some(wire),
            Err(error) => {
                super::skip(test, "veth", &format!("no pair of devices to be had: {error}"));
                None
            }
        }
    }

    /// Runs something in the other namespace. A socket that is opened there stays there, wherever it is used.
    pub fn far_away<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                netns::enter(self.namespace.as_fd()).expect("a thread may go where it has been");
                what()
            });
            there.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
        })
    }
}

fn bring_up(name: &str, v4: IpAddr, v6: IpAddr) -> io::Result<()> {
    device::leave_checksums(name, false)?;
    device::set_up(name)?;
    device::add_address(name, v4, 24)?;
    device::add_address(name, v6, 64)
}
