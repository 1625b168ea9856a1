//! Groups, what is sent to them, and what their sockets got of it.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{ControlFilter, Group, Spread, SpreadError};
use fourtuple_syscalls::datagram::Batch;

/// How long the slowest machine may take for what the fastest does at once.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// So many may wait in one queue, also where each takes a page.
const VOLLEY: u32 = 32;

/// A group, or a counted skip where BPF cannot be had.
pub(crate) fn open(test: &str, address: SocketAddr, members: usize, spread: &str) -> Option<Group> {
    opened(test, Group::open(address, members, &spread.parse::<Spread>().unwrap()))
}

/// The same with a socket for control.
pub(crate) fn open_with_control(
    test: &str,
    address: SocketAddr,
    members: usize,
    spread: &str,
    filter: &str,
) -> Option<Group> {
    let (spread, filter) = (spread.parse::<Spread>().unwrap(), filter.parse::<ControlFilter>().unwrap());
    opened(test, Group::open_with_control(address, members, &spread, &filter))
}

fn opened(test: &str, result: Result<Group, SpreadError>) -> Option<Group> {
    match result {
        Ok(group) => Some(group),
        #[cfg(feature = "bpf")]
        Err(SpreadError::Bpf {
            source:
                error @ (fourtuple_bpf::BpfError::NotPermitted { .. } | fourtuple_bpf::BpfError::Absent { .. }),
            ..
        }) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            None
        }
        Err(SpreadError::NotBuilt { .. }) => {
            fourtuple_testing::skip(test, "feature-bpf", "built without it");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// A socket that sends to the group, from the same address.
pub(crate) fn sender(group: &Group) -> UdpSocket {
    UdpSocket::bind((group.address().ip(), 0)).unwrap()
}

pub(crate) fn members(group: &Group) -> Vec<OwnedFd> {
    (0..group.len()).map(|index| group.member(index).unwrap()).collect()
}

/// What waits in the queue of a socket, by its first 4 bytes.
pub(crate) fn take(socket: &OwnedFd, batch: &mut Batch, into: &mut Vec<u32>) -> usize {
    let mut taken = 0;
    while batch.receive(socket.as_fd()).is_ok() {
        let number = |bytes: &[u8]| u32::from_be_bytes(*bytes.first_chunk().unwrap());
        into.extend(batch.iter().map(|datagram| number(datagram.bytes)));
        taken += batch.len();
    }
    taken
}

/// What each member gets of `packets` from one sender, whose payload is the packet's number. All arrive, or this fails.
pub(crate) fn shares(group: &Group, sender: &UdpSocket, packets: u32) -> Vec<Vec<u32>> {
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

/// Each socket's share is within 1 point of what it should be.
pub(crate) fn assert_even(got: &[Vec<u32>]) {
    let lengths = lengths(got);
    let sum: usize = lengths.iter().sum();
    let fair = sum as f64 / lengths.len() as f64;
    assert!(lengths.iter().all(|got| (*got as f64 - fair).abs() <= sum as f64 / 100.0), "{lengths:?}");
}
