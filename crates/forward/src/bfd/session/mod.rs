//! A BFD session: the procedures of RFC 5880, section 6.8, in asynchronous mode, without authentication and without echo.
//!
//! A session has no clock: `now` is the time since an origin that the caller chooses once, and must never go backwards.

use std::num::{NonZeroU8, NonZeroU32};
use std::time::Duration;

use fastrand::Rng;
use thiserror::Error;

use crate::bfd::packet::{Diagnostic, Discard, Discards, Packet, State};

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

    /// Returns whether later silence of this side is not a failure to the peer: the peer has confirmed this side's AdminDown, or the
    /// peer is in AdminDown itself, in which it runs no detection timer.
    pub fn peer_expects_silence(&self) -> bool {
        self.state == State::AdminDown
            && match self.remote.state {
                State::AdminDown => true,
                State::Down => self.remote.last_received.is_some_and(|at| at > self.since),
                State::Init | State::Up => false,
            }
    }

    pub fn local_discriminator(&self) -> NonZeroU32 {
        self.local_discriminator
    }

    /// Returns bfd.RemoteDiscr; `None` while it is unknown.
    pub fn remote_discriminator(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.remote.discriminator)
    }

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

// The saved state with which another process continues a session so that the peer notices no change. A session without this
// state would restart in Down, the only initial state of RFC 5880.

/// Saved values by name: intervals in microseconds, ages in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedState(Vec<(String, u64)>);

impl SavedState {
    pub(crate) fn set(&mut self, name: &str, number: u64) {
        self.0.push((name.to_owned(), number));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, number)| (name.as_str(), *number))
    }

    fn get(&self, name: &str) -> Option<u64> {
        self.iter().find_map(|(its, number)| (its == name).then_some(number))
    }

    fn age(&self, name: &str) -> Option<Duration> {
        self.get(name).map(Duration::from_nanos)
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.get("failed") == Some(1)
    }

    /// Returns the age of the oldest event in the saved state.
    pub(crate) fn longest_age(&self) -> Duration {
        let ages = ["heard-ns", "sent-ns", "since-ns"].iter().filter_map(|name| self.age(name));
        ages.max().unwrap_or_default()
    }
}

impl Session {
    /// Returns the saved state for another process. It omits discard counters: each process counts its own discards.
    pub(crate) fn saved_state(&self, now: Duration, has_failed: bool) -> SavedState {
        let Remote {
            discriminator,
            state,
            min_rx_us,
            demand,
            min_tx_us,
            detect_mult,
            diagnostic,
            last_received,
        } = self.remote;
        let age = |time: Duration| u64::try_from(now.saturating_sub(time).as_nanos()).unwrap_or(u64::MAX);
        let mut saved_state = SavedState::default();
        let numbers = [
            ("desired-min-tx-us", self.timers.desired_min_tx_us.get().into()),
            ("required-min-rx-us", self.timers.required_min_rx_us.into()),
            ("detect-mult", self.timers.detect_mult.get().into()),
            ("discriminator", self.local_discriminator.get().into()),
            ("state", self.state as u64),
            ("diagnostic", self.diagnostic.code().into()),
            ("remote-discriminator", discriminator.into()),
            ("remote-state", state as u64),
            ("remote-min-rx-us", min_rx_us.into()),
            ("remote-demand", demand.into()),
            ("remote-min-tx-us", min_tx_us.into()),
            ("remote-detect-mult", detect_mult.into()),
            ("remote-diagnostic", diagnostic.code().into()),
            ("says-min-tx-us", self.desired_min_tx_us.into()),
            ("keeps-tx-us", self.tx_us.into()),
            ("keeps-rx-us", self.rx_us.into()),
            ("polls", (self.poll != PollSequence::Idle).into()),
            ("owes-final", self.owes_final.into()),
            ("told-state", self.last_sent.0 as u64),
            ("told-diagnostic", self.last_sent.1.code().into()),
            ("since-ns", age(self.since)),
            ("transitions", self.transitions),
            ("ups", self.ups),
            ("downs", self.downs),
            ("last-failure", self.last_failure.code().into()),
            ("transmitted", self.transmitted),
            ("received", self.received),
            ("failed", has_failed.into()),
        ];
        numbers.into_iter().for_each(|(name, number)| saved_state.set(name, number));
        let times = [("heard-ns", last_received), ("sent-ns", self.sent)];
        times.into_iter().for_each(|(name, time)| {
            if let Some(time) = time {
                saved_state.set(name, age(time));
            }
        });
        saved_state
    }

    /// Restores a session from its saved state; `None` if a value is missing or out of range.
    pub(crate) fn restore(saved_state: &SavedState, now: Duration, random: Rng) -> Option<Session> {
        let word = |name| saved_state.get(name).and_then(|number| u32::try_from(number).ok());
        let byte = |name| saved_state.get(name).and_then(|number| u8::try_from(number).ok());
        let state = |name| byte(name).map(State::from_bits);
        let diagnostic = |name| byte(name).map(Diagnostic::from_code);
        let time = |name| saved_state.age(name).map(|age| now.saturating_sub(age));
        let timers = Timers {
            desired_min_tx_us: NonZeroU32::new(word("desired-min-tx-us")?)?,
            required_min_rx_us: word("required-min-rx-us")?,
            detect_mult: byte("detect-mult")?.try_into().ok()?,
        };
        let remote = Remote {
            discriminator: word("remote-discriminator")?,
            state: state("remote-state")?,
            min_rx_us: word("remote-min-rx-us")?,
            demand: word("remote-demand")? != 0,
            min_tx_us: word("remote-min-tx-us")?,
            detect_mult: byte("remote-detect-mult")?,
            diagnostic: diagnostic("remote-diagnostic")?,
            last_received: time("heard-ns"),
        };
        let mut poll = PollSequence::default();
        if word("polls")? != 0 {
            // The session may have missed the peer's answer during the takeover, so it polls again.
            poll.request();
        }
        Some(Session {
            timers,
            local_discriminator: NonZeroU32::new(word("discriminator")?)?,
            state: state("state")?,
            diagnostic: diagnostic("diagnostic")?,
            remote,
            desired_min_tx_us: word("says-min-tx-us")?,
            tx_us: word("keeps-tx-us")?,
            rx_us: word("keeps-rx-us")?,
            poll,
            owes_final: word("owes-final")? != 0,
            sent: time("sent-ns"),
            last_sent: (state("told-state")?, diagnostic("told-diagnostic")?),
            jitter: 0.0,
            random,
            since: time("since-ns")?,
            transitions: saved_state.get("transitions")?,
            ups: saved_state.get("ups")?,
            downs: saved_state.get("downs")?,
            last_failure: diagnostic("last-failure")?,
            transmitted: saved_state.get("transmitted")?,
            received: saved_state.get("received")?,
            discards: Discards::default(),
        })
    }
}

/// The time after the end of a sequence at which the next sequence may begin even if no packet without F has arrived. It has to
/// exceed a round trip on a single link (section 6.8.3 names both ways to tell two sequences apart).
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// The progress of the current Poll Sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PollSequence {
    /// No change needs a confirmation.
    #[default]
    Idle,
    /// Periodic packets carry P.
    Running {
        /// At least one packet with P was sent.
        asked: bool,
        /// A parameter changed after a packet with P was sent. The peer's F may not cover this change, so another sequence
        /// follows.
        again: bool,
    },
    /// The peer has sent F. A second packet with F may be in flight, and must not be taken for an answer to the next sequence.
    Settling {
        /// The arrival time of the F.
        since: Duration,
        /// Another sequence follows.
        again: bool,
    },
}

const BEGUN: PollSequence = PollSequence::Running { asked: false, again: false };

impl PollSequence {
    /// Records a change that the peer has to confirm.
    pub(super) fn request(&mut self) {
        match self {
            PollSequence::Idle => *self = BEGUN,
            // The first packet of this sequence already carries the change.
            PollSequence::Running { asked: false, .. } => {}
            PollSequence::Running { again, .. } | PollSequence::Settling { again, .. } => *again = true,
        }
    }

    /// Returns whether packets carry P.
    fn is_running(self) -> bool {
        matches!(self, PollSequence::Running { .. })
    }

    /// Records that a packet with P was sent.
    pub(super) fn sent(&mut self) {
        if let PollSequence::Running { asked, .. } = self {
            *asked = true;
        }
    }

    /// Records a received packet. Returns `true` if it ends a sequence in which every packet carried the present parameters, so
    /// that the peer has confirmed all changes.
    pub(super) fn received(&mut self, now: Duration, is_final: bool) -> bool {
        match *self {
            PollSequence::Running { asked: true, again } if is_final => {
                *self = PollSequence::Settling { since: now, again };
                !again
            }
            PollSequence::Settling { again, .. } if !is_final => {
                *self = if again { BEGUN } else { PollSequence::Idle };
                false
            }
            _ => false,
        }
    }

    /// Returns the time at which the next sequence begins if no packet arrives before.
    pub(super) fn due(self) -> Option<Duration> {
        match self {
            PollSequence::Settling { since, again: true } => Some(since + SETTLED_AFTER),
            _ => None,
        }
    }

    /// Begins the next sequence if it is due.
    fn advance(&mut self, now: Duration) {
        if let PollSequence::Settling { since, again } = *self
            && now >= since + SETTLED_AFTER
        {
            *self = if again { BEGUN } else { PollSequence::Idle };
        }
    }
}

/// The timers that a session requests; it negotiates the effective intervals with the peer, for each direction (RFC 5880,
/// section 6.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    pub(super) desired_min_tx_us: NonZeroU32,
    pub(super) required_min_rx_us: u32,
    pub(super) detect_mult: NonZeroU8,
}

/// An error for timers that no session can have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TimersError {
    /// The transmit interval is 0, which RFC 5880, section 4.1 reserves, or below the wire's unit of 1 us, or does not fit into
    /// 32 bits.
    #[error("packets cannot be sent every {0:?}: an interval is a microsecond to 4294 s")]
    DesiredMinTx(Duration),
    /// The receive interval does not fit into 32 bits.
    #[error("packets cannot be received every {0:?}: an interval is at most 4294 s; 0 asks for none at all")]
    RequiredMinRx(Duration),
    /// The detection multiplier is 0 (RFC 5880, section 6.8.1).
    #[error("a detection multiplier of 0 would detect nothing and everything: it is 1 to 255")]
    DetectMult,
}

impl Timers {
    /// Creates timers with a minimum transmit interval of `desired_min_tx` (at least one second until the session is Up), a
    /// minimum receive interval of `required_min_rx` (0 asks for no periodic packets), and a detection multiplier: the peer
    /// declares the session down when `detect_mult` packets in a row are missing. Truncates intervals to microseconds.
    pub fn new(
        desired_min_tx: Duration,
        required_min_rx: Duration,
        detect_mult: u8,
    ) -> Result<Timers, TimersError> {
        let us = |interval: Duration| u32::try_from(interval.as_micros()).ok();
        Ok(Timers {
            desired_min_tx_us: us(desired_min_tx)
                .and_then(NonZeroU32::new)
                .ok_or(TimersError::DesiredMinTx(desired_min_tx))?,
            required_min_rx_us: us(required_min_rx).ok_or(TimersError::RequiredMinRx(required_min_rx))?,
            detect_mult: NonZeroU8::new(detect_mult).ok_or(TimersError::DetectMult)?,
        })
    }

    /// Returns the minimum transmit interval.
    pub fn desired_min_tx(&self) -> Duration {
        Duration::from_micros(self.desired_min_tx_us.get().into())
    }

    /// Returns the minimum receive interval.
    pub fn required_min_rx(&self) -> Duration {
        Duration::from_micros(self.required_min_rx_us.into())
    }

    pub fn detect_mult(&self) -> u8 {
        self.detect_mult.get()
    }
}

impl Default for Timers {
    /// Returns 300 ms in both directions and a multiplier of 3, as other implementations do.
    fn default() -> Timers {
        Timers {
            desired_min_tx_us: NonZeroU32::new(300_000).expect("not 0"),
            required_min_rx_us: 300_000,
            detect_mult: NonZeroU8::new(3).expect("not 0"),
        }
    }
}

#[cfg(test)]
mod tests;
