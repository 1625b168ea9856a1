//! The limit on client sockets of a forwarder, and the eviction of clients at the limit.

use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::{Forward, ForwardError, Link, PlaneCounts, PlaneKind, Running};
use fourtuple_testing::stream::LONG;
use fourtuple_testing::{in_namespace, set_sysctl};

use crate::sources::Sources;
use crate::{kinds, socket, until};

/// The first byte of a packet to which the next hop replies.
const REQUEST: u8 = b'r';
const PLANES: usize = 2;

fn kinds() -> Vec<PlaneKind> {
    kinds::kinds("clients")
}

fn start(kind: PlaneKind, to: SocketAddr) -> (Running, SocketAddr) {
    let link = Link { replies: true, ..Link::new("127.0.0.1:4000".parse().unwrap(), to) };
    let running = Forward { kind, ..Forward::new(link, PLANES) }.start().unwrap();
    let listen = running.address(0).unwrap();
    (running, listen)
}

/// Replies to requests until none has arrived for longer than the test takes.
fn answer(hop: &UdpSocket) {
    let hop = hop.try_clone().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 100];
        while let Ok((length, from)) = hop.recv_from(&mut buffer) {
            if buffer[0] == REQUEST {
                // The port of an expired client is closed, so the send may fail.
                let _ = hop.send_to(&buffer[..length], from);
            }
        }
    });
}

/// Sends a packet until a reply comes, and returns the number of packets. A plane closes a client two ticks after its only packet, and a
/// reply that is later is lost.
fn exchange(client: &UdpSocket, to: SocketAddr, what: &str) -> u64 {
    client.set_read_timeout(Some(LONG / 6)).unwrap();
    let mut packets = 0;
    loop {
        client.send_to(&[REQUEST; 64], to).unwrap();
        packets += 1;
        match client.recv(&mut [0; 64]) {
            Ok(_) => return packets,
            Err(error) => assert!(packets < 6, "{what}: {error}"),
        }
    }
}

fn exchange_all(clients: &[UdpSocket], to: SocketAddr, what: &str) -> u64 {
    clients.iter().map(|client| exchange(client, to, what)).sum()
}

fn sum(running: &Running, of: impl Fn(&PlaneCounts) -> u64) -> u64 {
    running.counts(0).iter().map(of).sum()
}

#[test]
fn a_flood_of_sources_leaves_space_for_clients() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40063");
        let hop = socket("127.0.0.1:5000");
        answer(&hop);
        for kind in kinds() {
            let (running, to) = start(kind, hop.local_addr().unwrap());
            let limit = running.client_limit().unwrap();
            assert_eq!((limit.clients, limit.ports), (48, 64), "a quarter is for others");
            let established: Vec<_> = (1..=4).map(|ip| socket(format!("127.0.0.{ip}:3000"))).collect();
            let mut sent = 0;
            for _ in 0..3 {
                sent += exchange_all(&established, to, "before");
            }
            let mut sources = Sources::new(3001).unwrap();
            // Each chunk has fewer sources than one plane has client slots.
            for chunk in 1..=250 {
                assert_eq!(sources.send(to, 4), 4);
                sent += 4;
                until(|| sum(&running, |plane| plane.received) == sent);
                // The counters of the planes are read in turn, not at one instant.
                until(|| sum(&running, |plane| plane.clients) <= 48);
                if chunk % 10 == 0 {
                    let newcomer = socket(format!("127.0.1.{}:3000", chunk / 10));
                    sent += exchange(&newcomer, to, "a new client");
                    sent += exchange_all(&established, to, "established");
                    let others: Vec<_> = (0..10).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
                    assert!(
                        others.iter().all(Result::is_ok),
                        "{kind}: another program has no port: {others:?}"
                    );
                }
            }
            assert!(sum(&running, |plane| plane.evicted) > 0, "{kind}");
            let counts = running.drain().unwrap().remove(0);
            assert!(counts.iter().all(|plane| plane.dropped.is_empty()), "{kind}: {counts:?}");
        }
    });
}

#[test]
fn a_client_without_a_reply_is_closed_early() {
    in_namespace(|| {
        let hop = socket("127.0.0.1:5000");
        answer(&hop);
        let (running, to) = start(PlaneKind::Batched, hop.local_addr().unwrap());
        let (answered, repeated) = (socket("127.0.0.1:3000"), socket("127.0.0.2:3000"));
        let mut received = exchange(&answered, to, "the first packet");
        loop {
            let closed = sum(&running, |plane| plane.unanswered);
            (0..2).for_each(|_| assert_eq!(repeated.send_to(b"x", to).unwrap(), 1));
            received += 2;
            until(|| sum(&running, |plane| plane.received) == received);
            // If this thread was stalled between both packets, the client was closed before the second one.
            if sum(&running, |plane| plane.unanswered) == closed {
                break;
            }
        }
        let closed = sum(&running, |plane| plane.unanswered);
        assert_eq!(Sources::new(3001).unwrap().send(to, 5), 5);
        until(|| sum(&running, |plane| plane.unanswered) == closed + 5);
        assert_eq!(sum(&running, |plane| plane.clients), 2, "the others stay for as long as --idle says");
        assert_eq!(sum(&running, |plane| plane.evicted), 0);
    });
}

/// Packets that arrive slightly more often than the ticks do not delay a tick. On a busy machine ticks may be late for another reason:
/// one attempt in time is enough.
#[test]
fn sparse_packets_delay_no_tick() {
    in_namespace(|| {
        let hop = socket("127.0.0.1:5000");
        let link =
            Link { replies: true, ..Link::new("127.0.0.1:4000".parse().unwrap(), hop.local_addr().unwrap()) };
        let running = Forward::new(link, 1).start().unwrap();
        let to = running.address(0).unwrap();
        let (silent, sparse) = (socket("127.0.0.1:3000"), socket("127.0.0.2:3000"));
        let end = Instant::now() + LONG;
        let mut closed = 0;
        loop {
            silent.send_to(b"x", to).unwrap();
            let sent_at = Instant::now();
            let mut packets = 0;
            while sum(&running, |plane| plane.unanswered) == closed {
                if sent_at.elapsed() >= packets * Duration::from_millis(900) {
                    sparse.send_to(b"x", to).unwrap();
                    packets += 1;
                }
                thread::sleep(Duration::from_millis(1));
            }
            closed += 1;
            // The third tick comes after 2 to 3 s. If each packet began another second of waiting, a tick would take 1.8 s.
            if sent_at.elapsed() < Duration::from_millis(3_500) {
                return;
            }
            assert!(Instant::now() < end, "{:?} until the third tick", sent_at.elapsed());
        }
    });
}

#[test]
fn more_clients_than_ports_are_refused() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40063");
        set_sysctl("net.ipv4.ip_local_reserved_ports", "40010-40011,40020-40021,40030-40031,40040-40043");
        let link = Link {
            replies: true,
            ..Link::new("127.0.0.1:4000".parse().unwrap(), "127.0.0.1:1".parse().unwrap())
        };
        let with = |clients| Forward { clients: Some(clients), ..Forward::new(link.clone(), 1) }.start();
        let error = with(55).unwrap_err();
        assert!(matches!(error, ForwardError::TooManyClients { clients: 55, ports: 54, .. }), "{error}");
        assert!(error.is_usage());
        assert_eq!(with(54).unwrap().client_limit().unwrap().clients, 54);
    });
}

/// Established clients are never evicted: a new client is refused instead.
#[test]
fn established_clients_are_never_evicted() {
    in_namespace(|| {
        let hop = socket("127.0.0.1:5000");
        answer(&hop);
        let to = hop.local_addr().unwrap();
        let link = Link { replies: true, ..Link::new("127.0.0.1:4000".parse().unwrap(), to) };
        let running = Forward { clients: Some(3), ..Forward::new(link, 1) }.start().unwrap();
        let to = running.address(0).unwrap();
        let established: Vec<_> = (1..=3).map(|ip| socket(format!("127.0.0.{ip}:3000"))).collect();
        let mut sent = 5;
        for _ in 0..2 {
            sent += exchange_all(&established, to, "established");
        }
        assert_eq!(Sources::new(3001).unwrap().send(to, 5), 5);
        until(|| sum(&running, |plane| plane.received) == sent);
        exchange_all(&established, to, "established");
        let counts = running.drain().unwrap().remove(0).remove(0);
        assert_eq!(
            counts.dropped.iter().map(|(reason, number)| (reason.name(), *number)).collect::<Vec<_>>(),
            [("no-client", 5)]
        );
        assert_eq!((counts.clients, counts.evicted), (3, 0));
    });
}
