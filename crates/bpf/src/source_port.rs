//! Replaces the source port of packets before the kernel sees them, so that one 4-tuple becomes many.

use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::call::{AllAtomic, Shared};
use crate::error::BpfError;
use crate::object::Program;
use crate::xdp::{self, Attached, Counted, Counts, Mode, ModeRequest, PROCESSORS, Target};

/// The first port that packets are given; this port and all higher ports are dynamic ports, not assigned to any service (RFC 6335).
const FIRST: u16 = 49_152;

#[derive(Debug)]
#[repr(C)]
struct State {
    target: Target,
    first: AtomicU32,
    ports: AtomicU32,
    counts: [Counts; PROCESSORS],
}

// SAFETY: all fields are atomics or padding that is never read.
unsafe impl AllAtomic for State {}

// The layout must equal struct state in source_port.bpf.c.
const _: () = assert!(mem::offset_of!(State, counts) == 32);

/// The program at its device. The receiver sees the replaced source ports, so replies do not reach the sender.
///
/// The program adjusts the checksum to the new port (RFC 1624), so the sum over the packet stays the same, also if the network
/// card has computed it (CHECKSUM_COMPLETE). A packet without a checksum yet (CHECKSUM_PARTIAL: from a sender on this host
/// whose device leaves the checksum to the next device) is received correctly, but must not be forwarded.
#[derive(Debug)]
pub struct SourcePort {
    state: Shared<State>,
    attached: Attached,
}

impl SourcePort {
    /// Maximum number of source ports.
    pub const MAX_PORTS: u16 = u16::MAX - FIRST + 1;

    /// Loads the program and attaches it to the device with the index `device`. Packets to `group` get a random source port out of
    /// `ports` ports, 1 to [`SourcePort::MAX_PORTS`].
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN; [`BpfError::Absent`] before Linux 5.9;
    /// [`BpfError::Busy`].
    pub fn attach(
        group: SocketAddr,
        ports: u16,
        device: u32,
        wish: ModeRequest,
    ) -> Result<SourcePort, BpfError> {
        let (program, state) = load(group, ports)?;
        let attached = xdp::attach(program.as_fd(), device, wish)?;
        Ok(SourcePort { state, attached })
    }

    /// Returns the BPF link. The program stays at the device while a descriptor of the link is open, also after this value is
    /// dropped, so that another process can take over.
    pub fn link(&self) -> BorrowedFd<'_> {
        self.attached.link()
    }

    /// Returns the mode in which the program is attached.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Returns the packets counted so far.
    pub fn counted(&self) -> Counted {
        xdp::counted(&self.state.counts)
    }
}

fn load(group: SocketAddr, ports: u16) -> Result<(OwnedFd, Shared<State>), BpfError> {
    let program = Program::read("source_port", include_bytes!("source_port.o"))?;
    let (array, state) = Shared::<State>::create("state")?;
    state.target.set(group);
    state.first.store(FIRST.into(), Ordering::Relaxed);
    state.ports.store(ports.clamp(1, SourcePort::MAX_PORTS).into(), Ordering::Relaxed);
    Ok((program.load(&[("state", &array)])?, state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call;
    use crate::packet::{self, Net, Packet};

    const PORTS: u16 = 4;

    /// Returns the packet after the program and the counters, or `None` if BPF is not available.
    fn run(test: &str, group: &str, packet: &Packet) -> Option<(Packet, Counted)> {
        let (program, state) = packet::loaded(test, load(group.parse().unwrap(), PORTS))?;
        let (action, bytes) = call::run_on_packet(program.as_fd(), &packet.bytes).unwrap();
        assert_eq!(action, 2, "XDP_PASS");
        Some((Packet { bytes, ..packet.clone() }, xdp::counted(&state.counts)))
    }

    const CHANGED: Counted = Counted { changed: 1, passed: 0 };
    const PASSED: Counted = Counted { changed: 0, passed: 1 };

    fn all() -> Vec<(&'static str, Packet)> {
        let mut all = Vec::new();
        for tags in [&[][..], &[0x8100], &[0x88a8, 0x8100]] {
            for payload in [&b""[..], b"x", b"an odd number", &[0xff; 64]] {
                for options in [0, 4, 40] {
                    all.push(("192.0.2.1:7000", Packet::new(Net::V4 { options }, tags, payload)));
                }
                all.push(("[2001:db8::1]:7000", Packet::new(Net::V6, tags, payload)));
            }
        }
        all
    }

    #[test]
    fn the_port_changes_and_the_checksum_is_right() {
        let _alone = packet::alone();
        let mut ports = Vec::new();
        for (group, packet) in all() {
            assert!(packet.checksum_is_right());
            let test = "the_port_changes_and_the_checksum_is_right";
            let Some((changed, counted)) = run(test, group, &packet) else { return };
            assert_eq!(counted, CHANGED, "{packet:?}");
            assert!(changed.checksum_is_right(), "{packet:?} {changed:?}");
            assert_eq!(changed.without_port_and_checksum(), packet.without_port_and_checksum());
            ports.push(changed.source_port());
        }
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports, [49_152, 49_153, 49_154, 49_155]);
    }

    /// Covers every sum, including the sum whose checksum would be 0, which means that there is no checksum.
    #[test]
    fn no_checksum_becomes_none() {
        let _alone = packet::alone();
        let mut packets = 0;
        let Ok((program, _state)) = load("192.0.2.1:7000".parse().unwrap(), 1) else { return };
        for word in 0..=u16::MAX {
            let packet = Packet::new(Net::V4 { options: 0 }, &[], &word.to_be_bytes());
            let (_, bytes) = call::run_on_packet(program.as_fd(), &packet.bytes).unwrap();
            let changed = Packet { bytes, ..packet };
            assert!(changed.checksum() != 0 && changed.checksum_is_right(), "{word:#x}");
            packets += 1;
        }
        assert_eq!(packets, 1 << 16);
    }

    #[test]
    fn packets_without_a_checksum_get_none() {
        let _alone = packet::alone();
        let test = "packets_without_a_checksum_get_none";
        let mut packet = Packet::new(Net::V4 { options: 0 }, &[], b"data");
        packet.set_checksum(0);
        let Some((changed, counted)) = run(test, "192.0.2.1:7000", &packet) else { return };
        assert_eq!((changed.checksum(), counted), (0, CHANGED));
        assert_ne!(changed.source_port(), packet.source_port());
        // IPv6 does not allow packets without a checksum; the kernel handles them.
        let mut packet = Packet::new(Net::V6, &[], b"data");
        packet.set_checksum(0);
        let (passed, counted) = run(test, "[2001:db8::1]:7000", &packet).unwrap();
        assert_eq!((passed.bytes, counted), (packet.bytes, PASSED));
    }

    #[test]
    fn foreign_and_fragmented_packets_pass_unchanged() {
        let _alone = packet::alone();
        let test = "foreign_and_fragmented_packets_pass_unchanged";
        let v4 = Packet::new(Net::V4 { options: 0 }, &[], b"data");
        let v6 = Packet::new(Net::V6, &[], b"data");
        let with = |packet: &Packet, at: usize, value: u8| {
            let mut packet = packet.clone();
            packet.bytes[at] = value;
            packet
        };
        let cut = |packet: &Packet, length: usize| {
            let mut packet = packet.clone();
            packet.bytes.truncate(length);
            packet
        };
        for (group, packet) in [
            ("192.0.2.1:7001", v4.clone()),
            ("192.0.2.2:7000", v4.clone()),
            ("[2001:db8::1]:7000", v4.clone()),
            ("192.0.2.1:7000", v6.clone()),
            ("[2001:db8::2]:7000", v6.clone()),
            ("0.0.0.0:7000", v6.clone()),
            // More fragments, an offset, TCP, a header that is too short, another version.
            ("192.0.2.1:7000", with(&v4, 20, 0x20)),
            ("192.0.2.1:7000", with(&v4, 21, 1)),
            ("192.0.2.1:7000", with(&v4, 23, 6)),
            ("192.0.2.1:7000", with(&v4, 14, 0x44)),
            ("192.0.2.1:7000", with(&v4, 14, 0x55)),
            // A header between, another version.
            ("[2001:db8::1]:7000", with(&v6, 20, 44)),
            ("[2001:db8::1]:7000", with(&v6, 14, 0x40)),
            // Truncated packets.
            ("192.0.2.1:7000", cut(&v4, 41)),
            ("192.0.2.1:7000", cut(&v4, 33)),
            ("[2001:db8::1]:7000", cut(&v6, 61)),
            ("0.0.0.0:7000", cut(&v4, 14)),
        ] {
            let Some((passed, counted)) = run(test, group, &packet) else { return };
            assert_eq!((passed.bytes, counted), (packet.bytes, PASSED), "{group}");
        }
        for (group, packet) in [("0.0.0.0:7000", &v4), ("[::]:7000", &v4), ("[::]:7000", &v6)] {
            assert_eq!(run(test, group, packet).unwrap().1, CHANGED, "{group}");
        }
    }
}
