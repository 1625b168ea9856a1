//! One session: the procedures of RFC 5880, section 6.8, in asynchronous mode, without authentication, without echo.
//!
//! There is no clock here: `now` is the time since any origin that the caller keeps to, and never goes backwards.

mod past;

use std::num::NonZeroU32;
use std::time::Duration;

use fastrand::Rng;

use super::discard::{Discard, Discards};
use super::packet::{Diagnostic, Packet, State};
use super::poll_sequence::PollSequence;
use super::timers::Timers;
pub(crate) use past::Past;

/// Section 6.8.3: the least DesiredMinTx of a session that is not up.
const SLOW_US: u32 = 1_000_000;
/// RFC 5881, section 5: with how many hops left a packet comes that has not passed a router.
pub(super) const HOPS: u8 = 255;

/// What a session is made with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How often it sends, wants to receive, and what is lost.
    pub timers: Timers,
    /// Its number on this host, which no other session may have; better drawn than counted (section 6.8.1).
    pub local_discriminator: NonZeroU32,
}

/// What the owner of a session has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this packet now. It counts as sent.
    Transmit(Packet),
    /// Nothing until then, or until a packet comes.
    Wait(Duration),
    /// Nothing until a packet comes: the peer wants to hear nothing, and nothing is awaited from it.
    WaitForPacket,
}

/// What was last heard of the peer, or what is assumed before.
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
    /// Its Desired Min TX Interval and Detect Mult.
    min_tx_us: u32,
    detect_mult: u8,
    diagnostic: Diagnostic,
    /// When it was last heard; `None` once a detection time has gone by since.
    heard: Option<Duration>,
}

/// The state variables of section 6.8.1, and what is to be sent when.
#[derive(Debug)]
pub struct Session {
    timers: Timers,
    local_discriminator: NonZeroU32,
    state: State,
    diagnostic: Diagnostic,
    remote: Remote,
    /// bfd.DesiredMinTxInterval: what packets say.
    desired_min_tx_us: u32,
    /// What is kept to of it: less, while the peer has not confirmed that it became more.
    tx_us: u32,
    /// What of RequiredMinRx the detection time is reckoned with: more, while the peer has not confirmed that it became less.
    rx_us: u32,
    poll: PollSequence,
    /// A packet with P came that is not answered yet.
    owes_final: bool,
    /// When the last packet went out that was no answer to P.
    sent: Option<Duration>,
    /// State and diagnostic that the last packet told.
    told: (State, Diagnostic),
    /// What is taken off the present interval, from 0 for nothing to 1 for as much as may be.
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
    /// A session that is down, and whose first packet is due at once.
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
                heard: None,
            },
            desired_min_tx_us: slow,
            tx_us: slow,
            rx_us: timers.required_min_rx_us,
            poll: PollSequence::default(),
            owes_final: false,
            sent: None,
            told: (State::Down, Diagnostic::None),
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

    /// Takes a datagram that came with `hops` left (section 6.8.6; RFC 5881, section 5).
    ///
    /// Time that has gone by is not looked at before: who was kept from running first gives the session what waits in the
    /// socket, and then asks for the next action, so that a late owner is not taken for a dead peer.
    ///
    /// # Errors
    ///
    /// Why the packet was discarded, which is counted.
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
        self.remote = Remote {
            discriminator: packet.my_discriminator,
            state: packet.state,
            min_rx_us: packet.required_min_rx_us,
            demand: packet.demand,
            min_tx_us: packet.desired_min_tx_us,
            detect_mult: packet.detect_mult.get(),
            diagnostic: packet.diagnostic,
            heard: Some(now),
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
            // What went wrong before is told until both know that it is over.
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

    /// Counts a packet that its owner has discarded.
    pub fn discard(&mut self, why: Discard) {
        self.discards.count(why);
    }

    /// What is to be done at `now`. To be asked again after each packet that was sent or came, and when the wait is over.
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

    /// Section 6.8.4, and of 6.8.1 and 6.8.18 what is forgotten of a peer that is silent for a detection time.
    fn expire(&mut self, now: Duration) {
        if self.expiry().is_none_or(|expiry| now < expiry) {
            return;
        }
        self.remote.heard = None;
        self.remote.discriminator = 0;
        self.remote.min_rx_us = 1;
        if matches!(self.state, State::Init | State::Up) {
            self.change(now, State::Down, Diagnostic::DetectionTimeExpired);
        }
    }

    fn expiry(&self) -> Option<Duration> {
        self.remote.heard.map(|heard| heard + self.detection_time())
    }

    /// Section 6.8.7: when the next packet is due that is no answer; `None` while none may be sent.
    fn transmission(&self) -> Option<Duration> {
        if self.remote.min_rx_us == 0 {
            return None;
        }
        let Some(sent) = self.sent else { return Some(Duration::ZERO) };
        if self.told != (self.state, self.diagnostic) {
            return Some(sent);
        }
        let is_quiet = self.remote.demand && self.state == State::Up && self.remote.state == State::Up;
        (!is_quiet || self.poll.is_running()).then(|| sent + self.transmit_interval().mul_f64(self.kept()))
    }

    /// The part of the interval that is left after jitter: section 6.8.7.
    fn kept(&self) -> f64 {
        if self.timers.detect_mult.get() == 1 { 0.9 - 0.15 * self.jitter } else { 1.0 - 0.25 * self.jitter }
    }

    fn packet(&mut self, is_final: bool) -> Packet {
        self.transmitted += 1;
        self.told = (self.state, self.diagnostic);
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

    /// Section 6.8.3: brings the state variables to what timers and state ask for, and has the peer confirm it.
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

    /// Changes the timers (sections 6.8.3 and 6.8.10 to 6.8.12). While the session is up, a longer interval to send or a
    /// shorter one to receive is kept to only when the peer has confirmed it; everything else at once.
    pub fn set_timers(&mut self, timers: Timers) {
        let before = self.timers;
        self.timers = timers;
        self.apply_timers();
        // Section 6.6: a peer in demand mode hears of nothing that it is not asked to confirm.
        let unheard = self.remote.demand && before.detect_mult != timers.detect_mult;
        if before.required_min_rx_us != timers.required_min_rx_us || unheard {
            self.poll.request();
        }
    }

    /// Section 6.8.16: holds the session down, and tells the peer so; or lets it come up again.
    pub fn set_admin_down(&mut self, now: Duration, is_down: bool) {
        if is_down {
            self.change(now, State::AdminDown, Diagnostic::AdministrativelyDown);
        } else if self.state == State::AdminDown {
            self.change(now, State::Down, self.diagnostic);
        }
    }

    /// Section 6.8.15: the data plane began anew, and what the peer knows of it holds no longer.
    pub fn reset_forwarding_plane(&mut self, now: Duration) {
        if self.state != State::AdminDown {
            self.change(now, State::Down, Diagnostic::ForwardingPlaneReset);
        }
    }

    /// Section 6.8.17: tells the peer of a path behind this one, without a change of state.
    pub fn signal(&mut self, diagnostic: Diagnostic) {
        self.diagnostic = diagnostic;
        if self.remote.demand {
            self.poll.request();
        }
    }

    /// bfd.SessionState
    pub fn state(&self) -> State {
        self.state
    }

    /// When it became that.
    pub fn since(&self) -> Duration {
        self.since
    }

    /// How often the state has changed.
    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// How often it went up, and how often down from there.
    pub fn ups_and_downs(&self) -> (u64, u64) {
        (self.ups, self.downs)
    }

    /// Why it was up the last time no longer; [`Diagnostic::None`] when that never was.
    pub fn last_failure(&self) -> Diagnostic {
        self.last_failure
    }

    /// bfd.LocalDiag: why the state is what it is, and nothing once the session is up.
    pub fn diagnostic(&self) -> Diagnostic {
        self.diagnostic
    }

    /// What the peer said last: its state and why.
    pub fn remote(&self) -> (State, Diagnostic) {
        (self.remote.state, self.remote.diagnostic)
    }

    /// Whether the peer has shown that it knows of this side's being administratively down: nothing is lost by silence then.
    pub fn farewell_was_heard(&self) -> bool {
        self.state == State::AdminDown
            && self.remote.heard.is_some_and(|heard| heard > self.since)
            && matches!(self.remote.state, State::Down | State::AdminDown)
    }

    /// bfd.LocalDiscr
    pub fn local_discriminator(&self) -> NonZeroU32 {
        self.local_discriminator
    }

    /// bfd.RemoteDiscr; `None` while the peer's is not known.
    pub fn remote_discriminator(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.remote.discriminator)
    }

    /// What was asked for.
    pub fn timers(&self) -> Timers {
        self.timers
    }

    /// At most how often this side sends at present, without jitter (section 6.8.7).
    pub fn transmit_interval(&self) -> Duration {
        Duration::from_micros(self.tx_us.max(self.remote.min_rx_us).into())
    }

    /// How long the peer may be silent (section 6.8.4); 0 before it was heard.
    pub fn detection_time(&self) -> Duration {
        let interval = Duration::from_micros(self.rx_us.max(self.remote.min_tx_us).into());
        interval * u32::from(self.remote.detect_mult)
    }

    /// How long this side may be silent before the peer takes it for dead, at the present interval.
    pub fn detection_time_of_peer(&self) -> Duration {
        self.transmit_interval() * u32::from(self.timers.detect_mult())
    }

    /// Packets that were sent.
    pub fn transmitted(&self) -> u64 {
        self.transmitted
    }

    /// Packets that were taken.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Packets that were not.
    pub fn discards(&self) -> &Discards {
        &self.discards
    }
}

#[cfg(test)]
mod tests;
