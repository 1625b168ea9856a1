//! Selectors that are BPF programs: a slot table that changes while packets arrive, and XDP programs.

use std::error::Error;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use fourtuple::spread::{Selector, SlotRule, UdpGroup, UdpGroupError};
use fourtuple_bpf::BpfError;
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, option};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::arrives;

use crate::{DEADLINE, assert_even, lengths, open, sender, shares, take};

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
            let end = Instant::now() + DEADLINE;
            while got[0].len() + got[1].len() < 64 {
                take(&group.member(0).unwrap(), &mut batch, &mut got[0]);
                take(&stranger, &mut batch, &mut got[1]);
                assert!(Instant::now() < end, "{spread}: {:?}", lengths(&got));
            }
            assert_eq!(got[1].is_empty(), spread == "map:hash", "{spread}: {:?}", lengths(&got));
        }
    });
}

// XDP programs that change packets, or move them to another CPU, before the network stack receives them. The loopback driver
// has no XDP support, so the programs run in generic mode.

/// Returns the error of the BPF program.
fn reason(error: &UdpGroupError) -> Option<&BpfError> {
    error.source()?.downcast_ref()
}

#[test]
fn more_source_ports_spread_one_tuple_better() {
    in_namespace(|| {
        let test = "more_source_ports_spread_one_tuple_better";
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Some(group) = open(test, address.parse().unwrap(), 4, "xdp:1024") else { return };
            let got = shares(&group, &sender(&group), 4_000);
            // The expected share is 256 ports with a standard deviation of 14, or 1,000 packets with a standard deviation of 27
            // plus the variation of the ports.
            assert!(got.iter().all(|got| got.len().abs_diff(1_000) < 500), "{:?}", lengths(&got));
            let at = group.at_device().unwrap();
            assert_eq!((at.changed, at.native), (4_000, false));
        }
        // The secret of the hash differs between boots, not between groups: other ports give independent samples.
        let busy = |ports: u32| -> usize {
            let group = open(test, "127.0.0.1:0".parse().unwrap(), 10, &format!("xdp:{ports}")).unwrap();
            let got = shares(&group, &sender(&group), 20 * ports.max(100));
            got.iter().filter(|got| !got.is_empty()).count()
        };
        // 10 balls in 10 cells leave 3.5 cells empty: 6.5 are busy, with a standard deviation of 1; in 12 groups 78, with a
        // standard deviation of 3.5.
        let seeds: usize = (0..12).map(|_| busy(10)).sum();
        assert!((60..=96).contains(&seeds), "{seeds} of 120");
        // The probability of 10 empty cells with 256 balls is 2e-11.
        assert_eq!(busy(256), 10);
    });
}

#[test]
fn the_receiver_sees_the_configured_number_of_peers() {
    in_namespace(|| {
        let test = "the_receiver_sees_the_configured_number_of_peers";
        let Some(group) = open(test, "127.0.0.1:0".parse().unwrap(), 1, "xdp:8@lo") else { return };
        let sender = sender(&group);
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut batch = Batch::new(64, 64);
        let mut peers = Vec::new();
        let end = Instant::now() + DEADLINE;
        for _ in 0..200 {
            sender.send_to(b"data", group.address()).unwrap();
            while batch.receive(group.member(0).unwrap().as_fd()).is_err() {
                assert!(Instant::now() < end);
                thread::yield_now();
            }
            peers.extend(batch.iter().map(|datagram| datagram.from().unwrap().port()));
        }
        peers.sort_unstable();
        peers.dedup();
        assert_eq!(peers, (49_152..49_160).collect::<Vec<_>>());
        let send = |to: SocketAddr| {
            sender.send_to(b"data", to).unwrap();
        };
        let to_other = || send(other.local_addr().unwrap());
        assert_eq!(arrives(to_other, &other, &mut [0; 8]).1, sender.local_addr().unwrap());
        let at = group.at_device().unwrap();
        assert_eq!(at.changed, 200);
        assert!(at.passed >= 1);
        // The program is detached when the group is dropped.
        let address = group.address();
        drop(group);
        // A child of another test has a copy of the group's socket until exec().
        let plain = loop {
            match UdpSocket::bind(address) {
                Ok(plain) => break plain,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
        };
        assert_eq!(arrives(|| send(address), &plain, &mut [0; 8]).1, sender.local_addr().unwrap());
    });
}

#[test]
fn all_addresses_are_one_group() {
    in_namespace(|| {
        let test = "all_addresses_are_one_group";
        for (listen, to) in [
            ("0.0.0.0:0", &["127.0.0.1", "127.0.0.2"][..]),
            ("[::]:0", &["127.0.0.1", "::1"]),
            ("127.0.0.3:0", &["127.0.0.3"]),
        ] {
            let Some(group) = open(test, listen.parse().unwrap(), 1, "xdp:8@lo") else { return };
            for to in to {
                let to: std::net::IpAddr = to.parse().unwrap();
                UdpSocket::bind((to, 0)).unwrap().send_to(b"data", (to, group.address().port())).unwrap();
            }
            let end = Instant::now() + DEADLINE;
            while group.at_device().unwrap().changed < to.len() as u64 {
                assert!(Instant::now() < end, "{listen}");
                thread::yield_now();
            }
        }
    });
}

#[test]
fn processors_get_packets_in_turn_and_each_has_its_socket() {
    in_namespace(|| {
        let test = "processors_get_packets_in_turn_and_each_has_its_socket";
        let cpus = thread::available_parallelism().unwrap().get().min(2);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let open = |spread: &str| open(test, address.parse().unwrap(), cpus, spread);
            let Some(group) = open(&format!("cpumap:{cpus}")) else { return };
            assert_even(&shares(&group, &sender(&group), 4_000));
            let at = group.at_device().unwrap();
            assert_eq!((at.changed, at.native), (4_000, false));
            drop(group);
            let group = open(&format!("cpumap:{cpus}:random@lo")).unwrap();
            assert!(shares(&group, &sender(&group), 1_000).iter().all(|got| got.len() > 300 / cpus));
            drop(group);
            let group = open("cpumap:flow:0:4@lo").unwrap();
            for (index, got) in shares(&group, &sender(&group), 1_000).iter().enumerate() {
                assert!(got.iter().all(|packet| *packet as usize % cpus == index), "{address}");
                assert!(got.is_sorted(), "packets overtook each other");
            }
        }
    });
}

#[test]
fn invalid_devices_are_named() {
    in_namespace(|| {
        let test = "invalid_devices_are_named";
        let local = "127.0.0.1:0".parse().unwrap();
        let Some(_first) = open(test, local, 1, "xdp:8") else { return };
        let refused = |address: &str, spread: &str| {
            UdpGroup::open(address.parse().unwrap(), 1, &spread.parse::<Selector>().unwrap()).unwrap_err()
        };
        let error = refused("127.0.0.1:0", "xdp:8@nosuch");
        assert!(matches!(error, UdpGroupError::NoDevice { .. }) && error.is_usage());
        assert!(error.to_string().contains("nosuch: ENODEV"), "{error}");
        let error = refused("0.0.0.0:0", "cpumap:1");
        assert!(error.to_string().contains("cpumap:1@DEVICE"), "{error}");
        // A device holds one program at a time.
        let error = refused("127.0.0.1:0", "xdp:8");
        assert!(matches!(reason(&error), Some(BpfError::Busy { .. })), "{error}");
        for spread in ["cpumap:65535@lo", "cpumap:9000@lo"] {
            let error = refused("127.0.0.1:0", spread);
            assert!(matches!(reason(&error), Some(BpfError::Processors { .. })), "{error}");
        }
    });
}

const INSIDE: &str = "FOURTUPLE_TEST_IS_A_CHILD";

/// A BPF link attaches the program, so the kernel detaches it when the process ends for any reason.
#[test]
fn a_killed_process_leaves_nothing_at_the_device() {
    if std::env::var_os(INSIDE).is_some() {
        // This child process runs in the namespace of its parent, which kills it here.
        let group = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 1, &"xdp:8".parse().unwrap()).unwrap();
        println!("attached {}", group.address());
        thread::sleep(DEADLINE);
        return;
    }
    in_namespace(|| {
        let test = "a_killed_process_leaves_nothing_at_the_device";
        if open(test, "127.0.0.1:0".parse().unwrap(), 1, "xdp:8").is_none() {
            return;
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("bpf::{test}"), "--nocapture"])
            .env(INSIDE, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let end = Instant::now() + DEADLINE;
        let busy = || {
            let result = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 1, &"xdp:8".parse().unwrap());
            result.is_err_and(|error| matches!(reason(&error), Some(BpfError::Busy { .. })))
        };
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap().contains("attached")));
        assert!(busy());
        child.kill().unwrap();
        child.wait().unwrap();
        while busy() {
            assert!(Instant::now() < end, "the program is still there");
            thread::yield_now();
        }
        assert!(device::index("lo").is_ok());
    });
}

#[test]
fn a_connected_member_gets_all_packets_of_its_peer() {
    in_namespace(|| {
        let test = "a_connected_member_gets_all_packets_of_its_peer";
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        for spread in ["random", "flow:0:4", "map:random"] {
            let Some(group) = open(test, address, 4, spread) else { return };
            let sender = sender(&group);
            assert!(lengths(&shares(&group, &sender, 400)).iter().all(|got| *got > 50));
            assert_eq!(group.connected().unwrap(), None);
            let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket::connect(group.member(2).unwrap().as_fd(), peer.local_addr().unwrap()).unwrap();
            assert_eq!(group.connected().unwrap(), Some(2));
            // No packet is lost; the shares depend on the kernel: see docs/spread.md.
            shares(&group, &sender, 400);
            // The connected member gets all packets of its peer.
            assert_eq!(lengths(&shares(&group, &peer, 400)), [0, 0, 400, 0], "{spread}");
        }
    });
}
