//! The checks of section 6.8.6 that need a session, and the hop limit of RFC 5881, section 5.

use super::*;

fn refused(change: impl FnOnce(&mut Vec<u8>), hops: u8) -> Discard {
    let mut bench = Bench::up(Timers::default());
    let mut bytes = from_peer(State::Down).encode().to_vec();
    change(&mut bytes);
    let why = bench.session.receive(bench.now, &bytes, hops).expect_err("discarded");
    assert_eq!(bench.session.state(), State::Up, "a discarded packet changes nothing");
    assert_eq!(bench.session.remote().0, State::Up);
    assert_eq!(bench.session.discards().iter().collect::<Vec<_>>(), [(why, 1)]);
    why
}

#[test]
fn packets_that_passed_a_router_are_discarded() {
    assert_eq!(refused(|_| {}, 254), Discard::Hops);
    assert_eq!(refused(|_| {}, 1), Discard::Hops);
    assert_eq!(refused(|_| {}, 0), Discard::Hops);
}

#[test]
fn packets_for_another_session_are_discarded() {
    assert_eq!(refused(|bytes| bytes[11] ^= 1, HOPS), Discard::NoSession);
}

#[test]
fn authenticated_packets_are_discarded() {
    let authenticate = |bytes: &mut Vec<u8>| {
        bytes[1] |= 4;
        bytes[3] = 28;
        bytes.extend([1, 4, 1, b'x']);
    };
    assert_eq!(refused(authenticate, HOPS), Discard::Authentication);
}

#[test]
fn malformed_packets_are_discarded_and_counted() {
    assert_eq!(refused(|bytes| bytes[0] = 0x40, HOPS), Discard::Version);
    assert_eq!(refused(|bytes| bytes[3] = 20, HOPS), Discard::Length);
    assert_eq!(refused(|bytes| bytes[3] = 60, HOPS), Discard::LengthBeyondPayload);
    assert_eq!(refused(|bytes| bytes[2] = 0, HOPS), Discard::DetectMult);
    assert_eq!(refused(|bytes| bytes[1] |= 1, HOPS), Discard::Multipoint);
    assert_eq!(refused(|bytes| bytes[4..8].fill(0), HOPS), Discard::MyDiscriminator);
    let zero_in_init = |bytes: &mut Vec<u8>| {
        bytes[1] = 0x80;
        bytes[8..12].fill(0);
    };
    assert_eq!(refused(zero_in_init, HOPS), Discard::YourDiscriminatorZero);
    // The owner of the session discards what never reaches it.
    let mut bench = Bench::up(Timers::default());
    bench.session.discard(Discard::Stranger);
    assert_eq!(bench.session.discards().of(Discard::Stranger), 1);
}

/// The session answers a poll at once in every state but AdminDown, independent of the transmission timer (section 6.5 and the
/// end of section 6.8.6).
#[test]
fn a_poll_is_answered_at_once() {
    let mut bench = Bench::up(Timers::default());
    for state in [State::Up, State::Down, State::Down, State::AdminDown] {
        let before = bench.sent.len();
        bench.receive(Packet { poll: true, ..from_peer(state) });
        let answers: Vec<_> = bench.sent[before..].iter().filter(|(_, packet)| packet.is_final).collect();
        assert_eq!(answers.len(), 1, "{state}");
        let (at, answer) = answers[0];
        assert_eq!(*at, bench.now);
        assert!(!answer.poll, "P and F are never both set");
        assert_eq!(answer.state, bench.session.state(), "of the state that the packet led to");
    }
}

#[test]
fn replies_do_not_shift_periodic_packets() {
    let mut asked = Bench::up(Timers::default());
    let mut unasked = Bench::up(Timers::default());
    let (sent, received) = (asked.session.transmitted(), asked.session.received());
    for _ in 0..50 {
        for (bench, poll) in [(&mut asked, true), (&mut unasked, false)] {
            bench.run(ms(90));
            bench.receive(Packet { poll, ..from_peer(State::Up) });
        }
    }
    assert_eq!(asked.intervals(), unasked.intervals());
    assert_eq!(asked.sent.len(), unasked.sent.len() + 50);
    assert_eq!(asked.session.transmitted() - sent, asked.sent.len() as u64);
    assert_eq!(asked.session.received() - received, 50);
}

#[test]
fn a_final_gets_no_answer() {
    let mut bench = Bench::up(Timers::default());
    bench.receive(Packet { is_final: true, ..from_peer(State::Up) });
    assert!(bench.sent.is_empty());
}

/// 100,000 datagrams, most of them invalid, cause no panic, no change of state without a diagnostic, and at most one answer
/// each.
#[test]
fn random_datagrams_do_not_break_a_session() {
    let mut random = Rng::with_seed(6886);
    let mut bench = Bench::new(timers(50, 50, 3));
    let mut ups = 0;
    for _ in 0..100_000 {
        let mut bytes = Packet {
            poll: random.bool(),
            is_final: random.bool(),
            demand: random.u8(..8) == 0,
            detect_mult: NonZeroU8::new(random.u8(1..)).unwrap(),
            your_discriminator: if random.u8(..4) == 0 { 0 } else { OURS },
            desired_min_tx_us: random.u32(..) >> random.u8(..32),
            required_min_rx_us: random.u32(..) >> random.u8(..32),
            ..from_peer(State::from_bits(random.u8(..)))
        }
        .encode();
        if random.u8(..4) == 0 {
            bytes[random.usize(..24)] = random.u8(..);
        }
        let before = bench.session.state();
        let taken = bench.session.receive(bench.now, &bytes, if random.u8(..16) == 0 { 64 } else { HOPS });
        assert!(taken.is_ok() || bench.session.state() == before);
        let sent = bench.sent.len();
        bench.act();
        // The two packets are an answer, and a packet with the new state or a periodic packet.
        assert!(bench.sent.len() - sent <= 2, "no packet makes a storm");
        bench.sent.clear();
        ups += u32::from(bench.session.state() == State::Up);
        if random.u8(..8) == 0 {
            bench.now += ms(random.u64(..200));
        }
    }
    assert!(ups > 1000, "it was up {ups} times");
}
