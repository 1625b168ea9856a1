use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::thread;

use super::*;
use crate::socket::Connect;

/// Returns a ring to a listener that answers each byte with a byte, or `None` with a message that says why not.
fn ring(slots: u32) -> Option<(Ring, TcpListener)> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Some((ring_to(listener.local_addr().unwrap(), slots)?, listener))
}

fn ring_to(destination: SocketAddr, slots: u32) -> Option<Ring> {
    match Ring::new(Transport::Tcp, &[Endpoint::Inet(destination)], slots, 64) {
        Ok(ring) => Some(ring),
        Err(error) => {
            eprintln!("SKIPPED io_uring: {error}");
            None
        }
    }
}

fn event(ring: &mut Ring) -> Event {
    for _ in 0..600 {
        if let Some(event) = ring.event() {
            return event;
        }
        ring.wait(Duration::from_millis(100)).unwrap();
    }
    panic!("no event within a minute")
}

fn connecting(address: SocketAddr) -> OwnedFd {
    let socket = crate::socket::open(Transport::Tcp, address, true).unwrap();
    assert_eq!(crate::socket::connect(socket.as_fd(), address).unwrap(), Connect::Pending);
    crate::socket::set_nonblocking(socket.as_fd(), false).unwrap();
    socket
}

fn errno(event: &Event) -> Option<i32> {
    event.result.as_ref().err()?.raw_os_error()
}

#[test]
fn a_chain_connects_and_exchanges_repeatedly() {
    let Some((mut ring, listener)) = ring(2) else { return };
    // A thread that is not joined, so that a failure here does not hang the test.
    thread::spawn(move || {
        for (mut stream, _) in std::iter::repeat_with(|| listener.accept().unwrap()) {
            let mut byte = [0];
            while stream.read(&mut byte).is_ok_and(|read| read == 1) {
                stream.write_all(&[byte[0] + 1]).unwrap();
            }
        }
    });
    {
        for round in 0..3 {
            ring.open(1, &OpenOptions { reset_on_close: round == 2, ..OpenOptions::default() }, b"a")
                .unwrap();
            let connected = event(&mut ring);
            assert_eq!((connected.slot, connected.step, connected.result.unwrap()), (1, Step::Connect, 0));
            assert_eq!(event(&mut ring).result.unwrap(), 1);
            assert_eq!(ring.received(1, 1), b"b");
            ring.exchange(1, b"c").unwrap();
            assert_eq!(event(&mut ring).result.unwrap(), 1);
            assert_eq!(ring.received(1, 1), b"d");
            assert!(!ring.is_busy(1));
            ring.close(1).unwrap();
        }
        ring.wait(Duration::ZERO).unwrap();
    }
    assert_eq!(ring.awaited, 0);
}

#[test]
fn a_failed_chain_reports_one_event_after_its_last_completion() {
    // A bound socket that does not listen: no other socket has its port, and the kernel refuses connections.
    let anywhere = "127.0.0.1:0".parse().unwrap();
    let bound = crate::socket::open(Transport::Tcp, anywhere, true).unwrap();
    crate::socket::bind(bound.as_fd(), anywhere).unwrap();
    let Some(mut ring) = ring_to(crate::socket::local_address(bound.as_fd()).unwrap(), 2) else { return };
    let opening = OpenOptions { source: Some("127.0.0.2:0".parse().unwrap()), ..OpenOptions::default() };
    let foreign = OpenOptions { source: Some("192.0.2.1:0".parse().unwrap()), ..OpenOptions::default() };
    // A silent step fails and ends the later steps of its chain without completions.
    ring.open(0, &foreign, b"a").unwrap();
    let failed = event(&mut ring);
    assert_eq!((failed.step, errno(&failed)), (Step::Bind, Some(libc::EADDRNOTAVAIL)));
    assert_eq!((ring.awaited, ring.is_busy(0)), (0, false));
    // A step with an event fails, and all later steps complete too.
    for _ in 0..3 {
        ring.open(0, &opening, b"a").unwrap();
        let refused = event(&mut ring);
        assert_eq!((refused.step, errno(&refused)), (Step::Connect, Some(libc::ECONNREFUSED)));
        assert_eq!((ring.awaited, ring.is_busy(0)), (0, false));
        ring.close(0).unwrap();
    }
    assert!(ring.event().is_none());
}

#[test]
fn waits_can_be_cancelled_and_sockets_adopted() {
    let Some((mut ring, listener)) = ring(1) else { return };
    let address = listener.local_addr().unwrap();
    ring.adopt(0, 0, connecting(address), b"a").unwrap();
    assert_eq!(event(&mut ring).step, Step::Connect);
    let (mut accepted, _) = listener.accept().unwrap();
    accepted.read_exact(&mut [0]).unwrap();
    // Between two steps there is nothing to cancel: the next step begins during the next wait of the ring.
    ring.wait(Duration::ZERO).unwrap();
    ring.cancel(0).unwrap();
    let cancelled = event(&mut ring);
    assert_eq!((cancelled.step, errno(&cancelled)), (Step::Receive, Some(libc::ECANCELED)));
    ring.watch(0).unwrap();
    drop(accepted);
    assert_eq!(event(&mut ring).step, Step::Watch);
    ring.close(0).unwrap();
    ring.adopt(0, 0, connecting("127.0.0.1:1".parse().unwrap()), b"a").unwrap();
    let refused = event(&mut ring);
    assert_eq!((refused.step, errno(&refused)), (Step::Connect, Some(libc::ECONNREFUSED)));
    ring.close(0).unwrap();
    ring.open(0, &OpenOptions::default(), b"a").unwrap();
    // Dropped during a receive that would never complete.
    drop(ring);
    drop(listener);
}

/// A seccomp filter does not see the calls of a ring, so that the test gives the results of a chain to the ring itself.
#[test]
fn a_chain_fails_with_every_errno() {
    let Some((mut ring, _listener)) = ring(1) else { return };
    let steps = [Step::Open, Step::Option, Step::Bind, Step::Connect, Step::Send, Step::Receive];
    for (at, failing) in steps.into_iter().enumerate() {
        for errno in Errno::ALL {
            let mut chain = Chain::default();
            steps.iter().for_each(|step| chain.push(*step));
            ring.slots[0].chain = chain;
            ring.awaited = 2;
            if at > 3 {
                let connected = ring.settle(0, Step::Connect, 0).unwrap();
                assert_eq!((connected.step, connected.result.unwrap()), (Step::Connect, 0));
            }
            let mut found = ring.settle(0, failing, -errno.number());
            // After a failed loud step each later step completes with ECANCELED.
            for later in &steps[at + 1..] {
                if found.is_none() {
                    found = ring.settle(0, *later, -libc::ECANCELED);
                }
            }
            let found = found.unwrap();
            assert_eq!((found.step, super::tests::errno(&found)), (failing, Some(errno.number())));
            assert!(!ring.is_busy(0) && ring.awaited == 0, "{failing:?} {errno}");
        }
    }
}
