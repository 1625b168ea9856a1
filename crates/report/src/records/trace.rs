//! Parts that the three traces share.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use fourtuple_record::errno;
use fourtuple_record::snapshot::{FailedCall, Failures, Part};
use fourtuple_record::{
    Distribution, LockPath, Remark, TraceAcceptRecord, TraceAcceptResults, TraceAcceptSettings,
    TraceConnectRecord, TraceConnectResults, TraceConnectSettings, TraceListener, TraceLocksRecord,
    TraceLocksResults, TraceLocksSettings, TraceSymptom, TraceTuple, TraceUnixListener, TraceWorker,
};

use crate::document::{Block, Document, Medium, Tone};
use crate::table::{Cell, Table, more};
use crate::words::{
    CommandLine, NOTHING, count, duration, index, maybe_duration, plural, present, quantity, quoted, rate,
    reasons, share, typed, unnamed, word,
};

/// The filters that every trace has.
pub(super) struct Filters<'a> {
    process: Option<u32>,
    name: Option<&'a str>,
    netns: Option<&'a str>,
    cgroup: Option<&'a str>,
    for_ns: Option<u64>,
}

impl<'a> Filters<'a> {
    pub(super) fn new(
        process: Option<u32>,
        name: &'a Option<String>,
        netns: &'a Option<String>,
        cgroup: &'a Option<String>,
        for_ns: Option<u64>,
    ) -> Filters<'a> {
        Filters { process, name: name.as_deref(), netns: netns.as_deref(), cgroup: cgroup.as_deref(), for_ns }
    }

    /// Returns the filters as text, including the trace's `own`; `all` without filters.
    pub(super) fn facts(&self, own: impl IntoIterator<Item = String>, all: &str) -> Vec<String> {
        let mut facts = Vec::new();
        facts.extend(self.process.map(|process| format!("process {process}")));
        facts.extend(self.name.map(|name| format!("threads called {name}")));
        facts.extend(own);
        facts.extend(self.netns.map(|netns| format!("in the network namespace {netns}")));
        facts.extend(self.cgroup.map(|cgroup| format!("cgroup {cgroup}")));
        if facts.is_empty() {
            facts.push(all.to_owned());
        }
        facts.extend(self.for_ns.map(|time| format!("for {} at most", duration(time))));
        facts
    }

    /// Adds the filters to a command line, including the trace's `own`.
    pub(super) fn add(&self, line: CommandLine, own: impl FnOnce(CommandLine) -> CommandLine) -> CommandLine {
        own(line.maybe("--pid", self.process).maybe("--comm", self.name.map(quoted)))
            .maybe("--netns", self.netns.map(word))
            .maybe("--cgroup", self.cgroup.map(quoted))
            .maybe("--for", self.for_ns.map(typed))
    }
}

/// Names the instrument: `traced with tp_btf (stable tracepoints, by BTF)`.
fn tier(name: &str) -> String {
    let what = match name {
        "tp_btf" => "stable tracepoints, by BTF",
        "fexit" => "beginning and return of __inet_hash_connect",
        "cgroup+tp_btf" => "programs of the root cgroup, and stable tracepoints by BTF",
        other => return format!("traced with {other}"),
    };
    format!("traced with {name} ({what})")
}

/// Returns the figure of an event, if it occurred.
fn occurred(name: &'static str, number: u64) -> Option<(&'static str, String)> {
    (number > 0).then(|| (name, count(number)))
}

/// The maximum number of causes that are listed.
const CAUSES: usize = 12;

/// Shows the account of calls that failed, and what their errnos mean.
fn failed_calls(document: &mut Document, calls: &Part<Failures>) {
    let (calls, left_out) = match calls.seen() {
        Ok(failures) => (&failures.calls, failures.left_out),
        Err(reason) => {
            return document.note(Tone::Dim, format!("calls that failed are not counted: {reason}"));
        }
    };
    if calls.is_empty() {
        return;
    }
    document.table_below("Failed calls", table(calls));
    if left_out > 0 {
        document.note(Tone::Bad, format!("not listed: {} that failed", plural(left_out, "more call")));
    }
    let (mut causes, mut listed) = (Vec::new(), BTreeSet::new());
    for call in calls {
        let address = call.address.as_deref().unwrap_or_default();
        let ip = address.parse().map_or_else(|_| address.to_owned(), |to: SocketAddr| to.ip().to_string());
        for cause in &call.causes {
            let line = format!("{}() {}: {cause}", call.call, call.errno);
            // The same cause of another address says nothing new.
            if listed.insert(line.replace(&ip, "")) {
                causes.push(line);
            }
        }
    }
    causes.truncate(CAUSES);
    document.items(Tone::Plain, unnamed(&causes));
}

/// Returns whether a connect is among the failed calls, or may be among those that are not listed.
fn may_have_failed_connect(calls: &Part<Failures>) -> bool {
    !calls.seen().is_ok_and(|failures| {
        failures.left_out == 0 && failures.calls.iter().all(|call| call.call != "connect")
    })
}

/// Returns whether calls or events were not seen or lost.
fn has_gaps(validity: &[Remark]) -> bool {
    validity.iter().any(|remark| matches!(remark.id.as_str(), "calls-unseen" | "events-lost"))
}

/// Shows the rest of the account: what grew, was dropped or waited in the network namespace.
fn symptoms(document: &mut Document, symptoms: &Part<Vec<TraceSymptom>>) {
    let symptoms = match symptoms.seen() {
        Ok(symptoms) => symptoms,
        Err(reason) => return document.note(Tone::Dim, format!("other symptoms are not known: {reason}")),
    };
    let rules = |symptom: &TraceSymptom| match &symptom.rules[..] {
        [] => "-".to_owned(),
        rules => rules.join(", "),
    };
    if !symptoms.is_empty() {
        let table: Table = Table::of(symptoms)
            .text("symptom", 0, |symptom| symptom.sentence.clone())
            .text("explained by `doctor`", 1, rules)
            .limit(20, 200, "row")
            .into();
        document.table_below("Other symptoms of the network namespace", table);
    }
}

/// Returns `nginx[812]`, or `curl (300 processes)`.
pub(super) fn process(process: u32, processes: u32, name: &str) -> String {
    match processes {
        0 | 1 => format!("{name}[{process}]"),
        several => format!("{name} ({})", plural(several.into(), "process")),
    }
}

fn table(calls: &[FailedCall]) -> Table {
    let process = |call: &FailedCall| process(call.owner.pid, call.processes, &call.owner.name);
    let before = |call: &FailedCall| match (call.call.as_str(), call.before_search) {
        ("connect", true) => "yes",
        ("connect", false) => "no",
        _ => "-",
    };
    Table::of(calls)
        .text("process", 0, process)
        .text("call", 1, |call| call.call.clone())
        .text("address", 0, |call| match (&call.address, call.addresses) {
            (None, _) => "-".to_owned(),
            (Some(address), 0 | 1) => address.clone(),
            (Some(address), all) => format!("{address} and {} more", count(u64::from(all) - 1)),
        })
        .text("errno", 0, |call| call.errno.clone())
        .text("before the search", 2, move |call| before(call).to_owned())
        .number("calls", 0, |call| Cell::bad_count(call.failed))
        .limit(20, 200, "row")
        .into()
}

/// Adds a row for each distribution that exists, and on the page an explanation of the names.
pub(super) fn show(
    document: &mut Document,
    title: &'static str,
    rows: &[(&'static str, Option<Distribution>)],
    explanation: impl Into<String>,
) {
    let rows: Vec<(&str, Distribution)> =
        rows.iter().filter_map(|(name, times)| Some((*name, (*times)?))).collect();
    if rows.is_empty() {
        return;
    }
    document.table(
        Table::of(&rows)
            .name(title, |(name, _)| *name)
            .number("samples", 4, |(_, times)| count(times.count))
            .number("mean", 3, |(_, times)| duration(times.mean))
            .number("p50", 0, |(_, times)| duration(times.p50))
            .number("p99", 0, |(_, times)| duration(times.p99))
            .number("p99.9", 1, |(_, times)| duration(times.p999))
            .number("max", 2, |(_, times)| duration(times.max)),
    );
    document.explain(explanation);
}

/// Merges histogram buckets to four per factor of ten, without gaps.
pub(super) fn steps<const N: usize>(
    histogram: impl IntoIterator<Item = (u64, [u64; N])>,
) -> Vec<(String, [u64; N])> {
    let mut steps: BTreeMap<i32, [u64; N]> = BTreeMap::new();
    for (from_ns, counts) in histogram {
        let step = ((from_ns.max(1) as f64).log10() * 4.0 + 1e-9).floor() as i32;
        let sums = steps.entry(step).or_insert([0; N]);
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum = sum.saturating_add(count);
        }
    }
    let ends = steps.keys().next().copied().zip(steps.keys().next_back().copied());
    let begin = |step: i32| duration(10_f64.powf(f64::from(step) / 4.0).round() as u64);
    let of = |step: i32| (begin(step), steps.get(&step).copied().unwrap_or([0; N]));
    ends.map_or_else(Vec::new, |(first, last)| (first..=last).map(of).collect())
}

/// The maximum number of workers whose calls failed that are named.
const FAILING: usize = 4;

/// The maximum number of listeners on the terminal and on the page.
const LISTENERS: (usize, usize) = (10, 100);

pub(super) fn trace_accept(record: &TraceAcceptRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("How long connections wait for accept()", command_line(settings), &[]);
    document.page_heading("All listeners");
    document.facts(trace_accept_facts(settings));
    document.facts(vec![tier(&results.tier), format!("for {}", duration(results.elapsed_ns))]);
    document.push(Block::Figures(figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    let is_by_acceptor = settings.process.is_some() || settings.name.is_some() || settings.cgroup.is_some();
    let is_by_listener = settings.listen.is_some() || settings.port.is_some();
    match results.overflows {
        0 if has_refused(record) || record.validity.iter().any(|remark| remark.id == "overflows-unseen") => {}
        0 if is_by_listener => document.note(Tone::Good, "no queue of these listeners overflowed"),
        // The other listeners are not known to belong to the chosen threads.
        0 if is_by_acceptor => document.note(Tone::Plain, "no queue of a listener with accepts overflowed"),
        0 => document.note(Tone::Good, "no queue overflowed"),
        some => document.note(Tone::Bad, format!("dropped at full queues: {}", count(some))),
    }
    trace_accept_unix_listeners(&mut document, record);
    failed_calls(&mut document, &results.calls);
    symptoms(&mut document, &results.symptoms);
    times_of(&mut document, results);
    document.histogram(
        "Accepts by wait",
        ["accepts"],
        &steps(results.histogram.iter().map(|step| (step.from_ns, [step.count]))),
    );
    for (at, listener) in results.listeners.iter().enumerate().take(LISTENERS.1) {
        let medium = if at < LISTENERS.0 { Medium::Both } else { Medium::Page };
        document.on(medium, |document| one_listener(document, listener));
    }
    for (medium, most) in [(Medium::Terminal, LISTENERS.0), (Medium::Page, LISTENERS.1)] {
        if let Some(more) = more(results.listeners.len(), most, "listener") {
            document.on(medium, |document| document.note(Tone::Dim, more));
        }
    }
    document
}

fn filters(settings: &TraceAcceptSettings) -> Filters<'_> {
    Filters::new(settings.process, &settings.name, &settings.netns, &settings.cgroup, settings.for_ns)
}

fn trace_accept_facts(settings: &TraceAcceptSettings) -> Vec<String> {
    let own = [
        settings.listen.as_ref().map(|listen| format!("listeners at {listen}")),
        settings.port.map(|port| format!("at port {port}")),
    ];
    filters(settings).facts(own.into_iter().flatten(), "every TCP accept() of this host")
}

fn command_line(settings: &TraceAcceptSettings) -> String {
    filters(settings)
        .add(CommandLine::new("trace accept"), |line| {
            line.maybe("--listen", settings.listen.as_ref()).maybe("--port", settings.port)
        })
        .finish()
}

/// Returns the counts. Events that did not occur are omitted, except lost ones.
fn figures(results: &TraceAcceptResults) -> Vec<(&'static str, String)> {
    present([
        Some(("connections accepted", count(results.accepts))),
        Some(("accepts per second", rate(results.accepts_per_s))),
        occurred("accepted, queued before the trace", results.earlier),
        occurred("accept() calls that failed with EAGAIN", results.empty),
        occurred("threads woken for nothing", results.woken_for_nothing),
        Some(("lost", count(results.lost))),
    ])
}

/// Returns whether the queue of a unix listener was full, or may have been: `overflows` counts those of TCP only.
fn has_refused(record: &TraceAcceptRecord) -> bool {
    let (settings, results) = (&record.settings, &record.results);
    // Not every listener that refused a call has a row.
    let is_refused =
        |call: &FailedCall| call.call == "connect" && call.errno == errno::EAGAIN && call.protocol == "unix";
    let is_full = |row: &TraceUnixListener| row.full > 0 || row.refused > Some(0);
    results.calls.seen().is_ok_and(|failures| failures.calls.iter().any(is_refused))
        || match results.unix_listeners.seen() {
            Ok(rows) => rows.iter().any(is_full),
            // A filter by address or port selects no unix listener.
            Err(_) => settings.listen.is_none() && settings.port.is_none(),
        }
}

/// Shows the queues of unix listeners, of which only readings are known.
fn trace_accept_unix_listeners(document: &mut Document, record: &TraceAcceptRecord) {
    let TraceAcceptSettings { listen, port, .. } = &record.settings;
    let rows = match record.results.unix_listeners.seen() {
        Ok(rows) => rows,
        // A filter by address or port selects no unix listener.
        Err(_) if listen.is_some() || port.is_some() => return,
        Err(reason) => {
            return document.note(Tone::Dim, format!("queues of unix listeners are not read: {reason}"));
        }
    };
    let Some(first) = rows.first() else { return };
    for row in rows.iter().filter(|row| row.refused > Some(0)).take(FAILING) {
        let calls = plural(row.refused.unwrap_or(0), "call");
        let line =
            format!("{calls} of connect() to {} failed with EAGAIN because the queue was full", row.path);
        document.note(Tone::Bad, line);
    }
    document.table_below("Unix listeners", unix_table(rows));
    let readings = plural(first.readings, "reading");
    document.note(
        Tone::Dim,
        format!("the queues are of {readings}; accepts and waits of unix sockets are not visible"),
    );
}

fn unix_table(rows: &[TraceUnixListener]) -> Table {
    let owner = |row: &TraceUnixListener| match &row.owners[..] {
        [] => NOTHING.to_owned(),
        [first, ..] => process(first.pid, row.owners.len() as u32, &first.name),
    };
    let connections =
        |row: &TraceUnixListener| row.workers.iter().map(|worker| u64::from(worker.sockets)).sum();
    Table::of(rows)
        .text("path", 0, |row| row.path.clone())
        .text("process", 1, owner)
        .number("queue max", 0, |row| count(row.waiting_max.into()))
        .number("backlog", 0, |row| count(row.backlog.into()))
        .number("full|Readings with a full queue", 2, |row| Cell::bad_count(row.full))
        .number("refused", 0, |row| row.refused.map_or_else(|| NOTHING.into(), Cell::bad_count))
        .number("accepted|Accepted connections that are open", 3, move |row| count(connections(row)))
        .limit(20, 100, "unix listener")
        .into()
}

fn times_of(document: &mut Document, results: &TraceAcceptResults) {
    let times =
        [("handshake (SYN-ACK to ACK)", results.handshake_ns), ("wait in the accept queue", results.wait_ns)];
    show(
        document,
        "|Time",
        &times,
        "The wait begins when the connection is established and ends when accept() or io_uring returns it. The handshake is \
         the kernel's own time from the SYN-ACK to its ACK.",
    );
}

fn one_listener(document: &mut Document, listener: &TraceListener) {
    document.heading(trace_accept_title(listener));
    document.facts(of_listener(listener));
    if listener.overflows > 0 {
        let (packets, acks) = (plural(listener.overflows, "packet"), count(listener.overflow_acks));
        let why = "accept() is too slow, or the backlog too short";
        let line = format!("{packets} dropped because the queue was full ({acks} of them final ACKs): {why}");
        document.note(Tone::Bad, line);
    }
    for worker in listener.workers.iter().filter(|worker| worker.failed > 0).take(FAILING) {
        let error = worker.error.as_deref().unwrap_or_default();
        let explained = if error == errno::EMFILE { "; `fourtuple explain F01`" } else { "" };
        let who = match worker.processes {
            0 | 1 => format!("{}[{}]", worker.name, worker.process),
            several => process(worker.process, several, &worker.name),
        };
        let times = plural(worker.failed, "time");
        let line = format!(
            "accept() of {who} failed {times} with {error}: the connections stay in the queue{explained}"
        );
        document.note(Tone::Bad, line);
    }
    if !listener.workers.is_empty() {
        document.table(trace_accept_workers(&listener.workers));
    }
}

/// Returns the address, with details that distinguish listeners at the same address.
fn trace_accept_title(listener: &TraceListener) -> String {
    let mut title = listener.address.clone();
    if listener.group > 0 {
        // `ss -e` prints the cookie in this format.
        title += &format!(" sk:{:x}, of a group of {}", listener.cookie, listener.group);
    }
    title += &format!(", netns {}", listener.namespace);
    if listener.closed {
        title += ", closed";
    }
    title
}

/// Returns short facts about a listener. Events that did not occur are omitted.
fn of_listener(listener: &TraceListener) -> Vec<String> {
    let depth = &listener.depth;
    let [max, backlog] = [depth.max, depth.backlog].map(|number| count(number.into()));
    let some = |number: u64, what: &str| (number > 0).then(|| format!("{} {what}", count(number)));
    let many = |number: u64, noun: &str, what: &str| {
        (number > 0).then(|| format!("{} {what}", plural(number, noun)))
    };
    let jain = || format!("Jain's index of the workers {}", index(listener.jain));
    present([
        Some(format!("{} accepted of {} queued", count(listener.accepts), count(listener.queued))),
        Some(match listener.queued {
            0 => format!("queue depth {max}, backlog {backlog}"),
            _ => format!("queue depth {} on average, {max} at most, backlog {backlog}", quantity(depth.mean)),
        }),
        (depth.full > 0).then(|| format!("full {}", often(depth.full))),
        some(listener.other_accepts, "accepted by threads outside the filters"),
        many(listener.retried_handshakes, "handshake", "with a retransmitted SYN-ACK"),
        many(
            listener.other_drops,
            "packet",
            match listener.ignored {
                Some(_) => "dropped for other reasons",
                None => "dropped for other reasons or ignored",
            },
        ),
        many(
            listener.ignored.unwrap_or(0),
            "packet",
            "ignored (sent again, or before data with TCP_DEFER_ACCEPT)",
        ),
        some(listener.never_accepted, "closed before they were accepted"),
        some(listener.closed_first, "closed by the workers first (TIME_WAIT here)"),
        some(listener.closed_by_peer, "closed by the peer first"),
        some(listener.reset, "reset"),
        (listener.workers.len() > 1).then(jain),
    ])
}

fn trace_accept_workers(workers: &[TraceWorker]) -> Table {
    let most = workers.iter().map(|worker| worker.accepts).max().unwrap_or(0);
    Table::of(workers)
        .text("worker", 0, |worker| match worker.processes {
            0 | 1 => format!("{}/{} {}", worker.process, worker.thread, worker.name),
            several => process(worker.process, several, &worker.name),
        })
        .number("accepts", 0, |worker| count(worker.accepts))
        .text("", 2, |worker| Cell::bar(worker.accepts, most))
        .number("open", 1, |worker| count(worker.open))
        .number("reads", 4, |worker| count(worker.reads))
        .page("Mean", |worker| duration(worker.mean_ns))
        .number("p50", 3, |worker| duration(worker.p50_ns))
        .number("p99", 0, |worker| duration(worker.p99_ns))
        .number("max", 8, |worker| duration(worker.max_ns))
        .number("for nothing|Woken for nothing", 5, |worker| Cell::bad_count(worker.woken_for_nothing))
        .number("empty", 7, |worker| count(worker.empty))
        .number("closed first", 6, |worker| count(worker.closed_first))
        .limit(20, 200, "worker")
        .into()
}

/// The instrument for UDP.
const UDP_TIER: &str = "cgroup+tp_btf";

pub(super) fn trace_connect(record: &TraceConnectRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new(
        "How long connect() searches for a source port",
        trace_connect_command_line(settings),
        &[],
    );
    document.page_heading("All searches");
    document.facts(trace_connect_filters(settings));
    document.facts(instrument(results));
    document.push(Block::Figures(trace_connect_figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    match reasons(&results.failed) {
        // Those of other sockets are in the table of failed calls; a trace with gaps denies none.
        none if none.is_empty()
            && (may_have_failed_connect(&results.calls) || has_gaps(&record.validity)) => {}
        none if none.is_empty() => document.note(Tone::Good, "no connect failed"),
        some => document.note(Tone::Bad, format!("failed: {some}")),
    }
    failed_calls(&mut document, &results.calls);
    symptoms(&mut document, &results.symptoms);
    if let Some(words) = trace_connect_flame(results) {
        document.note(Tone::Plain, words);
    }
    trace_connect_times_of(&mut document, results);
    document.histogram(
        "Searches by time",
        ["even|Even ports", "odd|Odd ports"],
        &steps(results.histogram.iter().map(|step| (step.from_ns, [step.even, step.odd]))),
    );
    if !results.samples.is_empty() {
        document.page_heading("Single searches");
        let number = count(results.samples.len() as u64);
        document
            .chart("trace-scatter", format!("A sample of {number} searches, each with the time it took."));
    }
    if !results.heat.columns.is_empty() {
        document.heading("Searches over time");
        let caption = "All searches, by the time when they ended and the time they took. The stronger the colour, the \
                       more searches, on a logarithmic scale.";
        document.push(Block::HeatMap { heat: results.heat.clone(), caption });
    }
    document.table_below("By process and destination", trace_connect_tuples(&results.tuples));
    document.advice.push(trace_connect_words(settings, results));
    document
}

/// Time of a search, in nanoseconds, from which on it is long: rule P09 of `doctor` has the same default.
const LONG_SEARCH_NS: u64 = 500_000;

/// Minimum number of searches of a process and destination for its 99th percentile to count.
const MIN_SEARCHES: u64 = 10;

/// Returns the result in plain words, with the next command.
fn trace_connect_words(settings: &TraceConnectSettings, results: &TraceConnectResults) -> String {
    let worst = results.tuples.iter().max_by_key(|tuple| tuple.no_port).filter(|tuple| tuple.no_port > 0);
    let p99_ns = results.search_ns.all.map(|times| times.p99);
    // One busy destination with short searches hides the long ones of another.
    let frequent = results.tuples.iter().filter(|tuple| tuple.searches >= MIN_SEARCHES);
    let slowest = frequent.max_by_key(|tuple| tuple.p99_ns).filter(|tuple| tuple.p99_ns >= LONG_SEARCH_NS);
    match (worst, p99_ns) {
        (Some(tuple), _) => format!(
            "connect() of {} to {} found no free port {}: `fourtuple doctor --to {}` says what has the ports, and what helps",
            process(tuple.process, tuple.processes, &tuple.name),
            tuple.destination,
            often(tuple.no_port),
            tuple.destination
        ),
        (None, Some(p99_ns)) if p99_ns >= LONG_SEARCH_NS => format!(
            "the search for a port is long (99th percentile {}): `fourtuple doctor` says why; `fourtuple fix ports` and \
             `fourtuple run` make it short",
            duration(p99_ns)
        ),
        (None, Some(_)) if let Some(tuple) = slowest => format!(
            "the search for a port of {} to {} is long (99th percentile {}): `fourtuple doctor --to {}` says why; \
             `fourtuple fix ports` and `fourtuple run` make it short",
            process(tuple.process, tuple.processes, &tuple.name),
            tuple.destination,
            duration(tuple.p99_ns),
            tuple.destination
        ),
        (None, Some(_)) => "the search for a port is short: it is not why connections are slow".to_owned(),
        (None, None) if !results.failed.is_empty() => {
            let all: u64 = results.failed.values().sum();
            let most = results.failed.iter().max_by_key(|(_, number)| **number);
            let most = most.map_or("", |(errno, _)| errno);
            format!("connect() failed {}, most with {most}, before it searched for a port", often(all))
        }
        (None, None) if results.untimed > 0 => format!(
            "no search for a port was timed: {} over IPv6 began before the trace could time them; a longer one may see more",
            plural(results.untimed, "connection")
        ),
        (None, None) if settings.for_ns.is_some() => {
            "nothing searched for a port during the trace: a longer one (`--for 1m`) may see more".to_owned()
        }
        (None, None) => "nothing searched for a port during the trace".to_owned(),
    }
}

fn often(number: u64) -> String {
    if number == 1 { "once".to_owned() } else { format!("{} times", count(number)) }
}

fn own_filters(settings: &TraceConnectSettings) -> Filters<'_> {
    Filters::new(settings.process, &settings.name, &settings.netns, &settings.cgroup, settings.for_ns)
}

fn trace_connect_filters(settings: &TraceConnectSettings) -> Vec<String> {
    let TraceConnectSettings { protocol, destination, port, tier, .. } = settings;
    let own = [
        destination.as_ref().map(|destination| format!("to {destination}")),
        port.map(|port| format!("to port {port}")),
    ];
    let all = format!("every {} connect() of this host", protocol.to_uppercase());
    let mut facts = own_filters(settings).facts(own.into_iter().flatten(), &all);
    if protocol != "tcp" && facts[0] != all {
        facts.insert(0, protocol.to_uppercase());
    }
    facts.extend((tier != "auto").then(|| format!("with tier {tier}")));
    facts
}

fn trace_connect_command_line(settings: &TraceConnectSettings) -> String {
    let TraceConnectSettings { protocol, destination, port, seed, tier, .. } = settings;
    let line =
        CommandLine::new("trace connect").maybe("--protocol", Some(protocol).filter(|name| *name != "tcp"));
    own_filters(settings)
        .add(line, |line| line.maybe("--dst", destination.as_ref()).maybe("--port", *port))
        .maybe("--tier", Some(tier).filter(|tier| *tier != "auto"))
        .set("--seed", seed)
        .finish()
}

fn instrument(results: &TraceConnectResults) -> Vec<String> {
    present([
        Some(tier(&results.tier)),
        results.tier_reason.as_ref().map(|reason| format!("not the first tier: {reason}")),
        Some(format!("for {}", duration(results.elapsed_ns))),
    ])
}

/// Returns the counts. Events that did not occur are omitted, except lost ones.
fn trace_connect_figures(results: &TraceConnectResults) -> Vec<(&'static str, String)> {
    let part = || share(results.switched as f64 / results.searches as f64);
    let switched = (results.switched > 0 && results.searches > 0)
        .then(|| format!("{} ({})", count(results.switched), part()));
    // UDP has no handshake.
    let established = (results.tier != UDP_TIER).then(|| count(results.established));
    present([
        Some(("searches that found a port", count(results.searches))),
        Some(("searches per second", rate(results.searches_per_s))),
        established.map(|number| ("connections established", number)),
        occurred("connects from a bound port (no search)", results.given_port),
        occurred("connections over IPv6 without a time", results.untimed),
        switched.map(|number| ("searches with a context switch", number)),
        Some(("lost", count(results.lost))),
    ])
}

/// Describes the samples of a flame graph; `None` without one.
fn trace_connect_flame(results: &TraceConnectResults) -> Option<String> {
    let flame = results.flame?;
    let lost = if flame.lost > 0 { format!(", {} lost", count(flame.lost)) } else { String::new() };
    let [connect, search] = [flame.in_connect, flame.in_search].map(share);
    let samples = plural(flame.samples, "sample");
    let part = format!("{connect} was in connect() and {search} in the search for a port ({samples}{lost})");
    Some(format!("Flame graph: of the time that these programs ran, {part}"))
}

fn trace_connect_times_of(document: &mut Document, results: &TraceConnectResults) {
    let search = &results.search_ns;
    let times = [
        ("search, all ports", search.all),
        ("search, even ports", search.even),
        ("search, odd ports", search.odd),
        ("search, found none", results.failed_search_ns),
        ("handshake", results.handshake_ns),
    ];
    let ends = if results.tier == UDP_TIER {
        "The search begins where the kernel runs the programs of the cgroup, and ends where the route is looked up."
    } else {
        "The search ends where the route is looked up again (IPv4) or the SYN is queued at the device (IPv6); the handshake \
         begins there."
    };
    let more = "Interrupts and context switches in between are included.";
    show(document, "|Time", &times, format!("{ends} {more}"));
}

fn trace_connect_tuples(tuples: &[TraceTuple]) -> Table {
    Table::of(tuples)
        .text("process", 0, |tuple| process(tuple.process, tuple.processes, &tuple.name))
        .text("destination", 0, |tuple| tuple.destination.clone())
        .number("searches", 0, |tuple| count(tuple.searches))
        .page("Even", |tuple| count(tuple.even))
        .page("Odd", |tuple| count(tuple.odd))
        .number("mean", 6, |tuple| duration(tuple.mean_ns))
        .number("p99", 4, |tuple| duration(tuple.p99_ns))
        .number("even p50", 2, |tuple| maybe_duration(tuple.even_p50_ns))
        .number("odd p50", 2, |tuple| maybe_duration(tuple.odd_p50_ns))
        .number("failed", 1, |tuple| Cell::bad_count(tuple.failed))
        .number("no port", 3, |tuple| Cell::bad_count(tuple.no_port))
        .page("Bound port", |tuple| count(tuple.given_port))
        .page("Established", |tuple| count(tuple.established))
        .number("retries", 7, |tuple| count(tuple.retries))
        .page("SYNs retransmitted", |tuple| count(tuple.syn_retries))
        .page("Closed first", |tuple| count(tuple.closed_first))
        .page("Closed by peer", |tuple| count(tuple.closed_by_peer))
        .number("ports in use", 5, fill)
        .limit(20, 200, "pair")
        .into()
}

/// Returns the fill as `14,900 of 15,000 (99.3%)`, or a dash.
fn fill(tuple: &TraceTuple) -> String {
    match (tuple.in_use, tuple.range, tuple.fill) {
        (Some(used), Some(range), Some(fill)) => {
            format!("{} of {} ({})", count(used.into()), count(range.into()), share(fill))
        }
        _ => "-".to_owned(),
    }
}

/// The maximum number of paths and of ports on a terminal.
const ROWS: usize = 12;

pub(super) fn trace_locks(record: &TraceLocksRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document =
        Document::new("Which TCP locks were contended", trace_locks_command_line(settings), &[]);
    document.page_heading("All waits");
    document.facts(trace_locks_facts(settings));
    document.facts(vec![tier(&results.tier), format!("for {}", duration(results.elapsed_ns))]);
    document.push(Block::Figures(trace_locks_figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    document.heading("By class");
    let is_blind = may_miss_waits(record);
    if !results.classes.is_empty() {
        document.table(trace_locks_classes(results));
    } else if is_blind {
        document.note(Tone::Plain, "no lock wait was seen");
    } else {
        document.note(Tone::Good, "no lock waits");
    }
    let remedies = results.classes.iter().map(|class| (class.class.clone(), class.remedy.clone()));
    document.list("Remedies", Tone::Plain, remedies);
    document.table_below("By call path, innermost function first", trace_locks_paths(results));
    document.table_below("Buckets of local ports", trace_locks_ports(results));
    symptoms(&mut document, &results.symptoms);
    document.list("What this host cannot show", Tone::Dim, unnamed(&results.blind_spots));
    let Some(class) = results.classes.iter().max_by_key(|class| class.wait_ns) else {
        if !is_blind {
            let words = "nothing waited for a lock of TCP: locks are not why connections are slow";
            document.advice.push(words.to_owned());
        }
        return document;
    };
    // Waits that sleep take no CPU time, and make connections as slow.
    let all_ns = results.elapsed_ns.max(1) as f64 * f64::from(record.host.cpus.max(1));
    let part = class.wait_ns as f64 / all_ns;
    let words = format!(
        "the waits for the lock class {} take the most time, {} of that of all processors",
        class.class,
        percent(part)
    );
    document.advice.push(if part < BUSY_SHARE {
        format!("{words}: nothing to change")
    } else {
        format!("{words}: {} (`fourtuple lab locks` measures the change)", class.remedy)
    });
    document
}

/// Share of the time of all processors from which on waits are worth a change: rule L01 of `doctor` has the same default.
const BUSY_SHARE: f64 = 0.05;

/// Returns whether waits for locks of TCP may have been missed.
fn may_miss_waits(record: &TraceLocksRecord) -> bool {
    let is_hidden = record.validity.iter().any(|remark| remark.id == "waits-hidden");
    // Without any wait for a spinlock it is open whether this host shows them: some virtual machines show none.
    is_hidden || record.results.lost > 0 || record.results.elsewhere_waits == 0
}

fn trace_locks_filters(settings: &TraceLocksSettings) -> Filters<'_> {
    Filters::new(settings.process, &settings.name, &settings.netns, &settings.cgroup, settings.for_ns)
}

fn trace_locks_facts(settings: &TraceLocksSettings) -> Vec<String> {
    trace_locks_filters(settings).facts([], "every TCP connection of this host")
}

fn trace_locks_command_line(settings: &TraceLocksSettings) -> String {
    trace_locks_filters(settings).add(CommandLine::new("trace locks"), |line| line).finish()
}

fn trace_locks_figures(results: &TraceLocksResults) -> Vec<(&'static str, String)> {
    let per_connection = results.waits_per_connection.map_or(NOTHING.to_owned(), few);
    let time = results.wait_ns_per_connection.map(|ns| ns.round() as u64);
    vec![
        ("connections", count(results.connections)),
        ("waits for TCP locks", count(results.waits)),
        ("time in waits", duration(results.wait_ns)),
        ("waits per connection", per_connection),
        ("time in waits per connection", maybe_duration(time)),
        ("share of all CPU time spent spinning", percent(results.cpu_share)),
        (
            "waits for other spinlocks",
            format!("{} ({})", count(results.elsewhere_waits), duration(results.elsewhere_wait_ns)),
        ),
        ("lost", count(results.lost)),
    ]
}

/// Formats a number that is usually far below one.
fn few(value: f64) -> String {
    if value > 0.0 && value < 0.1 { format!("{value:.4}") } else { quantity(value) }
}

fn percent(part: f64) -> String {
    if part > 0.0 && part < 0.0001 { "below 0.01%".to_owned() } else { share(part) }
}

fn trace_locks_classes(results: &TraceLocksResults) -> Table {
    let all = results.wait_ns.max(1) as f64;
    let time = |times: Option<Distribution>, of: fn(Distribution) -> u64| maybe_duration(times.map(of));
    Table::of(&results.classes)
        .text("class", 0, |class| class.class.clone())
        .number("waits", 0, |class| count(class.waits))
        .number("time", 0, |class| duration(class.wait_ns))
        .number("part", 1, |class| share(class.wait_ns as f64 / all))
        .number("asleep", 2, |class| count(class.sleeps))
        .page("Time asleep", |class| duration(class.sleep_ns))
        .number("locks", 5, |class| count(class.locks))
        .number("p50", 4, |class| time(class.times_ns, |times| times.p50))
        .number("p99", 3, |class| time(class.times_ns, |times| times.p99))
        .number("max", 6, |class| time(class.times_ns, |times| times.max))
        .into()
}

fn trace_locks_paths(results: &TraceLocksResults) -> Table {
    Table::of(&results.paths)
        .text("class", 0, |path| path.class.clone())
        .text("|How", 2, |path| path.kind.clone())
        .number("waits", 0, |path| count(path.waits))
        .number("time", 0, |path| duration(path.wait_ns))
        .number("max", 1, |path| duration(path.max_ns))
        .text("path", 0, call_path)
        .limit(ROWS, usize::MAX, "path")
        .into()
}

/// The maximum number of functions of a path on a terminal.
const FUNCTIONS: usize = 4;

/// Returns the functions of the path, innermost first.
fn call_path(path: &LockPath) -> Cell {
    if path.frames.is_empty() {
        return "unknown".into();
    }
    let first = &path.frames[..path.frames.len().min(FUNCTIONS)];
    Cell::from(first.join(" < ")).on_page(path.frames.join(" < "))
}

fn trace_locks_ports(results: &TraceLocksResults) -> Table {
    Table::of(&results.ports)
        .number("port", 0, |port| port.port.to_string())
        .number("waits", 0, |port| count(port.waits))
        .number("time", 0, |port| duration(port.wait_ns))
        .number("max", 1, |port| duration(port.max_ns))
        .limit(ROWS, usize::MAX, "port")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_filter_means_every_accept_of_the_host() {
        let settings = TraceAcceptSettings {
            process: None,
            name: None,
            listen: None,
            port: None,
            cgroup: None,
            netns: None,
            for_ns: None,
        };
        assert_eq!(trace_accept_facts(&settings), ["every TCP accept() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace accept");
    }

    #[test]
    fn no_filter_means_every_connect_of_the_host() {
        let settings = TraceConnectSettings {
            protocol: "tcp".into(),
            process: None,
            name: None,
            destination: None,
            port: None,
            netns: None,
            cgroup: None,
            for_ns: None,
            seed: 1,
            tier: "auto".into(),
        };
        assert_eq!(trace_connect_filters(&settings), ["every TCP connect() of this host"]);
        assert_eq!(trace_connect_command_line(&settings), "fourtuple trace connect --seed 1");
        let settings = TraceConnectSettings { tier: "fexit".into(), ..settings };
        assert_eq!(trace_connect_filters(&settings), ["every TCP connect() of this host", "with tier fexit"]);
        assert_eq!(trace_connect_command_line(&settings), "fourtuple trace connect --tier fexit --seed 1");
        let settings = TraceConnectSettings { protocol: "udp".into(), tier: "auto".into(), ..settings };
        assert_eq!(trace_connect_filters(&settings), ["every UDP connect() of this host"]);
        assert_eq!(trace_connect_command_line(&settings), "fourtuple trace connect --protocol udp --seed 1");
        let settings = TraceConnectSettings { process: Some(7), ..settings };
        assert_eq!(trace_connect_filters(&settings), ["UDP", "process 7"]);
    }

    #[test]
    fn no_filter_means_every_connection_of_the_host() {
        let settings =
            TraceLocksSettings { process: None, name: None, netns: None, cgroup: None, for_ns: None };
        assert_eq!(trace_locks_facts(&settings), ["every TCP connection of this host"]);
        assert_eq!(trace_locks_command_line(&settings), "fourtuple trace locks");
    }

    #[test]
    fn small_numbers_keep_their_digits() {
        assert_eq!([few(0.0), few(0.00444), few(1.5)], ["0.00", "0.0044", "1.50"]);
        assert_eq!([percent(0.0), percent(0.00001), percent(0.25)], ["0%", "below 0.01%", "25%"]);
    }
}
