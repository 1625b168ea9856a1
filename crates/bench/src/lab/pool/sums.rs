//! The results of a cell, summed over its runs.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use fourtuple::listen::Family;
use fourtuple_record::measure::misplaced::{AllBusy, ServedRequest};
use fourtuple_record::measure::{Histogram, balance, median_interval};
use fourtuple_record::{AcceptCell, Probe, Span, Timeline, WaitNs, Waiter};

use crate::lab::pool::client::{AnsweredRequest, Measured, nanos};

/// The settings of a cell.
#[derive(Clone, Debug)]
pub(crate) struct Label {
    pub(crate) policy: String,
    pub(crate) server: Option<String>,
    pub(crate) family: Family,
    pub(crate) close_every: u64,
    pub(crate) load: &'static str,
    pub(crate) workers: usize,
    pub(crate) clients: u32,
    /// Whether the balance of workers is computed from accepts; otherwise from requests.
    pub(crate) balance_of_accepts: bool,
    /// Requests that wait longer are slow.
    pub(crate) slow_ns: u64,
}

/// The fields of a request that the sums need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    pub(crate) request: ServedRequest,
    pub(crate) waited_ns: u64,
}

/// A distribution of waits over runs.
#[derive(Clone, Debug, Default)]
struct Waits {
    all: Histogram,
    slow: u64,
    /// The value of each run.
    p999: Vec<f64>,
}

/// Minimum number of runs for a confidence interval.
const ENOUGH: usize = 3;

impl Waits {
    fn add(&mut self, waits: impl Iterator<Item = u64>, slow_ns: u64) {
        let mut run = Histogram::new();
        for wait in waits {
            run.record(wait);
            self.slow += u64::from(wait > slow_ns);
        }
        if run.count() > 0 {
            self.p999.push(run.quantile(0.999) as f64);
            self.all.merge(&run);
        }
    }

    fn slow_per_10k(&self) -> f64 {
        self.slow as f64 * 10_000.0 / self.all.count().max(1) as f64
    }

    fn record(&self) -> WaitNs {
        let found = self.all.summary();
        let interval = if self.p999.len() < ENOUGH {
            None
        } else {
            // A fixed seed: the same runs give the same interval.
            median_interval(&self.p999, &mut Rng::with_seed(1))
        };
        WaitNs {
            p50: found.p50,
            p99: found.p99,
            p999: found.p999,
            max: found.max,
            p999_low: interval.map(|interval| interval.low as u64),
            p999_high: interval.map(|interval| interval.high as u64),
        }
    }
}

/// The sums of a cell.
pub(crate) struct Sums {
    label: Label,
    waits: Waits,
    probe: Option<Waits>,
    misplaced_ns: u128,
    accepts: Vec<u64>,
    requests: Vec<u64>,
    sockets: Vec<u64>,
    busy_ns: Vec<u64>,
    /// Jain's index of each run. Summing the workers' shares over runs would give a more even value than any run had.
    jain: Vec<f64>,
    max_over_mean: Vec<f64>,
    wakeups: u64,
    empty_accepts: u64,
    cpu: Duration,
    errors: BTreeMap<String, u64>,
    /// Answers that arrived before the requested work can have been done.
    pub(crate) too_soon: u64,
    operations: u64,
    repeats: u32,
}

impl Sums {
    pub(crate) fn new(label: Label) -> Sums {
        Sums {
            waits: Waits::default(),
            probe: None,
            misplaced_ns: 0,
            accepts: vec![0; label.workers],
            requests: vec![0; label.workers],
            sockets: vec![0; label.workers],
            busy_ns: vec![0; label.workers],
            jain: Vec::new(),
            max_over_mean: Vec::new(),
            wakeups: 0,
            empty_accepts: 0,
            cpu: Duration::ZERO,
            errors: BTreeMap::new(),
            too_soon: 0,
            operations: 0,
            repeats: 0,
            label,
        }
    }

    /// Adds a run, and returns its requests.
    pub(crate) fn add(&mut self, measured: &Measured) -> Vec<Served> {
        self.repeats += 1;
        let slow_ns = self.label.slow_ns;
        self.waits.add(measured.all().map(wait_ns), slow_ns);
        if let Some(probe) = &measured.probe {
            self.probe.get_or_insert_with(Waits::default).add(probe.iter().map(wait_ns), slow_ns);
        }
        self.operations += measured.all().count() as u64;
        self.too_soon += measured
            .all()
            .filter(|answered| answered.received_ns - answered.sent_ns < answered.asked_ns)
            .count() as u64;
        for (name, count) in &measured.errors {
            *self.errors.entry(name.clone()).or_default() += count;
        }
        self.cpu += measured.cpu;
        if measured.seats.is_empty() {
            self.add_server_timing(measured);
        } else {
            self.add_seats(measured);
        }
        let served = self.served(measured);
        let requests: Vec<ServedRequest> = served.iter().map(|served| served.request).collect();
        let all_busy = AllBusy::of(&requests, self.requests.len());
        self.misplaced_ns +=
            requests.iter().map(|request| u128::from(all_busy.misplaced_ns(request))).sum::<u128>();
        served
    }

    /// Adds the counts of the lab's own workers.
    fn add_seats(&mut self, measured: &Measured) {
        let count = |of: fn(&fourtuple::listen::SeatStats) -> u64| -> Vec<u64> {
            measured.seats.iter().map(of).collect()
        };
        let (accepts, requests) = (count(|seat| seat.accepts), count(|seat| seat.requests));
        self.balance(&accepts, &requests);
        add_each(&mut self.accepts, &accepts);
        add_each(&mut self.requests, &requests);
        add_each(&mut self.busy_ns, &count(|seat| nanos(seat.busy)));
        // Open connections are a state, not a sum: the last run counts.
        self.sockets = count(|seat| seat.open);
        self.wakeups += measured.seats.iter().map(|seat| seat.wakeups).sum::<u64>();
        self.empty_accepts += measured.seats.iter().map(|seat| seat.empty_accepts).sum::<u64>();
    }

    /// Adds the counts of an external server's workers from its responses. The first response of a connection names the worker that
    /// accepted the connection.
    fn add_server_timing(&mut self, measured: &Measured) {
        let names = names(measured);
        let workers = names.len().max(self.label.workers);
        let (mut accepts, mut requests, mut busy) = (vec![0; workers], vec![0; workers], vec![0; workers]);
        for answered in measured.all() {
            let Some(worker) = answered.timing.worker.and_then(|name| names.get(&name)) else { continue };
            accepts[*worker] += u64::from(answered.first);
            requests[*worker] += 1;
            busy[*worker] += service_ns(answered);
        }
        self.balance(&accepts, &requests);
        add_each(&mut self.accepts, &accepts);
        add_each(&mut self.requests, &requests);
        add_each(&mut self.busy_ns, &busy);
    }

    fn balance(&mut self, accepts: &[u64], requests: &[u64]) {
        let shares = if self.label.balance_of_accepts { accepts } else { requests };
        self.jain.extend(balance::jain(shares));
        self.max_over_mean.extend(balance::max_over_mean(shares));
    }

    /// Requests whose worker is known.
    fn served(&self, measured: &Measured) -> Vec<Served> {
        let names = if measured.seats.is_empty() {
            names(measured)
        } else {
            (0..measured.seats.len()).map(|seat| (seat as u64, seat)).collect()
        };
        let served = |answered: &AnsweredRequest| {
            let worker = *names.get(&answered.timing.worker?)?;
            let (begun_ns, ended_ns) = span(answered);
            let request = ServedRequest { sent_ns: answered.sent_ns, begun_ns, ended_ns, worker };
            Some(Served { request, waited_ns: wait_ns(answered) })
        };
        measured.all().filter_map(served).collect()
    }

    /// Returns the number of requests answered.
    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }

    /// Returns the number of runs added.
    pub(crate) fn repeats(&self) -> u32 {
        self.repeats
    }

    /// Returns the sums as a record keeps them.
    pub(crate) fn cell(&self) -> AcceptCell {
        let accepts: u64 = self.accepts.iter().sum();
        let ours = self.label.server.is_none();
        let per_accept = |count: u64| (ours && accepts > 0).then(|| count as f64 / accepts as f64);
        let operations = self.operations.max(1);
        AcceptCell {
            policy: self.label.policy.clone(),
            server: self.label.server.clone(),
            family: self.label.family.to_string(),
            close_every: self.label.close_every,
            load: self.label.load.to_owned(),
            workers: self.requests.len() as u32,
            clients: self.label.clients,
            accepts: self.accepts.clone(),
            requests: self.requests.clone(),
            sockets: self.sockets.clone(),
            busy_ns: self.busy_ns.clone(),
            jain: mean(&self.jain),
            max_over_mean: mean(&self.max_over_mean),
            wait_ns: self.waits.record(),
            slow_per_10k: self.waits.slow_per_10k(),
            misplaced_wait_ns: (self.misplaced_ns / u128::from(operations)) as u64,
            probe: self.probe.as_ref().map(|probe| Probe {
                requests: probe.all.count(),
                slow_per_10k: probe.slow_per_10k(),
                wait_ns: probe.record(),
            }),
            cpu_ns_per_request: nanos(self.cpu) / operations,
            wakeups_per_accept: per_accept(self.wakeups),
            empty_accepts_per_accept: per_accept(self.empty_accepts),
            operations: self.operations,
            errors: self.errors.clone(),
            repeats: self.repeats,
        }
    }
}

/// Returns the begin and end of the service: the worker's own timestamps if they are on the client's clock; else the
/// requested service time, ending with the arrival of the answer.
fn span(answered: &AnsweredRequest) -> (u64, u64) {
    match (answered.timing.begun_ns, answered.timing.ended_ns) {
        (Some(begun), Some(ended))
            if answered.sent_ns <= begun && begun <= ended && ended <= answered.received_ns =>
        {
            (begun, ended)
        }
        _ => {
            let begun = answered.received_ns.saturating_sub(answered.asked_ns);
            (begun.max(answered.sent_ns), answered.received_ns)
        }
    }
}

/// Returns the service time of a request: the difference of the worker's own timestamps, else the time that was asked for.
fn service_ns(answered: &AnsweredRequest) -> u64 {
    match (answered.timing.begun_ns, answered.timing.ended_ns) {
        (Some(begun), Some(ended)) if begun <= ended => ended - begun,
        _ => answered.asked_ns,
    }
}

/// Returns the latency less the service time.
pub(crate) fn wait_ns(answered: &AnsweredRequest) -> u64 {
    (answered.received_ns - answered.intended_ns).saturating_sub(service_ns(answered))
}

/// Maps the workers' own identifiers (such as process identifiers) to indexes.
fn names(measured: &Measured) -> BTreeMap<u64, usize> {
    let timing: std::collections::BTreeSet<u64> =
        measured.all().filter_map(|answered| answered.timing.worker).collect();
    timing.into_iter().enumerate().map(|(place, name)| (name, place)).collect()
}

fn add_each(sums: &mut Vec<u64>, more: &[u64]) {
    if sums.len() < more.len() {
        sums.resize(more.len(), 0);
    }
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

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
pub(in crate::lab) mod tests {
    use fourtuple::listen::SeatStats;

    use super::super::wire::ServerTiming;
    use super::*;

    /// Returns a label of a cell without probes of accepts.
    pub(in crate::lab) fn label(workers: usize) -> Label {
        Label {
            policy: "rotate".to_owned(),
            server: None,
            family: Family::Unix,
            close_every: 1,
            load: "sleep",
            workers,
            clients: 2,
            balance_of_accepts: false,
            slow_ns: 50,
        }
    }

    fn answered(intended_ns: u64, begun: u64, ended: u64, received_ns: u64, worker: u64) -> AnsweredRequest {
        let timing = ServerTiming { worker: Some(worker), begun_ns: Some(begun), ended_ns: Some(ended) };
        AnsweredRequest {
            intended_ns,
            sent_ns: intended_ns + 1,
            received_ns,
            asked_ns: 10,
            timing,
            first: true,
        }
    }

    fn seats(requests: [u64; 2]) -> Vec<SeatStats> {
        requests
            .iter()
            .map(|&requests| {
                let mut seat = SeatStats::default();
                seat.accepts = requests;
                seat.requests = requests;
                seat.wakeups = 2 * requests;
                seat.open = 1;
                seat
            })
            .collect()
    }

    #[test]
    fn waits_are_latency_less_service_and_add_up_over_runs() {
        let mut sums = Sums::new(label(2));
        // Worker 0 is busy from 2 to 102; the second request waits for it while worker 1 is idle.
        let run = Measured {
            load: vec![answered(0, 2, 102, 103, 0), answered(9, 102, 112, 113, 0)],
            probe: Some(vec![answered(200, 205, 215, 220, 1)]),
            seats: seats([2, 1]),
            cpu: Duration::from_nanos(33),
            ..Measured::default()
        };
        let served = sums.add(&run);
        assert_eq!(served.iter().map(|served| served.waited_ns).collect::<Vec<_>>(), [3, 94, 10]);
        let cell = sums.cell();
        assert_eq!((cell.wait_ns.p50, cell.wait_ns.max, cell.wait_ns.p999_low), (10, 94, None));
        assert_eq!((cell.operations, cell.requests, cell.sockets), (3, vec![2, 1], vec![1, 1]));
        assert!((cell.slow_per_10k - 10_000.0 / 3.0).abs() < 1e-9);
        assert_eq!(cell.probe.map(|probe| (probe.requests, probe.wait_ns.max)), Some((1, 10)));
        // The waits from send to begin are 1, 92 and 4; at no time were both workers busy.
        assert_eq!(cell.misplaced_wait_ns, (1 + 92 + 4) / 3);
        assert_eq!((cell.cpu_ns_per_request, cell.wakeups_per_accept), (11, Some(2.0)));
        sums.add(&Measured { seats: seats([1, 2]), ..run.clone() });
        sums.add(&Measured { seats: seats([3, 0]), ..run.clone() });
        let cell = sums.cell();
        assert_eq!((cell.operations, cell.repeats, cell.requests), (9, 3, vec![6, 3]));
        assert_eq!((cell.wait_ns.p999_low, cell.wait_ns.p999_high), (Some(94), Some(94)));
        // The mean of 0.9, 0.9 and 0.5, which is less even than the sums.
        assert!((cell.jain.unwrap() - (0.9 + 0.9 + 0.5) / 3.0).abs() < 1e-9, "{:?}", cell.jain);
    }

    #[test]
    fn external_workers_are_known_by_their_answers() {
        let mut sums = Sums::new(Label { server: Some("nginx".to_owned()), ..label(3) });
        let silent = |intended: u64, received: u64, worker: Option<u64>| AnsweredRequest {
            timing: ServerTiming { worker, ..ServerTiming::default() },
            ..answered(intended, 0, 0, received, 0)
        };
        let load = vec![silent(0, 30, Some(4711)), silent(0, 20, Some(815)), silent(50, 90, None)];
        let served = sums.add(&Measured { load, ..Measured::default() });
        assert_eq!(served.len(), 2, "the third answer names no worker");
        assert_eq!((served[0].request.worker, served[0].request.begun_ns), (1, 20));
        let cell = sums.cell();
        assert_eq!((cell.workers, &cell.requests, cell.operations), (3, &vec![1, 1, 0], 3));
        assert_eq!((cell.wait_ns.max, cell.wakeups_per_accept, cell.accepts), (30, None, vec![1, 1, 0]));
        assert_eq!(sums.too_soon, 0);
        sums.add(&Measured { load: vec![silent(0, 5, None)], ..Measured::default() });
        assert_eq!(sums.too_soon, 1);
    }

    #[test]
    fn a_missing_measurement_has_no_number() {
        let mut sums = Sums::new(label(2));
        sums.add(&Measured { seats: seats([0, 0]), ..Measured::default() });
        let cell = sums.cell();
        assert_eq!((cell.jain, cell.max_over_mean, cell.wakeups_per_accept), (None, None, None));
        assert_eq!((cell.operations, cell.slow_per_10k, cell.misplaced_wait_ns), (0, 0.0, 0));
    }
}

#[cfg(test)]
mod timeline_tests {
    use super::tests::label;
    use super::*;

    const MS: u64 = 1_000_000;

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
        let (misplaced, timeline) = longest(&label(3), 3, 90 * MS, &run).unwrap();
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
        assert!(longest(&label(3), 3, 0, &[]).is_none());
        // All workers are busy all the time.
        let run = [served(0, 0, 0, 10), served(1, 0, 0, 10), served(0, 2, 10, 12)];
        assert!(longest(&label(3), 2, 0, &run).is_none());
    }
}
