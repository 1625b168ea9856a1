//! Two sessions connected by a simulated wire with delay and loss.

use super::*;

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
        assert_eq!(wire.sessions[0].transmit_interval(), ms(100));
        assert_eq!(wire.sessions[1].transmit_interval(), ms(300));
        assert_eq!(wire.sessions[0].detection_time(), ms(1500));
        assert_eq!(wire.sessions[1].detection_time(), ms(300));
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
        assert_eq!(wire.sessions[0].diagnostic(), Diagnostic::DetectionTimeExpired);
        assert_eq!(wire.sessions[1].diagnostic(), Diagnostic::DetectionTimeExpired);
        assert_ne!(wire.sessions[0].state(), State::Up);
        assert_ne!(wire.sessions[1].state(), State::Up);
        wire.loss = [0, 0];
        wire.run(ms(3000));
        assert_eq!(wire.states(), [State::Up; 2]);
    }
}

#[test]
fn admin_down_reaches_the_peer_and_is_no_failure() {
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
