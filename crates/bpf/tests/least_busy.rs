//! The program chooses the least busy worker, regardless of other packets to the port, and the connections of a closed listener move to
//! other listeners of its group.
#![forbid(unsafe_code)]

mod group;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fourtuple_bpf::{BpfError, HandOver, Leaks, LeastBusy, SEATS};
use fourtuple_syscalls::option;
use fourtuple_testing::wire::{ACK, RST, Raw, SYN};
use fourtuple_testing::{in_namespace, set_sysctl};

use self::group::{Group, listen, loaded, until};

#[test]
fn the_idle_worker_gets_all_connections() {
    in_namespace(|| {
        for address in ["127.0.0.1", "::1"] {
            let Some(group) = Group::open_at("the_idle_worker_gets_all_connections", address, 4) else {
                return;
            };
            for idle in 0..4 {
                for seat in 0..4 {
                    group.busy.seat(seat).unwrap().set_busy(u64::from(seat != idle));
                }
                let mut expected = vec![0; 4];
                expected[idle] = 50;
                assert_eq!(group.shares(50), expected, "{address}");
            }
        }
    });
}

#[test]
fn open_connections_then_the_cursor_break_ties() {
    in_namespace(|| {
        let Some(group) = Group::open("open_connections_then_the_cursor_break_ties", 4) else {
            return;
        };
        // All workers have the same load and no connection counts as open: round robin. None is closed meanwhile, or before: the program also
        // runs for a late packet to a connection that is gone, and each run moves the cursor.
        let (mut seats, mut kept) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            let client = group.connect();
            let (seat, server) = group.accept_anywhere();
            group.busy.seat(seat).unwrap().closed();
            kept.push((client, server));
            seats.push(seat);
        }
        assert_eq!(seats[..4], seats[4..]);
        seats.truncate(4);
        seats.sort();
        assert_eq!(seats, [0, 1, 2, 3]);
        assert_eq!(group.shares(200), [50; 4]);
        // One worker has 3 open connections: the three remaining workers get the next 9.
        for _ in 0..3 {
            group.busy.seat(2).unwrap().opened();
        }
        assert_eq!(group.shares(9), [3, 3, 0, 3]);
    });
}

#[test]
fn queued_connections_count_as_load() {
    in_namespace(|| {
        let Some(group) = Group::open("queued_connections_count_as_load", 3) else { return };
        group.busy.seat(1).unwrap().set_busy(10);
        let _clients: Vec<_> = (0..20).map(|_| group.connect()).collect();
        until("all in the queues", || group.all_queued() == [10, 0, 10]);
        let _more: Vec<_> = (0..10).map(|_| group.connect()).collect();
        until("even", || group.all_queued().iter().sum::<u64>() == 30);
        let queued = group.all_queued();
        assert!(queued[1].abs_diff(3) <= 1 && queued[0].abs_diff(queued[2]) <= 1, "{queued:?}");
    });
}

#[test]
fn all_64_seats_are_searched() {
    in_namespace(|| {
        let Some(group) = Group::open("all_64_seats_are_searched", SEATS) else { return };
        for idle in [0, 1, 31, 62, 63] {
            for seat in 0..SEATS {
                group.busy.seat(seat).unwrap().set_busy(u64::from(seat != idle));
            }
            assert_eq!(group.shares(3)[idle], 3);
        }
    });
}

#[test]
fn a_leaving_worker_keeps_its_queue_and_gets_no_connection() {
    in_namespace(|| {
        let test = "a_leaving_worker_keeps_its_queue_and_gets_no_connection";
        let Some(mut group) = Group::open(test, 2) else { return };
        let _clients: Vec<_> = (0..10).map(|_| group.connect()).collect();
        until("all in the queues", || group.all_queued() == [5, 5]);
        group.busy.seat_left(0).unwrap();
        group.busy.seat_left(0).unwrap();
        let _more: Vec<_> = (0..10).map(|_| group.connect()).collect();
        until("all at the other", || group.all_queued() == [5, 15]);
        while group.accept(0).is_some() {}
        group.listeners[0] = None;

        // Another listener takes the seat; its counters start at 0.
        group.busy.seat(0).unwrap().set_busy(99);
        let (listener, _) = listen("127.0.0.1", group.address.port());
        group.busy.seat_taken(0, listener.as_fd()).unwrap();
        assert_eq!(group.busy.seat(0).unwrap().counters(), fourtuple_bpf::Counters::default());
        group.listeners[0] = Some(listener);
        let _rest: Vec<_> = (0..10).map(|_| group.connect()).collect();
        until("all at the new listener, which had less", || group.all_queued() == [10, 15]);
    });
}

#[test]
fn only_a_syn_is_a_claim() {
    in_namespace(|| {
        let Some(group) = Group::open("only_a_syn_is_a_claim", 2) else { return };
        let raw = Raw::open(Ipv4Addr::new(127, 0, 0, 2), group.v4());
        for port in 2000..3000 {
            for flags in [ACK, RST, RST | ACK, SYN | ACK, SYN | RST, 0] {
                raw.send(port, flags);
            }
        }
        let _client = group.connect();
        let (seat, _server) = group.accept_anywhere();
        let claimed: u64 = (0..2).map(|seat| group.busy.seat(seat).unwrap().counters().claimed).sum();
        assert_eq!(claimed, 1);
        assert_eq!(group.busy.seat(seat).unwrap().counters().accepted, 1);
    });
}

/// Sends 4,000 SYNs of spoofed sources, all counted at one worker, stray packets, and connections reset in its queue.
#[test]
fn a_flood_starves_no_worker() {
    in_namespace(|| {
        let Some(group) = Group::open("a_flood_starves_no_worker", 4) else { return };
        const SYNS: u16 = 4000;
        // A volley and its ACKs stay below net.core.netdev_max_backlog (1,000).
        const VOLLEY: u16 = 100;
        for seat in 1..4 {
            group.busy.seat(seat).unwrap().set_busy(1_000_000);
        }
        // A connection that is reset before the accept stays in the queue, so it is not lost and accept() returns it.
        const RESETS: i64 = 50;
        for _ in 0..RESETS {
            option::set_reset_on_close(group.connect().as_fd()).unwrap();
        }
        until("all in the queue", || group.queued(0) == RESETS as u64);
        let raw = Raw::open(Ipv4Addr::new(127, 0, 0, 2), group.v4());
        let mut sent = RESETS;
        for volley in 0..SYNS / VOLLEY {
            for port in 0..VOLLEY {
                raw.send(2000 + volley * VOLLEY + port, SYN);
                raw.send(2000 + volley * VOLLEY + port, ACK);
            }
            // Packets that the kernel has not processed yet would count for other workers once these are idle.
            sent += i64::from(VOLLEY);
            until("the flood is counted", || group.coming()[0] >= sent);
        }
        assert_eq!(group.coming()[0], sent);
        assert_eq!(group.coming()[1..], [0, 0, 0]);
        for seat in 1..4 {
            group.busy.seat(seat).unwrap().set_busy(0);
        }
        // The worker checks for leaked counts at times that the test chooses.
        let seat = group.busy.seat(0).unwrap();
        let mut leaks = Leaks::new();
        let mut look = |ms| seat.reconcile(&mut leaks, Duration::from_millis(ms), group.queued(0));
        assert_eq!(look(0), 0);
        for _ in 0..RESETS {
            assert!(group.accept(0).is_some());
            seat.accepted();
        }
        assert_eq!(look(500), 0);
        // Leaked claims count as load that never ends: the flooded worker gets nothing.
        assert_eq!(group.shares(99), [0, 33, 33, 33]);
        let leaked = group.coming()[0];
        assert_eq!(look(1000), leaked);
        assert_eq!(look(2500), 0);
        assert_eq!(group.coming(), [0; 4]);
        assert_eq!(group.shares(1000), [250; 4]);
    });
}

/// With SYN cookies the last ACK of a handshake selects a listener again, possibly another listener than the SYN did.
#[test]
fn claims_with_syn_cookies_are_corrected() {
    in_namespace(|| {
        let Some(group) = Group::open("claims_with_syn_cookies_are_corrected", 4) else { return };
        set_sysctl("net.ipv4.tcp_syncookies", "2");
        let total: usize = group.shares(200).iter().sum();
        assert_eq!(total, 200);
        for seat in 0..4 {
            let mut leaks = Leaks::new();
            for ms in [0, 500, 1000] {
                let now = Duration::from_millis(ms);
                group.busy.seat(seat).unwrap().reconcile(&mut leaks, now, group.queued(seat));
            }
        }
        assert_eq!(group.coming(), [0; 4]);
        set_sysctl("net.ipv4.tcp_syncookies", "1");
        assert_eq!(group.shares(100), [25; 4]);
    });
}

#[test]
fn invalid_seats_are_refused() {
    in_namespace(|| {
        assert!(matches!(LeastBusy::load(0), Err(BpfError::Seats { seats: 0 })));
        assert!(matches!(LeastBusy::load(SEATS + 1), Err(BpfError::Seats { seats: 65 })));
        let Some(busy) = loaded("invalid_seats_are_refused", LeastBusy::load(2)) else { return };
        let (listener, _) = listen("127.0.0.1", 0);
        assert!(matches!(busy.seat(2), Err(BpfError::NoSuchSeat { seat: 2, seats: 2 })));
        assert!(busy.seat_taken(2, listener.as_fd()).is_err());
        let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = busy.seat_taken(0, plain.as_fd()).unwrap_err();
        assert!(error.to_string().contains("EINVAL"), "{error}");
        assert!(!busy.seat(0).unwrap().is_taken());
        assert!(busy.attach(plain.as_fd()).unwrap_err().to_string().contains("EINVAL"));
        busy.seat_taken(0, listener.as_fd()).unwrap();
        assert!(busy.seat_taken(1, listener.as_fd()).is_err(), "two seats for one listener");
    });
}

/// Checks that the connection is alive: the client receives data from the server's socket.
fn is_served(client: &mut TcpStream, server: OwnedFd) {
    let mut server = TcpStream::from(server);
    server.set_nonblocking(false).unwrap();
    client.write_all(b"?").unwrap();
    let mut byte = [0];
    server.read_exact(&mut byte).unwrap();
    server.write_all(b"!").unwrap();
    client.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"!");
}

/// Serves as many connections as there are clients; the ports of the clients must differ.
fn serve_all(mut clients: Vec<TcpStream>, mut accept: impl FnMut() -> OwnedFd) {
    while !clients.is_empty() {
        let server = TcpStream::from(accept());
        let peer = server.peer_addr().unwrap();
        let at = clients.iter().position(|client| client.local_addr().unwrap() == peer);
        let mut client = clients.swap_remove(at.expect("a connection of ours, once"));
        is_served(&mut client, server.into());
    }
}

#[test]
fn the_queue_of_a_closed_listener_goes_to_the_least_busy() {
    in_namespace(|| {
        let test = "the_queue_of_a_closed_listener_goes_to_the_least_busy";
        let Some(mut group) = Group::open(test, 4) else { return };
        let clients: Vec<_> = (0..40).map(|_| group.connect()).collect();
        until("10 in each queue", || group.all_queued() == [10; 4]);
        // Like the kernel for a killed worker: the listener closes without a call of the program's API.
        group.listeners[0] = None;
        until("all with the others", || group.all_queued().iter().sum::<u64>() == 40);
        let queued = group.all_queued();
        assert!(queued[1..].iter().all(|length| (13..=14).contains(length)), "{queued:?}");
        assert_eq!(group.coming()[1..].iter().sum::<i64>(), 40);
        serve_all(clients, || group.accept_anywhere().1);

        // The first connection found the seat empty and cleared it.
        assert!(!group.busy.seat(0).unwrap().is_taken());
        assert_eq!(group.shares(30)[0], 0);
    });
}

#[test]
fn one_open_listener_of_the_group_suffices() {
    in_namespace(|| {
        let Some(mut group) = Group::open("one_open_listener_of_the_group_suffices", 64) else { return };
        let clients: Vec<_> = (0..64).map(|_| group.connect()).collect();
        until("one in each queue", || group.all_queued() == [1; 64]);
        for seat in 0..64 {
            if seat != 17 {
                group.listeners[seat] = None;
            }
        }
        until("all with the last one", || group.queued(17) == 64);
        serve_all(clients, || group.accept_anywhere().1);
        assert_eq!(group.shares(20)[17], 20);
    });
}

#[test]
fn the_hash_migrates_connections_too() {
    in_namespace(|| {
        let Some(program) = loaded("the_hash_migrates_connections_too", HandOver::load()) else { return };
        let (first, address) = listen("127.0.0.1", 0);
        let (second, _) = listen("127.0.0.1", address.port());
        program.attach(first.as_fd()).unwrap();
        // The program belongs to the group: it stays attached after the socket that attached it is closed.
        drop(program);
        let clients: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
        let queued = |listener: &OwnedFd| fourtuple_syscalls::option::accept_queue(listener.as_fd()).unwrap();
        until("all in the queues", || queued(&first) + queued(&second) == 100);
        assert!(queued(&first) > 0 && queued(&second) > 0, "the hash puts 100 on both");
        drop(first);
        until("all with the other", || queued(&second) == 100);
        serve_all(clients, || fourtuple_syscalls::socket::accept(second.as_fd()).unwrap());
    });
}
