//! Tests of every clause of section 6.8 that concerns asynchronous mode, on a simulated clock.

mod machine;

use std::num::NonZeroU8;

use super::*;

/// The discriminators of the session under test and of its peer.
const OURS: u32 = 0xaaaa;
const THEIRS: u32 = 0xbbbb;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn timers(tx_ms: u64, rx_ms: u64, detect_mult: u8) -> Timers {
    Timers::new(ms(tx_ms), ms(rx_ms), detect_mult).unwrap()
}

/// Returns a packet in this state with our discriminator, from a peer with the same timers (300 ms, 300 ms, 3).
fn from_peer(state: State) -> Packet {
    Packet {
        diagnostic: Diagnostic::None,
        state,
        poll: false,
        is_final: false,
        control_plane_independent: false,
        authenticated: false,
        demand: false,
        detect_mult: NonZeroU8::new(3).unwrap(),
        my_discriminator: THEIRS,
        your_discriminator: OURS,
        desired_min_tx_us: 300_000,
        required_min_rx_us: 300_000,
        required_min_echo_rx_us: 50_000,
    }
}

/// A session, its simulated clock, and the packets that it has sent, with their times.
struct Bench {
    session: Session,
    now: Duration,
    sent: Vec<(Duration, Packet)>,
}

impl Bench {
    /// Creates a bench whose clock does not begin at 0: no result may depend on the origin.
    fn new(timers: Timers) -> Bench {
        let now = ms(1_000_000);
        let settings = Settings { timers, local_discriminator: NonZeroU32::new(OURS).unwrap() };
        let mut bench =
            Bench { session: Session::new(settings, now, Rng::with_seed(7)), now, sent: Vec::new() };
        bench.act();
        bench
    }

    /// Creates a bench with a session in Up, its Poll Sequence answered and settled, and `sent` empty.
    fn up(timers: Timers) -> Bench {
        let mut bench = Bench::new(timers);
        bench.receive(from_peer(State::Init));
        assert_eq!(bench.session.state(), State::Up);
        bench.run_receiving(ms(1000), from_peer(State::Up));
        bench.confirm();
        assert!(!bench.session.poll.is_running());
        bench.sent.clear();
        bench
    }

    /// Does all steps that are due now, and returns the next one.
    fn act(&mut self) -> Action {
        loop {
            match self.session.next_action(self.now) {
                Action::Transmit(packet) => self.sent.push((self.now, packet)),
                other => return other,
            }
        }
    }

    /// Advances the clock and does each step when it is due.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Action::Wait(until) = self.act()
            && until <= end
        {
            assert!(until > self.now, "a wait that is over before it began");
            self.now = until;
        }
        self.now = end;
        self.act();
    }

    /// Advances the clock like `run`, and receives a packet every 100 ms.
    fn run_receiving(&mut self, time: Duration, packet: Packet) {
        let end = self.now + time;
        while self.now < end {
            self.run(ms(100).min(end - self.now));
            self.receive(packet);
        }
    }

    /// Forgets the packets that were sent, and then does as `run_receiving`.
    fn observe(&mut self, time: Duration, packet: Packet) {
        self.sent.clear();
        self.run_receiving(time, packet);
    }

    #[track_caller]
    fn expect(&self, state: State, diagnostic: Diagnostic) {
        assert_eq!((self.session.state(), self.session.diagnostic()), (state, diagnostic));
    }

    fn receive(&mut self, packet: Packet) {
        self.try_receive(packet).expect("taken");
    }

    /// Receives an answer to a poll, and then a packet without F.
    fn confirm(&mut self) {
        self.receive(Packet { is_final: true, ..from_peer(State::Up) });
        self.receive(from_peer(State::Up));
    }

    fn try_receive(&mut self, packet: Packet) -> Result<(), Discard> {
        let taken = self.session.receive(self.now, &packet.encode(), HOPS);
        self.act();
        taken
    }

    fn last(&self) -> Packet {
        self.sent.last().expect("something was sent").1
    }

    /// Returns the times between packets without F.
    fn intervals(&self) -> Vec<Duration> {
        let times: Vec<_> =
            self.sent.iter().filter(|(_, packet)| !packet.is_final).map(|(at, _)| *at).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

/// Returns the bench with its session restored from the saved state.
fn moved(mut bench: Bench) -> Bench {
    let saved_state = bench.session.saved_state(bench.now, false);
    assert!(!saved_state.has_failed() && bench.session.saved_state(bench.now, true).has_failed());
    // The saved state as text contains every value.
    bench.now = saved_state.longest_age();
    bench.session = Session::restore(&saved_state, bench.now, Rng::with_seed(8)).expect("it is whole");
    assert_eq!(bench.session.saved_state(bench.now, false), saved_state);
    bench.sent.clear();
    bench
}

#[test]
fn the_peer_sees_the_packets_of_one_session() {
    let stayed = Bench::up(timers(300, 300, 3));
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    assert_eq!(bench.session.ups_and_downs(), (1, 0));
    bench.run_receiving(ms(3000), from_peer(State::Up));
    assert!(bench.sent.len() >= 10, "{}", bench.sent.len());
    for (_, packet) in &bench.sent {
        assert_eq!((packet.state, packet.poll), (State::Up, false));
        assert_eq!((packet.my_discriminator, packet.your_discriminator), (OURS, THEIRS));
        assert_eq!(packet.desired_min_tx_us, stayed.session.desired_min_tx_us);
    }
    assert!(bench.intervals().iter().all(|interval| *interval <= ms(300)));
}

#[test]
fn the_detection_time_continues_after_a_takeover() {
    let mut bench = Bench::up(timers(300, 300, 3));
    bench.run(ms(600));
    let mut bench = moved(bench);
    bench.run(ms(299));
    assert_eq!(bench.session.state(), State::Up);
    bench.run(ms(1));
    bench.expect(State::Down, Diagnostic::DetectionTimeExpired);
}

#[test]
fn an_unanswered_poll_starts_again_after_a_takeover() {
    let mut bench = Bench::up(timers(300, 300, 3));
    bench.session.set_timers(timers(900, 300, 3));
    bench.run(ms(300));
    assert!(bench.last().poll);
    let mut bench = moved(bench);
    // The peer has not confirmed the change, so the session keeps the old transmit interval.
    bench.run_receiving(ms(1000), from_peer(State::Up));
    assert!(bench.last().poll && bench.intervals().iter().all(|interval| *interval <= ms(300)));
    bench.confirm();
    assert_eq!(bench.session.transmit_interval(), ms(900));
}

#[test]
fn new_timers_after_a_takeover_need_a_poll() {
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    bench.session.set_timers(timers(100, 300, 3));
    bench.run_receiving(ms(300), from_peer(State::Up));
    assert!(bench.sent.iter().any(|(_, packet)| packet.poll && packet.desired_min_tx_us == 100_000));
}

#[test]
fn an_incomplete_saved_state_is_refused() {
    let bench = Bench::up(timers(300, 300, 3));
    let saved_state = bench.session.saved_state(bench.now, false);
    let names: Vec<_> = saved_state.iter().map(|(name, _)| name.to_owned()).collect();
    for missing in names {
        let mut rest = SavedState::default();
        let kept = saved_state.iter().filter(|(name, _)| *name != missing);
        kept.for_each(|(name, number)| rest.set(name, number));
        // A valid saved state may lack a time of the last reception or transmission, and the failed flag belongs to the link,
        // not to the session.
        let may_be = ["heard-ns", "sent-ns", "failed"].contains(&missing.as_str());
        assert_eq!(Session::restore(&rest, bench.now, Rng::with_seed(1)).is_some(), may_be, "{missing}");
    }
    let mut zero = SavedState::default();
    for (name, number) in saved_state.iter() {
        zero.set(name, if name == "discriminator" { 0 } else { number });
    }
    assert!(Session::restore(&zero, bench.now, Rng::with_seed(1)).is_none());
}

#[test]
fn discarded_packets_change_nothing_and_are_counted() {
    type Change = fn(&mut Vec<u8>);
    let authenticate: Change = |bytes| {
        bytes[1] |= 4;
        bytes[3] = 28;
        bytes.extend([1, 4, 1, b'x']);
    };
    let zero_in_init: Change = |bytes| {
        bytes[1] = 0x80;
        bytes[8..12].fill(0);
    };
    let rows: [(&str, Change, u8, Discard); 12] = [
        ("passed a router", |_| {}, 254, Discard::Hops),
        ("passed many routers", |_| {}, 1, Discard::Hops),
        ("has no hop left", |_| {}, 0, Discard::Hops),
        ("for another session", |bytes| bytes[11] ^= 1, HOPS, Discard::NoSession),
        ("authenticated", authenticate, HOPS, Discard::Authentication),
        ("another version", |bytes| bytes[0] = 0x40, HOPS, Discard::Version),
        ("too short a length", |bytes| bytes[3] = 20, HOPS, Discard::Length),
        ("a length beyond the payload", |bytes| bytes[3] = 60, HOPS, Discard::LengthBeyondPayload),
        ("a multiplier of 0", |bytes| bytes[2] = 0, HOPS, Discard::DetectMult),
        ("multipoint", |bytes| bytes[1] |= 1, HOPS, Discard::Multipoint),
        ("no discriminator", |bytes| bytes[4..8].fill(0), HOPS, Discard::MyDiscriminator),
        ("no discriminator of ours in Init", zero_in_init, HOPS, Discard::YourDiscriminatorZero),
    ];
    for (name, change, hops, why) in rows {
        let mut bench = Bench::up(Timers::default());
        let mut bytes = from_peer(State::Down).encode().to_vec();
        change(&mut bytes);
        assert_eq!(bench.session.receive(bench.now, &bytes, hops), Err(why), "{name}");
        assert_eq!((bench.session.state(), bench.session.remote().0), (State::Up, State::Up), "{name}");
        assert_eq!(bench.session.discards().iter().collect::<Vec<_>>(), [(why, 1)], "{name}");
    }
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

const UP: fn() -> Packet = || from_peer(State::Up);

/// In Up, DesiredMinTx falls below a second; the peer has to confirm this like any other change.
#[test]
fn going_up_begins_a_poll() {
    let mut bench = Bench::new(Timers::default());
    assert!(!bench.last().poll);
    bench.receive(from_peer(State::Init));
    assert_eq!(bench.last().state, State::Up);
    assert!(bench.last().poll);
    assert_eq!(bench.last().desired_min_tx_us, 300_000);
    // The sequence continues with the periodic packets until the peer answers.
    bench.observe(ms(3000), UP());
    assert!(bench.sent.len() >= 10 && bench.sent.iter().all(|(_, packet)| packet.poll));
    assert!(bench.intervals().iter().all(|interval| *interval >= ms(225)), "no packets in between");
    bench.confirm();
    bench.observe(ms(3000), UP());
    assert!(bench.sent.iter().all(|(_, packet)| !packet.poll));
}

#[test]
fn a_slow_session_goes_up_without_a_poll() {
    let mut bench = Bench::new(timers(1000, 300, 3));
    bench.receive(from_peer(State::Init));
    assert!(!bench.last().poll, "nothing has changed but the state");
}

/// If the session slowed down before the peer knew the longer interval, the peer's detection time would expire.
#[test]
fn a_longer_interval_to_send_waits_for_the_answer() {
    let mut bench = Bench::up(timers(100, 300, 3));
    bench.receive(Packet { required_min_rx_us: 50_000, ..UP() });
    let fast = Packet { required_min_rx_us: 50_000, ..UP() };
    bench.session.set_timers(timers(2000, 300, 3));
    bench.run_receiving(ms(3000), fast);
    assert!(bench.sent.len() >= 29);
    assert!(bench.intervals().iter().all(|interval| *interval <= ms(100)));
    let is_told = |packet: &Packet| packet.poll && packet.desired_min_tx_us == 2_000_000;
    assert!(bench.sent.iter().filter(|(_, packet)| is_told(packet)).count() >= 28, "but it is told");
    bench.receive(Packet { is_final: true, ..fast });
    bench.observe(ms(20_000), fast);
    assert!((9..=14).contains(&bench.sent.len()), "{}", bench.sent.len());
    assert_eq!(bench.session.state(), State::Up);
}

#[test]
fn a_shorter_interval_to_send_counts_at_once() {
    let mut bench = Bench::up(timers(3000, 300, 3));
    bench.run_receiving(ms(3000), UP());
    bench.sent.clear();
    bench.session.set_timers(timers(300, 300, 3));
    bench.run_receiving(ms(300), UP());
    assert!((1..=2).contains(&bench.sent.len()), "not longer after the one before than the new interval");
    assert!(bench.last().poll);
    assert_eq!(bench.session.transmit_interval(), ms(300));
}

/// The peer sends at the old rate until it has received the change.
#[test]
fn a_shorter_interval_to_receive_waits_for_the_answer() {
    let mut bench = Bench::up(timers(300, 1000, 3));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.session.set_timers(timers(300, 100, 3));
    bench.run(ms(1));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.run(ms(2900));
    assert_eq!(bench.session.state(), State::Up);
    assert!(bench.last().poll);
    assert_eq!(bench.last().required_min_rx_us, 100_000);
    let fast = Packet { desired_min_tx_us: 100_000, ..UP() };
    bench.receive(fast);
    assert_eq!(bench.session.detection_time(), ms(3000), "no answer");
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.detection_time(), ms(300));
}

#[test]
fn a_longer_interval_to_receive_counts_at_once() {
    let mut bench = Bench::up(timers(300, 300, 3));
    assert_eq!(bench.session.detection_time(), ms(900));
    bench.session.set_timers(timers(300, 1000, 3));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.run(ms(300));
    assert!(bench.last().poll);
    assert_eq!(bench.last().required_min_rx_us, 1_000_000);
}

/// A change takes effect at once while the session is not Up.
#[test]
fn timers_change_at_once_while_not_up() {
    let mut bench = Bench::new(timers(2000, 1000, 3));
    bench.receive(from_peer(State::Down));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.session.set_timers(timers(3000, 500, 3));
    assert_eq!(bench.session.detection_time(), ms(1500));
    assert_eq!(bench.session.transmit_interval(), ms(3000));
    bench.receive(from_peer(State::Down));
    bench.run(ms(0));
    assert!(bench.session.poll.is_running());
}

/// The delay of a change applies to sessions in Up only, so it ends when the session goes down.
#[test]
fn pending_timers_take_effect_when_it_goes_down() {
    let mut bench = Bench::up(timers(100, 1000, 3));
    bench.session.set_timers(timers(2000, 100, 3));
    assert_eq!(bench.session.transmit_interval(), ms(300));
    bench.receive(from_peer(State::Down));
    assert_eq!(bench.session.state(), State::Down);
    assert_eq!(bench.session.transmit_interval(), ms(2000));
    assert_eq!(bench.session.detection_time(), ms(900));
}

/// The detection multiplier changes without a Poll Sequence (section 6.8.12).
#[test]
fn a_new_multiplier_needs_no_poll() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(timers(300, 300, 7));
    assert_eq!(bench.act(), bench.act());
    assert!(bench.sent.is_empty(), "not before it is due");
    bench.run(ms(300));
    assert_eq!(bench.last().detect_mult.get(), 7);
    assert!(!bench.last().poll);
    assert_eq!(bench.session.detection_time(), ms(900), "which is the peer's multiplier");
    assert_eq!(bench.session.detection_time_of_peer(), ms(2100));
}

#[test]
fn the_same_timers_again_are_not_a_change() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(Timers::default());
    bench.run(ms(300));
    assert!(!bench.last().poll);
}

/// A packet with F may answer a packet from before the last change, so it does not confirm that change (section 6.8.3).
#[test]
fn two_changes_are_confirmed_one_after_the_other() {
    let mut bench = Bench::up(timers(100, 300, 3));
    let fast = Packet { required_min_rx_us: 50_000, ..UP() };
    bench.receive(fast);
    bench.session.set_timers(timers(200, 300, 3));
    bench.run(ms(100));
    assert!(bench.last().poll);
    bench.session.set_timers(timers(400, 300, 3));
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.transmit_interval(), ms(100), "the answer may be to 200 ms");
    bench.run(ms(100));
    assert!(!bench.last().poll, "a packet without F has to come first");
    bench.receive(fast);
    bench.run(ms(100));
    assert!(bench.last().poll);
    assert_eq!(bench.last().desired_min_tx_us, 400_000);
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.transmit_interval(), ms(400));
}

/// The answer to the peer's poll already carries the changed values (end of section 6.8.3).
#[test]
fn an_answer_carries_the_changed_timers() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(timers(500, 600, 3));
    bench.receive(Packet { poll: true, ..UP() });
    assert!(bench.last().is_final && !bench.last().poll);
    assert_eq!((bench.last().desired_min_tx_us, bench.last().required_min_rx_us), (500_000, 600_000));
    bench.run(ms(300));
    assert!(bench.last().poll && !bench.last().is_final, "and is to be confirmed all the same");
}

#[test]
fn a_final_without_a_poll_is_ignored() {
    let mut bench = Bench::up(timers(100, 300, 3));
    bench.session.set_timers(timers(2000, 300, 3));
    bench.receive(Packet { is_final: true, required_min_rx_us: 50_000, ..UP() });
    assert_eq!(bench.session.transmit_interval(), ms(100), "it was not asked yet");
}

#[test]
fn the_first_packet_is_immediate_with_initial_values() {
    let bench = Bench::new(timers(300, 200, 5));
    let expected = Packet {
        state: State::Down,
        detect_mult: NonZeroU8::new(5).unwrap(),
        my_discriminator: OURS,
        your_discriminator: 0,
        desired_min_tx_us: 1_000_000,
        required_min_rx_us: 200_000,
        required_min_echo_rx_us: 0,
        ..from_peer(State::Down)
    };
    assert_eq!(bench.sent, [(bench.now, expected)]);
    assert_eq!(bench.session.remote().0, State::Down);
    assert_eq!(bench.session.remote.min_rx_us, 1);
    assert_eq!(bench.session.local_discriminator().get(), OURS);
    assert_eq!(bench.session.timers(), timers(300, 200, 5));
}

#[test]
fn at_most_one_packet_a_second_until_it_is_up() {
    for state in [State::Down, State::Init, State::AdminDown] {
        let mut bench = Bench::new(timers(10, 300, 3));
        match state {
            State::Init => bench.receive(from_peer(State::Down)),
            State::AdminDown => bench.session.set_admin_down(bench.now, true),
            _ => {}
        }
        bench.act();
        bench.sent.clear();
        // A session in Init has to receive packets, or its detection time expires.
        let peer_state = if state == State::Init { State::Down } else { State::AdminDown };
        let end = bench.now + ms(60_000);
        while bench.now < end {
            bench.run(ms(100));
            let _ = bench.try_receive(from_peer(peer_state));
        }
        assert_eq!(bench.session.state(), state);
        let intervals = bench.intervals();
        assert!(intervals.len() >= 58, "{} packets in {state}", intervals.len());
        assert!(intervals.iter().all(|interval| (ms(750)..=ms(1000)).contains(interval)), "{intervals:?}");
        assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 1_000_000));
    }
}

/// An interval longer than a second also applies while the session is not Up.
#[test]
fn a_slow_session_is_not_made_faster_by_being_down() {
    let mut bench = Bench::new(timers(4000, 300, 3));
    bench.run(ms(60_000));
    let intervals = bench.intervals();
    assert!(intervals.len() >= 14, "{} packets in 60 s", intervals.len());
    assert!(intervals.iter().all(|interval| (ms(3000)..=ms(4000)).contains(interval)), "{intervals:?}");
    assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 4_000_000));
}

/// The interval is the longer of our DesiredMinTx and the peer's RequiredMinRx, less a jitter of 0 to 25% drawn for each
/// packet.
#[test]
fn up_packets_have_the_negotiated_interval_with_jitter() {
    for (tx, their_rx, expected) in [(300, 100, 300), (100, 300, 300), (50, 50, 50)] {
        let mut bench = Bench::up(timers(tx, 300, 3));
        let packet = Packet { required_min_rx_us: their_rx * 1000, ..from_peer(State::Up) };
        bench.receive(packet);
        bench.run_receiving(ms(100), packet);
        bench.observe(ms(120_000), packet);
        let intervals = bench.intervals();
        let (least, most) = (ms(expected) * 3 / 4, ms(expected));
        assert!(intervals.iter().all(|interval| (least..=most).contains(interval)), "{intervals:?}");
        let mean = intervals.iter().sum::<Duration>() / intervals.len() as u32;
        let of_expected = mean.as_secs_f64() / most.as_secs_f64();
        assert!((0.865..0.885).contains(&of_expected), "12.5% less in the mean, not {of_expected}");
        let (low, high) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
        let is_whole = *low < least + most / 50 && *high > most - most / 50;
        assert!(is_whole, "all of the range: {low:?} to {high:?}");
    }
}

/// With a multiplier of 1 the peer would count a late packet as missing, so the interval is at most 90% of the negotiated one
/// (section 6.8.7).
#[test]
fn a_multiplier_of_1_limits_the_interval_to_75_to_90_percent() {
    let mut bench = Bench::up(timers(300, 300, 1));
    bench.run_receiving(ms(120_000), from_peer(State::Up));
    let intervals = bench.intervals();
    assert!(intervals.iter().all(|interval| (ms(225)..=ms(270)).contains(interval)), "{intervals:?}");
    let (low, high) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
    assert!(*low < ms(230) && *high > ms(265), "all of the range: {low:?} to {high:?}");
}

#[test]
fn required_min_rx_0_stops_all_but_answers() {
    let mut bench = Bench::up(Timers::default());
    let silent = Packet { required_min_rx_us: 0, ..from_peer(State::Up) };
    bench.receive(silent);
    bench.observe(ms(5000), silent);
    assert!(bench.sent.is_empty());
    bench.receive(Packet { poll: true, ..silent });
    assert_eq!(bench.sent.len(), 1);
    assert!(bench.last().is_final);
    // Periodic packets start again when the peer sends another RequiredMinRx.
    bench.receive(from_peer(State::Up));
    bench.run_receiving(ms(2000), from_peer(State::Up));
    assert!(bench.sent.len() >= 6);
}

/// The peer asked for no periodic packets and then fell silent (section 6.8.18).
#[test]
fn required_min_rx_0_ends_with_the_detection_time() {
    let mut bench = Bench::up(Timers::default());
    bench.receive(Packet { required_min_rx_us: 0, ..from_peer(State::Up) });
    bench.sent.clear();
    bench.run(ms(899));
    assert!(bench.sent.is_empty());
    bench.run(ms(5000));
    assert!(bench.sent.len() >= 4);
    let is_forgotten = |packet: &Packet| packet.state == State::Down && packet.your_discriminator == 0;
    assert!(bench.sent.iter().all(|(_, packet)| is_forgotten(packet)));
}

/// A shorter or a longer interval counts from the last packet sent (section 6.8.3).
#[test]
fn the_peers_required_min_rx_takes_effect_at_once() {
    let mut bench = Bench::up(timers(100, 300, 3));
    let slow = Packet { required_min_rx_us: 4_000_000, ..from_peer(State::Up) };
    bench.receive(slow);
    bench.run_receiving(ms(4000), slow);
    bench.observe(ms(2900), slow);
    assert!(bench.sent.len() <= 1);
    // More than 200 ms have passed since the last packet, or it was just sent.
    bench.run_receiving(ms(300), Packet { required_min_rx_us: 200_000, ..from_peer(State::Up) });
    assert!(!bench.sent.is_empty());
    let last = bench.sent.last().unwrap().0;
    assert!(bench.now - last <= ms(200));
}

/// A change of state is sent before the next periodic packet is due (section 6.8.7).
#[test]
fn a_change_of_state_is_sent_at_once() {
    let mut bench = Bench::new(Timers::default());
    bench.run(ms(100));
    bench.receive(from_peer(State::Down));
    bench.run(ms(1));
    assert_eq!(bench.last().state, State::Init);
    bench.receive(from_peer(State::Init));
    assert_eq!(bench.last().state, State::Up);
    assert_eq!(bench.sent.len(), 3);
    assert_eq!(bench.intervals(), [ms(100), ms(1)]);
}

#[test]
fn packet_fields_follow_the_rfc() {
    let mut bench = Bench::up(timers(250, 350, 4));
    bench.run_receiving(ms(1000), from_peer(State::Up));
    let expected = Packet {
        detect_mult: NonZeroU8::new(4).unwrap(),
        my_discriminator: OURS,
        your_discriminator: THEIRS,
        desired_min_tx_us: 250_000,
        required_min_rx_us: 350_000,
        required_min_echo_rx_us: 0,
        ..from_peer(State::Up)
    };
    assert!(bench.sent.len() >= 3);
    assert!(bench.sent.iter().all(|(_, packet)| *packet == expected), "{:?}", bench.sent);
}

/// A peer in demand mode gets no periodic packets while both sessions are Up, except during a Poll Sequence (sections 6.6 and
/// 6.8.7).
#[test]
fn demand_mode_stops_periodic_packets_while_up() {
    let mut bench = Bench::up(Timers::default());
    let demand = Packet { demand: true, ..from_peer(State::Up) };
    bench.receive(demand);
    bench.observe(ms(5000), demand);
    assert!(bench.sent.is_empty());
    bench.session.set_timers(timers(300, 300, 4));
    bench.run_receiving(ms(1000), demand);
    assert!(bench.sent.len() >= 2 && bench.sent.iter().all(|(_, packet)| packet.poll), "{:?}", bench.sent);
    bench.receive(Packet { is_final: true, ..demand });
    bench.observe(ms(1000), demand);
    assert!(bench.sent.is_empty());
    bench.receive(Packet { demand: true, ..from_peer(State::Init) });
    bench.run_receiving(ms(700), Packet { demand: true, ..from_peer(State::Init) });
    assert!(bench.sent.len() >= 2, "it does not see the session up");
    assert!(bench.sent.iter().all(|(_, packet)| !packet.demand), "and we never are in that mode");
}

const T: Duration = Duration::from_secs(9);

#[test]
fn one_change_is_one_sequence() {
    let mut poll = PollSequence::default();
    assert!(!poll.received(T, true), "no Poll Sequence is in progress");
    poll.request();
    poll.request();
    assert!(poll.is_running());
    assert!(!poll.received(T, true), "the Final bit answers an older packet: no Poll has been sent yet");
    poll.sent();
    assert!(!poll.received(T, false));
    assert!(poll.received(T, true));
    assert!(!poll.is_running());
    assert!(!poll.received(T, false));
    assert_eq!(poll, PollSequence::Idle);
}

#[test]
fn a_change_during_a_poll_needs_a_second_sequence() {
    let mut poll = PollSequence::default();
    poll.request();
    poll.sent();
    poll.request();
    assert!(!poll.received(T, true));
    assert!(!poll.is_running());
    assert!(!poll.received(T, true), "a second answer to the first sequence");
    assert!(!poll.is_running());
    assert!(!poll.received(T, false));
    assert!(poll.is_running());
    poll.sent();
    assert!(poll.received(T, true));
}

#[test]
fn a_silent_peer_delays_the_next_sequence_by_a_second() {
    let mut poll = PollSequence::default();
    poll.request();
    poll.sent();
    assert!(poll.received(T, true));
    poll.request();
    assert_eq!(poll.due(), Some(T + SETTLED_AFTER));
    poll.advance(T + SETTLED_AFTER / 2);
    assert!(!poll.is_running());
    poll.advance(T + SETTLED_AFTER);
    assert!(poll.is_running());
}

#[test]
fn intervals_beyond_the_wire_format_are_refused() {
    let ms = Duration::from_millis;
    assert_eq!(Timers::new(ms(300), ms(300), 3), Ok(Timers::default()));
    assert_eq!(Timers::new(Duration::ZERO, ms(1), 3), Err(TimersError::DesiredMinTx(Duration::ZERO)));
    let nanos = Duration::from_nanos(999);
    assert_eq!(Timers::new(nanos, ms(1), 3), Err(TimersError::DesiredMinTx(nanos)));
    let long = Duration::from_micros(1 << 32);
    assert_eq!(Timers::new(long, ms(1), 3), Err(TimersError::DesiredMinTx(long)));
    assert_eq!(Timers::new(ms(1), long, 3), Err(TimersError::RequiredMinRx(long)));
    assert_eq!(Timers::new(ms(1), ms(1), 0), Err(TimersError::DetectMult));
    assert_eq!(Timers::new(ms(1), Duration::ZERO, 1).unwrap().required_min_rx(), Duration::ZERO);
}
