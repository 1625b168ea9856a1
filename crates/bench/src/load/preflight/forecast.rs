use std::time::Duration;

use fourtuple::ports::TIME_WAIT;

use crate::load::preflight::{Closer, Need, Preflight, Snapshot, Transport};

/// New connections per second and thread that the forecast assumes for a closed loop when the server's rate is unknown:
/// about the best rate of a client with one thread on loopback that has the TIME_WAIT sockets.
pub const ASSUMED_CONNECTIONS_PER_S: f64 = 20_000.0;

/// Requests per second and thread that the forecast assumes for a closed loop over kept connections.
pub const ASSUMED_REQUESTS_PER_S: f64 = 100_000.0;

/// Maximum delay of the end of TIME_WAIT after its 60 s: the timer wheel's granularity at that distance, which is 5.12 s at
/// HZ=100, 2.05 s at HZ=250 and 4.10 s at HZ=1000 (the tables at the head of kernel/time/timer.c).
pub const LATEST_TIMER: Duration = Duration::from_millis(5_120);

/// The predicted exhaustion of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Time since the start of the run (with `hold`, since all held connections are open); `None` if the rate is unknown.
    pub at: Option<Duration>,
    /// Number of connections opened by then, without `hold`: the next connection finds no port.
    pub after_connections: u64,
}

/// The source of the rate of new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RateSource {
    /// An open loop: the requested rate.
    Offered,
    /// A closed loop with pauses, which limit its rate.
    Paused,
    /// A closed loop without pauses.
    Assumed,
}

/// The use of 4-tuples by a run.
#[derive(Clone, Debug)]
pub(super) struct TupleUsage {
    /// Time for which a 4-tuple stays in use after the end of its connection.
    pub(super) kept: Duration,
    /// New connections per second.
    pub(super) rate: f64,
    pub(super) basis: RateSource,
    /// Number of connections that are certainly open at once, in a closed loop.
    pub(super) at_once: u64,
    /// Maximum number of open connections.
    pub(super) at_most: u64,
    /// Number of connections of the whole run; `None` without a limit.
    pub(super) total: Option<u64>,
    /// Length of the run in seconds; infinite without a limit.
    pub(super) length: f64,
    /// Whether connections are closed and opened again.
    pub(super) churns: bool,
    pub(super) hold: u64,
    /// Number of all 4-tuples, including `hold`.
    budget: u64,
    /// Number of 4-tuples that other sockets use permanently.
    occupied: u64,
    /// TIME_WAIT sockets of earlier connections that connect() does not reuse: their number now, and how many expire in each
    /// second.
    waiting: u64,
    back: Vec<u64>,
    /// Number of sockets that may still enter TIME_WAIT before tcp_max_tw_buckets is reached.
    free_time_wait: u64,
}

impl TupleUsage {
    pub(super) fn of(snapshot: &Snapshot, need: &Need) -> TupleUsage {
        let requests = need.requests_per_connection;
        let per_connection = requests.max(1) as f64;
        let reuse = snapshot.reuse();
        let kept = match (need.transport, need.closer) {
            (Transport::Tcp, Closer::Client) => reuse.unwrap_or(TIME_WAIT),
            _ => Duration::ZERO,
        };
        let (rate, basis) = match need.rate_per_s {
            Some(rate) => (rate.max(0.0) / per_connection, RateSource::Offered),
            None => closed_loop(need, per_connection),
        };
        let operations = need.operations;
        let total = match requests {
            0 => Some(operations.map_or(need.connections, |operations| operations.min(need.connections))),
            requests => operations.map(|operations| operations.div_ceil(requests)),
        };
        let at_most = total.map_or(need.connections, |total| total.min(need.connections));
        let taken = &snapshot.taken;
        TupleUsage {
            kept,
            rate,
            basis,
            at_once: if basis == RateSource::Offered { 0 } else { at_most },
            at_most,
            total,
            length: need.length.map_or(f64::INFINITY, |length| length.as_secs_f64()),
            churns: requests > 0,
            hold: need.hold,
            budget: snapshot.budget(),
            occupied: taken.established + taken.other,
            waiting: if reuse.is_some() { 0 } else { taken.time_wait },
            back: taken.time_wait_back.clone(),
            free_time_wait: snapshot.tcp_max_tw_buckets.saturating_sub(snapshot.time_wait),
        }
    }

    /// Returns whether 4-tuples stay in use after the end of their connections.
    pub(super) fn leaves_time_wait(&self) -> bool {
        self.churns && !self.kept.is_zero()
    }

    /// Returns the maximum number of connections within `span` seconds from the start.
    pub(super) fn opened_in(&self, span: f64) -> u64 {
        // The conversion with `as` saturates.
        let opened = (self.rate * span.min(self.length)).ceil() as u64;
        opened.saturating_add(self.at_once).min(self.total.unwrap_or(u64::MAX))
    }

    /// Returns the maximum number of 4-tuples that the run uses at once, including `hold`.
    pub(super) fn needed(&self) -> u64 {
        let churn =
            if self.leaves_time_wait() { self.opened_in(self.kept.as_secs_f64()) } else { self.at_most };
        churn.saturating_add(self.hold)
    }

    /// Returns the number of 4-tuples for new connections once the TIME_WAIT sockets of earlier connections have expired.
    pub(super) fn steady(&self) -> u64 {
        self.budget.saturating_sub(self.occupied).saturating_sub(self.hold)
    }

    /// Returns the number of connections that find a port if no port becomes free; negative if they do not suffice for `hold`.
    pub(super) fn free_now(&self) -> i128 {
        i128::from(self.budget) - i128::from(self.occupied) - i128::from(self.waiting) - i128::from(self.hold)
    }

    /// Returns the time at which the ports certainly end, if the rate is correct.
    pub(super) fn stall(&self) -> Option<Stall> {
        self.stall_if(self.kept.as_secs_f64(), self.at_once)
    }

    /// Returns whether the ports may end even though [`stall`](Self::stall) predicts no end: because every permitted
    /// connection is open, or because the kernel's timers are late.
    pub(super) fn is_tight(&self) -> bool {
        // connect() checks the age of a reusable TIME_WAIT socket; every other TIME_WAIT socket ends by a timer, which may
        // be late.
        let late = if self.kept == TIME_WAIT { LATEST_TIMER } else { Duration::ZERO };
        self.stall_if((self.kept + late).as_secs_f64(), self.at_most).is_some()
    }

    fn stall_if(&self, first_back: f64, in_flight: u64) -> Option<Stall> {
        let total = self.total.map_or(i128::MAX, i128::from);
        let at = |seconds: f64| match self.basis {
            RateSource::Offered => Duration::try_from_secs_f64(seconds).ok(),
            RateSource::Paused | RateSource::Assumed => None,
        };
        if self.free_now() < 0 && self.hold > 0 {
            return Some(Stall { at: at(0.0), after_connections: 0 });
        }
        if !self.leaves_time_wait() {
            let free = self.free_now().max(0);
            // An open loop needs a tuple for its first connection, however soon the tuple is free again.
            let in_flight = in_flight.max(self.at_most.min(1));
            return (i128::from(in_flight) > free)
                .then(|| Stall { at: at(0.0), after_connections: free as u64 });
        }
        if self.rate <= 0.0 {
            return None;
        }
        let horizon = first_back.min(self.length);
        let mut free = self.free_now();
        // The sockets that expire within a second count at its end, to be on the safe side.
        for second in 0..=self.back.len() {
            let begin = second as f64;
            let end = if second == self.back.len() { horizon } else { horizon.min(begin + 1.0) };
            let usable = free.max(0);
            let when = ((usable - i128::from(in_flight)) as f64 / self.rate).max(begin);
            let cut_short = i128::from(self.free_time_wait) + i128::from(in_flight) < usable;
            if when < end && usable < total && !cut_short {
                return Some(Stall { at: at(when), after_connections: usable as u64 });
            }
            if begin >= horizon {
                break;
            }
            if self.waiting > 0 {
                free += i128::from(self.back.get(second).copied().unwrap_or(0));
            }
        }
        None
    }
}

/// Returns the maximum rate of a closed loop.
fn closed_loop(need: &Need, per_connection: f64) -> (f64, RateSource) {
    let threads = need.threads.max(1) as f64;
    let assumed = threads * ASSUMED_CONNECTIONS_PER_S.min(ASSUMED_REQUESTS_PER_S / per_connection);
    if need.pause.is_zero() {
        return (assumed, RateSource::Assumed);
    }
    let paused = need.connections as f64 / need.pause.as_secs_f64() / per_connection;
    if paused < assumed { (paused, RateSource::Paused) } else { (assumed, RateSource::Assumed) }
}

/// Returns the time from the start of the run to the exhaustion of ports, at the rate measured so far: `left` 4-tuples are
/// free, and the run used `used` of the free tuples in `elapsed`. Returns `None` if no tuple was used yet, or if the first
/// tuple is free again (`kept` after the start) before the ports end.
pub fn predict_live(left: u64, used: u64, elapsed: Duration, kept: Duration) -> Option<Duration> {
    if used == 0 || kept.is_zero() {
        return None;
    }
    let at = elapsed.as_secs_f64() * (1.0 + left as f64 / used as f64);
    let at = Duration::try_from_secs_f64(at).ok()?;
    (at < kept).then_some(at)
}

/// The rate is measured between two uses of the ports, as fractions (1/n) of all ports. The first is large enough that the
/// run has reached its steady rate.
const FROM: u64 = 10;

const UNTIL: u64 = 4;

/// The number of free 4-tuples, and the time at which none will be left.
pub(crate) struct Forecast {
    /// Number of 4-tuples that were free at the start of the run; `None` for targets without ports.
    free: Option<u64>,
    kept: Duration,
    pub(crate) predicted: Option<Duration>,
    /// Whether the forecast from the rate is still due.
    open: bool,
    /// Time at which the first fraction of the ports was used, and the number of ports used.
    from: Option<(u64, Duration)>,
}

impl Forecast {
    pub(crate) fn new(preflight: &Preflight) -> Self {
        let predicted = preflight.stall.and_then(|stall| stall.at);
        Forecast {
            free: preflight.budget.map(|budget| budget.saturating_sub(preflight.taken)),
            kept: preflight.kept,
            predicted,
            open: predicted.is_none() && preflight.stall.is_some(),
            from: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Makes the forecast once enough ports are in use.
    pub(crate) fn look(&mut self, used: u64, elapsed: Duration) {
        let Some(free) = self.free.filter(|free| self.open && used >= free / FROM) else { return };
        let (before, since) = *self.from.get_or_insert((used, elapsed));
        if used >= free / UNTIL && used > before {
            self.open = false;
            let left = free.saturating_sub(used);
            let pace = (elapsed - since).div_f64((used - before) as f64);
            let at = elapsed + pace.mul_f64(left as f64);
            // From here on, 4-tuples of the first connections are free again.
            self.predicted = (at < self.kept).then_some(at);
        }
    }

    /// Returns the number of whole seconds for which a connection keeps its 4-tuple.
    pub(crate) fn kept_seconds(&self) -> usize {
        self.kept.as_secs() as usize
    }

    /// Returns the number of free 4-tuples: all except those used by connections opened within the time that a tuple is
    /// kept. `before`: the connections that were opened before that time.
    pub(crate) fn left(&self, before: u64, connections: u64) -> Option<u64> {
        let free = self.free?;
        if self.kept.is_zero() {
            return Some(free);
        }
        Some(free.saturating_sub(connections.saturating_sub(before)))
    }

    pub(crate) fn end(&self, used: u64, elapsed: Duration) -> Option<Duration> {
        predict_live(self.free?.saturating_sub(used), used, elapsed, self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::preflight::Stall;

    #[test]
    fn the_live_forecast_continues_at_the_rate_so_far() {
        let seconds = Duration::from_secs;
        let minute = seconds(60);
        assert_eq!(predict_live(8_000, 2_000, seconds(2), minute), Some(seconds(10)));
        assert_eq!(predict_live(0, 10_000, seconds(10), minute), Some(seconds(10)), "they ended now");
        assert_eq!(predict_live(8_000, 2_000, seconds(12), minute), None, "the first is back before");
        assert_eq!(predict_live(8_000, 2_000, seconds(2), seconds(1)), None, "reused before");
        assert_eq!(predict_live(8_000, 0, seconds(2), minute), None, "nothing was used");
        let late = predict_live(u64::MAX, 1, seconds(u64::MAX), minute);
        assert_eq!(late, None, "beyond what there is of time");
    }

    /// Creates a forecast for 10,000 free tuples, each kept for a minute, in a closed loop that the preflight expects to
    /// stall.
    fn forecast(kept: u64) -> Forecast {
        Forecast::new(&Preflight {
            budget: Some(10_500),
            taken: 500,
            needed: Some(20_000),
            kept: Duration::from_secs(kept),
            stall: Some(Stall { at: None, after_connections: 10_000 }),
            sustainable_per_s: None,
            findings: Vec::new(),
        })
    }

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_forecast_ignores_a_slow_start() {
        let mut forecast = forecast(60);
        // No connection for half a second, then 10,000 per second.
        forecast.look(0, MS(500));
        forecast.look(1_000, MS(600));
        assert!(forecast.is_open() && forecast.predicted.is_none());
        forecast.look(2_500, MS(750));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, Some(MS(1_500))));
        forecast.look(9_000, MS(9_000));
        assert_eq!(forecast.predicted, Some(MS(1_500)), "it is said once");
    }

    #[test]
    fn ports_freed_before_the_last_is_taken_do_not_run_out() {
        let mut forecast = forecast(1);
        forecast.look(1_000, MS(500));
        forecast.look(2_500, MS(1_250));
        assert_eq!((forecast.is_open(), forecast.predicted), (false, None));
        assert_eq!(forecast.end(2_500, MS(1_250)), None);
    }

    #[test]
    fn tuples_of_recent_connections_are_not_free() {
        assert_eq!((forecast(2).kept_seconds(), forecast(60).kept_seconds()), (2, 60));
        assert_eq!(forecast(2).left(100, 750), Some(10_000 - 650), "older 4-tuples are free again");
        assert_eq!(forecast(60).left(0, 750), Some(10_000 - 750));
        assert_eq!(forecast(60).left(800, 750), Some(10_000), "the counts are not of the same moment");
        assert_eq!(forecast(0).left(0, 750), Some(10_000), "none is kept");
    }
}
