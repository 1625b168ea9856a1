//! Misplaced wait: the time for which a request waits although some worker is idle.
//!
//! A wait has two causes. While all workers are busy the load is too high, and no other distribution of requests
//! would help. While a worker is idle, the request waits for the wrong worker. A central queue, from which an idle
//! worker takes the next request, has a misplaced wait of 0, apart from the wakeup latency of the worker: some tens
//! of microseconds on an idle machine.

/// A request served by a pool of workers; all times in nanoseconds of one clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedRequest {
    /// Time at which the client sent it.
    pub sent_ns: u64,
    /// Time at which a worker started to serve it.
    pub begun_ns: u64,
    /// Time at which the worker finished.
    pub ended_ns: u64,
    /// Number of the worker, from 0.
    pub worker: usize,
}

/// The intervals in which all workers of a pool were busy.
#[derive(Clone, Debug, Default)]
pub struct AllBusy {
    /// Start, end, and the total length of all earlier intervals; ascending, without overlap.
    stretches: Vec<(u64, u64, u64)>,
}

impl AllBusy {
    /// Computes the intervals of a pool of `workers` from all requests of a run. A worker is busy from the start to
    /// the end of each of its requests, and counts once if two of them overlap.
    pub fn of(requests: &[ServedRequest], workers: usize) -> AllBusy {
        let mut spans: Vec<(usize, u64, u64)> = requests
            .iter()
            .filter(|request| request.ended_ns > request.begun_ns)
            .map(|request| (request.worker, request.begun_ns, request.ended_ns))
            .collect();
        spans.sort_unstable();
        // For each worker: the times at which it becomes busy (+1) and idle (-1).
        let mut edges: Vec<(u64, i64)> = Vec::with_capacity(2 * spans.len());
        let mut open: Option<(usize, u64)> = None;
        for (worker, from, to) in spans {
            open = match open {
                Some((of, until)) if of == worker && from <= until => Some((of, until.max(to))),
                before => {
                    edges.extend(before.map(|(_, until)| (until, -1)));
                    edges.push((from, 1));
                    Some((worker, to))
                }
            };
        }
        edges.extend(open.map(|(_, until)| (until, -1)));
        edges.sort_unstable();
        let mut busy = 0;
        let mut since = None;
        let mut before = 0;
        let mut stretches = Vec::new();
        for (at, step) in edges {
            busy += step;
            if busy == workers as i64 && step > 0 {
                since = Some(at);
            } else if let Some(from) = since.take() {
                stretches.push((from, at, before));
                before += at - from;
            }
        }
        AllBusy { stretches }
    }

    /// Returns the total time before `at` in which all workers were busy.
    fn before(&self, at: u64) -> u64 {
        let next = self.stretches.partition_point(|(from, _, _)| *from < at);
        match next.checked_sub(1).map(|last| self.stretches[last]) {
            Some((from, to, before)) => before + at.min(to) - from,
            None => 0,
        }
    }

    /// Returns the part of a request's wait in which some worker was idle, in nanoseconds.
    pub fn misplaced_ns(&self, request: &ServedRequest) -> u64 {
        let waited = request.begun_ns.saturating_sub(request.sent_ns);
        if waited == 0 {
            return 0;
        }
        waited.saturating_sub(self.before(request.begun_ns) - self.before(request.sent_ns))
    }
}

/// Returns the mean misplaced wait of all requests of a run by a pool of `workers`, in nanoseconds; 0 without
/// requests.
pub fn mean_misplaced_ns(requests: &[ServedRequest], workers: usize) -> u64 {
    let all_busy = AllBusy::of(requests, workers);
    let sum: u128 = requests.iter().map(|request| u128::from(all_busy.misplaced_ns(request))).sum();
    (sum / requests.len().max(1) as u128) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(worker: usize, sent_ns: u64, begun_ns: u64, ended_ns: u64) -> ServedRequest {
        ServedRequest { sent_ns, begun_ns, ended_ns, worker }
    }

    fn misplaced(requests: &[ServedRequest], workers: usize) -> Vec<u64> {
        let all_busy = AllBusy::of(requests, workers);
        requests.iter().map(|request| all_busy.misplaced_ns(request)).collect()
    }

    #[test]
    fn a_wait_while_another_worker_is_idle_is_misplaced() {
        let requests = [request(0, 0, 0, 100), request(0, 10, 100, 110)];
        assert_eq!(misplaced(&requests, 2), [0, 90]);
        assert_eq!(mean_misplaced_ns(&requests, 2), 45);
    }

    #[test]
    fn overload_is_not_misplaced_wait() {
        let requests = [request(0, 0, 0, 100), request(0, 10, 100, 110)];
        assert_eq!(misplaced(&requests, 1), [0, 0]);
        // Two workers, both busy from 0 to 50 and one of them to 100: from 50 on the idle worker could have served
        // the request.
        let requests = [request(0, 0, 0, 100), request(1, 0, 0, 50), request(0, 20, 100, 120)];
        assert_eq!(misplaced(&requests, 2), [0, 0, 50]);
    }

    #[test]
    fn only_idle_gaps_within_a_wait_count() {
        // Worker 0 is busy from 0 to 100 without a pause; worker 1 from 10 to 20 and from 40 to 60.
        let pool = [request(0, 0, 0, 100), request(1, 10, 10, 20), request(1, 40, 40, 60)];
        for (sent, begun, idle) in
            [(0, 100, 70), (15, 50, 20), (12, 18, 0), (25, 35, 10), (60, 100, 40), (20, 40, 20), (5, 5, 0)]
        {
            let all_busy = AllBusy::of(&pool, 2);
            let waiting = request(0, sent, begun, begun + 1);
            assert_eq!(all_busy.misplaced_ns(&waiting), idle, "from {sent} to {begun}");
        }
    }

    #[test]
    fn back_to_back_requests_leave_no_gap() {
        let requests =
            [request(0, 0, 0, 10), request(0, 0, 10, 20), request(0, 0, 20, 30), request(1, 0, 0, 30)];
        assert_eq!(misplaced(&requests, 2), [0, 0, 0, 0]);
        assert_eq!(misplaced(&requests, 3), [0, 10, 20, 0]);
    }

    #[test]
    fn overlapping_requests_of_a_worker_count_once() {
        let requests = [request(0, 0, 0, 50), request(0, 0, 10, 30), request(0, 20, 60, 70)];
        assert_eq!(misplaced(&requests, 2), [0, 10, 40]);
    }

    #[test]
    fn no_requests_and_unordered_times_are_safe() {
        assert_eq!(mean_misplaced_ns(&[], 4), 0);
        assert_eq!(misplaced(&[request(0, 50, 40, 45), request(7, 0, 9, 3)], 1), [0, 9]);
    }

    #[test]
    fn a_central_queue_has_no_misplaced_wait() {
        // An idle worker takes the next request; the schedule of 3 workers is written by hand.
        let mut free = [0_u64; 3];
        let requests: Vec<ServedRequest> = (0..500_u64)
            .map(|index| {
                let sent = index * 7;
                let worker = (0..3).min_by_key(|&worker| free[worker]).unwrap();
                let begun = sent.max(free[worker]);
                free[worker] = begun + if index % 5 == 0 { 60 } else { 8 };
                request(worker, sent, begun, free[worker])
            })
            .collect();
        assert!(requests.iter().any(|request| request.begun_ns > request.sent_ns), "no request waited");
        assert_eq!(mean_misplaced_ns(&requests, 3), 0);
    }
}
