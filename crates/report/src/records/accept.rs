use std::collections::BTreeSet;

use fourtuple_record::{
    AcceptCell, AcceptRecord, AcceptResults, AcceptSettings, BreakEven, SkippedCell, Span, Timeline as Seen,
    Waiter,
};

use crate::document::{Block, Document, Strip, StripKind, Timeline, TimelineRow, Tone, Workers};
use crate::table::{Cell, Column, Table};
use crate::words::{
    CommandLine, NOTHING, count, duration, errors, every, factor, grouped, index, interval, list, maybe,
    plural, present, quantity, quoted, share, typed,
};

/// The two labs that share this record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lab {
    /// `lab accept`: cells differ in their load, and count accepts.
    Accept,
    /// `lab keepalive`: cells differ in how often connections are closed, and count requests.
    Keepalive,
}

impl Lab {
    pub(super) fn question(self) -> &'static str {
        match self {
            Lab::Accept => "Which worker gets the connection",
            Lab::Keepalive => "How long requests wait on kept-alive connections",
        }
    }

    /// Returns the counts per worker that the lab compares, and their unit.
    fn counts(self, cell: &AcceptCell) -> (&[u64], &'static str) {
        match self {
            Lab::Accept => (&cell.accepts, "accepts"),
            Lab::Keepalive => (&cell.requests, "requests"),
        }
    }

    /// Returns the share of each worker, 0 to 1; empty if all counts are 0.
    fn shares(self, cell: &AcceptCell) -> Vec<f64> {
        let (counts, _) = self.counts(cell);
        let sum: f64 = counts.iter().map(|count| *count as f64).sum();
        if sum > 0.0 { counts.iter().map(|count| *count as f64 / sum).collect() } else { Vec::new() }
    }

    fn workers(self, cell: &AcceptCell, most: f64) -> Workers {
        let (counts, unit) = self.counts(cell);
        Workers {
            name: label(cell).to_owned(),
            unit,
            counts: counts.to_vec(),
            shares: self.shares(cell),
            most,
            note: format!("Jain {}", index(cell.jain)),
        }
    }
}

pub(super) fn document(lab: Lab, record: &AcceptRecord) -> Document {
    let mut document =
        Document::new(lab.question(), command_line(lab, &record.settings), &record.results.advice);
    body(&mut document, lab, &record.settings, &record.results);
    document
}

/// Adds the experiment to its own document or to the document of `lab`.
pub(super) fn body(document: &mut Document, lab: Lab, settings: &AcceptSettings, results: &AcceptResults) {
    document.facts(facts(settings));
    let groups = groups(lab, results);
    if groups.is_empty() {
        document.push(Block::Nothing);
    }
    if let Some(found) = &results.break_even {
        document.verdict(&break_even(found), String::new());
    }
    for group in &groups {
        document.heading(group.title.clone());
        let most = group.cells.iter().flat_map(|cell| lab.shares(cell)).fold(0.0, f64::max);
        match lab {
            Lab::Accept => {
                document.page(|document| ladder(document, group, most));
                document.table(accepts(group, most));
            }
            Lab::Keepalive => {
                if group.cells.iter().any(|cell| cell.operations > 0) {
                    chart(document, group);
                }
                document.table(waits(group, most));
                document.terminal(|document| document.table(work(group, most)));
            }
        }
    }
    if !groups.is_empty() {
        explain(document, lab);
    }
    if let Some(seen) = &results.timeline {
        document.heading("A request that waits while a worker is idle");
        timeline(document, seen);
    }
    let failed = results.cells.iter().filter(|cell| !cell.errors.is_empty());
    document.list("Errors", Tone::Bad, failed.map(|cell| (cell_name(cell), errors(&cell.errors))));
    document.list("Not run", Tone::Plain, skipped(&results.skipped));
}

fn explain(document: &mut Document, lab: Lab) {
    let own = match lab {
        Lab::Accept => {
            "Wakeups: how often a worker was woken for the listener; empty: accept4 calls that found no connection in the \
             queue, both per connection accepted. Sockets: open in each worker at the end."
        }
        Lab::Keepalive => {
            "Every: the number of requests after which a connection is closed. Wait: latency less the service time. Misplaced \
             wait: the part of the wait in which some worker was idle, the mean over all requests; a central queue has none. \
             Probe: one more client, which sends short requests only."
        }
    };
    document.note(
        Tone::Dim,
        format!(
            "Jain's index is 1 when the distribution is even, and 1/n when one of n workers has all. {own}"
        ),
    );
}

/// A group of cells that are compared with each other.
struct Group<'a> {
    /// Title: `unix, light load`.
    title: String,
    cells: Vec<&'a AcceptCell>,
}

/// Groups the cells by family and load, for `lab accept` also by `close_every`, in the order of the record.
fn groups(lab: Lab, results: &AcceptResults) -> Vec<Group<'_>> {
    let differ =
        |of: fn(&AcceptCell) -> u64| results.cells.iter().any(|cell| of(cell) != of(&results.cells[0]));
    let closings = lab == Lab::Accept && differ(|cell| cell.close_every);
    let key =
        |cell: &AcceptCell| (cell.family.clone(), cell.load.clone(), closings.then_some(cell.close_every));
    let title = |cell: &AcceptCell| {
        let load = match (lab, cell.load.as_str()) {
            (Lab::Accept, load) => format!("{load} load"),
            (Lab::Keepalive, "spin") => "workers that compute".to_owned(),
            (Lab::Keepalive, "sleep") => "workers that sleep".to_owned(),
            (Lab::Keepalive, other) => other.to_owned(),
        };
        let clients = differ(|cell| cell.clients.into()).then(|| plural(cell.clients.into(), "client"));
        let every = closings.then(|| format!("close every {}", close_every(cell.close_every)));
        present([Some(cell.family.clone()), Some(load), clients, every]).join(", ")
    };
    let groups = grouped(&results.cells, key).into_iter();
    groups.map(|cells| Group { title: title(cells[0]), cells }).collect()
}

/// Returns the policy, or the name of the external server.
fn label(cell: &AcceptCell) -> &str {
    cell.server.as_deref().unwrap_or(&cell.policy)
}

/// Formats `never`, `5`.
fn close_every(requests: u64) -> String {
    if requests == 0 { "never".to_owned() } else { count(requests) }
}

/// Returns the name of a cell in the list of errors.
fn cell_name(cell: &AcceptCell) -> String {
    format!("{}, {}, {}, close every {}", label(cell), cell.family, cell.load, close_every(cell.close_every))
}

fn ladder(document: &mut Document, group: &Group<'_>, most: f64) {
    let items = group.cells.iter().map(|cell| Lab::Accept.workers(cell, most)).collect();
    let caption = format!(
        "Share of the connections that each worker accepted, worker 0 on the left; the highest bar is {}. Dotted: an even \
         distribution.",
        share(most)
    );
    document.push(Block::Ladder { items, caption });
}

/// Jain's index above which no ladder is visible.
const EVEN: f64 = 0.97;
/// Jain's index below which the first workers have most of the work.
const LADDER: f64 = 0.75;

fn jain(cell: &AcceptCell) -> Cell {
    let tone = match cell.jain {
        Some(jain) if jain >= EVEN => Tone::Good,
        Some(jain) if jain < LADDER => Tone::Bad,
        _ => Tone::Plain,
    };
    Cell::toned(index(cell.jain), tone)
}

/// Formats `12 12 12 12`; a dash when the counts are not known.
fn each(counts: &[u64]) -> String {
    if counts.is_empty() {
        return NOTHING.to_owned();
    }
    counts.iter().map(|number| count(*number)).collect::<Vec<_>>().join(" ")
}

fn accepts(group: &Group<'_>, most: f64) -> Table {
    Table::of(&group.cells)
        .name("policy", |cell| label(cell).to_owned())
        .terminal(Column::text("share each", 1), |cell| Cell::workers(Lab::Accept.workers(cell, most)))
        .number("Jain", 0, |cell| jain(cell))
        .number("max/mean", 2, |cell| factor(cell.max_over_mean))
        .number("wakeups/accept|Wakeups per accept", 3, |cell| maybe(cell.wakeups_per_accept, quantity))
        .number("empty/accept|Empty accepts per accept", 4, |cell| {
            maybe(cell.empty_accepts_per_accept, quantity)
        })
        .text("open sockets each", 5, |cell| each(&cell.sockets))
        .text("accepts each", 6, |cell| each(&cell.accepts))
        .page("Wait p99", |cell| duration(cell.wait_ns.p99))
        .page("CPU per request", |cell| duration(cell.cpu_ns_per_request))
        .into()
}

/// Adds the chart of waits against `close_every`, drawn by accept.js.
fn chart(document: &mut Document, group: &Group<'_>) {
    let cell = group.cells[0];
    document.chart_of(
        "accept-wait",
        vec![("family", cell.family.clone()), ("load", cell.load.clone())],
        "Wait of the requests, a line for each policy: latency less the service time. Whiskers: 95% interval of p99.9 over \
         the repeats. A name in the legend shows or hides its line."
            .to_owned(),
    );
}

fn waits(group: &Group<'_>, most: f64) -> Table {
    Table::of(&group.cells)
        .name("policy", |cell| label(cell).to_owned())
        .number("every|Close every", 0, |cell| close_every(cell.close_every))
        .number("p50|Wait p50", 6, |cell| duration(cell.wait_ns.p50))
        .number("p99", 2, |cell| duration(cell.wait_ns.p99))
        .number("p99.9", 0, |cell| {
            Cell::from(duration(cell.wait_ns.p999)).note(interval(
                cell.wait_ns.p999_low,
                cell.wait_ns.p999_high,
                " to ",
            ))
        })
        .terminal(Column::number("(95%)", 5), |cell| {
            Cell::toned(interval(cell.wait_ns.p999_low, cell.wait_ns.p999_high, ".."), Tone::Dim)
        })
        .number("slow/10k|Slow per 10,000", 1, |cell| quantity(cell.slow_per_10k))
        .number("misplaced|Misplaced wait", 3, |cell| duration(cell.misplaced_wait_ns))
        .page("CPU per request", |cell| duration(cell.cpu_ns_per_request))
        .page("Jain", |cell| jain(cell))
        .page("Max/mean", |cell| factor(cell.max_over_mean))
        .page("Requests each", |cell| Cell::workers(Lab::Keepalive.workers(cell, most)))
        .page("Probe slow per 10,000", |cell| maybe(cell.probe, |probe| quantity(probe.slow_per_10k)))
        .page("Probe p99.9", |cell| maybe(cell.probe, |probe| duration(probe.wait_ns.p999)))
        .into()
}

/// Returns the columns of the page's table of waits that do not fit beside the waits on a terminal.
fn work(group: &Group<'_>, most: f64) -> Table {
    Table::of(&group.cells)
        .name("policy", |cell| label(cell).to_owned())
        .number("every", 0, |cell| close_every(cell.close_every))
        .text("share", 2, |cell| Cell::workers(Lab::Keepalive.workers(cell, most)))
        .number("Jain", 0, |cell| jain(cell))
        .number("max/mean", 5, |cell| factor(cell.max_over_mean))
        .number("CPU/req", 1, |cell| duration(cell.cpu_ns_per_request))
        .number("probe slow/10k", 4, |cell| maybe(cell.probe, |probe| quantity(probe.slow_per_10k)))
        .into()
}

/// Returns the combinations that were not run and why, one line for all cells of a policy with the same reason.
fn skipped(cells: &[SkippedCell]) -> Vec<(String, String)> {
    let alike = grouped(cells, |cell| (cell.policy.clone(), cell.why.clone()));
    let all: BTreeSet<u64> = cells.iter().map(|cell| cell.close_every).collect();
    let line = |group: &Vec<&SkippedCell>| {
        let families: BTreeSet<&str> = group.iter().map(|cell| cell.family.as_str()).collect();
        let closings: BTreeSet<u64> = group.iter().map(|cell| cell.close_every).collect();
        let mut name = format!("{} over {}", group[0].policy, Vec::from_iter(families).join(" and "));
        // A policy that is impossible with every `close_every` needs no list of them.
        if closings.len() < all.len() {
            let closings: Vec<String> = closings.into_iter().map(close_every).collect();
            name += &format!(", close every {}", closings.join(", "));
        }
        (name, group[0].why.clone())
    };
    alike.iter().map(line).collect()
}

/// Returns one sentence on whether closing pays.
fn break_even(found: &BreakEven) -> String {
    let (cost, wait) = (duration(found.fresh_connection_ns), duration(found.misplaced_wait_ns));
    let pays = if found.closes { "closing" } else { "keeping" };
    format!(
        "A fresh connection costs {cost}; with connections kept, a request waits {wait} on average while some worker is \
         idle: {pays} them pays."
    )
}

/// Returns the settings that all cells share: `8 workers`, `24 clients`, ...
fn facts(settings: &AcceptSettings) -> Vec<String> {
    let how = if settings.service == "spin" { "spinning" } else { "sleeping" };
    let short = duration(settings.short_ns);
    let service = match settings.long_share {
        share_ if share_ > 0.0 => {
            format!("{short}, {} of them {}", share(share_), duration(settings.long_ns))
        }
        _ => short,
    };
    let [light, heavy] = ["light", "heavy"].map(|load| settings.load.iter().any(|name| name == load));
    let run = duration(settings.for_ns);
    present([
        (settings.workers > 0).then(|| plural(settings.workers.into(), "worker")),
        Some(plural(settings.clients.into(), "client")),
        Some(format!("service time {service}, {how}")),
        (settings.pause_ns > 0).then(|| format!("pauses of {}", duration(settings.pause_ns))),
        Some(format!("slow: waited over {}", duration(settings.slow_ns))),
        light.then(|| format!("{} a run of light load", plural(settings.connections, "connection"))),
        heavy.then(|| format!("{run} a run of heavy load")),
        (!light && !heavy).then(|| format!("{run} a run")),
        (settings.repeats > 1).then(|| format!("{} runs of each cell", count(settings.repeats.into()))),
        Some(format!("backlog {}", count(settings.backlog.into()))),
        (settings.pause_ns > 0 || settings.long_share > 0.0).then(|| format!("seed {}", settings.seed)),
        settings.server.as_ref().map(|server| format!("server: {server}")),
    ])
}

fn command_line(lab: Lab, settings: &AcceptSettings) -> String {
    let short = typed(settings.short_ns);
    let line = match lab {
        Lab::Accept => CommandLine::new("lab accept")
            .set("--load", list(&settings.load))
            .set("--connections", settings.connections)
            .set("--work", short),
        Lab::Keepalive => {
            let closings: Vec<String> = settings.close_every.iter().copied().map(every).collect();
            CommandLine::new("lab keepalive")
                .set("--close-every", list(&closings))
                .set("--short", short)
                .set("--long", typed(settings.long_ns))
                .set("--long-share", format_args!("{}%", settings.long_share * 100.0))
                .set("--pause", typed(settings.pause_ns))
        }
    };
    let line = line.flag("--service spin", settings.service == "spin");
    let line = match &settings.server {
        Some(server) => line.set("--server", quoted(server)),
        None => line.set("--policy", list(&settings.policies)).set("--family", list(&settings.families)),
    };
    // 0: the number of an external server's workers was not given.
    line.maybe("--workers", Some(settings.workers).filter(|workers| *workers > 0))
        .set("--clients", settings.clients)
        .set("--slow", typed(settings.slow_ns))
        .set("--for", typed(settings.for_ns))
        .set("--repeats", settings.repeats)
        .maybe("--seed", (lab == Lab::Keepalive).then_some(settings.seed))
        .finish()
}

/// An interval of time, counted from the start of the run.
type Interval = (u64, u64);

/// Adds the sentence and the picture.
pub(super) fn timeline(document: &mut Document, seen: &Seen) {
    let waiting = &seen.waiting;
    let idle = idle(seen);
    document.note(Tone::Plain, sentence(seen, &idle));
    let mut rows = Vec::new();
    for (number, spans) in seen.workers.iter().enumerate() {
        if number == waiting.worker as usize {
            let wait = (waiting.sent_ns, waiting.begun_ns);
            let served = (waiting.begun_ns, waiting.ended_ns);
            let strips = vec![strip(StripKind::Waits, wait), strip(StripKind::Served, served)];
            rows.push(TimelineRow { name: "request".to_owned(), tone: Tone::Bad, strips });
        }
        let idles = number == waiting.idle_worker as usize;
        let gaps = idle.iter().filter(|_| idles).map(|gap| strip(StripKind::Gap, *gap));
        rows.push(TimelineRow {
            name: format!("worker {number}"),
            tone: if idles { Tone::Good } else { Tone::Plain },
            strips: gaps.chain(spans.iter().map(busy)).collect(),
        });
    }
    let caption = format!(
        "Between the dotted lines the request waits. The picture begins {} after the start of the run.",
        duration(seen.from_ns)
    );
    let marks = [waiting.sent_ns, waiting.begun_ns];
    let (from_ns, to_ns) = (seen.from_ns, seen.to_ns);
    document.push(Block::Timeline(Timeline { from_ns, to_ns, marks, rows, caption }));
}

fn strip(kind: StripKind, (from_ns, to_ns): Interval) -> Strip {
    let what = if kind == StripKind::Gap { "idle while the request waits" } else { kind.look().2 };
    let hint = format!("{what}, {}", duration(to_ns.saturating_sub(from_ns)));
    Strip { kind, from_ns, to_ns, hint }
}

fn busy(span: &Span) -> Strip {
    let hint = format!(
        "busy for {} with a request that had waited {}",
        duration(span.to_ns.saturating_sub(span.from_ns)),
        duration(span.waited_ns)
    );
    Strip { kind: StripKind::Busy, from_ns: span.from_ns, to_ns: span.to_ns, hint }
}

/// Returns the parts of the wait in which the idle worker had no request.
fn idle(seen: &Seen) -> Vec<Interval> {
    let (mut at, end) = (seen.waiting.sent_ns, seen.waiting.begun_ns);
    let mut idle = Vec::new();
    for span in seen.workers.get(seen.waiting.idle_worker as usize).into_iter().flatten() {
        if span.from_ns > at && at < end {
            idle.push((at, span.from_ns.min(end)));
        }
        at = at.max(span.to_ns);
    }
    if at < end {
        idle.push((at, end));
    }
    idle
}

/// Describes the timeline in one sentence.
fn sentence(seen: &Seen, idle: &[Interval]) -> String {
    let waiting = &seen.waiting;
    let idle = idle.iter().fold(0_u64, |sum, (from, to)| sum.saturating_add(to.saturating_sub(*from)));
    let during = |span: &&Span| span.to_ns > waiting.sent_ns && span.from_ns < waiting.begun_ns;
    let before =
        seen.workers.get(waiting.worker as usize).map_or(0, |spans| spans.iter().filter(during).count());
    let closing = match seen.close_every {
        0 => "never closed".to_owned(),
        1 => "closed after every request".to_owned(),
        requests => format!("closed after {}", plural(requests, "request")),
    };
    let Seen { policy, family, .. } = seen;
    let Waiter { worker, idle_worker, .. } = waiting;
    let waited = duration(waiting.begun_ns.saturating_sub(waiting.sent_ns));
    let (others, idle) = (plural(before as u64, "other"), duration(idle));
    format!(
        "{policy} over {family}, connections {closing}: a request waited {waited} behind {others} of worker {worker}, while \
         worker {idle_worker} was idle for {idle} of that time."
    )
}
