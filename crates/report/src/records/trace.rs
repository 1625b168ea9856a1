//! Parts that the three traces share.

use crate::number::{count, duration};
use crate::words::{CommandLine, quoted, typed};

/// The filters that every trace has.
pub(super) struct Filters<'a> {
    process: Option<u32>,
    name: Option<&'a str>,
    cgroup: Option<&'a str>,
    for_ns: Option<u64>,
}

impl<'a> Filters<'a> {
    pub(super) fn new(
        process: Option<u32>,
        name: &'a Option<String>,
        cgroup: &'a Option<String>,
        for_ns: Option<u64>,
    ) -> Filters<'a> {
        Filters { process, name: name.as_deref(), cgroup: cgroup.as_deref(), for_ns }
    }

    /// Returns the filters as text, including the trace's `own`; `all` without filters.
    pub(super) fn facts(&self, own: impl IntoIterator<Item = String>, all: &str) -> Vec<String> {
        let mut facts = Vec::new();
        facts.extend(self.process.map(|process| format!("process {process}")));
        facts.extend(self.name.map(|name| format!("threads called {name}")));
        facts.extend(own);
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
