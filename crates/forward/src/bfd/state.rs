//! The state of a session as other threads read it; one thread owns the session.

use std::fmt;
#[cfg(not(all(test, fourtuple_loom)))]
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[cfg(all(test, fourtuple_loom))]
use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::bfd::discard::Discards;
use crate::bfd::packet::{Diagnostic, State};
use crate::bfd::session::Session;

/// The state of a link, which any thread can read without a lock.
#[derive(Clone)]
pub struct LinkState(Arc<Published>);

struct Published {
    /// The instant from which the session counts its times.
    origin: Instant,
    state: AtomicU8,
    since_ns: AtomicU64,
    transitions: AtomicU64,
    failed: AtomicBool,
    report: Mutex<LinkReport>,
}

/// A report on a link at one moment.
#[derive(Clone, Debug)]
pub struct LinkReport {
    /// State of the local session.
    pub state: State,
    /// The reason for this state, if a failure led to it.
    pub diagnostic: Diagnostic,
    /// Time since the last change of state.
    pub for_time: Duration,
    /// Number of state changes.
    pub transitions: u64,
    /// Number of changes to Up.
    pub ups: u64,
    /// Number of changes from Up to a lower state.
    pub downs: u64,
    /// The reason for the last change from Up; [`Diagnostic::None`] if there was none.
    pub last_failure: Diagnostic,
    /// State in the peer's last packet.
    pub remote_state: State,
    /// Diagnostic in the peer's last packet.
    pub remote_diagnostic: Diagnostic,
    /// The local discriminator.
    pub local_discriminator: u32,
    /// The peer's discriminator; `None` while it is unknown.
    pub remote_discriminator: Option<u32>,
    /// The negotiated transmit interval, before jitter.
    pub transmit_interval: Duration,
    /// The time without a packet after which the session goes down; 0 before the peer's first packet.
    pub detection_time: Duration,
    /// Packets sent.
    pub transmitted: u64,
    /// Packets that the kernel failed to send.
    pub unsent: u64,
    /// Packets accepted.
    pub received: u64,
    /// Packets discarded, by reason.
    pub discards: Discards,
    /// Packets that the data planes put into the inbox.
    pub handed: u64,
    /// Packets that the data planes received and the inbox dropped because it was full.
    pub handed_dropped: u64,
    /// Packets that the kernel dropped at the session's own socket, if it has one (`sk_drops`): the socket filter rejected them
    /// because they had passed a router, or the receive queue was full.
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

    /// Sets whether the session has failed, as the previous process reported it.
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
        // The state is stored last: a thread that loads the state first then reads the values of the same change or of a later
        // one.
        published.state.store(report.state as u8, Ordering::Release);
        *published.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }

    /// Returns the state, with one atomic load.
    pub fn state(&self) -> State {
        State::from_bits(self.0.state.load(Ordering::Acquire))
    }

    /// Returns whether both ends receive each other's packets, as far as BFD knows.
    pub fn is_up(&self) -> bool {
        self.state() == State::Up
    }

    /// Returns whether BFD has detected a failure: the session was Up, went down, and is not Up again. A session that was never
    /// Up may have a peer without BFD, and a session that an administrator holds down at either end has not failed (RFC 5882,
    /// sections 3.2 and 4.1). Costs one atomic load.
    pub fn has_failed(&self) -> bool {
        self.0.failed.load(Ordering::Relaxed)
    }

    /// Returns the time of the last change of state.
    pub fn since(&self) -> Instant {
        self.0.origin + Duration::from_nanos(self.0.since_ns.load(Ordering::Relaxed))
    }

    /// Returns the number of state changes.
    pub fn transitions(&self) -> u64 {
        self.0.transitions.load(Ordering::Relaxed)
    }

    /// Returns the report as of the session's last event. Takes a lock, so data planes must not call it per packet.
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

#[cfg(all(test, fourtuple_loom))]
mod models {
    use std::num::NonZeroU32;

    use loom::thread;

    use super::*;
    use crate::bfd::{Settings, Timers};

    /// A reader that sees a state also sees the counters of the same change or of a later one. The test fails if the state is
    /// stored or loaded with `Relaxed`.
    #[test]
    fn loom_a_reader_of_the_state_reads_its_counters() {
        loom::model(|| {
            let settings =
                Settings { timers: Timers::default(), local_discriminator: NonZeroU32::new(7).unwrap() };
            let session = Session::new(settings, Duration::ZERO, fastrand::Rng::with_seed(1));
            let down = LinkReport::of(&session, Duration::ZERO);
            let changes = [(State::Init, 1), (State::Up, 2), (State::Down, 3)];
            let link = LinkState::new(
                Instant::now(),
                LinkReport { state: State::Init, transitions: 1, ..down.clone() },
            );
            let reader = thread::spawn({
                let link = link.clone();
                move || (link.state(), link.transitions(), link.has_failed())
            });
            for (state, transitions) in changes {
                link.publish(Duration::ZERO, LinkReport { state, transitions, ..down.clone() });
            }
            let (state, transitions, failed) = reader.join().unwrap();
            let (_, least) = changes.into_iter().find(|(its, _)| *its == state).unwrap();
            assert!(transitions >= least, "{state} with {transitions}");
            assert!(failed || state != State::Down, "it went down and did not fail");
        });
    }
}
