//! Planes that leave and join while packets arrive: no packet is lost or sent twice.

use crate::kinds::kinds;
use fourtuple::spread::{FlowKey, Selector};
use fourtuple_forward::{Forward, ForwardError, Link};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::{self, Stream};

fn changes() -> usize {
    let number = std::env::var("FOURTUPLE_PLANE_CHANGES").ok();
    number.map_or(20, |number| number.parse().expect("FOURTUPLE_PLANE_CHANGES is a number"))
}

#[test]
fn no_packet_is_lost_when_planes_come_and_go() {
    in_namespace(|| {
        for kind in kinds("no_packet_is_lost_when_planes_come_and_go") {
            for replies in [false, true] {
                let mut stream = Stream::new(replies);
                let mut link = Link::new("127.0.0.1:0".parse().unwrap(), stream.target());
                link.spread = Selector::Key(FlowKey::whole(0, 4));
                link.replies = replies;
                let mut running = Forward { kind, ..Forward::new(link, 3) }.start().unwrap();
                let sent = stream.run(running.address(0).unwrap(), || {
                    for change in 0..changes() {
                        running.leave(change % 3).unwrap();
                        assert_eq!(running.at_work().len(), 2);
                        running.join().unwrap();
                        assert_eq!(running.at_work(), [0, 1, 2]);
                    }
                    running.check().unwrap();
                });
                let planes = running.drain().unwrap().remove(0);
                let received: u64 = planes.iter().map(|plane| plane.received).sum();
                assert_eq!(received, sent, "{kind}");
                assert!(planes.iter().all(|plane| plane.dropped.is_empty()), "{kind} {planes:?}");
            }
        }
    });
}

#[test]
fn the_last_plane_stays_and_a_join_needs_a_socket() {
    in_namespace(|| {
        let target = stream::socket();
        let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        let mut running = Forward::new(link, 2).start().unwrap();
        assert!(matches!(running.join(), Err(ForwardError::NoSeat { planes: 2 })));
        running.leave(0).unwrap();
        assert!(matches!(running.leave(0), Err(ForwardError::NoPlane { plane: 0 })));
        assert!(matches!(running.leave(1), Err(ForwardError::NoPlane { plane: 1 })));
        assert_eq!(running.join().unwrap(), 0);
    });
}
