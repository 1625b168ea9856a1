//! The timeline of one request that waits for a busy worker while another worker is idle.

use fourtuple_measure::misplaced::{AllBusy, ServedRequest};
use fourtuple_record::{Span, Timeline, Waiter};

use crate::pool::sums::{Label, Served};

/// Number of requests examined, longest misplaced wait first.
const CANDIDATES: usize = 50;

/// Minimum share of the wait during which the request's worker must be busy; below, the wait had another cause.
const BEHIND: f64 = 0.8;

/// Minimum time shown before and after the request.
const MARGIN_NS: u64 = 2_000_000;

/// Returns the request of a run with the longest misplaced wait behind a busy worker, and this wait in nanoseconds. Times in
/// the record are relative to `begun_ns`. Returns `None` if no request had such a wait.
pub(crate) fn longest(
    label: &Label,
    workers: usize,
    begun_ns: u64,
    served: &[Served],
) -> Option<(u64, Timeline)> {
    let requests: Vec<ServedRequest> = served.iter().map(|served| served.request).collect();
    let all_busy = AllBusy::of(&requests, workers);
    let mut found: Vec<(u64, usize)> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| (all_busy.misplaced_ns(request), index))
        .filter(|(misplaced, _)| *misplaced > 0)
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    let busy_ns = |worker: usize, request: &ServedRequest| -> u64 {
        let of_worker = requests.iter().filter(|other| other.worker == worker && *other != request);
        of_worker
            .map(|other| {
                let from = other.begun_ns.max(request.sent_ns);
                other.ended_ns.min(request.begun_ns).saturating_sub(from)
            })
            .sum()
    };
    let (misplaced, chosen) = found.into_iter().take(CANDIDATES).find(|(_, index)| {
        let request = &requests[*index];
        let waited = request.begun_ns - request.sent_ns;
        busy_ns(request.worker, request) as f64 >= BEHIND * waited as f64
    })?;
    let chosen = requests[chosen];
    let idle = (0..workers).filter(|&worker| worker != chosen.worker);
    let idle_worker = idle.min_by_key(|&worker| busy_ns(worker, &chosen))?;
    let margin = ((chosen.ended_ns - chosen.sent_ns) / 2).max(MARGIN_NS);
    let (from, to) =
        (chosen.sent_ns.saturating_sub(margin).max(begun_ns), chosen.ended_ns.saturating_add(margin));
    let since = |ns: u64| ns.saturating_sub(begun_ns);
    let mut spans = vec![Vec::new(); workers];
    for served in served {
        let request = served.request;
        if request.ended_ns > from && request.begun_ns < to && request.worker < workers {
            spans[request.worker].push(Span {
                from_ns: since(request.begun_ns),
                to_ns: since(request.ended_ns),
                waited_ns: served.waited_ns,
            });
        }
    }
    spans.iter_mut().for_each(|spans| spans.sort_unstable_by_key(|span| span.from_ns));
    let timeline = Timeline {
        policy: label.policy.clone(),
        family: label.family.to_string(),
        close_every: label.close_every,
        workers: spans,
        from_ns: since(from),
        to_ns: since(to),
        waiting: Waiter {
            worker: chosen.worker as u32,
            sent_ns: since(chosen.sent_ns),
            begun_ns: since(chosen.begun_ns),
            ended_ns: since(chosen.ended_ns),
            idle_worker: idle_worker as u32,
        },
    };
    Some((misplaced, timeline))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fourtuple::listen::Family;

    use super::*;

    const MS: u64 = 1_000_000;

    fn label() -> Label {
        Label {
            policy: "exclusive".to_owned(),
            server: None,
            family: Family::Unix,
            close_every: 0,
            load: "sleep",
            workers: 3,
            clients: 3,
            balance_of_accepts: false,
            slow: Duration::ZERO,
        }
    }

    fn served(worker: usize, sent: u64, begun: u64, ended: u64) -> Served {
        let request =
            ServedRequest { sent_ns: sent * MS, begun_ns: begun * MS, ended_ns: ended * MS, worker };
        Served { request, waited_ns: (begun - sent) * MS }
    }

    #[test]
    fn the_longest_wait_for_a_busy_worker_is_found() {
        let run = [
            served(0, 100, 100, 110),
            served(0, 101, 110, 111),
            served(1, 100, 100, 104),
            // This wait is longer, but the worker was idle meanwhile: the request was late for another reason.
            served(2, 120, 140, 141),
            served(1, 180, 180, 190),
        ];
        let (misplaced, timeline) = longest(&label(), 3, 90 * MS, &run).unwrap();
        assert_eq!(misplaced, 9 * MS);
        let expected =
            Waiter { worker: 0, sent_ns: 11 * MS, begun_ns: 20 * MS, ended_ns: 21 * MS, idle_worker: 2 };
        assert_eq!(timeline.waiting, expected);
        assert_eq!((timeline.from_ns, timeline.to_ns), (6 * MS, 26 * MS));
        assert_eq!(timeline.workers.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 0]);
        assert_eq!(timeline.workers[0][1], Span { from_ns: 20 * MS, to_ns: 21 * MS, waited_ns: 9 * MS });
    }

    #[test]
    fn without_a_misplaced_wait_there_is_no_timeline() {
        assert!(longest(&label(), 3, 0, &[]).is_none());
        // All workers are busy all the time.
        let run = [served(0, 0, 0, 10), served(1, 0, 0, 10), served(0, 2, 10, 12)];
        assert!(longest(&label(), 2, 0, &run).is_none());
    }
}
