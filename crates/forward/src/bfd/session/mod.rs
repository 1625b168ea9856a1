//! A BFD session: the procedures of RFC 5880, section 6.8, in asynchronous mode, without authentication and without echo.
//!
//! A session has no clock: `now` is the time since an origin that the caller chooses once, and must never go backwards.

mod saved_state;

use std::num::NonZeroU32;
use std::time::Duration;

use fastrand::Rng;

use crate::bfd::discard::{Discard, Discards};
use crate::bfd::packet::{Diagnostic, Packet, State};
use crate::bfd::poll_sequence::PollSequence;
use crate::bfd::timers::Timers;
pub(crate) use saved_state::SavedState;

/// The minimum DesiredMinTx of a session that is not Up (section 6.8.3).
const SLOW_US: u32 = 1_000_000;
/// The TTL or hop limit of a packet that has not passed a router (RFC 5881, section 5).
pub(super) const HOPS: u8 = 255;

/// The parameters of a new session.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The requested intervals and the detection multiplier.
    pub timers: Timers,
    /// The local discriminator, unique on this host; better random than consecutive (section 6.8.1).
    pub local_discriminator: NonZeroU32,
}

/// The next step for the owner of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this packet now. The session already counts it as sent.
    Transmit(Packet),
    /// Wait until this time or until a packet arrives.
    Wait(Duration),
    /// Wait until a packet arrives: the peer wants no packets, and the session expects none.
    WaitForPacket,
}

/// The state variables received from the peer, or their initial values.
#[derive(Clone, Copy, Debug)]
struct Remote {
    /// bfd.RemoteDiscr
    discriminator: u32,
    /// bfd.RemoteSessionState
    state: State,
    /// bfd.RemoteMinRxInterval
    min_rx_us: u32,
    /// bfd.RemoteDemandMode
    demand: bool,
    /// The peer's Desired Min TX Interval and Detect Mult.
    min_tx_us: u32,
    detect_mult: u8,
    diagnostic: Diagnostic,
    /// The arrival time of the peer's last packet; `None` once a detection time has passed since.
    last_received: Option<Duration>,
}

/// The state variables of section 6.8.1, and the transmission schedule.
#[derive(Debug)]
pub struct Session {
    timers: Timers,
    local_discriminator: NonZeroU32,
    state: State,
    diagnostic: Diagnostic,
    remote: Remote,
    /// bfd.DesiredMinTxInterval, as packets carry it.
    desired_min_tx_us: u32,
    /// The DesiredMinTx in use, which stays at the lower value until the peer has confirmed an increase.
    tx_us: u32,
    /// The RequiredMinRx used for the detection time, which stays at the higher value until the peer has confirmed a decrease.
    rx_us: u32,
    poll: PollSequence,
    /// A packet with P has arrived and is not answered yet.
    owes_final: bool,
    /// The time of the last packet sent other than an answer to P.
    sent: Option<Duration>,
    /// State and diagnostic in the last packet sent.
    last_sent: (State, Diagnostic),
    /// The jitter subtracted from the present interval, from 0 (none) to 1 (the permitted maximum).
    jitter: f64,
    random: Rng,
    since: Duration,
    transitions: u64,
    ups: u64,
    downs: u64,
    last_failure: Diagnostic,
    transmitted: u64,
    received: u64,
    discards: Discards,
}

impl Session {
    /// Creates a session in state Down, with its first packet due at once.
    pub fn new(settings: Settings, now: Duration, random: Rng) -> Session {
        let Settings { timers, local_discriminator } = settings;
        let slow = timers.desired_min_tx_us.get().max(SLOW_US);
        Session {
            timers,
            local_discriminator,
            state: State::Down,
            diagnostic: Diagnostic::None,
            remote: Remote {
                discriminator: 0,
                state: State::Down,
                min_rx_us: 1,
                demand: false,
                min_tx_us: 0,
                detect_mult: 0,
                diagnostic: Diagnostic::None,
                last_received: None,
            },
            desired_min_tx_us: slow,
            tx_us: slow,
            rx_us: timers.required_min_rx_us,
            poll: PollSequence::default(),
            owes_final: false,
            sent: None,
            last_sent: (State::Down, Diagnostic::None),
            jitter: 0.0,
            random,
            since: now,
            transitions: 0,
            ups: 0,
            downs: 0,
            last_failure: Diagnostic::None,
            transmitted: 0,
            received: 0,
            discards: Discards::default(),
        }
    }

    /// Processes a datagram received with a TTL or hop limit of `hops` (section 6.8.6; RFC 5881, section 5).
    ///
    /// Does not check the detection time first. A thread that was scheduled late passes all packets from its socket queue to
    /// the session, then calls `next_action`, so that its own delay does not look like a dead peer.
    ///
    /// # Errors
    ///
    /// The reason why the packet was discarded, which the session has counted.
    pub fn receive(&mut self, now: Duration, datagram: &[u8], hops: u8) -> Result<(), Discard> {
        let taken = if hops == HOPS {
            Packet::parse(datagram).and_then(|packet| self.take(now, &packet))
        } else {
            Err(Discard::Hops)
        };
        match taken {
            Ok(()) => self.received += 1,
            Err(why) => self.discards.count(why),
        }
        taken
    }

    fn take(&mut self, now: Duration, packet: &Packet) -> Result<(), Discard> {
        if packet.your_discriminator != 0 && packet.your_discriminator != self.local_discriminator.get() {
            return Err(Discard::NoSession);
        }
        if packet.authenticated {
            return Err(Discard::Authentication);
        }
        // This rule is stricter than RFC 5880, section 6.8.6, by which such a packet takes the session down if its state is
        // Down or AdminDown. The packet proves nothing but the peer's source address, which every host on the link can forge; a
        // packet with our discriminator proves that its sender has received our packets. FRR's bfdd ignores such packets too.
        // The cost: if a peer has restarted, or has forgotten our discriminator after losing our packets for a detection time
        // (section 6.8.1), the session notices only when its own detection time expires. The ignored packet does not restart
        // that time, and once the session is Down the same packet starts it again.
        if packet.your_discriminator == 0 && matches!(self.state, State::Init | State::Up) {
            return Err(Discard::YourDiscriminatorZero);
        }
        self.remote = Remote {
            discriminator: packet.my_discriminator,
            state: packet.state,
            min_rx_us: packet.required_min_rx_us,
            demand: packet.demand,
            min_tx_us: packet.desired_min_tx_us,
            detect_mult: packet.detect_mult.get(),
            diagnostic: packet.diagnostic,
            last_received: Some(now),
        };
        if self.poll.received(now, packet.is_final) {
            self.tx_us = self.desired_min_tx_us;
            self.rx_us = self.timers.required_min_rx_us;
        }
        match (self.state, packet.state) {
            (State::AdminDown, _) => return Err(Discard::AdminDown),
            (State::Init | State::Up, State::AdminDown) | (State::Up, State::Down) => {
                self.change(now, State::Down, Diagnostic::NeighborSignaledDown);
            }
            (State::Down, State::Down) => self.change(now, State::Init, self.diagnostic),
            // The diagnostic of the last failure stays until both ends know that the session is Up.
            (State::Down, State::Init) | (State::Init, State::Init | State::Up) => {
                self.change(now, State::Up, Diagnostic::None);
            }
            (State::Down, State::AdminDown | State::Up)
            | (State::Init, State::Down)
            | (State::Up, State::Init | State::Up) => {}
        }
        self.owes_final |= packet.poll;
        Ok(())
    }

    /// Counts a packet that the owner of the session has discarded.
    pub fn discard(&mut self, why: Discard) {
        self.discards.count(why);
    }

    /// Returns the next step at time `now`. Call it again after each packet sent or received, and when the wait is over.
    pub fn next_action(&mut self, now: Duration) -> Action {
        self.expire(now);
        self.poll.advance(now);
        if self.owes_final {
            self.owes_final = false;
            return Action::Transmit(self.packet(true));
        }
        let due = self.transmission();
        if due.is_some_and(|due| due <= now) {
            self.sent = Some(now);
            self.jitter = self.random.f64();
            self.poll.sent();
            return Action::Transmit(self.packet(false));
        }
        let next = [due, self.expiry(), self.poll.due()].into_iter().flatten().min();
        next.map_or(Action::WaitForPacket, Action::Wait)
    }

    /// Handles an expired detection time (section 6.8.4) and forgets the values of a peer that is silent for a detection time
    /// (sections 6.8.1 and 6.8.18).
    fn expire(&mut self, now: Duration) {
        if self.expiry().is_none_or(|expiry| now < expiry) {
            return;
        }
        self.remote.last_received = None;
        self.remote.discriminator = 0;
        self.remote.min_rx_us = 1;
        if matches!(self.state, State::Init | State::Up) {
            self.change(now, State::Down, Diagnostic::DetectionTimeExpired);
        }
    }

    fn expiry(&self) -> Option<Duration> {
        self.remote.last_received.map(|at| at + self.detection_time())
    }

    /// Returns the time of the next periodic packet; `None` while the session may send none (section 6.8.7).
    fn transmission(&self) -> Option<Duration> {
        if self.remote.min_rx_us == 0 {
            return None;
        }
        let Some(sent) = self.sent else { return Some(Duration::ZERO) };
        if self.last_sent != (self.state, self.diagnostic) {
            return Some(sent);
        }
        let is_quiet = self.remote.demand && self.state == State::Up && self.remote.state == State::Up;
        (!is_quiet || self.poll.is_running()).then(|| sent + self.transmit_interval().mul_f64(self.kept()))
    }

    /// Returns the fraction of the interval that remains after jitter (section 6.8.7).
    fn kept(&self) -> f64 {
        if self.timers.detect_mult.get() == 1 { 0.9 - 0.15 * self.jitter } else { 1.0 - 0.25 * self.jitter }
    }

    fn packet(&mut self, is_final: bool) -> Packet {
        self.transmitted += 1;
        self.last_sent = (self.state, self.diagnostic);
        Packet {
            diagnostic: self.diagnostic,
            state: self.state,
            poll: self.poll.is_running() && !is_final,
            is_final,
            control_plane_independent: false,
            authenticated: false,
            demand: false,
            detect_mult: self.timers.detect_mult,
            my_discriminator: self.local_discriminator.get(),
            your_discriminator: self.remote.discriminator,
            desired_min_tx_us: self.desired_min_tx_us,
            required_min_rx_us: self.timers.required_min_rx_us,
            required_min_echo_rx_us: 0,
        }
    }

    fn change(&mut self, now: Duration, state: State, diagnostic: Diagnostic) {
        self.diagnostic = diagnostic;
        if self.state != state {
            if self.state == State::Up {
                self.downs += 1;
                self.last_failure = diagnostic;
            }
            self.ups += u64::from(state == State::Up);
            self.state = state;
            self.since = now;
            self.transitions += 1;
            self.apply_timers();
        }
    }

    /// Sets the state variables for the present timers and state, and starts a Poll Sequence if they change (section 6.8.3).
    fn apply_timers(&mut self) {
        let least = if self.state == State::Up { 0 } else { SLOW_US };
        let desired = self.timers.desired_min_tx_us.get().max(least);
        if desired != self.desired_min_tx_us {
            self.desired_min_tx_us = desired;
            self.poll.request();
        }
        let required = self.timers.required_min_rx_us;
        if self.state == State::Up {
            self.tx_us = self.tx_us.min(desired);
            self.rx_us = self.rx_us.max(required);
        } else {
            self.tx_us = desired;
            self.rx_us = required;
        }
    }

    /// Changes the timers (sections 6.8.3 and 6.8.10 to 6.8.12). While the session is Up, a longer transmit interval or a
    /// shorter receive interval takes effect once the peer has confirmed it; other changes take effect at once.
    pub fn set_timers(&mut self, timers: Timers) {
        let before = self.timers;
        self.timers = timers;
        self.apply_timers();
        // A peer in demand mode receives no periodic packets, so only a Poll Sequence can carry the new multiplier (section
        // 6.6).
        let unheard = self.remote.demand && before.detect_mult != timers.detect_mult;
        if before.required_min_rx_us != timers.required_min_rx_us || unheard {
            self.poll.request();
        }
    }

    /// Holds the session down and tells the peer so, or lets the session come up again (section 6.8.16).
    pub fn set_admin_down(&mut self, now: Duration, is_down: bool) {
        if is_down {
            self.change(now, State::AdminDown, Diagnostic::AdministrativelyDown);
        } else if self.state == State::AdminDown {
            self.change(now, State::Down, self.diagnostic);
        }
    }

    /// Reports a reset of the forwarding plane to the peer (section 6.8.15).
    pub fn reset_forwarding_plane(&mut self, now: Duration) {
        if self.state != State::AdminDown {
            self.change(now, State::Down, Diagnostic::ForwardingPlaneReset);
        }
    }

    /// Signals the state of a concatenated path to the peer, without a change of state (section 6.8.17).
    pub fn signal(&mut self, diagnostic: Diagnostic) {
        self.diagnostic = diagnostic;
        if self.remote.demand {
            self.poll.request();
        }
    }

    /// Returns bfd.SessionState.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the time of the last change of state.
    pub fn since(&self) -> Duration {
        self.since
    }

    /// Returns the number of state changes.
    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// Returns the number of changes to Up, and the number of changes from Up.
    pub fn ups_and_downs(&self) -> (u64, u64) {
        (self.ups, self.downs)
    }

    /// Returns the diagnostic of the last change from Up; [`Diagnostic::None`] if there was none.
    pub fn last_failure(&self) -> Diagnostic {
        self.last_failure
    }

    /// Returns bfd.LocalDiag: the reason for the present state, and no diagnostic while the session is Up.
    pub fn diagnostic(&self) -> Diagnostic {
        self.diagnostic
    }

    /// Returns the state and the diagnostic in the peer's last packet.
    pub fn remote(&self) -> (State, Diagnostic) {
        (self.remote.state, self.remote.diagnostic)
    }

    /// Returns whether later silence of this side is no failure to the peer: the peer has confirmed this side's AdminDown, or the
    /// peer is in AdminDown itself, in which it runs no detection timer.
    pub fn peer_expects_silence(&self) -> bool {
        self.state == State::AdminDown
            && match self.remote.state {
                State::AdminDown => true,
                State::Down => self.remote.last_received.is_some_and(|at| at > self.since),
                State::Init | State::Up => false,
            }
    }

    /// Returns bfd.LocalDiscr.
    pub fn local_discriminator(&self) -> NonZeroU32 {
        self.local_discriminator
    }

    /// Returns bfd.RemoteDiscr; `None` while it is unknown.
    pub fn remote_discriminator(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.remote.discriminator)
    }

    /// Returns the requested timers.
    pub fn timers(&self) -> Timers {
        self.timers
    }

    /// Returns the present transmit interval, before jitter (section 6.8.7).
    pub fn transmit_interval(&self) -> Duration {
        Duration::from_micros(self.tx_us.max(self.remote.min_rx_us).into())
    }

    /// Returns the detection time (section 6.8.4); 0 before the peer's first packet.
    pub fn detection_time(&self) -> Duration {
        let interval = Duration::from_micros(self.rx_us.max(self.remote.min_tx_us).into());
        interval * u32::from(self.remote.detect_mult)
    }

    /// Returns the peer's detection time for this session, at the present transmit interval.
    pub fn detection_time_of_peer(&self) -> Duration {
        self.transmit_interval() * u32::from(self.timers.detect_mult())
    }

    /// Returns the number of packets sent.
    pub fn transmitted(&self) -> u64 {
        self.transmitted
    }

    /// Returns the number of packets accepted.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the numbers of packets discarded, by reason.
    pub fn discards(&self) -> &Discards {
        &self.discards
    }
}

#[cfg(test)]
mod tests;
