//! Parts that the three traces share.

use fourtuple_record::snapshot::{FailedCall, Failures, Part};

use crate::document::{Document, Tone};
use crate::number::{count, duration};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, quoted, typed, unnamed, word};

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

/// Names the instrument: `tier tp_btf (stable tracepoints, by BTF)`.
pub(super) fn tier(name: &str) -> String {
    let what = match name {
        "tp_btf" => "stable tracepoints, by BTF",
        "fexit" => "beginning and return of __inet_hash_connect",
        "cgroup+tp_btf" => "programs of the root cgroup, and stable tracepoints by BTF",
        other => return format!("tier {other}"),
    };
    format!("tier {name} ({what})")
}

/// Returns the figure of an event, if it occurred.
pub(super) fn occurred(name: &'static str, number: u64) -> Option<(&'static str, String)> {
    (number > 0).then(|| (name, count(number)))
}

/// The maximum number of causes that are listed.
const CAUSES: usize = 12;

/// Shows the account of calls that failed, and what their errnos mean.
pub(super) fn failed_calls(document: &mut Document, calls: &Part<Failures>) {
    let calls = match calls.seen() {
        Ok(failures) => &failures.calls,
        Err(reason) => {
            return document.note(Tone::Dim, format!("calls that failed are not counted: {reason}"));
        }
    };
    if calls.is_empty() {
        return;
    }
    document.table_below("Failed calls", table(calls));
    let mut causes = Vec::new();
    for call in calls {
        for cause in &call.causes {
            let line = format!("{}() {}: {cause}", call.call, call.errno);
            if !causes.contains(&line) {
                causes.push(line);
            }
        }
    }
    causes.truncate(CAUSES);
    document.items(Tone::Plain, unnamed(&causes));
}

/// Returns `812 nginx`, or `300 processes curl`.
pub(super) fn process(process: u32, processes: u32, name: &str) -> String {
    match processes {
        0 | 1 => format!("{process} {name}"),
        several => format!("{} {name}", plural(several.into(), "process")),
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
        .text("address", 0, |call| call.address.clone().unwrap_or_else(|| "-".to_owned()))
        .text("errno", 0, |call| call.errno.clone())
        .text("before the search", 2, move |call| before(call).to_owned())
        .number("calls", 0, |call| Cell::bad_count(call.failed))
        .limit(20, 200, "row")
        .into()
}
