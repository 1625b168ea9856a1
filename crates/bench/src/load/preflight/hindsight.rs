use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::measure::words::{counted, grouped, percent};
use fourtuple_record::{LoadStatus, Remark, Second, errno, format_time};

use crate::load::preflight::{Finding, Need, Preflight, Remedy};

/// The measurements of a run that the hindsight judges.
#[derive(Clone, Debug)]
pub struct RunMeasurements<'a> {
    /// The judgement of the preflight.
    pub preflight: &'a Preflight,
    /// The need of the run.
    pub need: &'a Need,
    /// Predicted time of port exhaustion: the last forecast ([`predict_live`](crate::load::preflight::predict_live)), or the
    /// forecast of the preflight.
    pub predicted_stall: Option<Duration>,
    /// The time without a free port.
    pub no_port: Option<NoPort>,
    /// Number of 4-tuples that the connections of the run used.
    pub tuples_used: u64,
    /// Number of TIME_WAIT sockets to the destination when the ports were exhausted, or at the end; `None`: unknown.
    pub time_wait: Option<u64>,
    /// Failures by name, as in the record.
    pub errors: &'a BTreeMap<String, u64>,
    /// Text of the first failure of each name, as in the record.
    pub details: &'a BTreeMap<String, String>,
    /// Responses of HTTP by status code, as in the record.
    pub statuses: &'a [LoadStatus],
    /// Number of operations that succeeded.
    pub operations: u64,
    /// The counts of each second.
    pub seconds: &'a [Second],
    /// Number of operations in progress at the end of each second of `seconds`. Empty: unknown.
    pub in_flight: &'a [u64],
    /// Signs of the server in each second of `seconds`: receives of bytes, and failures by an answer, such as ECONNREFUSED; neither timeouts
    /// nor a lack of ports.
    pub answers: &'a [u64],
    /// Size of a request.
    pub request_bytes: u64,
    /// The offered load; `None` in a closed loop.
    pub offered: Option<Offered>,
    /// Time from the first intended start to the end of the last operation.
    pub elapsed: Duration,
    /// CPU time of all threads that generate load.
    pub client_cpu: Duration,
    /// Time in which an operation was due while all connections were busy.
    pub all_busy: Duration,
}

/// The offered and the achieved load of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Number of operations that were due, without held connections. With random arrivals it differs from rate times time.
    pub intended: u64,
    /// Number of these operations that succeeded.
    pub done: u64,
    /// Time from the first intended start to the end of the last of these operations.
    pub span: Duration,
    /// Delay of the last operation behind its intended start.
    pub behind: Duration,
}

/// The time without a port (EADDRNOTAVAIL of connect(); EAGAIN of a UDP socket).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPort {
    /// First failure for want of a port, since the start of the run.
    pub first: Duration,
    /// Last failure for want of a port, since the start of the run.
    pub last: Duration,
    /// Total time in which no connection could be opened.
    pub total: Duration,
}

/// The outcome of the hindsight: remarks on validity, and advice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hindsight {
    /// Reasons why the result is not valid, or only in part.
    pub remarks: Vec<Remark>,
    /// Advice in plain language.
    pub advice: Vec<String>,
}

/// Share of CPU time of a thread from which the result measures the client instead of the server.
const SATURATED: f64 = 0.95;

/// Minimum length of a run for the finding that the client was saturated: a shorter run consists mostly of its start.
const MIN_ELAPSED: Duration = Duration::from_millis(100);

/// Minimum share of the offered operations that must succeed.
const DELIVERED: f64 = 0.99;

/// Delay in seconds that the last operation may have in a run of any length.
const PUNCTUAL: f64 = 0.05;

/// Judges the result of a run.
pub fn hindsight(seen: &RunMeasurements<'_>) -> Hindsight {
    let mut found = Hindsight::default();
    ports(seen, &mut found);
    offered(seen, &mut found);
    saturated(seen, &mut found);
    server_stalls(seen, &mut found);
    errors(seen, &mut found);
    no_success(seen, &mut found);
    found
}

impl Hindsight {
    fn remark(&mut self, id: &str, message: String) {
        self.remarks.push(Remark::new(id, message));
    }
}

impl RunMeasurements<'_> {
    fn is_saturated(&self) -> bool {
        let share = |cpu: Duration| cpu.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        self.elapsed >= MIN_ELAPSED && share(self.client_cpu) / self.need.threads.max(1) as f64 >= SATURATED
    }
}

fn ports(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    let Some(no_port) = seen.no_port else {
        if let Some(predicted) = seen.predicted_stall.filter(|at| *at < seen.elapsed) {
            found.advice.push(format!(
                "The ports were to run out after {}, and did not: {} were used.",
                format_time(predicted),
                counted(seen.tuples_used, "tuple")
            ));
        }
        return;
    };
    let predicted = match seen.predicted_stall {
        Some(at) => format!(" (predicted: after {})", format_time(at)),
        None => " (not predicted)".to_owned(),
    };
    let budget = seen.preflight.budget.unwrap_or(0);
    let why = match seen.time_wait {
        Some(waiting) => format!("{} of {} tuples were in TIME_WAIT", grouped(waiting), grouped(budget)),
        None => format!(
            "the run had taken {} where there are {}, {} of them taken before",
            counted(seen.tuples_used, "tuple"),
            grouped(budget),
            grouped(seen.preflight.taken)
        ),
    };
    found.remark(
        "ports-ran-out",
        format!(
            "the ports ran out after {}{predicted}, and for {} in all no connection could be opened: {why}",
            format_time(no_port.first),
            format_time(no_port.total),
        ),
    );
    let of_ports = |finding: &&Finding| finding.id == "ports" || finding.id == "ports-tight";
    let mut remedies: Vec<String> = match seen.preflight.findings.iter().find(of_ports) {
        Some(finding) => finding.remedies.iter().map(Remedy::to_string).collect(),
        None => Vec::new(),
    };
    if remedies.is_empty() {
        // The preflight did not predict the stall, so it cannot tell how many ports would have been enough.
        remedies.push("--source with more addresses".to_owned());
        if !seen.preflight.kept.is_zero() {
            remedies.push("--close server".to_owned());
        }
    }
    found.advice.push(format!("Against running out of ports: {}.", remedies.join(", or ")));
    if let Some(most) = seen.preflight.sustainable_per_s {
        found.advice.push(format!(
            "{} a second can go on for ever here: {} for each tuple after its connection, {}.",
            counted(most as u64, "new connection"),
            format_time(seen.preflight.kept),
            counted(budget, "tuple")
        ));
    }
}

fn offered(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    let Some(Offered { intended, done, span, behind }) = seen.offered else { return };
    let seconds = span.as_secs_f64();
    let in_time = behind.as_secs_f64() <= (seconds * (1.0 - DELIVERED)).max(PUNCTUAL);
    if done as f64 >= intended as f64 * DELIVERED && in_time {
        return;
    }
    let achieved = done as f64 / seconds.max(1e-9);
    // Random arrivals may have exceeded their mean rate.
    let offered = seen.need.rate_per_s.unwrap_or(0.0).max(intended as f64 / seconds.max(1e-9));
    let share = |part: Duration| percent((part.as_secs_f64() / seconds.max(1e-9)).min(1.0));
    let failed: u64 = seen.errors.values().sum();
    let mut reasons = Vec::new();
    if let Some(no_port) = seen.no_port.filter(|no_port| !no_port.total.is_zero()) {
        reasons.push(format!("there was no port for {} of the time", share(no_port.total)));
    }
    if seen.is_saturated() {
        reasons.push("the client's CPU was saturated".to_owned());
    }
    if seen.all_busy * 20 >= seen.elapsed {
        reasons.push(format!(
            "all {} were busy for {} of the time",
            counted(seen.need.connections, "connection"),
            share(seen.all_busy)
        ));
    }
    if failed as f64 >= intended.saturating_sub(done) as f64 * 0.5 && failed > 0 {
        reasons.push(format!("{} failed", counted(failed, "operation")));
    }
    if reasons.is_empty() {
        reasons.push("the cause is not known".to_owned());
    }
    found.remark(
        "offered-rate-not-reached",
        format!(
            "{} of the {} operations a second that were offered were done ({} fewer a second): {}",
            grouped(achieved.round() as u64),
            grouped(offered.round() as u64),
            grouped((offered - achieved).round().max(1.0) as u64),
            reasons.join("; ")
        ),
    );
    if seen.all_busy * 20 >= seen.elapsed && !seen.is_saturated() {
        found.advice.push(format!(
            "More than {} (--connections) would show whether the server can do more.",
            counted(seen.need.connections, "connection")
        ));
    }
}

fn saturated(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    if !seen.is_saturated() {
        return;
    }
    let threads = seen.need.threads.max(1);
    let share = seen.client_cpu.as_secs_f64() / seen.elapsed.as_secs_f64().max(1e-9) / threads as f64;
    found.remark(
        "client-saturated",
        format!(
            "the client was busy for {} of the time of its {}: these are its numbers, not the server's",
            percent(share.min(1.0)),
            counted(threads, "thread")
        ),
    );
    found.advice.push("More --threads, or a lower --rate, would leave the client idle time.".to_owned());
}

/// Requests up to this size are in the buffers of the socket at once. A larger one takes the time of its upload, in which a server answers
/// nothing.
const SENT_AT_ONCE: u64 = 64 * 1024;

/// Reports whole seconds in which nothing was received although operations were in progress.
fn server_stalls(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    let mut stalls: Vec<(Duration, u32)> = Vec::new();
    let mut goes_on = false;
    for (index, (second, in_flight)) in seen.seconds.iter().zip(seen.in_flight).enumerate() {
        let at = Duration::from_nanos(second.at_ns);
        let end = at + Duration::from_secs(1);
        let before = index.checked_sub(1).map_or(*in_flight, |index| seen.in_flight[index]);
        let ours = seen.no_port.is_some_and(|no_port| no_port.first < end && at < no_port.last);
        let answered = seen.answers.get(index).is_some_and(|answers| *answers > 0);
        let silent = second.operations == 0
            && !answered
            && *in_flight > 0
            && before > 0
            && end <= seen.elapsed
            && !ours;
        match stalls.last_mut() {
            Some((_, seconds)) if silent && goes_on => *seconds += 1,
            _ if silent => stalls.push((at, 1)),
            _ => {}
        }
        goes_on = silent;
    }
    let Some(longest) = stalls.iter().max_by_key(|(_, seconds)| *seconds) else { return };
    let all: u32 = stalls.iter().map(|(_, seconds)| seconds).sum();
    let mut message = format!(
        "in {} nothing was answered though operations were under way, the longest time {} from {} on",
        counted(all.into(), "second"),
        format_time(Duration::from_secs(longest.1.into())),
        format_time(longest.0)
    );
    if seen.request_bytes > SENT_AT_ONCE {
        message += &format!(
            "; requests of {} may still have been on their way",
            counted(seen.request_bytes, "byte")
        );
    }
    found.remark("server-stalled", message);
}

/// The meanings of the names of errors.
const MEANINGS: &[(&str, &str)] = &[
    (errno::EADDRNOTAVAIL, "no source port was left"),
    (errno::EADDRINUSE, "the source port was taken"),
    (errno::EAGAIN, "no source port was left (UDP), or the accept queue of the unix socket was full"),
    (errno::ECONNREFUSED, "no socket listens there"),
    (
        errno::ECONNRESET,
        "the server ended the connection with a reset: it crashed, closed with data unread, or refused at its limit",
    ),
    (errno::EPIPE, "the server had closed before the request was sent"),
    (errno::ECONNABORTED, "the connection was ended on this host"),
    (errno::EHOSTUNREACH, "no way to the host"),
    (errno::ENETUNREACH, "no route to the network"),
    (errno::ETIMEDOUT, "the kernel gave up: SYNs or data were not acknowledged"),
    (errno::EMFILE, "descriptors ran out: raise ulimit -n"),
    (errno::ENFILE, "the system's descriptors ran out: raise fs.file-max"),
    (errno::ENOBUFS, "the kernel had no memory for it"),
    (errno::ENOMEM, "the kernel had no memory for it"),
    (errno::EPERM, "a firewall of this host forbade it, or its connection tracking was full"),
    ("timeout", "no answer within the timeout"),
    ("closed-early", "the server closed before its response was complete"),
    ("malformed", "the response was not what the protocol says"),
    ("tls", "the TLS handshake failed: no TLS is spoken there, or not in a version that both know"),
    ("tls-expired", "the certificate of the server has expired: renew it; --insecure accepts it for a test"),
    (
        "tls-not-yet-valid",
        "the certificate of the server is not valid yet: check the clocks of both hosts; --insecure accepts it for a test",
    ),
    (
        "tls-wrong-name",
        "the certificate of the server is for another name: use that name as the target, with --resolve NAME:PORT:ADDR if it does \
         not resolve to this server; --insecure accepts it for a test",
    ),
    (
        "tls-unknown-issuer",
        "no authority that this host trusts has signed the certificate: --ca FILE trusts its issuer, --insecure any certificate",
    ),
    (
        "tls-certificate",
        "the certificate of the server is not acceptable: --ca FILE with this certificate trusts it, --insecure any certificate",
    ),
    (
        "tls-client-certificate",
        "the server demands a certificate of the client: --cert and --key give one; if they are given, it did not accept it",
    ),
    (
        "tls-alpn",
        "server and load have no protocol in common (ALPN): load speaks HTTP/1.1, the server perhaps HTTP/2 only",
    ),
    ("unanswered", "no answer when the run was over"),
    ("not-closed", "the answer came, and the server did not close after it as --close server has it"),
];

/// Returns one line per name of an error, the most frequent first.
fn errors(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    let mut named: Vec<(&String, &u64)> = seen.errors.iter().filter(|(_, count)| **count > 0).collect();
    named.sort_by_key(|(_, count)| Reverse(**count));
    if named.is_empty() {
        return;
    }
    let list: Vec<String> =
        named.iter().map(|(name, count)| format!("{} {name}", grouped(**count))).collect();
    // An HTTP error response is a completed operation, and an operation that waited for a port continues.
    let is_answered = |name: &str| name.starts_with("status-") || name == "not-closed";
    let count = |which: &dyn Fn(&str) -> bool| -> u64 {
        named.iter().filter(|(name, _)| which(name)).map(|(_, count)| **count).sum()
    };
    let unanswered = count(&|name| !is_answered(name) && name != errno::EADDRNOTAVAIL);
    let failed = unanswered + count(&is_answered);
    let whole = unanswered + seen.operations;
    let message = if failed == 0 {
        format!("no operation failed, but some had to wait: {}", list.join(", "))
    } else {
        let share = failed as f64 / whole.max(1) as f64;
        let all = counted(whole, "operation");
        format!("{} of {all} failed ({}): {}", grouped(failed), percent(share), list.join(", "))
    };
    found.remark("errors", message);
    for (name, count) in named {
        let meaning = match (MEANINGS.iter().find(|(known, _)| known == name), name.strip_prefix("status-")) {
            (Some((_, meaning)), _) => (*meaning).to_owned(),
            (None, Some(code)) => status(code),
            (None, None) => continue,
        };
        let detail = seen.details.get(name).map_or(String::new(), |detail| format!(" The first: {detail}."));
        found.advice.push(format!("{name}, {}: {meaning}.{detail}", counted(*count, "time")));
    }
}

/// Remarks responses of which none was a success. 304 answers a conditional request as it wanted.
fn no_success(seen: &RunMeasurements<'_>, found: &mut Hindsight) {
    let is_success = |status: &&LoadStatus| matches!(status.code, 200..=299 | 304);
    // Failures alone are in the remark on errors.
    let is_redirected = |status: &&LoadStatus| status.code < 400;
    if seen.statuses.iter().any(|status| is_success(&status))
        || !seen.statuses.iter().any(|status| is_redirected(&status))
    {
        return;
    }
    let list: Vec<String> =
        seen.statuses.iter().map(|status| format!("{} {}", grouped(status.count), status.code)).collect();
    found.remark("no-success", format!("no response was a success (2xx): {}", list.join(", ")));
    let redirected = seen.statuses.iter().filter(is_redirected).max_by_key(|status| status.count);
    let to = redirected.and_then(|status| status.location.as_ref());
    found.advice.push(match to {
        Some(location) => format!(
            "The server redirects, and load follows no redirection: make {location} the target to measure what is there."
        ),
        None => "The server redirects without a Location: another path is needed to measure a success.".to_owned(),
    });
}

fn status(code: &str) -> String {
    match code.as_bytes().first() {
        Some(b'5') => format!("the server answered {code}, a failure of its own"),
        Some(b'4') => format!("the server answered {code}: the request was not to its liking"),
        _ => format!("the server answered {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::preflight::judge;
    use crate::load::preflight::tests::{host, run};

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
                answers: &[],
                request_bytes: 1,
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
        let expected = "the ports ran out after 28.0s (predicted: after 28.2s), and for 2.00s in all no connection could be opened: \
                        28,232 of 28,232 tuples were in TIME_WAIT";
        assert_eq!(found.remarks[0].message, expected);
        let advice = &found.advice;
        assert!(advice[0].contains("--source with 3 addresses, or --close server"), "{advice:?}");
        assert!(advice[1].starts_with("470 new connections a second"), "{advice:?}");
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
        let expected = "100 of the 200 operations a second that were offered were done (100 fewer a second): all 10 connections were \
                        busy for 50% of the time";
        assert_eq!(hindsight(&busy).remarks[0].message, expected);
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
        assert!(found.remarks[0].message.ends_with("2.00s from 1.00s on"), "{:?}", found.remarks);
        let upload = hindsight(&RunMeasurements { request_bytes: 10_000_000, ..case.seen() });
        let message = &upload.remarks[0].message;
        let large = "requests of 10,000,000 bytes may still have been on their way";
        assert!(message.ends_with(large), "{message}");
        let no_port = Some(NoPort { first: SECOND, last: SECOND * 5, total: SECOND * 3 });
        assert_eq!(ids(&hindsight(&RunMeasurements { no_port, ..case.seen() })), ["ports-ran-out"]);
        let idle = [0; 6];
        assert!(hindsight(&RunMeasurements { in_flight: &idle, ..case.seen() }).remarks.is_empty());
        assert!(hindsight(&RunMeasurements { in_flight: &[], ..case.seen() }).remarks.is_empty());
        // A refused connection and a part of a long response are answers.
        let answers = [0, 9, 9, 0, 0, 0];
        let found = hindsight(&RunMeasurements { answers: &answers, ..case.seen() });
        assert!(found.remarks[0].message.starts_with("in 1 second nothing"), "{:?}", found.remarks);
    }

    #[test]
    fn every_error_has_a_meaning() {
        let mut case = Case::with(None, &[90]);
        let errors = [("ECONNREFUSED", 7), ("status-503", 2), ("closed-early", 1), ("errno 99999", 0)];
        case.errors = errors.map(|(name, count)| (name.to_owned(), count)).into();
        let found = hindsight(&case.seen());
        let expected = "10 of 98 operations failed (10%): 7 ECONNREFUSED, 2 status-503, 1 closed-early";
        assert_eq!(found.remarks[0].message, expected);
        assert_eq!(found.advice[0], "ECONNREFUSED, 7 times: no socket listens there.");
        assert_eq!(found.advice.len(), 3);
        let detail = "not a status line of HTTP/1: \"SSH-2.0\"";
        case.errors = BTreeMap::from([("malformed".to_owned(), 1)]);
        case.details = BTreeMap::from([("malformed".to_owned(), detail.to_owned())]);
        let first = "malformed, 1 time: the response was not what the protocol says. The first: ";
        assert_eq!(hindsight(&case.seen()).advice, [format!("{first}{detail}.")]);
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
        let follow = "The server redirects, and load follows no redirection: make /a/ the target to measure what is there.";
        assert_eq!(found.advice, [follow]);
        for fine in [200, 204, 304] {
            case.statuses[1].code = fine;
            assert_eq!(hindsight(&case.seen()), Hindsight::default(), "{fine}");
        }
        // Failures alone are the remark `errors`.
        case.statuses = vec![status(404, 6, None)];
        assert_eq!(hindsight(&case.seen()), Hindsight::default());
    }
}
