//! Planes that leave and join while packets flow: none is lost, none is sent twice.

mod kinds;

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::spread::{Key, Spread};
use fourtuple_forward::{Forward, ForwardError, Link};
use fourtuple_testing::in_namespace;
use kinds::kinds;

/// Nothing takes as long on a machine that works.
const LONG: Duration = Duration::from_secs(20);
/// Packets under way: fewer than any queue has room for.
const WINDOW: u32 = 64;

fn changes() -> usize {
    let number = std::env::var("FOURTUPLE_PLANE_CHANGES").ok();
    number.map_or(20, |number| number.parse().expect("FOURTUPLE_PLANE_CHANGES is a number"))
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Sends numbered packets to `to` until told to stop, no more than a window of them under way, and gives how many came out at
/// `out`, each of them once.
fn stream(to: SocketAddr, sender: &UdpSocket, out: &UdpSocket, stop: &AtomicBool) -> u32 {
    let (mut sent, mut got) = (0, HashSet::new());
    let mut room = [0; 100];
    while !stop.load(Ordering::Relaxed) || got.len() < sent as usize {
        while !stop.load(Ordering::Relaxed) && sent - (got.len() as u32) < WINDOW {
            sender.send_to(&sent.to_be_bytes(), to).unwrap();
            sent += 1;
        }
        if got.len() < sent as usize {
            assert_eq!(out.recv(&mut room).expect("a packet that was sent comes out"), 4);
            assert!(got.insert(u32::from_be_bytes(room[..4].try_into().unwrap())), "a packet came twice");
        }
    }
    assert!((0..sent).all(|number| got.contains(&number)));
    sent
}

#[test]
fn no_packet_is_lost_when_planes_come_and_go() {
    in_namespace(|| {
        for kind in kinds("no_packet_is_lost_when_planes_come_and_go") {
            for replies in [false, true] {
                let (client, target) = (socket(), socket());
                let mut link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
                link.spread = Spread::Key(Key::whole(0, 4));
                link.replies = replies;
                let mut running = Forward { kind, ..Forward::new(link, 3) }.start().unwrap();
                let to = running.address(0).unwrap();
                let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
                let sent = thread::scope(|scope| {
                    let (stop, over, client, target) = (&stop, &over, &client, &target);
                    // With replies the far end sends everything back, and it is the client that counts.
                    let echo = replies.then(|| {
                        scope.spawn(move || {
                            target.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                            let mut room = [0; 100];
                            while !over.load(Ordering::Relaxed) {
                                let Ok((length, from)) = target.recv_from(&mut room) else { continue };
                                target.send_to(&room[..length], from).unwrap();
                            }
                        })
                    });
                    let out = if replies { client } else { target };
                    let stream = scope.spawn(move || stream(to, client, out, stop));
                    for change in 0..changes() {
                        running.leave(change % 3).unwrap();
                        assert_eq!(running.at_work().len(), 2);
                        running.join().unwrap();
                        assert_eq!(running.at_work(), [0, 1, 2]);
                    }
                    running.check().unwrap();
                    stop.store(true, Ordering::Relaxed);
                    let sent = stream.join();
                    over.store(true, Ordering::Relaxed);
                    if let Some(echo) = echo {
                        echo.join().unwrap();
                    }
                    sent.unwrap()
                });
                let planes = running.drain().unwrap().remove(0);
                let received: u64 = planes.iter().map(|plane| plane.received).sum();
                assert_eq!(received, u64::from(sent), "{kind}");
                assert!(planes.iter().all(|plane| plane.dropped.is_empty()), "{kind} {planes:?}");
            }
        }
    });
}

#[test]
fn the_last_plane_stays_and_nobody_joins_without_a_socket() {
    in_namespace(|| {
        let target = socket();
        let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        let mut running = Forward::new(link, 2).start().unwrap();
        assert!(matches!(running.join(), Err(ForwardError::NoSeat { planes: 2 })));
        running.leave(0).unwrap();
        assert!(matches!(running.leave(0), Err(ForwardError::NoPlane { plane: 0 })));
        assert!(matches!(running.leave(1), Err(ForwardError::NoPlane { plane: 1 })));
        assert_eq!(running.join().unwrap(), 0);
    });
}
