use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::Errno;
use crate::interval_timer::IntervalTimer;

/// Returns a ring, or `None` if io_uring is disabled on this host.
fn ring() -> Option<AcceptRing> {
    match AcceptRing::new() {
        Ok(ring) => Some(ring),
        Err(error) => {
            assert!(
                matches!(Errno::of(&error), Some(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL)),
                "{error}"
            );
            None
        }
    }
}

#[test]
fn accepts_and_polls_complete_once() {
    let Some(mut ring) = ring() else { return };
    assert!(ring.waits().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    ring.accept(1, listener.as_fd()).unwrap();
    ring.wait(Some(Duration::ZERO)).unwrap();
    assert!(ring.outcome().is_none());
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ring.wait(None).unwrap();
    let Some((1, Outcome::Accepted(server))) = ring.outcome() else { panic!("no connection was accepted") };
    ring.poll(2, server.as_fd()).unwrap();
    ring.wait(Some(Duration::ZERO)).unwrap();
    assert!(ring.outcome().is_none());
    client.write_all(b"x").unwrap();
    ring.wait(None).unwrap();
    assert!(matches!(ring.outcome(), Some((2, Outcome::Ready))));
    ring.wait(Some(Duration::ZERO)).unwrap();
    assert!(ring.outcome().is_none());
}

#[test]
fn a_cancelled_accept_loses_no_connection() {
    let Some(mut ring) = ring() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for _ in 0..50 {
        ring.accept(1, listener.as_fd()).unwrap();
        ring.wait(Some(Duration::ZERO)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ring.cancel(1).unwrap();
        let outcome = loop {
            ring.wait(Some(Duration::from_secs(60))).unwrap();
            if let Some((1, outcome)) = ring.outcome() {
                break outcome;
            }
        };
        match outcome {
            Outcome::Accepted(_) => {}
            Outcome::Cancelled => drop(listener.accept().unwrap()),
            other => panic!("{other:?}"),
        }
        drop(client);
    }
}

#[test]
fn dropping_a_ring_releases_its_descriptors() {
    let Some(mut ring) = ring() else { return };
    let (mut near, far) = UnixStream::pair().unwrap();
    ring.poll(1, far.as_fd()).unwrap();
    ring.wait(Some(Duration::ZERO)).unwrap();
    drop(ring);
    drop(far);
    // A child of another test has a copy of the descriptor until exec() or its end.
    let error = loop {
        if let Err(error) = near.write(b"x") {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_pending_accept_keeps_its_listener_open() {
    let Some(mut ring) = ring() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    ring.accept(1, listener.as_fd()).unwrap();
    // The descriptor number of the closed listener may be reused; the request must not refer to the new file.
    drop(listener);
    let _other = UnixStream::pair().unwrap();
    let _client = TcpStream::connect(address).unwrap();
    ring.wait(Some(Duration::from_secs(60))).unwrap();
    assert!(matches!(ring.outcome(), Some((1, Outcome::Accepted(_)))));
}

#[test]
fn signals_do_not_change_what_the_probe_finds() {
    let Some(mut ring) = ring() else { return };
    let before = IntervalTimer::signals();
    let _timer = IntervalTimer::for_this_thread(Duration::from_micros(20)).unwrap();
    while IntervalTimer::signals() < before + 1000 {
        assert!(ring.waits().unwrap());
    }
}
