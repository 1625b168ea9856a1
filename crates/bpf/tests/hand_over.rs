//! The connections of a closed listener move to other listeners of its group.

mod group;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_bpf::HandOver;
use fourtuple_testing::in_namespace;

use self::group::{Group, listen, loaded, until};

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
