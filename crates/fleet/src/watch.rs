//! Which workers are lost.

use std::time::Duration;

/// Number of missing intervals from which a worker is lost.
pub const MISSING: u64 = 3;

/// Time that an interval may take from the end of its second to the coordinator. With it a pause of [`MISSING`] seconds loses no
/// worker.
pub const TRANSIT: Duration = Duration::from_millis(1500);

/// Returns whether a worker is lost: [`MISSING`] intervals that were due have not arrived.
///
/// `elapsed`: time since the start of the run. `connected`: time for which the coordinator has been connected without an
/// interruption; an outage of NATS delays the intervals of every worker and loses none. `next`: the first second that has not
/// arrived. `last_second`: number of the last second that the run can have, if it is limited in time; after it a worker owes its
/// end only, and `grace` is the time that it has for this.
pub fn is_lost(
    elapsed: Duration,
    connected: Duration,
    next: u64,
    last_second: Option<u64>,
    grace: Duration,
) -> bool {
    let patience = Duration::from_secs(MISSING) + TRANSIT;
    if connected < patience {
        return false;
    }
    match last_second {
        // All its seconds have arrived or may never come: the end is due.
        Some(last) if next > last => elapsed >= Duration::from_secs(last + 1) + grace + patience,
        // Second n is due at n + 1.
        _ => elapsed >= Duration::from_secs(next + 1) + Duration::from_secs(MISSING - 1) + TRANSIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const GRACE: Duration = Duration::from_secs(2);

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_worker_is_lost_after_three_missing_intervals() {
        // Seconds 0 to 4 have arrived; 5, 6 and 7 are missing when 8 s have passed.
        assert!(!is_lost(seconds(7.9), LONG, 5, Some(100), GRACE));
        assert!(!is_lost(seconds(9.4), LONG, 5, Some(100), GRACE));
        assert!(is_lost(seconds(9.5), LONG, 5, Some(100), GRACE));
        assert!(!is_lost(seconds(9.5), LONG, 6, Some(100), GRACE));
        assert!(is_lost(seconds(4.5), LONG, 0, None, GRACE), "it never began");
    }

    #[test]
    fn an_outage_of_nats_loses_no_worker() {
        assert!(!is_lost(seconds(60.0), seconds(4.4), 5, Some(100), GRACE));
        assert!(is_lost(seconds(60.0), seconds(4.5), 5, Some(100), GRACE));
    }

    #[test]
    fn a_worker_has_time_for_its_end() {
        assert!(!is_lost(seconds(10.0), LONG, 10, Some(9), GRACE));
        assert!(!is_lost(seconds(16.4), LONG, 10, Some(9), GRACE));
        assert!(is_lost(seconds(16.5), LONG, 10, Some(9), GRACE));
    }
}
