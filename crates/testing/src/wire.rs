//! A pair of network devices (veth) between two network namespaces, with checksums on all packets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use fourtuple_syscalls::{device, netns};

/// Device in the namespace of the thread that called [`Wire::open`].
pub const NEAR: &str = "near";
/// Device in the far namespace.
pub const FAR: &str = "far";
/// IPv4 address of the near device.
pub const NEAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
/// IPv4 address of the far device.
pub const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
/// IPv6 address of the near device.
pub const NEAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1));
/// IPv6 address of the far device.
pub const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2));

/// A veth pair whose far device is in a second namespace. Dropping the value removes that namespace.
#[derive(Debug)]
pub struct Wire {
    namespace: OwnedFd,
}

impl Wire {
    /// Creates both devices and brings them up. Both compute the checksums of sent packets, as hardware does, or a veth device after
    /// `ethtool -K DEV tx off`. Call it in a namespace of the test. Returns `None` and reports `test` as skipped if the kernel has no
    /// veth.
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

    /// Runs `what` in the far namespace. A socket opened there belongs to that namespace, in whichever thread it is used.
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
