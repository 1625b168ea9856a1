//! The table of workloads.
//!
//! Names, parsing, help texts and checks derive from a workload's row.

use std::mem;

use crate::target::Scheme;
use crate::workload::{HttpRequest, Workload};

/// The properties of one workload.
struct Row {
    /// The name on the command line and in records.
    name: &'static str,
    /// The workload with its default sizes.
    workload: Workload,
    /// The text of the help, if the name does not suffice.
    description: &'static str,
    /// The targets that it goes with.
    schemes: &'static [Scheme],
    /// Whether a connection stays open for further requests by default.
    keeps: bool,
}

static TABLE: [Row; 5] = [
    Row {
        name: "connect",
        workload: Workload::Connect,
        description: "open, close",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
    Row {
        name: "crr",
        workload: Workload::Crr { request: 1, response: 1 },
        description: "connect, request, response, close",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
    Row {
        name: "http",
        workload: Workload::Http(HttpRequest::EMPTY),
        description: "",
        schemes: &[Scheme::Http, Scheme::Https, Scheme::Unix],
        keeps: true,
    },
    Row {
        name: "udp",
        workload: Workload::Udp { request: 1 },
        description: "",
        schemes: &[Scheme::Udp],
        keeps: true,
    },
    // The workload connect, beside connections that the run keeps open: the name in records of such a run.
    Row {
        name: Workload::HOLD,
        workload: Workload::Connect,
        description: "keep --hold connections, open and close further connections",
        schemes: &[Scheme::Tcp, Scheme::Unix],
        keeps: false,
    },
];

impl Workload {
    /// The name of the workload connect in a run that keeps connections open.
    pub const HOLD: &str = "hold";

    /// Returns all names, in the order of the table.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.name)
    }

    /// Returns the workload with this name and its default sizes.
    pub fn named(name: &str) -> Option<Workload> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.workload.clone())
    }

    /// Returns the names of the workloads with this property: `crr and udp`.
    pub fn names_of(has: impl Fn(&Workload) -> bool) -> Vec<&'static str> {
        TABLE.iter().filter(|row| has(&row.workload)).map(|row| row.name).collect()
    }

    /// Returns the names with their descriptions, for a help text.
    pub fn descriptions() -> String {
        let words = |row: &Row| match row.description {
            "" => row.name.to_owned(),
            text => format!("{} ({text})", row.name),
        };
        TABLE.iter().map(words).collect::<Vec<_>>().join(", ")
    }

    fn row(&self) -> &'static Row {
        let is_same = |row: &&Row| mem::discriminant(&row.workload) == mem::discriminant(self);
        TABLE.iter().find(is_same).expect("every workload has a row")
    }

    /// The name on the command line.
    pub fn name(&self) -> &'static str {
        self.row().name
    }

    /// Whether a connection stays open for further requests by default.
    pub fn keeps_connections(&self) -> bool {
        self.row().keeps
    }

    /// Returns the targets that the workload goes with.
    pub fn schemes(&self) -> &'static [Scheme] {
        self.row().schemes
    }

    /// Returns the targets that each workload needs: `udp needs udp://`.
    pub(crate) fn needs() -> String {
        let needs = |row: &Row| {
            let schemes: Vec<_> = row.schemes.iter().map(|scheme| scheme.prefix()).collect();
            format!("{} needs {}", row.name, schemes.join(" or "))
        };
        TABLE.iter().map(needs).collect::<Vec<_>>().join(", ")
    }
}
