//! Tests of every clause of section 6.8 that concerns asynchronous mode, on a simulated clock.

mod machine;
mod peers;
mod poll;
mod reception;
mod saved_state;
mod transmission;

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
        bench.receive(Packet { is_final: true, ..from_peer(State::Up) });
        bench.receive(from_peer(State::Up));
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

    fn receive(&mut self, packet: Packet) {
        self.try_receive(packet).expect("taken");
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
