//! More comes than a queue has room for.

use std::time::Duration;

use fourtuple_forward::{Drop, Forward, Link};
use fourtuple_testing::in_namespace;

use crate::{drain, kinds, require_balance, socket, until};

/// Every packet that was offered was received or met a full queue.
#[test]
fn what_met_a_full_queue_is_counted() {
    const OFFERED: u64 = 300;
    in_namespace(|| {
        for kind in kinds() {
            let target = socket("127.0.0.1:0");
            let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
            // A queue of a few packets, and a plane that is busy with the first of them for longer than sending the rest takes.
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
            // It is told while planes are at work, too.
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
