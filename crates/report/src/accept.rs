//! What labs of accepting found, in the words that the terminal and the page share.

use std::collections::BTreeSet;

use fourtuple_record::{AcceptCell, AcceptResults, AcceptSettings, BreakEven, SkippedCell, Timeline, WaitNs};

use crate::envelope::{plural, quoted, typed};
use crate::number::{NOTHING, count, duration, share};

/// The two labs, which have one kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lab {
    /// Who gets a connection: cells differ in their load, what counts is accepts.
    Accept,
    /// Who waits when connections are kept: cells differ in when they close, what counts is requests.
    Keepalive,
}

impl Lab {
    /// What the lab divides among the workers.
    pub(crate) fn counts(self, cell: &AcceptCell) -> &[u64] {
        match self {
            Lab::Accept => &cell.accepts,
            Lab::Keepalive => &cell.requests,
        }
    }

    /// Each worker's share, 0 to 1; none when there was nothing to divide.
    pub(crate) fn shares(self, cell: &AcceptCell) -> Vec<f64> {
        let counts = self.counts(cell);
        let sum: f64 = counts.iter().map(|count| *count as f64).sum();
        if sum > 0.0 { counts.iter().map(|count| *count as f64 / sum).collect() } else { Vec::new() }
    }

    pub(crate) fn question(self) -> &'static str {
        match self {
            Lab::Accept => "Which worker gets the connection",
            Lab::Keepalive => "What a kept connection costs the request that waits",
        }
    }
}

/// Cells that are compared with each other.
pub(crate) struct Group<'a> {
    pub(crate) family: &'a str,
    pub(crate) load: &'a str,
    /// `unix, light load`.
    pub(crate) title: String,
    pub(crate) cells: Vec<&'a AcceptCell>,
}

/// The cells by family and load, of `lab accept` also by closing, each group in the order of the record.
pub(crate) fn groups(lab: Lab, results: &AcceptResults) -> Vec<Group<'_>> {
    let first = results.cells.first().map(|cell| cell.close_every);
    let closings = lab == Lab::Accept && results.cells.iter().any(|cell| Some(cell.close_every) != first);
    let mut groups: Vec<Group<'_>> = Vec::new();
    for cell in &results.cells {
        let same = |group: &&mut Group<'_>| {
            let every = group.cells.first().map(|first| first.close_every);
            group.family == cell.family
                && group.load == cell.load
                && (!closings || every == Some(cell.close_every))
        };
        if let Some(group) = groups.iter_mut().find(same) {
            group.cells.push(cell);
            continue;
        }
        let mut title = match lab {
            Lab::Accept => format!("{}, {} load", cell.family, cell.load),
            Lab::Keepalive if cell.load == "spin" => format!("{}, workers that compute", cell.family),
            Lab::Keepalive if cell.load == "sleep" => format!("{}, workers that sleep", cell.family),
            Lab::Keepalive => format!("{}, {}", cell.family, cell.load),
        };
        if results.cells.iter().any(|other| other.clients != cell.clients) {
            title += &format!(", {}", plural(cell.clients.into(), "client"));
        }
        if closings {
            title += &format!(", close every {}", close_every(cell.close_every));
        }
        groups.push(Group { family: &cell.family, load: &cell.load, title, cells: vec![cell] });
    }
    groups
}

/// The policy, or the name of the other server.
pub(crate) fn label(cell: &AcceptCell) -> &str {
    cell.server.as_deref().unwrap_or(&cell.policy)
}

/// `never`, `5`.
pub(crate) fn close_every(requests: u64) -> String {
    if requests == 0 { "never".to_owned() } else { count(requests) }
}

/// What becomes of connections, in words.
fn closing(requests: u64) -> String {
    match requests {
        0 => "never closed".to_owned(),
        1 => "closed after every request".to_owned(),
        _ => format!("closed after {}", plural(requests, "request")),
    }
}

/// Three decimals, as [`crate::serve`] has it.
pub(crate) fn index(jain: Option<f64>) -> String {
    jain.filter(|jain| jain.is_finite()).map_or_else(|| NOTHING.to_owned(), |jain| format!("{jain:.3}"))
}

/// Two decimals of a figure per something.
pub(crate) fn per(value: Option<f64>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), crate::number::quantity)
}

/// `17.0ms to 20.0ms`; empty without an interval.
pub(crate) fn interval(wait: &WaitNs) -> String {
    match (wait.p999_low, wait.p999_high) {
        (Some(low), Some(high)) => format!("{} to {}", duration(low), duration(high)),
        _ => String::new(),
    }
}

/// `12 12 12 12`; a dash when nobody knows.
pub(crate) fn row_of(counts: &[u64]) -> String {
    if counts.is_empty() {
        return NOTHING.to_owned();
    }
    counts.iter().map(|number| count(*number)).collect::<Vec<_>>().join(" ")
}

/// `12 ECONNRESET, 3 timeout`; empty without errors.
pub(crate) fn errors(cell: &AcceptCell) -> String {
    let words: Vec<String> =
        cell.errors.iter().map(|(name, number)| format!("{} {name}", count(*number))).collect();
    words.join(", ")
}

/// Where a cell stands, for its errors.
pub(crate) fn place(cell: &AcceptCell) -> String {
    format!("{}, {}, {}, close every {}", label(cell), cell.family, cell.load, close_every(cell.close_every))
}

/// What was not run and why, one line for all cells of a policy with the same reason.
pub(crate) fn skipped(cells: &[SkippedCell]) -> Vec<(String, String)> {
    let mut alike: Vec<Vec<&SkippedCell>> = Vec::new();
    for cell in cells {
        let same = |group: &&mut Vec<&SkippedCell>| {
            group.first().is_some_and(|first| (&first.policy, &first.why) == (&cell.policy, &cell.why))
        };
        match alike.iter_mut().find(same) {
            Some(group) => group.push(cell),
            None => alike.push(vec![cell]),
        }
    }
    let all: BTreeSet<u64> = cells.iter().map(|cell| cell.close_every).collect();
    let line = |group: &Vec<&SkippedCell>| {
        let families: BTreeSet<&str> = group.iter().map(|cell| cell.family.as_str()).collect();
        let closings: BTreeSet<u64> = group.iter().map(|cell| cell.close_every).collect();
        let mut name = format!("{} over {}", group[0].policy, Vec::from_iter(families).join(" and "));
        // What was skipped however it closes needs no list.
        if closings.len() < all.len() {
            name += &format!(
                ", close every {}",
                Vec::from_iter(closings.into_iter().map(close_every)).join(", ")
            );
        }
        (name, group[0].why.clone())
    };
    alike.iter().map(line).collect()
}

/// Whether closing pays, in a sentence.
pub(crate) fn break_even(found: &BreakEven) -> String {
    format!(
        "A fresh connection costs {}; with connections kept, a request waits {} on average while some worker is idle: {}.",
        duration(found.fresh_connection_ns),
        duration(found.misplaced_wait_ns),
        if found.closes { "closing them pays" } else { "keeping them pays" },
    )
}

/// Between two times since the start of the run.
pub(crate) type Stretch = (u64, u64);

/// The pieces of the wait in which the idle worker of a timeline did nothing.
pub(crate) fn idle(timeline: &Timeline) -> Vec<Stretch> {
    let (mut at, end) = (timeline.waiting.sent_ns, timeline.waiting.begun_ns);
    let mut idle = Vec::new();
    for span in timeline.workers.get(timeline.waiting.idle_worker as usize).into_iter().flatten() {
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

/// What one sees in a timeline.
pub(crate) fn sight(timeline: &Timeline) -> String {
    let waiting = &timeline.waiting;
    let idle =
        idle(timeline).iter().fold(0_u64, |sum, (from, to)| sum.saturating_add(to.saturating_sub(*from)));
    let before = timeline.workers.get(waiting.worker as usize).map_or(0, |spans| {
        let during =
            |span: &&fourtuple_record::Span| span.to_ns > waiting.sent_ns && span.from_ns < waiting.begun_ns;
        spans.iter().filter(during).count() as u64
    });
    format!(
        "{} over {}, connections {}: a request waited {} behind {} of worker {}, while worker {} was idle for {} of that \
         time.",
        timeline.policy,
        timeline.family,
        closing(timeline.close_every),
        duration(waiting.begun_ns.saturating_sub(waiting.sent_ns)),
        plural(before, "other"),
        waiting.worker,
        waiting.idle_worker,
        duration(idle),
    )
}

/// What every cell has in common: `8 workers`, `24 clients`, ...
pub(crate) fn details(settings: &AcceptSettings) -> Vec<String> {
    let how = if settings.service == "spin" { "spinning" } else { "sleeping" };
    let mut words = Vec::new();
    if settings.workers > 0 {
        words.push(plural(settings.workers.into(), "worker"));
    }
    words.push(plural(settings.clients.into(), "client"));
    words.push(format!("service time {}, {how}", service(settings)));
    if settings.pause_ns > 0 {
        words.push(format!("pauses of {}", duration(settings.pause_ns)));
    }
    words.push(format!("slow: waited over {}", duration(settings.slow_ns)));
    let has = |load: &str| settings.load.iter().any(|name| name == load);
    if has("light") {
        words.push(format!("{} a run of light load", plural(settings.connections, "connection")));
    }
    if has("heavy") {
        words.push(format!("{} a run of heavy load", duration(settings.for_ns)));
    } else if !has("light") {
        words.push(format!("{} a run", duration(settings.for_ns)));
    }
    if settings.repeats > 1 {
        words.push(format!("{} runs of each cell", count(settings.repeats.into())));
    }
    words.push(format!("backlog {}", count(settings.backlog.into())));
    words.push(format!("seed {}", settings.seed));
    words.extend(settings.server.as_ref().map(|server| format!("server: {server}")));
    words
}

/// `100us`, or `100us, 5% of them 10.0ms`.
fn service(settings: &AcceptSettings) -> String {
    let short = duration(settings.short_ns);
    if settings.long_share > 0.0 {
        format!("{short}, {} of them {}", share(settings.long_share), duration(settings.long_ns))
    } else {
        short
    }
}

/// The command line that asks for the same again.
pub(crate) fn command_line(lab: Lab, settings: &AcceptSettings) -> String {
    let AcceptSettings {
        workers,
        clients,
        connections,
        families,
        policies,
        close_every,
        load,
        service,
        short_ns,
        long_ns,
        long_share,
        pause_ns,
        slow_ns,
        for_ns,
        repeats,
        // Not asked for: the same for every cell.
        backlog: _,
        seed,
        server,
    } = settings;
    let closings: Vec<String> = close_every
        .iter()
        .map(|every| if *every == 0 { "never".to_owned() } else { every.to_string() })
        .collect();
    let own = match lab {
        Lab::Accept => {
            format!(
                "accept --load {} --connections {connections} --work {}",
                load.join(","),
                typed(*short_ns)
            )
        }
        Lab::Keepalive => format!(
            "keepalive --close-every {} --short {} --long {} --long-share {}% --pause {}",
            closings.join(","),
            typed(*short_ns),
            typed(*long_ns),
            long_share * 100.0,
            typed(*pause_ns),
        ),
    };
    let whom = match server {
        Some(server) => format!("--server {}", quoted(server)),
        None => {
            format!("--policy {} --family {}", policies.join(","), families.join(","))
        }
    };
    // 0: nobody said how many.
    let pool = if *workers > 0 { format!(" --workers {workers}") } else { String::new() };
    format!(
        "fourtuple lab {own}{} {whom}{pool} --clients {clients} --slow {} --for {} --repeats {repeats} --seed {seed}",
        if service == "spin" { " --service spin" } else { "" },
        typed(*slow_ns),
        typed(*for_ns),
    )
}
