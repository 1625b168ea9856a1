//! A receive queue that overflows.

use std::thread;
use std::time::Duration;

use fourtuple_forward::{Drop, Forward, Link, PlaneKind};
use fourtuple_testing::in_namespace;

use crate::flood::Flood;

use super::{burst, drain, kinds, require_balance, socket, until};

/// Each packet was either received or dropped at a full queue.
#[test]
fn drops_at_a_full_queue_are_counted() {
    const OFFERED: u64 = 300;
    in_namespace(|| {
        for kind in kinds() {
            let target = socket("127.0.0.1:0");
            let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
            // The queue holds a few packets, and the plane works on the first of them for longer than the sender needs for all
            // others.
            let running = Forward {
                kind,
                work: Duration::from_millis(20),
                receive_buffer: Some(4096),
                ..Forward::new(link, 1)
            };
            let running = running.start().unwrap();
            let sender = socket("127.0.0.1:0");
            for _ in 0..OFFERED {
                sender.send_to(&[7; 500], running.address(0).unwrap()).unwrap();
            }
            // The counter also rises while planes run, not only at their end.
            until(|| running.counts(0)[0].dropped.iter().any(|(reason, _)| *reason == Drop::Overflow));
            let counts = drain(running);
            require_balance(&counts, kind.name());
            let overflow: u64 = counts.dropped_in_all();
            assert_eq!(counts.dropped, [(Drop::Overflow, overflow)], "{kind}");
            assert_eq!(counts.received + overflow, OFFERED, "{kind} {counts:?}");
            assert!(overflow > 0 && counts.sent > 0, "{kind} {counts:?}");
        }
    });
}

/// Drains a forwarder after 250 packets, which its queue holds, and during a flood if `floods`. Returns the number of received packets.
fn received_by_drain(kind: PlaneKind, floods: bool) -> u64 {
    let target = socket("127.0.0.1:0");
    let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
    let forward = Forward { kind, work: Duration::from_micros(200), ..Forward::new(link, 1) };
    let running = forward.start().unwrap();
    let (sender, to) = (socket("127.0.0.1:0"), running.address(0).unwrap());
    (0..100).for_each(|_| assert_eq!(sender.send_to(b"x", to).unwrap(), 1));
    (0..3).for_each(|_| burst(&sender, to, 50, 1));
    let flood = floods.then(|| Flood::start(sender.into(), to));
    let draining = thread::spawn(|| drain(running));
    until(|| draining.is_finished());
    flood.map(Flood::end);
    draining.join().unwrap().received
}

/// A drain forwards all packets that are in the receive queue, and ends although packets arrive faster than the plane forwards.
#[test]
fn a_drain_empties_the_queue_and_ends_during_a_flood() {
    in_namespace(|| {
        for kind in kinds() {
            // On a busy machine the kernel may deliver packets after the drain (ksoftirqd): one attempt without such packets is enough.
            assert!((0..10).any(|_| received_by_drain(kind, false) == 250), "{kind}");
            received_by_drain(kind, true);
        }
    });
}
