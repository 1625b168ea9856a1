//! Targets of the data plane: the parser of BFD packets, a session that receives arbitrary packets, and the messages of a takeover between
//! the old and the new process.

use std::net::{IpAddr, UdpSocket};
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::Duration;

use fastrand::Rng;
use fourtuple_forward::bfd::{Action, Demultiplexer, LENGTH, Packet, Session, Settings, State, Timers};
use fourtuple_forward::{Forward, Link, fuzzing};

/// Checks that an encoded packet equals the parsed one. An authentication section is not encoded.
pub(crate) fn bfd_packet(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    let written = packet.encode();
    let read = Packet::parse(&written).expect("an encoded packet can be parsed");
    assert_eq!(read, Packet { authenticated: false, ..packet });
    if !packet.authenticated {
        let mut first = bytes[..LENGTH].to_vec();
        first[3] = LENGTH as u8;
        assert_eq!(first, written);
    }
}

/// Bytes of one step: an operation, an argument and a control packet.
const STEP: usize = 2 + LENGTH;

/// Runs a session through steps. A step advances the clock, delivers a packet through a demultiplexer, or changes a setting.
pub(crate) fn bfd_session(bytes: &[u8]) {
    let mut now = Duration::ZERO;
    let settings =
        Settings { timers: Timers::default(), local_discriminator: NonZeroU32::new(7).expect("not 0") };
    let mut session = Session::new(settings, now, Rng::with_seed(1));
    let mut sessions = Demultiplexer::new();
    let peer: IpAddr = [192, 0, 2, 1].into();
    assert!(sessions.add(7, peer, ()));
    for step in bytes.chunks(STEP).take(64) {
        let (what, rest) = (step[0], &step[1..]);
        let argument = rest.first().copied().unwrap_or_default();
        let datagram = rest.get(1..).unwrap_or_default();
        match what % 8 {
            0 => now += Duration::from_millis(u64::from(argument) * 10),
            1 => session.set_admin_down(now, argument & 1 == 1),
            2 => session.reset_forwarding_plane(now),
            3 => {
                let interval = Duration::from_micros(u64::from(argument) << (argument % 24));
                if let Ok(timers) = Timers::new(interval, interval * 2, argument) {
                    session.set_timers(timers);
                }
            }
            _ => receive(&mut session, &sessions, now, datagram, if argument == 1 { 254 } else { 255 }),
        }
        now = act(&mut session, now);
        assert!(session.since() <= now);
        let (ups, downs) = session.ups_and_downs();
        assert!(downs <= ups && ups - downs == u64::from(session.state() == State::Up));
    }
}

fn receive(session: &mut Session, sessions: &Demultiplexer<()>, now: Duration, datagram: &[u8], hops: u8) {
    let before = (session.state(), session.remote_discriminator());
    let found = Packet::parse(datagram)
        .and_then(|packet| sessions.find(&packet, [192, 0, 2, 1].into()).map(|()| packet));
    let taken = session.receive(now, datagram, hops);
    if found.is_err() {
        assert!(taken.is_err(), "the session took a packet for another session: {found:?}");
        assert_eq!(before, (session.state(), session.remote_discriminator()));
    }
    assert!(hops == 255 || taken.is_err());
}

/// Executes all actions that are due at `now`. Returns the time of the last action.
fn act(session: &mut Session, now: Duration) -> Duration {
    // At most three packets are due at once: the answer to a Poll, the periodic packet, and the packet that reports a new state.
    for _ in 0..4 {
        match session.next_action(now) {
            Action::Transmit(sent) => {
                assert_eq!(Packet::parse(&sent.encode()), Ok(sent));
                assert_eq!(sent.state, session.state());
                assert!(!(sent.poll && sent.is_final), "RFC 5880, section 6.5");
            }
            Action::Wait(until) => {
                assert!(until > now, "the next action is not in the future: {until:?}");
                return now;
            }
            Action::WaitForPacket => return now,
        }
    }
    panic!("a fourth packet at the same moment");
}

/// Byte between two messages. It does not occur in UTF-8.
const SEPARATOR: u8 = 0xff;

/// Parses the messages of one half of a takeover. The first byte selects the half; the first byte of each message is the number
/// of its descriptors, modulo 8.
pub(crate) fn handover(bytes: &[u8]) {
    static SOCKET: OnceLock<UdpSocket> = OnceLock::new();
    let socket = SOCKET.get_or_init(|| UdpSocket::bind("127.0.0.1:0").expect("bind"));
    let Some((half, rest)) = bytes.split_first() else { return };
    let messages: Vec<(&[u8], usize)> = rest
        .split(|byte| *byte == SEPARATOR)
        .filter_map(|message| message.split_first())
        .map(|(number, text)| (text, usize::from(number % 8)))
        .collect();
    if half & 1 == 0 {
        let listen = ([127, 0, 0, 1], 4000).into();
        let forward = Forward::new(Link::new(listen, ([127, 0, 0, 1], 4001).into()), 1);
        fuzzing::offer(&messages, socket.as_fd(), &forward);
    } else {
        fuzzing::inherited(&messages, socket.as_fd(), rest);
    }
}
