//! The tables of the view, from a snapshot.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use fourtuple_observe::doctor::Budget;
use fourtuple_record::snapshot::{Connections, Owner, Snapshot, Tuple, UnixListener};
use fourtuple_record::{Finding, Severity};
use fourtuple_report::duration;

use crate::watch::time_to_exhaustion;

/// Minimum change per second of a figure that is not steady.
const MIN_RATE: f64 = 0.05;

/// A table of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Panel {
    Findings,
    Tuples,
    Listeners,
    Workers,
    TimeWait,
}

/// A column: title, width (0: the rest), and whether its cells are numbers.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: u16,
    pub(super) is_number: bool,
    /// The column is left out of a narrow table.
    pub(super) is_extra: bool,
}

const fn text(title: &'static str, width: u16) -> Column {
    Column { title, width, is_number: false, is_extra: false }
}

/// Returns a column of numbers of up to `width` characters, with space for its title and the mark of the sort.
const fn number(title: &'static str, width: u16) -> Column {
    let titled = title.len() as u16 + 1;
    Column { title, width: if width > titled { width } else { titled }, is_number: true, is_extra: false }
}

const fn extra(title: &'static str, width: u16) -> Column {
    Column { is_extra: true, ..number(title, width) }
}

/// A cell: its text, and the number by which a numeric column is sorted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) text: String,
    number: f64,
}

impl Cell {
    fn text(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), number: 0.0 }
    }

    fn count(number: u64) -> Cell {
        Cell { text: indicatif::HumanCount(number).to_string(), number: number as f64 }
    }

    fn rate(number: f64) -> Cell {
        let text = if number.abs() < MIN_RATE { "-".to_owned() } else { format!("{number:.1}") };
        Cell { text, number }
    }

    /// Returns a count with an arrow in the direction of its change.
    fn trend(number: u64, change: f64) -> Cell {
        let arrow = match change {
            up if up >= MIN_RATE => "↑",
            down if down <= -MIN_RATE => "↓",
            _ => "",
        };
        let count = Cell::count(number);
        Cell { text: format!("{arrow}{}", count.text), ..count }
    }

    fn percent(share: f64) -> Cell {
        Cell { text: format!("{:.0}%", share * 100.0), number: share }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) cells: Vec<Cell>,
    /// The severity of a finding.
    pub(super) severity: Option<Severity>,
}

impl From<Vec<Cell>> for Row {
    fn from(cells: Vec<Cell>) -> Row {
        Row { cells, severity: None }
    }
}

impl Panel {
    pub(super) const ALL: [Panel; 5] =
        [Panel::Findings, Panel::Tuples, Panel::Listeners, Panel::Workers, Panel::TimeWait];

    pub(super) fn title(self) -> &'static str {
        match self {
            Panel::Findings => "findings",
            Panel::Tuples => "ports by source and destination",
            Panel::Listeners => "accept queues",
            Panel::Workers => "connections by worker",
            Panel::TimeWait => "TIME_WAIT by the side that closed first",
        }
    }

    pub(super) fn columns(self) -> &'static [Column] {
        const FINDINGS: &[Column] = &[text("rule", 4), text("severity", 8), text("finding", 0)];
        const TUPLES: &[Column] = &[
            text("source → destination", 0),
            number("in use", 7),
            extra("share", 5),
            number("TIME_WAIT", 9),
            extra("growth/s", 8),
            number("left", 7),
            text("process", 16),
        ];
        const LISTENERS: &[Column] = &[
            text("listener", 0),
            number("queued", 6),
            number("backlog", 7),
            number("handshakes", 10),
            number("drops", 7),
            text("process", 16),
        ];
        const WORKERS: &[Column] =
            &[text("port or path", 20), text("worker", 0), number("connections", 11), number("share", 5)];
        const TIME_WAIT: &[Column] =
            &[text("closed first", 0), number("sockets", 9), number("closes/s", 9), text("process", 16)];
        match self {
            Panel::Findings => FINDINGS,
            Panel::Tuples => TUPLES,
            Panel::Listeners => LISTENERS,
            Panel::Workers => WORKERS,
            Panel::TimeWait => TIME_WAIT,
        }
    }

    /// Returns the column and the direction of the first sort; the findings come in the order of their severity.
    pub(super) fn first_sort(self) -> Option<usize> {
        match self {
            Panel::Findings => None,
            Panel::Tuples | Panel::Listeners | Panel::TimeWait => Some(1),
            Panel::Workers => Some(2),
        }
    }

    /// Returns the rows, or the reason why the snapshot has none.
    pub(super) fn rows(self, snapshot: &Snapshot, findings: &[Finding]) -> Result<Vec<Row>, String> {
        match self {
            Panel::Findings => Ok(findings.iter().map(finding).collect()),
            Panel::Tuples => {
                let tuples = snapshot.connections.seen()?.tuples.iter();
                tuples.map(|one| Ok(tuple(one, &Budget::of(snapshot, one)?))).collect()
            }
            Panel::Listeners => {
                let tcp = snapshot.listeners.seen()?.iter().map(listener);
                Ok(tcp.chain(unix(snapshot).iter().map(unix_listener)).collect())
            }
            Panel::Workers => Ok(workers(snapshot.connections.seen()?, unix(snapshot))),
            Panel::TimeWait => Ok(time_wait(snapshot.connections.seen()?)),
        }
    }
}

/// Sorts rows by a column: numbers descending, texts ascending, the other way round if `reversed`.
pub(super) fn sort(rows: &mut [Row], panel: Panel, column: usize, reversed: bool) {
    let is_number = panel.columns().get(column).is_some_and(|column| column.is_number);
    rows.sort_by(|one, other| {
        let (one, other) = (&one.cells[column], &other.cells[column]);
        let order = if is_number {
            other.number.partial_cmp(&one.number).unwrap_or(Ordering::Equal)
        } else {
            one.text.cmp(&other.text)
        };
        if reversed { order.reverse() } else { order }
    });
}

fn process(owner: Option<&Owner>) -> Cell {
    Cell::text(owner.map_or_else(|| "-".to_owned(), Owner::to_string))
}

fn finding(finding: &Finding) -> Row {
    let severity = format!("{:?}", finding.severity).to_lowercase();
    let cells = vec![Cell::text(&finding.id), Cell::text(severity), Cell::text(&finding.verdict)];
    Row { cells, severity: Some(finding.severity) }
}

fn tuple(tuple: &Tuple, budget: &Budget) -> Row {
    let left = time_to_exhaustion(tuple, budget);
    let left = Cell {
        text: left.map_or_else(|| "-".to_owned(), |left| duration((left * 1e9) as u64)),
        // A tuple that never runs out comes last.
        number: left.map_or(f64::NEG_INFINITY, |left| -left),
    };
    Row::from(vec![
        Cell::text(tuple.to_string()),
        Cell::trend(tuple.in_use.into(), tuple.growth_per_s),
        Cell::percent(f64::from(budget.taken()) / f64::from(budget.total.max(1))),
        Cell::count(tuple.states.get("time-wait").copied().unwrap_or(0)),
        Cell::rate(tuple.growth_per_s),
        left,
        process(tuple.owners.first()),
    ])
}

fn queued(waiting: u32, before: u32) -> Cell {
    Cell::trend(waiting.into(), f64::from(waiting) - f64::from(before))
}

fn listener(listener: &fourtuple_record::snapshot::Listener) -> Row {
    Row::from(vec![
        Cell::text(listener.address.to_string()),
        queued(listener.waiting, listener.waiting_before),
        Cell::count(listener.backlog.into()),
        Cell::count(listener.handshakes.into()),
        listener.drops.map_or_else(|| Cell::text("-"), |drops| Cell::count(drops.total)),
        process(listener.owners.first()),
    ])
}

fn unix_listener(listener: &UnixListener) -> Row {
    Row::from(vec![
        Cell::text(&listener.path),
        queued(listener.waiting, listener.waiting_before),
        Cell::count(listener.backlog.into()),
        Cell::text("-"),
        Cell::text("-"),
        process(listener.owners.first()),
    ])
}

fn unix(snapshot: &Snapshot) -> &[UnixListener] {
    snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default()
}

fn workers(connections: &Connections, unix: &[UnixListener]) -> Vec<Row> {
    let tcp = connections.services.iter().map(|service| (service.port.to_string(), &service.workers));
    let unix = unix.iter().map(|listener| (listener.path.clone(), &listener.workers));
    let of_listener = |(place, workers): (String, &Vec<Owner>)| -> Vec<Row> {
        let all: u32 = workers.iter().map(|worker| worker.sockets).sum();
        let row = |worker: &Owner| {
            Row::from(vec![
                Cell::text(&place),
                process(Some(worker)),
                Cell::count(worker.sockets.into()),
                Cell::percent(f64::from(worker.sockets) / f64::from(all.max(1))),
            ])
        };
        workers.iter().map(row).collect()
    };
    tcp.chain(unix).flat_map(of_listener).collect()
}

/// TIME_WAIT sockets have no process: the process that holds most of the connections of the tuple or port stands for it.
fn time_wait(connections: &Connections) -> Vec<Row> {
    let row = |name: String, states: &BTreeMap<String, u64>, closes_per_s: f64, owner: Option<&Owner>| {
        let sockets = states.get("time-wait").copied().unwrap_or(0);
        let cells = vec![Cell::text(name), Cell::count(sockets), Cell::rate(closes_per_s), process(owner)];
        (sockets > 0).then(|| Row::from(cells))
    };
    let tuples = connections
        .tuples
        .iter()
        .filter_map(|tuple| row(tuple.to_string(), &tuple.states, tuple.closes_per_s, tuple.owners.first()));
    let services = connections.services.iter().filter_map(|service| {
        let name = format!("server at port {}", service.port);
        row(name, &service.states, service.closes_per_s, service.workers.first())
    });
    tuples.chain(services).collect()
}
