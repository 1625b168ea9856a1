use super::*;
use crate::preflight::judge;
use crate::preflight::judge::tests::{host, run};

const SECOND: Duration = Duration::from_secs(1);

struct Case {
    need: Need,
    preflight: Preflight,
    errors: BTreeMap<String, u64>,
    seconds: Vec<Second>,
    in_flight: Vec<u64>,
    details: BTreeMap<String, String>,
    statuses: Vec<LoadStatus>,
}

impl Case {
    /// Creates one second per entry of `operations`, with the number of operations of the entry.
    fn with(rate_per_s: Option<f64>, operations: &[u64]) -> Case {
        let need = Need { rate_per_s, ..run() };
        let second = |(index, operations): (usize, &u64)| Second {
            at_ns: index as u64 * 1_000_000_000,
            operations: *operations,
            connections: *operations,
            errors: 0,
            p50_ns: 0,
            p99_ns: 0,
            max_ns: 0,
            ports_left: None,
        };
        Case {
            preflight: judge(&host(), &need),
            need,
            errors: BTreeMap::new(),
            seconds: operations.iter().enumerate().map(second).collect(),
            in_flight: vec![5; operations.len()],
            details: BTreeMap::new(),
            statuses: Vec::new(),
        }
    }

    fn seen(&self) -> RunMeasurements<'_> {
        RunMeasurements {
            preflight: &self.preflight,
            need: &self.need,
            predicted_stall: None,
            no_port: None,
            tuples_used: 0,
            time_wait: None,
            errors: &self.errors,
            operations: self.seconds.iter().map(|second| second.operations).sum(),
            seconds: &self.seconds,
            in_flight: &self.in_flight,
            refusals: &[],
            details: &self.details,
            statuses: &self.statuses,
            offered: self.need.rate_per_s.map(|rate| Offered {
                intended: (rate * self.seconds.len() as f64) as u64,
                done: self.seconds.iter().map(|second| second.operations).sum(),
                span: SECOND * self.seconds.len() as u32,
                behind: Duration::ZERO,
            }),
            elapsed: SECOND * self.seconds.len() as u32,
            client_cpu: Duration::ZERO,
            all_busy: Duration::ZERO,
        }
    }
}

fn ids(hindsight: &Hindsight) -> Vec<&str> {
    hindsight.remarks.iter().map(|remark| remark.id.as_str()).collect()
}

#[test]
fn a_good_run_has_no_remarks() {
    let case = Case::with(Some(100.0), &[100, 100, 100]);
    assert_eq!(hindsight(&case.seen()), Hindsight::default());
}

#[test]
fn exhausted_ports_are_named_with_forecast_and_remedy() {
    let case = Case::with(Some(1_000.0), &[1_000; 30]);
    let seen = RunMeasurements {
        predicted_stall: Some(Duration::from_millis(28_200)),
        no_port: Some(NoPort { first: SECOND * 28, last: SECOND * 30, total: SECOND * 2 }),
        time_wait: Some(28_232),
        tuples_used: 28_232,
        ..case.seen()
    };
    let found = hindsight(&seen);
    assert_eq!(ids(&found), ["ports-ran-out"]);
    assert_eq!(
        found.remarks[0].message,
        "the ports ran out after 28.0s (predicted: after 28.2s), and for 2.00s in all no connection could be opened: \
         28,232 of 28,232 tuples were in TIME_WAIT"
    );
    assert!(found.advice[0].contains("--source with 3 addresses, or --close server"), "{:?}", found.advice);
    assert!(found.advice[1].starts_with("470 new connections a second"), "{:?}", found.advice);
}

#[test]
fn a_predicted_stall_that_did_not_happen_is_reported() {
    let case = Case::with(Some(1_000.0), &[1_000; 30]);
    let found = hindsight(&RunMeasurements { predicted_stall: Some(SECOND * 28), ..case.seen() });
    assert!(found.remarks.is_empty());
    assert!(found.advice[0].contains("did not"), "{:?}", found.advice);
}

#[test]
fn the_report_explains_a_missed_rate() {
    let case = Case::with(Some(200.0), &[100; 10]);
    let busy = RunMeasurements { all_busy: SECOND * 5, ..case.seen() };
    assert_eq!(
        hindsight(&busy).remarks[0].message,
        "100 of the 200 operations a second that were offered were done (100 fewer a second): all 10 connections were \
         busy for 50% of the time"
    );
    let cpu = RunMeasurements { client_cpu: Duration::from_millis(9_700), ..case.seen() };
    let found = hindsight(&cpu);
    assert_eq!(ids(&found), ["offered-rate-not-reached", "client-saturated"]);
    assert!(found.remarks[1].message.contains("97%"), "{:?}", found.remarks);
    let unknown = hindsight(&case.seen());
    assert!(unknown.remarks[0].message.ends_with("the cause is not known"), "{:?}", unknown.remarks);
}

#[test]
fn a_second_without_response_is_a_stall_of_server_or_ports() {
    let case = Case::with(None, &[100, 0, 0, 100, 0, 100]);
    let found = hindsight(&case.seen());
    assert_eq!(ids(&found), ["server-stalled"]);
    assert!(found.remarks[0].message.contains("in 3 seconds"), "{:?}", found.remarks);
    assert!(found.remarks[0].message.contains("2.00s from 1.00s on"), "{:?}", found.remarks);
    let no_port = Some(NoPort { first: SECOND, last: SECOND * 5, total: SECOND * 3 });
    assert_eq!(ids(&hindsight(&RunMeasurements { no_port, ..case.seen() })), ["ports-ran-out"]);
    let idle = [0; 6];
    assert!(hindsight(&RunMeasurements { in_flight: &idle, ..case.seen() }).remarks.is_empty());
    assert!(hindsight(&RunMeasurements { in_flight: &[], ..case.seen() }).remarks.is_empty());
    // A refused connection is an answer.
    let refusals = [0, 9, 9, 0, 0, 0];
    let found = hindsight(&RunMeasurements { refusals: &refusals, ..case.seen() });
    assert!(found.remarks[0].message.starts_with("in 1 second nothing"), "{:?}", found.remarks);
}

#[test]
fn every_error_has_a_meaning() {
    let mut case = Case::with(None, &[90]);
    for (name, count) in [("ECONNREFUSED", 7), ("status-503", 2), ("closed-early", 1), ("errno 99999", 0)] {
        case.errors.insert(name.to_owned(), count);
    }
    let found = hindsight(&case.seen());
    assert_eq!(
        found.remarks[0].message,
        "10 of 98 operations failed (10%): 7 ECONNREFUSED, 2 status-503, 1 closed-early"
    );
    assert_eq!(found.advice[0], "ECONNREFUSED, 7 times: no socket listens there.");
    assert_eq!(found.advice.len(), 3);
    let detail = "not a status line of HTTP/1: \"SSH-2.0\"";
    case.errors = BTreeMap::from([("malformed".to_owned(), 1)]);
    case.details = BTreeMap::from([("malformed".to_owned(), detail.to_owned())]);
    assert_eq!(
        hindsight(&case.seen()).advice,
        [format!("malformed, 1 time: the response was not what the protocol says. The first: {detail}.")]
    );
}

#[test]
fn responses_without_a_success_are_a_remark() {
    let mut case = Case::with(None, &[90]);
    let status = |code, count, location: Option<&str>| LoadStatus {
        code,
        count,
        location: location.map(ToOwned::to_owned),
    };
    case.statuses = vec![status(301, 80, Some("/a/")), status(307, 4, None), status(404, 6, None)];
    let found = hindsight(&case.seen());
    assert_eq!(ids(&found), ["no-success"]);
    assert_eq!(found.remarks[0].message, "no response was a success (2xx): 80 301, 4 307, 6 404");
    assert_eq!(
        found.advice,
        [
            "The server redirects, and load follows no redirection: make /a/ the target to measure what is there."
        ]
    );
    for fine in [200, 204, 304] {
        case.statuses[1].code = fine;
        assert_eq!(hindsight(&case.seen()), Hindsight::default(), "{fine}");
    }
    // Failures alone are the remark `errors`.
    case.statuses = vec![status(404, 6, None)];
    assert_eq!(hindsight(&case.seen()), Hindsight::default());
}
