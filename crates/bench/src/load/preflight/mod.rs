//! The preflight compares the ports, descriptors and queues of this host with the need of a run, and proposes remedies.
//! After the run the hindsight judges the measurements in the same way.
//!
//! Only [`Snapshot::read`] queries the kernel; the rest is arithmetic on its result.

mod findings;
mod forecast;
mod hindsight;
mod snapshot;

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::load::preflight::forecast::TupleUsage;

pub use findings::Remedy;
pub(crate) use forecast::Forecast;
pub use forecast::{ASSUMED_CONNECTIONS_PER_S, ASSUMED_REQUESTS_PER_S, LATEST_TIMER, Stall, predict_live};
pub use hindsight::{Hindsight, NoPort, Offered, RunMeasurements, hindsight};
pub use snapshot::{Conntrack, Descriptors, ListenQueue, ReadError, Snapshot, Taken};

/// The transport of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// UDP: a flow uses its port until its socket is closed.
    Udp,
    /// A unix socket: no ports.
    Unix,
}

/// How connections end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closer {
    /// The client sends its FIN first and has the TIME_WAIT socket.
    #[default]
    Client,
    /// The server sends its FIN first and has the TIME_WAIT socket.
    Server,
    /// The client sends RST: no TIME_WAIT socket.
    Reset,
}

/// The need of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    pub transport: Transport,
    /// How connections end.
    pub closer: Closer,
    /// Operations per second in an open loop; `None` in a closed loop.
    pub rate_per_s: Option<f64>,
    /// Maximum number of open connections (or UDP flows), besides `hold`.
    pub connections: u64,
    /// Pause between two operations of a connection in a closed loop.
    pub pause: Duration,
    /// Number of operations after which the run ends.
    pub operations: Option<u64>,
    /// Time after which the run ends. Without this and `operations` the run does not end by itself.
    pub length: Option<Duration>,
    /// Number of operations after which a connection is closed; 0 means never.
    pub requests_per_connection: u64,
    /// Number of connections that the run opens first and keeps open.
    pub hold: u64,
    /// Number of threads that generate load; 0 counts as 1.
    pub threads: u64,
    /// Whether each connection needs a file descriptor (`epoll`), and not a direct descriptor of a ring (`uring`).
    pub engine_needs_descriptors: bool,
    /// Whether the workload can send more than one request per connection (`http`), so that `--close-every` helps.
    pub may_keep_alive: bool,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The result needs care in its interpretation.
    Warn,
    /// The run would measure this limit instead of the server.
    Refuse,
}

/// A limit of this host that affects a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Name in kebab-case, stable for programs: `ports`, `descriptors`.
    pub id: &'static str,
    pub severity: Severity,
    /// A one-line description with numbers, without the remedy.
    pub message: String,
    /// Remedies, the best one first. Each one alone is sufficient.
    pub remedies: Vec<Remedy>,
}

/// The judgement on whether this host has the resources that a run needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Preflight {
    /// Number of 4-tuples to the destination: ports x sources. `None` for unix sockets.
    pub budget: Option<u64>,
    /// Number of these 4-tuples already in use, TIME_WAIT sockets included.
    pub taken: u64,
    /// Maximum number of 4-tuples that the run uses at once, if nothing stalls it; `None` for unix sockets.
    pub needed: Option<u64>,
    /// Time for which a 4-tuple stays in use after the end of its connection.
    pub kept: Duration,
    /// Forecast of the exhaustion of ports; `None` if they do not end.
    pub stall: Option<Stall>,
    /// Sustainable rate of new connections per second; `None` without a limit (`kept` is 0, or there are no ports).
    pub sustainable_per_s: Option<f64>,
    /// All findings, the most severe first.
    pub findings: Vec<Finding>,
}

impl Preflight {
    /// Returns whether the run must be refused without `--anyway`.
    pub fn refuses(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Refuse)
    }
}

impl fmt::Display for Finding {
    /// Returns description and remedies in one line: `DESCRIPTION; use REMEDY or REMEDY`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        let mut verb_said = false;
        for (index, remedy) in self.remedies.iter().enumerate() {
            formatter.write_str(if index == 0 { "; " } else { " or " })?;
            if !verb_said && !remedy.is_instruction() {
                formatter.write_str("use ")?;
                verb_said = true;
            }
            write!(formatter, "{remedy}")?;
        }
        Ok(())
    }
}

/// Compares the need of a run with the resources of the host.
///
/// In an open loop the rate of new connections is known (the rate over the requests per connection), and the time of a
/// stall is exact: the run takes tuples one by one, no tuple is free again before `kept` is over, and the run stalls if it
/// takes the last free tuple before that. A closed loop with a pause is at most as fast as its pauses allow. A closed loop
/// without a pause is assumed to make [`ASSUMED_CONNECTIONS_PER_S`]: the
/// forecast has no time of a stall then, only a number of connections.
pub fn judge(snapshot: &Snapshot, need: &Need) -> Preflight {
    let course = TupleUsage::of(snapshot, need);
    let mut findings = findings::without_ports(snapshot, need, &course);
    let has_ports = need.transport != Transport::Unix;
    let mut stall = None;
    if has_ports {
        findings.extend(findings::of_ports(snapshot, need, &course));
        stall = course.stall();
    }
    findings.sort_by_key(|finding| Reverse(finding.severity));
    let churns = has_ports && course.leaves_time_wait();
    Preflight {
        budget: has_ports.then(|| snapshot.budget()),
        taken: if has_ports { snapshot.taken.all() } else { 0 },
        needed: has_ports.then(|| course.needed()),
        kept: course.kept,
        stall,
        sustainable_per_s: churns.then(|| course.steady() as f64 / course.kept.as_secs_f64()),
        findings,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use fourtuple::ports::{PortRange, PortSet};
    use proptest::prelude::*;

    use super::*;
    use crate::load::preflight::{Conntrack, Descriptors, ListenQueue, Taken};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns a host with the kernel's default settings, and a destination on a different host.
    pub(in crate::load::preflight) fn host() -> Snapshot {
        Snapshot {
            destination: Some(SocketAddr::from(([10, 0, 0, 9], 80))),
            range: PortRange::KERNEL_DEFAULT,
            reserved: PortSet::new(),
            listened_at: 0,
            unseen: None,
            sources: 1,
            taken: Taken::default(),
            loopback: false,
            tcp_tw_reuse: 2,
            tcp_tw_reuse_delay: Some(Duration::from_secs(1)),
            tcp_timestamps: true,
            descriptors: Descriptors { soft: 20_000, hard: 20_000, open: 10 },
            somaxconn: Some(4096),
            tcp_max_syn_backlog: 2048,
            tcp_syncookies: true,
            listener: None,
            conntrack: None,
            tcp_max_tw_buckets: 1 << 24,
            time_wait: 0,
        }
    }

    fn on_loopback() -> Snapshot {
        Snapshot {
            destination: Some(SocketAddr::from(([127, 0, 0, 1], 80))),
            loopback: true,
            listener: Some(ListenQueue { sockets: 1, backlog: 4096, waiting: 0 }),
            ..host()
        }
    }

    /// Returns a run with one connection per operation, ten at once, without an end.
    pub(in crate::load::preflight) fn run() -> Need {
        Need { connections: 10, requests_per_connection: 1, threads: 1, ..Need::default() }
    }

    fn ids(preflight: &Preflight) -> Vec<&str> {
        preflight.findings.iter().map(|finding| finding.id).collect()
    }

    fn text(snapshot: &Snapshot, need: &Need) -> String {
        judge(snapshot, need).findings[0].to_string()
    }

    fn stall(at_ms: impl Into<Option<u64>>, after_connections: u64) -> Option<Stall> {
        Some(Stall { at: at_ms.into().map(Duration::from_millis), after_connections })
    }

    #[test]
    fn benchmarkers_beware_figures_are_reproduced() {
        // 16,384 ports, one source and 60 s of TIME_WAIT, with one connection per transaction.
        let range = PortRange::new(49152, 65535).unwrap();
        let snapshot = Snapshot { range, tcp_tw_reuse: 0, ..on_loopback() };
        for (operations, expected) in
            [(16_300, None), (16_383, None), (16_384, None), (16_385, stall(None, 16_384))]
        {
            let need = Need { operations: Some(operations), connections: 125, ..run() };
            let judged = judge(&snapshot, &need);
            assert_eq!(judged.stall, expected, "{operations}");
            assert_eq!(judged.refuses(), expected.is_some(), "{operations}");
            assert_eq!((judged.budget, judged.needed), (Some(16_384), Some(operations)));
            assert_eq!((judged.kept, judged.sustainable_per_s), (MINUTE, Some(16_384.0 / 60.0)));
        }
        let need = Need { operations: Some(20_000), connections: 125, ..run() };
        assert_eq!(
            text(&snapshot, &need),
            "this run needs 20,000 tuples, there are 16,384 a minute: it would stall after 16,384 connections; use --source \
         127.0.0.0/30 or --close server or --rate 249/s or sysctl net.ipv4.ip_local_port_range=\"1024 65535\""
        );
    }

    #[test]
    fn the_ports_finding_names_tuples_stall_and_remedies() {
        let snapshot = Snapshot { tcp_tw_reuse: 0, listened_at: 1, ..on_loopback() };
        let need = Need { rate_per_s: Some(20_000.0), length: Some(MINUTE), connections: 100, ..run() };
        let text = text(&snapshot, &need);
        let expected = "this run needs 1,200,000 tuples, there are 28,231 a minute: it would stall after 1.41s; use --source \
                    127.0.0.0/26 or --close server or --rate ";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn open_loops() {
        let open = |rate: f64, length: u64| Need {
            rate_per_s: Some(rate),
            length: Some(Duration::from_secs(length)),
            ..run()
        };
        let http = |need: Need, requests| Need { requests_per_connection: requests, ..need };
        let reset = |need| Need { closer: Closer::Reset, ..need };
        let server = |need| Need { closer: Closer::Server, ..need };
        let reused = Snapshot { tcp_tw_reuse: 1, ..host() };
        let cases = [
            // 28,232 ports, used at 2,823.2 per second, end after 10 s.
            ("ends before", host(), open(2_823.2, 10), None),
            ("does not end before", host(), open(2_823.2, 11), stall(10_000, 28_232)),
            ("sustainable", host(), open(433.0, 36_000), None),
            ("more than that", host(), open(500.0, 36_000), stall(56_464, 28_232)),
            ("few operations", host(), Need { operations: Some(28_232), ..open(2_823.2, 3_600) }, None),
            ("kept alive", host(), http(open(28_232.0, 3_600), 10), stall(10_000, 28_232)),
            ("kept for ever", host(), http(open(28_232.0, 3_600), 0), None),
            ("reset", host(), reset(open(28_232.0, 3_600)), None),
            ("the server closes", host(), server(open(28_232.0, 3_600)), None),
            ("reused", reused.clone(), open(28_000.0, 3_600), None),
            ("reused, but faster", reused.clone(), open(56_464.0, 3_600), stall(500, 28_232)),
            (
                "reuse needs timestamps",
                Snapshot { tcp_timestamps: false, ..reused },
                open(2_823.2, 11),
                stall(10_000, 28_232),
            ),
            ("reused on loopback", on_loopback(), open(20_000.0, 3_600), None),
            ("UDP", host(), Need { transport: Transport::Udp, ..open(28_232.0, 60) }, None),
        ];
        for (name, snapshot, need, expected) in cases {
            let judged = judge(&snapshot, &need);
            assert_eq!(judged.stall, expected, "{name}: {:?}", judged.findings);
            assert_eq!(judged.refuses(), expected.is_some(), "{name}: {:?}", judged.findings);
        }
    }

    #[test]
    fn closed_loops() {
        let timed = |seconds| Need { length: Some(Duration::from_secs(seconds)), ..run() };
        let paused = Need { pause: Duration::from_millis(100), ..timed(3_600) };
        let kept = Need { requests_per_connection: 0, may_keep_alive: true, ..timed(3_600) };
        for (name, need, stalls) in [
            ("20,000 in a second fit", timed(1), false),
            ("40,000 in two seconds do not", timed(2), true),
            ("nor do those of two threads", Need { threads: 2, ..timed(1) }, true),
            ("without an end", run(), true),
            ("100 a second for ever", paused, false),
            ("1,000 a second for an hour", Need { connections: 100, ..paused }, true),
            ("kept", kept, false),
            ("more kept than ports", Need { connections: 30_000, ..kept }, true),
        ] {
            assert_eq!(judge(&host(), &need).stall, stall(None, 28_232).filter(|_| stalls), "{name}");
        }
        let assumed = "at 20,000 new connections a second and thread, which is an assumption, it would stall after 1.41s";
        assert!(text(&host(), &timed(2)).contains(assumed));
        let http = Need { requests_per_connection: 1, ..kept };
        assert!(text(&host(), &http).contains("--close-every "), "{}", text(&host(), &http));
    }

    #[test]
    fn tuples_of_other_sockets_are_subtracted_until_free() {
        let need = Need { rate_per_s: Some(2_000.0), length: Some(MINUTE), ..run() };
        let with = |time_wait, back: &[u64]| {
            let time_wait_back = back.to_vec();
            Snapshot { taken: Taken { established: 8_000, other: 232, time_wait, time_wait_back }, ..host() }
        };
        // 2,000 tuples are free again in the eleventh second, the others in the first.
        let back = |first| [first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2_000];
        let reused = Snapshot { tcp_tw_reuse: 1, ..with(17_000, &back(15_000)) };
        for (name, snapshot, expected) in [
            ("open", with(0, &[]), stall(10_000, 20_000)),
            ("in TIME_WAIT for a minute", with(18_000, &[]), stall(1_000, 2_000)),
            ("back at the end of their second", with(18_100, &back(16_100)), stall(950, 1_900)),
            ("back in time", with(17_000, &back(15_000)), stall(9_000, 18_000)),
            ("reused: connect() takes TIME_WAIT sockets of every process", reused, None),
        ] {
            assert_eq!(judge(&snapshot, &need).stall, expected, "{name}");
        }
        let short = Need { operations: Some(5_000), ..need };
        let taken = Taken { time_wait: 28_000, time_wait_back: vec![0; 42], ..Taken::default() };
        let text = text(&Snapshot { taken, ..host() }, &short);
        let waits = "it would stall after 116ms; wait 42.0s or use --source with 2 addresses or --close";
        assert!(text.contains(&format!("28,000 of them taken: {waits}")), "{text}");
    }

    #[test]
    fn a_run_without_a_free_tuple_is_refused() {
        let taken = Taken { time_wait: 28_232, time_wait_back: vec![0; 42], ..Taken::default() };
        let full = Snapshot { taken, ..host() };
        let open = Need { rate_per_s: Some(200.0), length: Some(MINUTE), connections: 100, ..run() };
        let closed = Need { rate_per_s: None, pause: Duration::from_secs(1), ..open };
        for need in [open, closed] {
            for closer in [Closer::Client, Closer::Server, Closer::Reset] {
                for requests_per_connection in [0, 1] {
                    let need = Need { closer, requests_per_connection, ..need };
                    let judged = judge(&full, &need);
                    let stall = judged.stall.unwrap();
                    assert!(judged.refuses() && stall.after_connections == 0, "{need:?}: {judged:?}");
                    let text = judged.findings[0].to_string();
                    let expected =
                        "28,232 of them taken: no connection would find a port; wait 42.0s or use --source";
                    assert!(text.contains(expected) && !text.contains("--close server"), "{need:?}: {text}");
                    let reused = Snapshot { tcp_tw_reuse: 1, ..full.clone() };
                    assert!(!judge(&reused, &Need { rate_per_s: Some(200.0), ..need }).refuses(), "{need:?}");
                }
            }
        }
        let one = Snapshot { taken: Taken { time_wait: 28_231, ..full.taken.clone() }, ..full };
        let server = Need { closer: Closer::Server, ..open };
        let found = judge(&one, &server);
        assert_eq!(ids(&found), ["ports-tight", "ports-taken"], "100 at once are possible, not certain");
    }

    #[test]
    fn hold_and_churn_must_fit_together() {
        let need = Need {
            hold: 20_000,
            rate_per_s: Some(1_000.0),
            length: Some(MINUTE),
            engine_needs_descriptors: false,
            threads: 2,
            ..run()
        };
        assert_eq!(judge(&host(), &need).stall, stall(8_232, 8_232));
        let too_many = Need { hold: 30_000, ..need };
        let judged = judge(&host(), &too_many);
        assert_eq!(judged.stall, stall(0, 0));
        assert!(judged.findings[0].message.ends_with("the 30,000 to hold leave none for others"));
        let flows = Need { transport: Transport::Udp, connections: 30_000, threads: 2, ..run() };
        assert_eq!(judge(&host(), &flows).stall, stall(None, 28_232));
    }

    #[test]
    fn tcp_max_tw_buckets_limits_time_wait_sockets() {
        let snapshot = Snapshot { tcp_max_tw_buckets: 16_384, time_wait: 384, ..host() };
        let need = Need { rate_per_s: Some(1_000.0), length: Some(MINUTE), ..run() };
        let judged = judge(&snapshot, &need);
        assert_eq!((judged.stall, ids(&judged)), (None, vec!["tw-buckets"]));
        assert!(judged.findings[0].message.starts_with("up to 28,232 sockets in TIME_WAIT"));
    }

    #[test]
    fn limits_beside_ports() {
        let kept = |connections| Need {
            connections,
            requests_per_connection: 0,
            engine_needs_descriptors: true,
            ..run()
        };
        let limit = text(&host(), &kept(19_950));
        let remedies = "use --engine uring or --connections 19922 or raise the hard limit";
        assert!(limit.contains(remedies), "{limit}");
        let soft = Snapshot { descriptors: Descriptors { soft: 1024, hard: 1 << 20, open: 10 }, ..host() };
        assert!(text(&soft, &kept(2_000)).contains("raise the limit with ulimit -n 2078 or use"));
        let rings = Need { engine_needs_descriptors: false, ..kept(2_000) };
        assert!(text(&soft, &rings).contains("use --threads 2"), "{}", text(&soft, &rings));
        let queue = Some(ListenQueue { sockets: 1, backlog: 128, waiting: 3 });
        let queue = Snapshot { listener: queue, ..on_loopback() };
        let full = text(&queue, &kept(1_000));
        assert!(full.contains("queue holds 128"), "{full}");
        assert!(full.contains("give the server a backlog of 1000"), "{full}");
        let tracking = |count| Snapshot { conntrack: Some(Conntrack { max: 10_000, count }), ..host() };
        let churn = Need { rate_per_s: Some(200.0), length: Some(MINUTE), ..run() };
        let mut reserved = host();
        reserved.range.iter().for_each(|port| assert!(reserved.reserved.insert(port)));
        let crowded = Snapshot { taken: Taken { established: 3_000, ..Taken::default() }, ..host() };
        let no_cookies = Snapshot { tcp_syncookies: false, ..on_loopback() };
        let refused = true;
        for (name, snapshot, need, refuses, expected) in [
            ("a connection too many", host(), kept(19_950), refused, "descriptors"),
            ("as many as descriptors", host(), kept(19_922), false, ""),
            ("two threads share", soft, Need { threads: 2, ..rings }, false, ""),
            ("a queue that is long enough", queue, kept(128), false, ""),
            ("no cookies", no_cookies, kept(2_000), false, "syn-backlog"),
            ("no listener", Snapshot { listener: None, ..on_loopback() }, kept(1), false, "nobody-listens"),
            ("an empty table tracks nothing", tracking(0), kept(15_000), false, ""),
            ("kept beyond the table", tracking(1), kept(15_000), refused, "conntrack"),
            ("closed beyond the table", tracking(1), churn, false, "conntrack"),
            ("a reserved range", reserved.clone(), kept(1), refused, "range-reserved"),
            ("sockets of others", crowded, kept(1), false, "ports-taken"),
        ] {
            let judged = judge(&snapshot, &need);
            assert_eq!((judged.refuses(), ids(&judged).join(",")), (refuses, expected.to_owned()), "{name}");
        }
        let unix = Need { transport: Transport::Unix, connections: 50, ..run() };
        let judged = judge(&reserved, &unix);
        assert_eq!((judged.budget, judged.needed, judged.findings), (None, None, vec![]));
    }

    #[test]
    fn nearly_exhausted_ports_are_a_warning() {
        // 470.5 per second would be sustainable if the kernel's timers were never late.
        let need = Need { rate_per_s: Some(470.0), length: Some(MINUTE * 60), ..run() };
        let judged = judge(&host(), &need);
        assert_eq!((judged.stall, judged.refuses(), ids(&judged)), (None, false, vec!["ports-tight"]));
        let slow =
            Need { rate_per_s: Some(10.0), connections: 30_000, closer: Closer::Reset, threads: 2, ..need };
        assert_eq!(ids(&judge(&host(), &slow)), ["ports-tight"]);
    }

    prop_compose! {
        fn needs()(
            rate in prop::option::of(1.0..100_000.0_f64),
            connections in 1..2_000_u64,
            pause_ms in prop_oneof![Just(0), 1..1_000_u64],
            operations in prop::option::of(1..2_000_000_u64),
            length in prop::option::of(1..200_u64),
            requests in 0..4_u64,
            hold in prop_oneof![Just(0), 0..30_000_u64],
            closer in prop_oneof![Just(Closer::Client), Just(Closer::Server), Just(Closer::Reset)],
        ) -> Need {
            Need {
                transport: Transport::Tcp,
                closer,
                rate_per_s: rate,
                connections,
                pause: Duration::from_millis(pause_ms),
                operations,
                length: length.map(Duration::from_secs),
                requests_per_connection: requests,
                hold,
                threads: 2,
                engine_needs_descriptors: false,
                may_keep_alive: true,
            }
        }
    }

    prop_compose! {
        fn hosts()(
            high in 33_000..60_999_u16,
            sources in 1..5_u64,
            established in 0..3_000_u64,
            back in prop::collection::vec(0..500_u64, 0..60),
            reuse in 0..=2_u8,
            buckets in prop_oneof![Just(1_u64 << 24), 1_000..200_000_u64],
            loopback: bool,
        ) -> Snapshot {
            let taken = Taken { established, time_wait: back.iter().sum(), other: 0, time_wait_back: back };
            Snapshot {
                range: PortRange::new(32_768, high).unwrap(),
                sources,
                time_wait: taken.time_wait,
                taken,
                tcp_tw_reuse: reuse,
                tcp_max_tw_buckets: buckets,
                ..if loopback { on_loopback() } else { host() }
            }
        }
    }

    /// Returns a number for comparison: the later the stall, the larger the number.
    fn when(stall: Option<Stall>) -> (Duration, u64) {
        stall.map_or((Duration::MAX, u64::MAX), |stall| {
            (stall.at.unwrap_or(Duration::MAX), stall.after_connections)
        })
    }

    proptest! {
        #[test]
        fn more_sources_never_worsen(snapshot in hosts(), need in needs(), more in 1..50_u64) {
            let richer = Snapshot { sources: snapshot.sources + more, ..snapshot.clone() };
            let (before, after) = (judge(&snapshot, &need), judge(&richer, &need));
            prop_assert!(when(after.stall).0 >= when(before.stall).0, "{:?} {:?}", before.stall, after.stall);
            prop_assert!(when(after.stall).1 >= when(before.stall).1, "{:?} {:?}", before.stall, after.stall);
            prop_assert!(after.sustainable_per_s >= before.sustainable_per_s);
        }

        #[test]
        fn a_larger_rate_never_postpones_the_stall(snapshot in hosts(), need in needs(), more in 0.0..50_000.0_f64) {
            let rate = need.rate_per_s.unwrap_or(500.0);
            let slow = Need { rate_per_s: Some(rate), ..need };
            let fast = Need { rate_per_s: Some(rate + more), ..need };
            let (slow, fast) = (judge(&snapshot, &slow).stall, judge(&snapshot, &fast).stall);
            prop_assert!(when(fast).0 <= when(slow).0, "{slow:?} {fast:?}");
        }

        #[test]
        fn every_remedy_is_enough(snapshot in hosts(), need in needs()) {
            let judged = judge(&snapshot, &need);
            let Some(ports) = judged.findings.iter().find(|finding| finding.id.starts_with("ports")) else { return Ok(()) };
            if ports.id == "ports-taken" {
                return Ok(());
            }
            for remedy in &ports.remedies {
                let (mut snapshot, mut need) = (snapshot.clone(), need);
                match remedy {
                    Remedy::SourceNetwork { network, prefix } => {
                        let pool: fourtuple::dial::SourcePool = format!("{network}/{prefix}").parse().unwrap();
                        snapshot.sources = pool.addresses().len() as u64;
                    }
                    Remedy::Sources(count) => snapshot.sources = *count,
                    Remedy::CloseServer => need.closer = Closer::Server,
                    Remedy::Rate(rate) => need.rate_per_s = Some(*rate as f64),
                    Remedy::CloseEvery(requests) => need.requests_per_connection = *requests,
                    Remedy::Range(low, high) => snapshot.range = PortRange::new(*low, *high).unwrap(),
                    Remedy::TwReuse => snapshot.tcp_tw_reuse = 1,
                    Remedy::Wait(_) => snapshot.taken = Taken { time_wait: 0, time_wait_back: vec![], ..snapshot.taken },
                    Remedy::Connections(count) => need.connections = *count,
                    other => prop_assert!(false, "{other}"),
                }
                let again = judge(&snapshot, &need);
                prop_assert!(again.stall.is_none() && !ids(&again).contains(&"ports-tight"), "{remedy}: {again:?}");
            }
        }
    }
}
