//! Tests of the socket selection inside a group, as the kernel performs it. This file has the groups, and packets sent to them, counted
//! by receiving socket.
#![forbid(unsafe_code)]

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{ControlFilter, Selector, UdpGroup, UdpGroupError};
use fourtuple_syscalls::datagram::Batch;

#[cfg(feature = "bpf")]
mod bpf;
mod selectors;

/// A time limit for the slowest machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The number of packets that fit into one receive queue even if each occupies a page.
const VOLLEY: u32 = 32;

/// Opens a group, or counts a skipped test if the host has no BPF.
pub(crate) fn open(test: &str, address: SocketAddr, members: usize, spread: &str) -> Option<UdpGroup> {
    let spread = spread.parse::<Selector>().unwrap();
    opened(test, when_released(|| UdpGroup::open(address, members, &spread)))
}

/// Opens a group again until the sockets and the program of a closed one are gone: a child of another test has a copy of them until
/// exec().
fn when_released(open: impl Fn() -> Result<UdpGroup, UdpGroupError>) -> Result<UdpGroup, UdpGroupError> {
    let end = Instant::now() + DEADLINE;
    loop {
        match open() {
            Err(error) if is_busy(&error) && Instant::now() < end => thread::yield_now(),
            result => return result,
        }
    }
}

/// Opens a group with a control socket, or counts a skipped test if the host has no BPF.
pub(crate) fn open_with_control(
    test: &str,
    address: SocketAddr,
    members: usize,
    spread: &str,
    filter: &str,
) -> Option<UdpGroup> {
    let (spread, filter) = (spread.parse::<Selector>().unwrap(), filter.parse::<ControlFilter>().unwrap());
    opened(test, when_released(|| UdpGroup::open_with_control(address, members, &spread, &filter)))
}

/// Returns whether the address is in use, or the device has a program already.
fn is_busy(error: &UdpGroupError) -> bool {
    let reason = std::error::Error::source(error);
    let of_socket = reason.and_then(|source| source.downcast_ref::<std::io::Error>());
    #[cfg(feature = "bpf")]
    if let Some(fourtuple_bpf::BpfError::Busy { .. }) = reason.and_then(|source| source.downcast_ref()) {
        return true;
    }
    of_socket.is_some_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
}

fn opened(test: &str, result: Result<UdpGroup, UdpGroupError>) -> Option<UdpGroup> {
    match result {
        Ok(group) => Some(group),
        Err(error @ (UdpGroupError::NotPermitted { .. } | UdpGroupError::Absent { .. })) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            None
        }
        Err(UdpGroupError::NotBuilt { .. }) => {
            fourtuple_testing::skip(test, "feature-bpf", "built without it");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Opens a socket that sends to the group, from the group's own address.
pub(crate) fn sender(group: &UdpGroup) -> UdpSocket {
    UdpSocket::bind((group.address().ip(), 0)).unwrap()
}

pub(crate) fn members(group: &UdpGroup) -> Vec<OwnedFd> {
    (0..group.len()).map(|index| group.member(index).unwrap()).collect()
}

/// Takes all packets from the queue of a socket, each as its first 4 bytes.
pub(crate) fn take(socket: &OwnedFd, batch: &mut Batch, into: &mut Vec<u32>) -> usize {
    let mut taken = 0;
    while batch.receive(socket.as_fd()).is_ok() {
        let number = |bytes: &[u8]| u32::from_be_bytes(*bytes.first_chunk().unwrap());
        into.extend(batch.iter().map(|datagram| number(datagram.bytes)));
        taken += batch.len();
    }
    taken
}

/// Sends `packets` numbered packets from one sender, and returns the numbers that each member received. Panics if a packet is
/// lost.
pub(crate) fn shares(group: &UdpGroup, sender: &UdpSocket, packets: u32) -> Vec<Vec<u32>> {
    let members = members(group);
    let mut got = vec![Vec::new(); members.len()];
    let mut batch = Batch::new(64, 64);
    let mut received = 0;
    for packet in 0..packets {
        sender.send_to(&packet.to_be_bytes(), group.address()).unwrap();
        if packet % VOLLEY == VOLLEY - 1 || packet + 1 == packets {
            let end = Instant::now() + DEADLINE;
            while received <= packet as usize {
                let before = received;
                for (member, got) in members.iter().zip(&mut got) {
                    received += take(member, &mut batch, got);
                }
                if received == before {
                    let counts = lengths(&got);
                    assert!(Instant::now() < end, "{received} of {} came: {counts:?}", packet + 1);
                    thread::yield_now();
                }
            }
        }
    }
    assert_eq!(received, packets as usize);
    got
}

pub(crate) fn lengths(got: &[Vec<u32>]) -> Vec<usize> {
    got.iter().map(Vec::len).collect()
}

/// Checks that the share of each socket is within one percentage point of an even share.
pub(crate) fn assert_even(got: &[Vec<u32>]) {
    let lengths = lengths(got);
    let sum: usize = lengths.iter().sum();
    let fair = sum as f64 / lengths.len() as f64;
    assert!(lengths.iter().all(|got| (*got as f64 - fair).abs() <= sum as f64 / 100.0), "{lengths:?}");
}
