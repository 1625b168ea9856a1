use std::net::{Ipv4Addr, UdpSocket};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::datagram::Outgoing;
use crate::epoll::{Epoll, Interest, Ready};
use crate::{Errno, option};

/// Returns a ring, or `None` if io_uring is disabled on this host.
fn ring(buffers: u16, room: usize) -> Option<DatagramRing> {
    match DatagramRing::new(buffers, room) {
        Ok(ring) => Some(ring),
        Err(error) => {
            assert!(
                matches!(Errno::of(&error), Some(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL)),
                "{error}"
            );
            eprintln!("SKIPPED io_uring: {error}");
            None
        }
    }
}

fn pair() -> (UdpSocket, UdpSocket) {
    let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    (sender, receiver)
}

/// Returns the numbers in the payloads of the last messages.
fn numbers(ring: &DatagramRing) -> impl Iterator<Item = u32> + '_ {
    ring.iter().map(|datagram| u32::from_be_bytes(datagram.bytes.try_into().unwrap()))
}

#[test]
fn ring_buffers_are_forwarded_without_a_copy() {
    let Some(mut ring) = ring(8, 2048) else { return };
    assert!(DatagramRing::works().unwrap());
    let (sender, router) = pair();
    let target = UdpSocket::bind("127.0.0.1:0").unwrap();
    // Queued datagrams, and an empty datagram, after which the kernel ends the request.
    sender.send(b"one").unwrap();
    ring.resume(router.as_fd()).unwrap();
    let epoll = Epoll::new().unwrap();
    epoll.add(ring.as_fd(), 7, Interest::READ).unwrap();
    let mut room = [Ready::NONE];
    assert_eq!(epoll.wait(&mut room, None).unwrap()[0].token(), 7);
    for text in ["", "three"] {
        sender.send(text.as_bytes()).unwrap();
    }
    let mut outgoing = Outgoing::new();
    let mut got = Vec::new();
    let mut there = [0; 100];
    while got.len() < 3 {
        epoll.wait(&mut room, None).unwrap();
        ring.receive().unwrap();
        outgoing.clear();
        for (index, datagram) in ring.iter().enumerate() {
            assert_eq!(datagram.from(), Some(sender.local_addr().unwrap()));
            outgoing.message(Some(target.local_addr().unwrap()), None);
            outgoing.part(index, 0..datagram.bytes.len());
        }
        assert_eq!(outgoing.send(router.as_fd(), &ring, 0).unwrap(), outgoing.len());
        for _ in 0..outgoing.len() {
            let length = target.recv(&mut there).unwrap();
            got.push(there[..length].to_vec());
        }
        ring.resume(router.as_fd()).unwrap();
    }
    assert_eq!(got, [&b"one"[..], b"", b"three"]);
    assert!(epoll.wait(&mut room, Some(Duration::ZERO)).unwrap().is_empty());
    assert_eq!((ring.receive().unwrap(), ring.get(0).is_none()), (0, true));
}

#[test]
fn no_packet_is_lost_with_fewer_buffers_than_packets() {
    let Some(mut ring) = ring(4, 64) else { return };
    let (sender, receiver) = pair();
    for number in 0..50_u32 {
        sender.send(&number.to_be_bytes()).unwrap();
    }
    let (mut got, mut ends) = (Vec::new(), 0);
    ring.resume(receiver.as_fd()).unwrap();
    while got.len() < 50 {
        ring.receive().unwrap();
        assert!(ring.received.len() <= 4);
        got.extend(numbers(&ring));
        // The kernel had no buffer for the next datagram (ENOBUFS), which stayed in the queue.
        ends += u32::from(!ring.is_receiving);
        ring.resume(receiver.as_fd()).unwrap();
        assert!(ring.is_receiving || !ring.ring.completion().is_empty());
    }
    assert!(got.into_iter().eq(0..50));
    assert!(ends > 5, "{ends}");
    assert_eq!(ring.receive().unwrap(), 0);
}

#[test]
fn stop_returns_buffered_packets_and_leaves_the_rest_queued() {
    let Some(mut ring) = ring(8, 64) else { return };
    let (sender, receiver) = pair();
    receiver.set_nonblocking(true).unwrap();
    for round in 0..20 {
        ring.resume(receiver.as_fd()).unwrap();
        for number in 0..20_u32 {
            sender.send(&number.to_be_bytes()).unwrap();
            if number == round {
                // The kernel moves queued packets into buffers; the test does not read them.
                ring.enter().unwrap();
            }
        }
        let mut got = Vec::new();
        while ring.stop().unwrap() > 0 {
            got.extend(numbers(&ring));
        }
        assert!(got.len() > round.min(7) as usize, "{round}: {got:?}");
        assert!(!ring.is_receiving && ring.ring.completion().is_empty());
        let mut number = [0; 4];
        while receiver.recv(&mut number).is_ok() {
            got.push(u32::from_be_bytes(number));
        }
        assert!(got.into_iter().eq(0..20), "{round}");
    }
}

#[test]
fn stop_ends_under_continuous_packets() {
    let Some(mut ring) = ring(8, 64) else { return };
    let (sender, receiver) = pair();
    ring.resume(receiver.as_fd()).unwrap();
    let mut stops = 0;
    loop {
        // If the request is still active, the kernel receives this datagram before send() returns.
        sender.send(b"more").unwrap();
        if ring.stop().unwrap() == 0 {
            break;
        }
        stops += 1;
        assert!(stops < 10, "it goes on receiving");
    }
}

#[test]
fn control_messages_of_datagrams_are_read() {
    let Some(mut ring) = ring(8, 60) else { return };
    let receiver = UdpSocket::bind("0.0.0.0:0").unwrap();
    option::set_packet_info(receiver.as_fd(), true).unwrap();
    option::set_receive_hops(receiver.as_fd(), true).unwrap();
    let port = receiver.local_addr().unwrap().port();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    option::set_hops(sender.as_fd(), 9).unwrap();
    sender.send_to(&[7; 60], ("127.0.0.7", port)).unwrap();
    sender.send_to(&[7; 61], ("127.0.0.8", port)).unwrap();
    ring.resume(receiver.as_fd()).unwrap();
    ring.receive().unwrap();
    let seen: Vec<_> = ring
        .iter()
        .map(|datagram| (datagram.bytes.len(), datagram.truncated, datagram.arrived_at, datagram.hops))
        .collect();
    let at = |last| Some(Ipv4Addr::new(127, 0, 0, last).into());
    assert_eq!(seen, [(60, false, at(7), Some(9)), (60, true, at(8), Some(9))]);
}

#[test]
fn one_message_may_be_many_datagrams() {
    let Some(mut ring) = ring(8, 65_536) else { return };
    let (sender, receiver) = pair();
    assert_eq!(option::set_udp_gro(receiver.as_fd(), true).unwrap(), option::Answer::Done);
    let (source, router) = pair();
    source.send(&[7; 250]).unwrap();
    let mut batch = crate::datagram::Batch::new(1, 2048);
    assert!(crate::socket::wait_readable(router.as_fd(), None).unwrap());
    assert_eq!(batch.receive(router.as_fd()).unwrap(), 1);
    let mut outgoing = Outgoing::new();
    outgoing.message(None, Some(100));
    outgoing.part(0, 0..250);
    assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).unwrap(), 1);
    let mut bytes = 0;
    while bytes < 250 {
        ring.resume(receiver.as_fd()).unwrap();
        ring.receive().unwrap();
        for datagram in ring.iter() {
            assert!(datagram.segment.is_none_or(|segment| segment == 100), "{datagram:?}");
            bytes += datagram.bytes.len();
        }
    }
    assert_eq!(bytes, 250);
}

#[test]
fn a_packet_wakes_a_waiting_epoll() {
    let Some(mut ring) = ring(64, 64) else { return };
    let (sender, receiver) = pair();
    ring.resume(receiver.as_fd()).unwrap();
    let epoll = Epoll::new().unwrap();
    epoll.add(ring.as_fd(), 7, Interest::READ).unwrap();
    let (ask, asked) = mpsc::channel::<u32>();
    let sending = thread::spawn(move || {
        asked.iter().for_each(|number| {
            // By then the other thread sleeps in most runs.
            thread::sleep(Duration::from_millis(1));
            sender.send(&number.to_be_bytes()).unwrap();
        })
    });
    let mut room = [Ready::NONE];
    for number in 0..100 {
        ask.send(number).unwrap();
        let begun = Instant::now();
        // The wait may end early, because the kernel interrupts it to receive.
        while epoll.wait(&mut room, Some(Duration::from_secs(60))).unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no packet {number}");
        }
        ring.receive().unwrap();
        assert!(numbers(&ring).eq([number]));
        ring.resume(receiver.as_fd()).unwrap();
    }
    drop(ask);
    sending.join().unwrap();
}

#[test]
fn only_the_thread_that_created_the_ring_may_use_it() {
    let Some(mut ring) = ring(8, 64) else { return };
    let (sender, receiver) = pair();
    ring.resume(receiver.as_fd()).unwrap();
    // Another thread can still drop the ring, and later datagrams to the socket do no harm.
    let elsewhere = thread::spawn(move || {
        let refused = ring.stop().unwrap_err().raw_os_error();
        (refused, ring.is_receiving)
    });
    assert_eq!(elsewhere.join().unwrap(), (Some(libc::EEXIST), true));
    sender.send(b"x").unwrap();
}

#[test]
fn buffers_larger_than_the_address_space_are_refused() {
    // Sizes that would overflow without checks: the header size wraps, or a buffer exceeds the 32-bit length of its
    // entry.
    for room in [usize::MAX, usize::MAX - HEAD, u32::MAX as usize, u32::MAX as usize - HEAD + 1] {
        let error = Buffers::new(32_768, room).err().unwrap();
        assert_eq!(Errno::of(&error), Some(Errno::ENOMEM), "{room}");
    }
}

#[test]
fn a_ring_that_could_not_submit_stays_broken() {
    let Some(mut ring) = ring(8, 64) else { return };
    let (_, receiver) = pair();
    let (mut ring, receiver) = thread::spawn(move || {
        let error = ring.resume(receiver.as_fd()).unwrap_err();
        assert_eq!(Errno::of(&error), Some(Errno::EEXIST));
        (ring, receiver)
    })
    .join()
    .unwrap();
    // The queued request names the receiver's descriptor number, which may be reused by now.
    drop(receiver);
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    for error in [ring.resume(other.as_fd()).unwrap_err(), ring.receive().unwrap_err()] {
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}

/// The kernel holds the file of an active request, so neither the end of the caller's descriptor nor its number matters.
#[test]
fn a_ring_keeps_its_socket_when_the_caller_closes_it() {
    let Some(mut ring) = ring(8, 64) else { return };
    let (sender, receiver) = pair();
    let (other_sender, other) = pair();
    ring.resume(receiver.as_fd()).unwrap();
    let number = receiver.as_raw_fd();
    // SAFETY: dup3() takes numbers. It closes the receiver's descriptor and makes its number mean the other socket; `receiver` owns the
    // number from now on.
    assert_eq!(unsafe { libc::dup3(other.as_raw_fd(), number, libc::O_CLOEXEC) }, number);
    for text in [b"one", b"two"] {
        other_sender.send(b"other").unwrap();
        sender.send(text).unwrap();
        assert_eq!(ring.receive().unwrap(), 1);
        assert_eq!(ring.get(0).unwrap().bytes, text);
        // The request is active, so the ring uses no descriptor.
        ring.resume(receiver.as_fd()).unwrap();
    }
    drop(receiver);
    sender.send(b"last").unwrap();
    assert_eq!(ring.receive().unwrap(), 1);
    assert_eq!(ring.get(0).unwrap().bytes, b"last");
    while ring.stop().unwrap() > 0 {}
    drop(ring);
    let mut room = [0; 8];
    other.set_nonblocking(true).unwrap();
    for _ in 0..2 {
        assert_eq!(other.recv(&mut room).unwrap(), 5);
    }
    assert_eq!(other.recv(&mut room).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn an_error_ends_the_request_and_is_reported_once() {
    let Some(mut ring) = ring(4, 64) else { return };
    let (near, far) = pair();
    far.connect(near.local_addr().unwrap()).unwrap();
    ring.resume(far.as_fd()).unwrap();
    // An ICMP error for a datagram to a port without a socket.
    let (at, to) = (near.local_addr().unwrap(), far.local_addr().unwrap());
    drop(near);
    far.send(b"x").unwrap();
    let begun = Instant::now();
    while ring.failure.is_none() {
        assert_eq!(ring.receive().unwrap(), 0);
        assert!(begun.elapsed() < Duration::from_secs(60), "no error");
    }
    assert_eq!((ring.take_failure(), ring.take_failure()), (Some(Errno::ECONNREFUSED), None));
    ring.resume(far.as_fd()).unwrap();
    let near = UdpSocket::bind(at).unwrap();
    near.send_to(b"y", to).unwrap();
    while ring.receive().unwrap() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is received");
    }
    assert_eq!(ring.take_failure(), None);
    assert_eq!(ring.get(0).unwrap().bytes, b"y");
}
