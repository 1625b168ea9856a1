use std::time::Duration;

use fourtuple::ports::TIME_WAIT;

use super::{Closer, Need, Snapshot, Transport};

/// New connections per second and thread that a closed loop is taken to make, where nothing says how fast the server
/// is: about what the best client of one thread does on loopback with TIME_WAIT left to it.
pub const ASSUMED_CONNECTIONS_PER_S: f64 = 20_000.0;

/// Requests per second and thread that a closed loop is taken to send over connections that are kept.
pub const ASSUMED_REQUESTS_PER_S: f64 = 100_000.0;

/// How much later than its 60 s a TIME_WAIT may end: the timer wheel's granularity at that distance, which is 5.12 s at
/// HZ=100, 2.05 s at HZ=250 and 4.10 s at HZ=1000 (the tables at the head of kernel/time/timer.c).
pub const LATEST_TIMER: Duration = Duration::from_millis(5_120);

/// When the ports end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Since the start of the run (of the churn, in `hold`); `None`: nothing says how fast it will go.
    pub at: Option<Duration>,
    /// How many connections there will have been by then, those of `hold` not counted: the next one finds no port.
    pub after_connections: u64,
}

/// Where the rate of new connections comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// An open loop: it is what was asked for.
    Offered,
    /// A closed loop that cannot be faster, because of its pauses.
    Paused,
    /// A closed loop that goes as fast as it can.
    Assumed,
}

/// How a run uses tuples.
#[derive(Clone, Debug)]
pub(super) struct Course {
    /// How long a tuple stays taken after its connection's end.
    pub(super) kept: Duration,
    /// New connections per second.
    pub(super) rate: f64,
    pub(super) basis: Basis,
    /// Connections that are certainly open at once: those of a closed loop.
    pub(super) at_once: u64,
    /// Connections that may be open at once.
    pub(super) at_most: u64,
    /// Connections of the whole run; `None`: it does not end by their number.
    pub(super) total: Option<u64>,
    /// Seconds of the whole run; infinite: it does not end by time.
    pub(super) length: f64,
    /// Whether connections are closed and opened again.
    pub(super) churns: bool,
    pub(super) hold: u64,
    /// Tuples there are, those of `hold` included.
    budget: u64,
    /// Tuples that others have for good.
    occupied: u64,
    /// Tuples in TIME_WAIT that are not ours and are not reused: now, and how many come back in each second.
    waiting: u64,
    back: Vec<u64>,
    /// How many sockets may enter TIME_WAIT before tcp_max_tw_buckets cuts them.
    room: u64,
}

impl Course {
    pub(super) fn of(snapshot: &Snapshot, need: &Need) -> Course {
        let requests = need.requests_per_connection;
        let per_connection = requests.max(1) as f64;
        let reuse = snapshot.reuse();
        let kept = match (need.transport, need.closer) {
            (Transport::Tcp, Closer::Client) => reuse.unwrap_or(TIME_WAIT),
            _ => Duration::ZERO,
        };
        let (rate, basis) = match need.rate_per_s {
            Some(rate) => (rate.max(0.0) / per_connection, Basis::Offered),
            None => closed_loop(need, per_connection),
        };
        let operations = need.operations;
        let total = match requests {
            0 => Some(operations.map_or(need.connections, |operations| operations.min(need.connections))),
            requests => operations.map(|operations| operations.div_ceil(requests)),
        };
        let at_most = total.map_or(need.connections, |total| total.min(need.connections));
        let taken = &snapshot.taken;
        Course {
            kept,
            rate,
            basis,
            at_once: if basis == Basis::Offered { 0 } else { at_most },
            at_most,
            total,
            length: need.length.map_or(f64::INFINITY, |length| length.as_secs_f64()),
            churns: requests > 0,
            hold: need.hold,
            budget: snapshot.budget(),
            occupied: taken.established + taken.other,
            waiting: if reuse.is_some() { 0 } else { taken.time_wait },
            back: taken.time_wait_back.clone(),
            room: snapshot.tcp_max_tw_buckets.saturating_sub(snapshot.time_wait),
        }
    }

    /// Whether tuples stay taken after their connections, so that time matters.
    pub(super) fn leaves_time_wait(&self) -> bool {
        self.churns && !self.kept.is_zero()
    }

    /// Connections within `span` seconds from the start, at most.
    pub(super) fn opened_in(&self, span: f64) -> u64 {
        // `as` saturates.
        let opened = (self.rate * span.min(self.length)).ceil() as u64;
        opened.saturating_add(self.at_once).min(self.total.unwrap_or(u64::MAX))
    }

    /// Most tuples that the run has at once, those of `hold` included.
    pub(super) fn needed(&self) -> u64 {
        let churn =
            if self.leaves_time_wait() { self.opened_in(self.kept.as_secs_f64()) } else { self.at_most };
        churn.saturating_add(self.hold)
    }

    /// Tuples for new connections once nobody else's are in TIME_WAIT any more.
    pub(super) fn steady(&self) -> u64 {
        self.budget.saturating_sub(self.occupied).saturating_sub(self.hold)
    }

    /// Connections that find a port, if none comes back; negative: not even those of `hold` do.
    pub(super) fn free_now(&self) -> i128 {
        i128::from(self.budget) - i128::from(self.occupied) - i128::from(self.waiting) - i128::from(self.hold)
    }

    /// When the ports certainly end, as far as the rate is right.
    pub(super) fn stall(&self) -> Option<Stall> {
        self.stall_if(self.kept.as_secs_f64(), self.at_once)
    }

    /// Whether they may end though [`stall`](Self::stall) does not say so: because every connection that may be open is
    /// open, or because the kernel's timers are late.
    pub(super) fn is_tight(&self) -> bool {
        // What is reused is compared with a clock when it is wanted; what is not, waits for a timer.
        let late = if self.kept == TIME_WAIT { LATEST_TIMER } else { Duration::ZERO };
        self.stall_if((self.kept + late).as_secs_f64(), self.at_most).is_some()
    }

    fn stall_if(&self, first_back: f64, in_flight: u64) -> Option<Stall> {
        let total = self.total.map_or(i128::MAX, i128::from);
        let at = |seconds: f64| match self.basis {
            Basis::Offered => Duration::try_from_secs_f64(seconds).ok(),
            Basis::Paused | Basis::Assumed => None,
        };
        if self.free_now() < 0 && self.hold > 0 {
            return Some(Stall { at: at(0.0), after_connections: 0 });
        }
        if !self.leaves_time_wait() {
            let free = self.free_now().max(0);
            return (i128::from(in_flight) > free)
                .then(|| Stall { at: at(0.0), after_connections: free as u64 });
        }
        if self.rate <= 0.0 {
            return None;
        }
        let horizon = first_back.min(self.length);
        let mut free = self.free_now();
        // In each second as many come back as come back in it; at its end, to be on the safe side.
        for second in 0..=self.back.len() {
            let begin = second as f64;
            let end = if second == self.back.len() { horizon } else { horizon.min(begin + 1.0) };
            let usable = free.max(0);
            let when = ((usable - i128::from(in_flight)) as f64 / self.rate).max(begin);
            let cut_short = i128::from(self.room) + i128::from(in_flight) < usable;
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

/// What a closed loop makes at most.
fn closed_loop(need: &Need, per_connection: f64) -> (f64, Basis) {
    let threads = need.threads.max(1) as f64;
    let assumed = threads * ASSUMED_CONNECTIONS_PER_S.min(ASSUMED_REQUESTS_PER_S / per_connection);
    if need.pause.is_zero() {
        return (assumed, Basis::Assumed);
    }
    let paused = need.connections as f64 / need.pause.as_secs_f64() / per_connection;
    if paused < assumed { (paused, Basis::Paused) } else { (assumed, Basis::Assumed) }
}

/// When the ports end at the rate measured so far, since the start of the run: `left` tuples are free of those that the
/// run had at its start or got back since, `used` were taken by it in `elapsed`. `None`: nothing was used yet, or the
/// first tuple is back (`kept` after the start) before they end.
pub fn predict_live(left: u64, used: u64, elapsed: Duration, kept: Duration) -> Option<Duration> {
    if used == 0 || kept.is_zero() {
        return None;
    }
    let at = elapsed.as_secs_f64() * (1.0 + left as f64 / used as f64);
    let at = Duration::try_from_secs_f64(at).ok()?;
    (at < kept).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_live_forecast_goes_on_at_the_rate_so_far() {
        let seconds = Duration::from_secs;
        let minute = seconds(60);
        assert_eq!(predict_live(8_000, 2_000, seconds(2), minute), Some(seconds(10)));
        assert_eq!(predict_live(0, 10_000, seconds(10), minute), Some(seconds(10)), "they ended now");
        assert_eq!(predict_live(8_000, 2_000, seconds(12), minute), None, "the first is back before");
        assert_eq!(predict_live(8_000, 2_000, seconds(2), seconds(1)), None, "reused before");
        assert_eq!(predict_live(8_000, 0, seconds(2), minute), None, "nothing was used");
        assert_eq!(
            predict_live(u64::MAX, 1, seconds(u64::MAX), minute),
            None,
            "beyond what there is of time"
        );
    }
}
