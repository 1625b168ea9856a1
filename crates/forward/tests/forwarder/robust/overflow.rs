//! A receive queue that overflows.

use std::time::Duration;

use fourtuple_forward::{Drop, Forward, Link};
use fourtuple_testing::in_namespace;

use super::{drain, kinds, require_balance, socket, until};

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
