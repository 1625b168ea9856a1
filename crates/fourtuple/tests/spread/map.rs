//! A slot table that changes while packets arrive.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use fourtuple::spread::{SlotRule, UdpGroup, UdpGroupError};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;

use crate::group::{DEADLINE, assert_even, lengths, open, sender, shares, take};

const LOCAL: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];

fn local() -> SocketAddr {
    LOCAL[0].parse().unwrap()
}

#[test]
fn table_rules_match_the_selectors() {
    in_namespace(|| {
        for address in LOCAL {
            let test = "table_rules_match_the_selectors";
            let address: SocketAddr = address.parse().unwrap();
            let Some(mut group) = open(test, address, 4, "map:random") else { return };
            let sender = sender(&group);
            // The expected share is 5,000 packets; 400 are more than six standard deviations.
            let got = shares(&group, &sender, 20_000);
            assert!(got.iter().all(|got| got.len().abs_diff(5_000) < 400), "{:?}", lengths(&got));
            group.choose(SlotRule::Hash).unwrap();
            let got = shares(&group, &sender, 1_000);
            assert_eq!(got.iter().filter(|got| !got.is_empty()).count(), 1);
            group.choose("flow:0:4:0xf".parse::<fourtuple::spread::Selector>().map(key).unwrap()).unwrap();
            for (index, got) in shares(&group, &sender, 4_000).iter().enumerate() {
                assert_eq!(got.len(), 1_000);
                assert!(got.iter().all(|packet| packet & 3 == index as u32) && got.is_sorted());
            }
            group.choose(SlotRule::Cpu).unwrap();
            let got = shares(&group, &sender, 1_000);
            assert!(got.iter().filter(|got| !got.is_empty()).count() <= 2.max(cpus()));
            assert_eq!(group.strays(), 0);
        }
    });
}

fn key(spread: fourtuple::spread::Selector) -> SlotRule {
    match spread {
        fourtuple::spread::Selector::Key(key) => SlotRule::Key(key),
        other => panic!("{other}"),
    }
}

fn cpus() -> usize {
    thread::available_parallelism().unwrap().get()
}

#[test]
fn ten_members_are_all_busy_and_many_tuples_meet_all_by_hash() {
    in_namespace(|| {
        let test = "ten_members_are_all_busy_and_many_tuples_meet_all_by_hash";
        let Some(mut group) = open(test, local(), 10, "map") else { return };
        let got = shares(&group, &sender(&group), 4_000);
        assert!(got.iter().all(|got| got.len().abs_diff(400) < 160), "{:?}", lengths(&got));
        group.choose(SlotRule::Hash).unwrap();
        let mut busy = [false; 10];
        for _ in 0..200 {
            let got = shares(&group, &sender(&group), 1);
            busy[got.iter().position(|got| !got.is_empty()).unwrap()] = true;
        }
        // The probability of 10 empty cells with 200 balls is 7e-9.
        assert_eq!(busy, [true; 10]);
    });
}

#[test]
fn weights_are_shares() {
    in_namespace(|| {
        let Some(mut group) = open("weights_are_shares", local(), 3, "map:flow:0:4") else { return };
        let sender = sender(&group);
        group.steer(&[1, 2, 5]).unwrap();
        // Each of the 4,096 slots gets one packet.
        assert_eq!(lengths(&shares(&group, &sender, 4_096)), [512, 1_024, 2_560]);
        group.steer(&[0, 1, 0]).unwrap();
        assert_eq!(lengths(&shares(&group, &sender, 1_000)), [0, 1_000, 0]);
        for bad in [&[1, 1][..], &[0, 0, 0], &[1, 1, 1, 1]] {
            assert!(matches!(group.steer(bad), Err(UdpGroupError::Weights { .. })), "{bad:?}");
        }
        assert_eq!(lengths(&shares(&group, &sender, 1_000)), [0, 1_000, 0]);
    });
}

#[test]
fn numbers_of_removed_members_are_reused() {
    in_namespace(|| {
        let test = "numbers_of_removed_members_are_reused";
        let Some(mut group) = open(test, local(), 2, "map:flow:0:4") else { return };
        drop(group.leave(0).unwrap());
        assert!(matches!(group.leave(0), Err(UdpGroupError::NoMember { index: 0, .. })));
        assert!(matches!(group.leave(1), Err(UdpGroupError::Weights { .. })), "the last one");
        assert!(matches!(group.steer(&[1, 1]), Err(UdpGroupError::Weights { .. })));
        assert!(group.member(0).is_err());
        assert_eq!(group.len(), 1);
        assert_eq!(group.join().unwrap(), 0);
        assert_eq!(group.join().unwrap(), 2);
        assert_even(&shares(&group, &sender(&group), 8_192));
    });
}

/// A thread that sends until it is told to stop; the number of packets in flight never exceeds one socket queue.
struct Sender {
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    thread: thread::JoinHandle<u64>,
}

const AHEAD: u64 = 100;

fn start(to: SocketAddr) -> Sender {
    let (stop, received) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (stop_flag, counted) = (stop.clone(), received.clone());
    let socket = UdpSocket::bind((to.ip(), 0)).unwrap();
    let thread = thread::spawn(move || {
        let mut sent = 0;
        while !stop_flag.load(Ordering::Relaxed) {
            if sent - counted.load(Ordering::Relaxed) < AHEAD {
                socket.send_to(&(sent as u32).to_be_bytes(), to).unwrap();
                sent += 1;
            } else {
                thread::yield_now();
            }
        }
        sent
    });
    Sender { stop, received, thread }
}

/// Reads all members once, and counts the packets.
fn read(group: &UdpGroup, sender: &Sender, batch: &mut Batch, got: &mut Vec<u32>) {
    let before = got.len();
    for index in 0..8 {
        if let Ok(member) = group.member(index) {
            take(&member, batch, got);
        }
    }
    sender.received.fetch_add((got.len() - before) as u64, Ordering::Relaxed);
}

#[test]
fn members_come_and_go_under_traffic_and_nothing_is_lost() {
    in_namespace(|| {
        for address in LOCAL {
            let test = "members_come_and_go_under_traffic_and_nothing_is_lost";
            let address: SocketAddr = address.parse().unwrap();
            let Some(mut group) = open(test, address, 2, "map:random") else { return };
            let sender = start(group.address());
            let mut batch = Batch::new(64, 64);
            let mut got = Vec::new();
            for round in 0..60 {
                let goal = got.len() + 200;
                let end = Instant::now() + DEADLINE;
                while got.len() < goal {
                    read(&group, &sender, &mut batch, &mut got);
                    assert!(Instant::now() < end, "nothing comes in round {round}");
                }
                match round % 4 {
                    0 => drop(group.join().unwrap()),
                    1 => {
                        let weights: Vec<u32> = (0..3)
                            .map(|index| if group.member(index).is_ok() { 1 + index as u32 } else { 0 })
                            .collect();
                        group.steer(&weights).unwrap();
                    }
                    2 => group
                        .choose([SlotRule::Random, SlotRule::Hash, SlotRule::Cpu][round / 4 % 3])
                        .unwrap(),
                    _ => {
                        let leaver = group.leave(round / 4 % 3).unwrap();
                        let taken = take(&leaver, &mut batch, &mut got);
                        sender.received.fetch_add(taken as u64, Ordering::Relaxed);
                    }
                }
            }
            sender.stop.store(true, Ordering::Relaxed);
            let end = Instant::now() + DEADLINE;
            while !sender.thread.is_finished() {
                assert!(Instant::now() < end, "the sender does not end");
                read(&group, &sender, &mut batch, &mut got);
            }
            read(&group, &sender, &mut batch, &mut got);
            let sent = sender.thread.join().unwrap();
            got.sort_unstable();
            // Packets may still be in flight over loopback when the sender has ended.
            let end = Instant::now() + DEADLINE;
            while (got.len() as u64) < sent && Instant::now() < end {
                for index in 0..8 {
                    if let Ok(member) = group.member(index) {
                        take(&member, &mut batch, &mut got);
                    }
                }
            }
            got.sort_unstable();
            got.dedup();
            assert_eq!(got.len() as u64, sent, "lost");
            assert_eq!(group.strays(), 0);
        }
    });
}

/// Any process of the same user can bind with SO_REUSEPORT, and becomes a member without notice.
#[test]
fn a_foreign_socket_gets_packets_by_hash_but_not_by_table() {
    in_namespace(|| {
        let test = "a_foreign_socket_gets_packets_by_hash_but_not_by_table";
        for spread in ["map:hash", "hash"] {
            let Some(group) = open(test, local(), 1, spread) else { return };
            let stranger = socket::open(Transport::Udp, group.address(), true).unwrap();
            let _done = option::set_reuse_port(stranger.as_fd()).unwrap();
            socket::bind(stranger.as_fd(), group.address()).unwrap();
            for _ in 0..64 {
                sender(&group).send_to(&[0; 4], group.address()).unwrap();
            }
            let mut got = [Vec::new(), Vec::new()];
            let mut batch = Batch::new(64, 64);
            take(&group.member(0).unwrap(), &mut batch, &mut got[0]);
            take(&stranger, &mut batch, &mut got[1]);
            assert_eq!(got[0].len() + got[1].len(), 64);
            assert_eq!(got[1].is_empty(), spread == "map:hash", "{spread}: {:?}", lengths(&got));
        }
    });
}
