//! What others read of a session while one thread owns it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::discard::Discards;
use super::packet::{Diagnostic, State};
use super::session::Session;

/// The state of a link, for planes and whoever else wants to know: reading it takes no lock.
#[derive(Clone)]
pub struct LinkState(Arc<Published>);

struct Published {
    /// What the times of the session are counted from.
    origin: Instant,
    state: AtomicU8,
    since_ns: AtomicU64,
    transitions: AtomicU64,
    failed: AtomicBool,
    report: Mutex<LinkReport>,
}

/// All that is known of a link, at one moment.
#[derive(Clone, Debug)]
pub struct LinkReport {
    /// State of the session here.
    pub state: State,
    /// Why it is in this state, if that is a failure.
    pub diagnostic: Diagnostic,
    /// How long it has been in this state.
    pub for_time: Duration,
    /// How often its state has changed.
    pub transitions: u64,
    /// How often it went up.
    pub ups: u64,
    /// How often it went down from up.
    pub downs: u64,
    /// Why it did so last; [`Diagnostic::None`] when it never did.
    pub last_failure: Diagnostic,
    /// State that the peer said last.
    pub remote_state: State,
    /// And its diagnostic.
    pub remote_diagnostic: Diagnostic,
    /// The number of the session here.
    pub local_discriminator: u32,
    /// The peer's; `None` while it is not known.
    pub remote_discriminator: Option<u32>,
    /// At most how often this side sends, as negotiated.
    pub transmit_interval: Duration,
    /// How long the peer may be silent; 0 before it was heard.
    pub detection_time: Duration,
    /// Packets that went out.
    pub transmitted: u64,
    /// Packets that the kernel did not send.
    pub unsent: u64,
    /// Packets that were taken.
    pub received: u64,
    /// Packets that were not, by reason.
    pub discards: Discards,
    /// Packets that others have handed over.
    pub handed: u64,
    /// Those of them that found no room.
    pub handed_dropped: u64,
    /// Packets that found no room in the queue of the session's own socket, if it has one (`sk_drops`).
    pub overflowed: u64,
}

impl LinkReport {
    pub(super) fn of(session: &Session, now: Duration) -> LinkReport {
        let (remote_state, remote_diagnostic) = session.remote();
        let (ups, downs) = session.ups_and_downs();
        LinkReport {
            state: session.state(),
            diagnostic: session.diagnostic(),
            for_time: now.saturating_sub(session.since()),
            transitions: session.transitions(),
            ups,
            downs,
            last_failure: session.last_failure(),
            remote_state,
            remote_diagnostic,
            local_discriminator: session.local_discriminator().get(),
            remote_discriminator: session.remote_discriminator().map(u32::from),
            transmit_interval: session.transmit_interval(),
            detection_time: session.detection_time(),
            transmitted: session.transmitted(),
            unsent: 0,
            received: session.received(),
            discards: *session.discards(),
            handed: 0,
            handed_dropped: 0,
            overflowed: 0,
        }
    }
}

impl LinkState {
    pub(super) fn new(origin: Instant, report: LinkReport) -> LinkState {
        let state = LinkState(Arc::new(Published {
            origin,
            state: AtomicU8::new(report.state as u8),
            since_ns: AtomicU64::new(0),
            transitions: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            report: Mutex::new(report.clone()),
        }));
        state.publish(Duration::ZERO, report);
        state
    }

    /// What a process before this one has found out.
    pub(super) fn set_failed(&self, failed: bool) {
        self.0.failed.store(failed, Ordering::Relaxed);
    }

    pub(super) fn publish(&self, since: Duration, report: LinkReport) {
        let published = &self.0;
        published.since_ns.store(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        published.transitions.store(report.transitions, Ordering::Relaxed);
        let is_meant = State::AdminDown == report.state || State::AdminDown == report.remote_state;
        if report.state == State::Up || is_meant {
            published.failed.store(false, Ordering::Relaxed);
        } else if self.state() == State::Up {
            published.failed.store(true, Ordering::Relaxed);
        }
        // Last: who reads this one first has the others of this change, or of a later one.
        published.state.store(report.state as u8, Ordering::Release);
        *published.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    /// The state: one load.
    pub fn state(&self) -> State {
        State::from_bits(self.0.state.load(Ordering::Acquire))
    }

    /// Whether packets arrive at the other end, as far as both ends know.
    pub fn is_up(&self) -> bool {
        self.state() == State::Up
    }

    /// Whether packets do not arrive at the other end as far as BFD knows: the session was up, went down, and is not up again.
    /// What was never up may be a peer without BFD, and what an administrator holds down, here or there, is no failure (RFC
    /// 5882, sections 3.2 and 4.1). One load.
    pub fn has_failed(&self) -> bool {
        self.0.failed.load(Ordering::Relaxed)
    }

    /// When the state became what it is.
    pub fn since(&self) -> Instant {
        self.0.origin + Duration::from_nanos(self.0.since_ns.load(Ordering::Relaxed))
    }

    /// How often it has changed.
    pub fn transitions(&self) -> u64 {
        self.0.transitions.load(Ordering::Relaxed)
    }

    /// Everything, as of when something was last done for the link. Takes a lock: not for planes.
    pub fn report(&self) -> LinkReport {
        let mut report = self.0.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
        report.for_time = self.since().elapsed();
        report
    }
}

impl fmt::Debug for LinkState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LinkState")
            .field("state", &self.state())
            .field("transitions", &self.transitions())
            .finish_non_exhaustive()
    }
}
