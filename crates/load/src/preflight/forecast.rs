use std::time::Duration;

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
