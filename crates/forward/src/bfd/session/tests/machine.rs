//! Session states and diagnostics: sections 6.2, 6.8.4, 6.8.6, and 6.8.15 to 6.8.18.

use super::*;

/// Returns a bench whose session is in this state.
fn in_state(state: State) -> Bench {
    let mut bench = Bench::new(Timers::default());
    match state {
        State::AdminDown => bench.session.set_admin_down(bench.now, true),
        State::Down => {}
        State::Init => bench.receive(from_peer(State::Down)),
        State::Up => bench = Bench::up(Timers::default()),
    }
    assert_eq!(bench.session.state(), state);
    bench
}

#[test]
fn state_transitions_follow_the_rfc() {
    use State::{AdminDown, Down, Init, Up};
    let none = Diagnostic::None;
    let signaled = Diagnostic::NeighborSignaledDown;
    let table = [
        (Down, AdminDown, Down, none),
        (Down, Down, Init, none),
        (Down, Init, Up, none),
        (Down, Up, Down, none),
        (Init, AdminDown, Down, signaled),
        (Init, Down, Init, none),
        (Init, Init, Up, none),
        (Init, Up, Up, none),
        (Up, AdminDown, Down, signaled),
        (Up, Down, Down, signaled),
        (Up, Init, Up, none),
        (Up, Up, Up, none),
    ];
    for (before, received, after, diagnostic) in table {
        let mut bench = in_state(before);
        let transitions = bench.session.transitions();
        bench.run(ms(50));
        bench.receive(from_peer(received));
        let found = (bench.session.state(), bench.session.diagnostic());
        assert_eq!(found, (after, diagnostic), "{before} hears {received}");
        assert_eq!(bench.session.transitions() - transitions, u64::from(before != after));
        assert_eq!(bench.session.since() == bench.now, before != after);
    }
}

/// A session in AdminDown stores the values of a received packet and discards it (section 6.8.6).
#[test]
fn admin_down_stores_the_values_and_discards() {
    for received in [State::AdminDown, State::Down, State::Init, State::Up] {
        let mut bench = in_state(State::AdminDown);
        let packet = Packet { poll: true, required_min_rx_us: 2_000_000, ..from_peer(received) };
        let before = bench.sent.len();
        assert_eq!(bench.try_receive(packet), Err(Discard::AdminDown));
        assert_eq!(bench.session.state(), State::AdminDown);
        let is_silent = bench.sent[before..].iter().all(|(_, packet)| !packet.is_final);
        assert!(is_silent, "no answer to a discarded packet");
        assert_eq!(bench.session.remote().0, received);
        assert_eq!(bench.session.remote_discriminator().unwrap().get(), THEIRS);
        assert_eq!(bench.session.transmit_interval(), ms(2000));
        assert_eq!(bench.session.discards().of(Discard::AdminDown), 1);
    }
}

#[test]
fn silence_takes_it_down_after_the_detection_time() {
    for state in [State::Init, State::Up] {
        let mut bench = in_state(state);
        assert_eq!(bench.session.detection_time(), ms(900));
        bench.run(ms(899));
        assert_eq!(bench.session.state(), state);
        bench.run(ms(1));
        bench.expect(State::Down, Diagnostic::DetectionTimeExpired);
        // The session also tells the peer at once, in case the other direction works.
        assert_eq!(bench.sent.last().unwrap().0, bench.now);
        assert_eq!(bench.last().state, State::Down);
        assert_eq!(bench.last().diagnostic, Diagnostic::DetectionTimeExpired);
    }
}

#[test]
fn only_accepted_packets_restart_the_detection_time() {
    let mut bench = in_state(State::Up);
    bench.run_receiving(ms(5000), from_peer(State::Up));
    assert_eq!(bench.session.state(), State::Up);
    let mut wrong = from_peer(State::Up);
    wrong.your_discriminator = OURS + 1;
    for _ in 0..9 {
        bench.run(ms(100));
        assert_eq!(bench.try_receive(wrong), Err(Discard::NoSession));
    }
    assert_eq!(bench.session.state(), State::Down);
}

/// The detection time is the peer's multiplier times the longer of our RequiredMinRx and the peer's DesiredMinTx (section
/// 6.8.4).
#[test]
fn the_detection_time_follows_the_rfc() {
    for (required, desired_ms, mult, expected) in
        [(300, 100, 3, 900), (100, 300, 3, 900), (50, 10, 1, 50), (10, 20, 255, 5100)]
    {
        let mut bench = Bench::new(timers(300, required, 9));
        assert_eq!(bench.session.detection_time(), Duration::ZERO);
        bench.receive(Packet {
            desired_min_tx_us: desired_ms * 1000,
            detect_mult: NonZeroU8::new(mult).unwrap(),
            ..from_peer(State::Down)
        });
        assert_eq!(bench.session.detection_time(), ms(expected));
    }
}

/// After a detection time of silence the session forgets the peer's discriminator in every state (section 6.8.1), and
/// RemoteMinRx becomes 1 (section 6.8.18).
#[test]
fn a_silent_peer_is_forgotten_in_every_state() {
    for state in [State::AdminDown, State::Down, State::Init, State::Up] {
        let mut bench = in_state(state);
        let peer_state = if state == State::Down { State::AdminDown } else { State::Up };
        let packet = Packet { required_min_rx_us: 5_000_000, ..from_peer(peer_state) };
        let _ = bench.try_receive(packet);
        assert_eq!(bench.session.remote_discriminator().unwrap().get(), THEIRS);
        bench.run(ms(899));
        assert!(bench.session.remote_discriminator().is_some());
        bench.run(ms(1));
        assert!(bench.session.remote_discriminator().is_none(), "{state}");
        assert_eq!(bench.session.remote.min_rx_us, 1);
        bench.run(ms(1000));
        assert_eq!(bench.last().your_discriminator, 0);
    }
}

#[test]
fn a_session_recovers_after_a_failure() {
    let mut bench = in_state(State::Up);
    bench.run(ms(10_000));
    assert_eq!(bench.session.state(), State::Down);
    assert_eq!(bench.session.ups_and_downs(), (1, 1));
    bench.receive(Packet { your_discriminator: 0, my_discriminator: 5, ..from_peer(State::Down) });
    assert_eq!(bench.session.state(), State::Init);
    assert_eq!(bench.last().your_discriminator, 5);
    assert_eq!(bench.last().diagnostic, Diagnostic::DetectionTimeExpired, "until both know that it is over");
    bench.receive(Packet { my_discriminator: 5, ..from_peer(State::Up) });
    assert_eq!(bench.session.state(), State::Up);
    assert_eq!(bench.last().diagnostic, Diagnostic::None);
    assert_eq!(bench.session.ups_and_downs(), (2, 1));
    assert_eq!(bench.session.last_failure(), Diagnostic::DetectionTimeExpired);
}

/// An attacker could forge such a packet with nothing but the peer's source address.
#[test]
fn discriminator_0_is_ignored_in_init_and_up() {
    for (state, said, interval) in [
        (State::Init, State::Down, ms(1000)),
        (State::Init, State::AdminDown, ms(1000)),
        (State::Up, State::Down, ms(300)),
        (State::Up, State::AdminDown, ms(300)),
    ] {
        let mut bench = in_state(state);
        let before = (bench.session.remote_discriminator(), bench.session.transitions());
        let forged = Packet { your_discriminator: 0, my_discriminator: 5, poll: true, ..from_peer(said) };
        let forged = Packet { required_min_rx_us: 9_000_000, ..forged };
        bench.sent.clear();
        let answer = bench.try_receive(forged);
        assert_eq!(answer, Err(Discard::YourDiscriminatorZero), "{state} hears {said}");
        assert_eq!((bench.session.state(), bench.session.transmit_interval()), (state, interval));
        assert_eq!((bench.session.remote_discriminator(), bench.session.transitions()), before);
        assert!(bench.sent.iter().all(|(_, packet)| !packet.is_final), "no answer to a discarded packet");
    }
}

/// A restarted peer sends Down without a discriminator every second. The detection time expires meanwhile, and the session
/// comes up with the peer's new discriminator.
#[test]
fn a_restarted_peer_is_noticed_by_the_detection_time() {
    let mut bench = in_state(State::Up);
    bench.receive(from_peer(State::Up));
    let restarted = Packet { your_discriminator: 0, my_discriminator: 5, ..from_peer(State::Down) };
    for _ in 0..8 {
        bench.run(ms(100));
        assert_eq!(bench.try_receive(restarted), Err(Discard::YourDiscriminatorZero));
        assert_eq!(bench.session.state(), State::Up);
    }
    bench.run(ms(100));
    bench.expect(State::Down, Diagnostic::DetectionTimeExpired);
    bench.receive(restarted);
    assert_eq!(bench.session.state(), State::Init);
    bench.receive(Packet { my_discriminator: 5, ..from_peer(State::Init) });
    assert_eq!(bench.session.state(), State::Up);
}

/// An administrator holds the session down and releases it (section 6.8.16).
#[test]
fn admin_down_holds_it_down_until_released() {
    for state in [State::Down, State::Init, State::Up] {
        let mut bench = in_state(state);
        bench.session.set_admin_down(bench.now, true);
        bench.act();
        assert_eq!(bench.last().state, State::AdminDown, "told at once");
        assert_eq!(bench.last().diagnostic, Diagnostic::AdministrativelyDown);
        // AdminDown packets continue for at least a detection time, and here without end.
        bench.sent.clear();
        bench.run(ms(20_000));
        assert!(bench.sent.len() >= 19);
        assert!(bench.sent.iter().all(|(_, packet)| packet.state == State::AdminDown));
        assert_eq!(bench.session.state(), State::AdminDown, "no expiry either");
        bench.session.set_admin_down(bench.now, false);
        assert_eq!(bench.session.state(), State::Down);
        bench.act();
        assert_eq!(bench.last().state, State::Down);
        bench.receive(from_peer(State::Down));
        assert_eq!(bench.session.state(), State::Init);
    }
}

/// A drain can end before the detection time if the peer has confirmed AdminDown.
#[test]
fn a_down_from_the_peer_confirms_admin_down() {
    let mut bench = in_state(State::Up);
    bench.session.set_admin_down(bench.now, true);
    bench.run(ms(5));
    assert!(!bench.session.peer_expects_silence());
    assert_eq!(bench.try_receive(from_peer(State::Up)), Err(Discard::AdminDown));
    assert!(!bench.session.peer_expects_silence(), "that was under way");
    assert_eq!(bench.try_receive(from_peer(State::Down)), Err(Discard::AdminDown));
    assert!(bench.session.peer_expects_silence());
    // A Down of the same moment came before AdminDown.
    let mut bench = in_state(State::Init);
    bench.session.set_admin_down(bench.now, true);
    assert!(!bench.session.peer_expects_silence());
}

/// A peer that ended in order runs no detection timer, and answers nothing.
#[test]
fn a_peer_in_admin_down_need_not_confirm() {
    let mut bench = in_state(State::Up);
    bench.receive(from_peer(State::AdminDown));
    assert_eq!(bench.session.state(), State::Down);
    assert!(!bench.session.peer_expects_silence(), "this side has not ended");
    bench.session.set_admin_down(bench.now, true);
    assert!(bench.session.peer_expects_silence());
}

#[test]
fn releasing_a_session_not_held_down_changes_nothing() {
    let mut bench = in_state(State::Up);
    bench.session.set_admin_down(bench.now, false);
    assert_eq!(bench.session.state(), State::Up);
}

/// A reset of the forwarding plane takes the session down (section 6.8.15).
#[test]
fn a_forwarding_plane_reset_takes_it_down() {
    let mut bench = in_state(State::Up);
    bench.session.reset_forwarding_plane(bench.now);
    bench.act();
    let told = (bench.last().state, bench.last().diagnostic);
    assert_eq!(told, (State::Down, Diagnostic::ForwardingPlaneReset));
    let mut bench = in_state(State::AdminDown);
    bench.session.reset_forwarding_plane(bench.now);
    assert_eq!(bench.session.state(), State::AdminDown);
}

/// The packet carries the diagnostic, and the state does not change (section 6.8.17).
#[test]
fn concatenated_path_is_signaled_without_a_state_change() {
    let mut bench = in_state(State::Up);
    bench.session.signal(Diagnostic::ConcatenatedPathDown);
    bench.act();
    assert_eq!((bench.last().state, bench.last().diagnostic), (State::Up, Diagnostic::ConcatenatedPathDown));
    assert!(!bench.last().poll);
    bench.receive(Packet { demand: true, ..from_peer(State::Up) });
    bench.session.signal(Diagnostic::None);
    bench.act();
    assert!(bench.last().poll, "a peer in demand mode has to confirm");
}

struct Wire {
    sessions: [Session; 2],
    /// The time of arrival, the receiving session and the packet.
    under_way: Vec<(Duration, usize, Packet)>,
    now: Duration,
    delay: Duration,
    /// The loss rate per receiver, in packets per 1000.
    loss: [u32; 2],
    random: Rng,
}

impl Wire {
    fn new(timers: [Timers; 2], seed: u64) -> Wire {
        let session = |index: usize| {
            let local_discriminator = NonZeroU32::new(100 + index as u32).unwrap();
            let settings = Settings { timers: timers[index], local_discriminator };
            Session::new(settings, Duration::ZERO, Rng::with_seed(seed * 2 + index as u64))
        };
        Wire {
            sessions: [session(0), session(1)],
            under_way: Vec::new(),
            now: Duration::ZERO,
            delay: ms(5),
            loss: [0, 0],
            random: Rng::with_seed(seed),
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let mut next = end;
            for from in 0..2 {
                loop {
                    match self.sessions[from].next_action(self.now) {
                        Action::Transmit(packet) => {
                            let to = 1 - from;
                            if self.random.u32(..1000) >= self.loss[to] {
                                self.under_way.push((self.now + self.delay, to, packet));
                            }
                        }
                        Action::Wait(until) => {
                            next = next.min(until);
                            break;
                        }
                        Action::WaitForPacket => break,
                    }
                }
            }
            next = self.under_way.iter().fold(next, |next, (at, ..)| next.min(*at));
            self.now = next;
            let (arrived, left) = self.under_way.drain(..).partition(|(at, ..)| *at <= next);
            self.under_way = left;
            let arrived: Vec<(Duration, usize, Packet)> = arrived;
            if next == end && arrived.is_empty() {
                return;
            }
            for (_, to, packet) in arrived {
                let _ = self.sessions[to].receive(next, &packet.encode(), HOPS);
            }
        }
    }

    fn states(&self) -> [State; 2] {
        [self.sessions[0].state(), self.sessions[1].state()]
    }
}

#[test]
fn sessions_come_up_in_three_packets_and_confirm_timers() {
    for seed in 0..50 {
        let mut wire = Wire::new([timers(100, 200, 3), timers(300, 50, 5)], seed);
        wire.run(ms(50));
        assert_eq!(wire.states(), [State::Up; 2]);
        wire.run(ms(3000));
        let times = wire.sessions.each_ref().map(|side| (side.transmit_interval(), side.detection_time()));
        assert_eq!(times, [(ms(100), ms(1500)), (ms(300), ms(300))]);
        for session in &wire.sessions {
            assert!(!session.poll.is_running());
            assert_eq!(session.discards().total(), 0);
        }
    }
}

#[test]
fn sessions_survive_loss_below_the_multiplier() {
    for detect_mult in [1, 3] {
        let mut wire = Wire::new([timers(300, 300, detect_mult); 2], 3);
        wire.run(ms(3_600_000));
        assert_eq!(wire.states(), [State::Up; 2]);
        assert_eq!(wire.sessions.each_ref().map(Session::transitions), [2, 2], "an hour, and never down");
    }
    let mut wire = Wire::new([timers(300, 300, 6); 2], 3);
    wire.loss = [50, 50];
    wire.run(ms(3_600_000));
    assert_eq!(wire.states(), [State::Up; 2]);
}

/// Each side detects the failure, and both come up again. The side that still receives accepts no packet either: its peer has
/// forgotten the discriminator and sends 0, so the detection time expires on both sides.
#[test]
fn a_unidirectional_failure_takes_both_down() {
    for seed in 0..20 {
        let mut wire = Wire::new([Timers::default(); 2], seed);
        wire.run(ms(5000));
        wire.loss = [1000, 0];
        // The wait covers both detection times, in sequence, and the packets in flight.
        wire.run(ms(2 * 900 + 5 + 5 + 1));
        for session in &wire.sessions {
            assert_eq!(session.diagnostic(), Diagnostic::DetectionTimeExpired);
            assert_ne!(session.state(), State::Up);
        }
        wire.loss = [0, 0];
        wire.run(ms(3000));
        assert_eq!(wire.states(), [State::Up; 2]);
    }
}

#[test]
fn admin_down_reaches_the_peer_and_is_not_a_failure() {
    let mut wire = Wire::new([Timers::default(); 2], 1);
    wire.run(ms(5000));
    wire.sessions[0].set_admin_down(wire.now, true);
    wire.run(ms(10));
    assert_eq!(wire.states(), [State::AdminDown, State::Down]);
    assert_eq!(wire.sessions[1].diagnostic(), Diagnostic::NeighborSignaledDown);
    assert_eq!(wire.sessions[1].remote(), (State::AdminDown, Diagnostic::AdministrativelyDown));
    wire.run(ms(60_000));
    assert_eq!(wire.states(), [State::AdminDown, State::Down]);
    wire.sessions[0].set_admin_down(wire.now, false);
    wire.run(ms(2000));
    assert_eq!(wire.states(), [State::Up; 2]);
}

/// Timers change repeatedly under loss: no change makes a detection time expire, and in the end both sides use the timers that
/// were requested last.
#[test]
fn timers_change_while_it_is_up() {
    let choices = [50, 100, 300, 700, 1500];
    for seed in 0..40 {
        let mut wire = Wire::new([timers(300, 300, 8), timers(100, 500, 8)], seed);
        wire.run(ms(5000));
        assert_eq!(wire.states(), [State::Up; 2]);
        wire.loss = [30, 30];
        let mut random = Rng::with_seed(seed);
        let mut last = [Timers::default(); 2];
        for _ in 0..100 {
            let mut draw = || choices[random.usize(..choices.len())];
            for (session, last) in wire.sessions.iter_mut().zip(&mut last) {
                *last = timers(draw(), draw(), 8);
                session.set_timers(*last);
            }
            wire.run(ms(random.u64(1..4000)));
            assert_eq!(wire.sessions.each_ref().map(Session::transitions), [2, 2], "seed {seed}");
        }
        wire.loss = [0, 0];
        wire.run(ms(20_000));
        for (session, peer) in [(0, 1), (1, 0)] {
            let expected = last[session].desired_min_tx().max(last[peer].required_min_rx());
            assert_eq!(wire.sessions[session].transmit_interval(), expected);
            assert_eq!(wire.sessions[peer].detection_time(), expected * 8);
            assert!(!wire.sessions[session].poll.is_running());
        }
    }
}
