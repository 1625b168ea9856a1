use fourtuple_record::{
    TraceAcceptRecord, TraceAcceptResults, TraceAcceptSettings, TraceListener, TraceUnixListener, TraceWorker,
};

use crate::document::{Block, Document, Medium, Tone};
use crate::number::{NOTHING, count, duration, quantity, rate};
use crate::records::times::{self, steps};
use crate::records::trace::{Filters, failed_calls, occurred, process, tier};
use crate::table::{Cell, Table, more};
use crate::words::{CommandLine, index, plural, present, unnamed};

/// The maximum number of workers whose calls failed that are named.
const FAILING: usize = 4;
/// The maximum number of listeners on the terminal and on the page.
const LISTENERS: (usize, usize) = (10, 100);

pub(super) fn document(record: &TraceAcceptRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("How long connections wait for accept()", command_line(settings), &[]);
    document.page_heading("All listeners");
    document.facts(facts(settings));
    document.facts(vec![tier(&results.tier), format!("traced for {}", duration(results.elapsed_ns))]);
    document.push(Block::Figures(figures(results)));
    document.items(Tone::Plain, unnamed(&results.notes));
    let is_by_acceptor = settings.process.is_some() || settings.name.is_some() || settings.cgroup.is_some();
    match results.overflows {
        // The other listeners are not known to belong to the chosen threads.
        0 if has_refused(results) => {}
        0 if is_by_acceptor => document.note(Tone::Good, "no queue of a listener with accepts overflowed"),
        0 => document.note(Tone::Good, "no queue overflowed"),
        some => document.note(Tone::Bad, format!("dropped at full queues: {}", count(some))),
    }
    unix_listeners(&mut document, record);
    failed_calls(&mut document, &results.calls);
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

fn facts(settings: &TraceAcceptSettings) -> Vec<String> {
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

fn has_refused(results: &TraceAcceptResults) -> bool {
    results.unix_listeners.seen().is_ok_and(|rows| rows.iter().any(|row| row.refused > Some(0)))
}

/// Shows the queues of unix listeners, of which only readings are known.
fn unix_listeners(document: &mut Document, record: &TraceAcceptRecord) {
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
        [only] => format!("{} {}", only.pid, only.name),
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
    times::show(
        document,
        "|Time",
        &times,
        "The wait begins when the connection is established and ends when accept() or io_uring returns it. The handshake is \
         the kernel's own time from the SYN-ACK to its ACK.",
    );
}

fn one_listener(document: &mut Document, listener: &TraceListener) {
    document.heading(title(listener));
    document.facts(of_listener(listener));
    if listener.overflows > 0 {
        let (packets, acks) = (plural(listener.overflows, "packet"), count(listener.overflow_acks));
        let why = "accept() is too slow, or the backlog too short";
        let line = format!("{packets} dropped because the queue was full ({acks} of them final ACKs): {why}");
        document.note(Tone::Bad, line);
    }
    for worker in listener.workers.iter().filter(|worker| worker.failed > 0).take(FAILING) {
        let error = worker.error.as_deref().unwrap_or_default();
        let explained = if error == "EMFILE" { "; `fourtuple explain F01`" } else { "" };
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
        document.table(workers(&listener.workers));
    }
}

/// Returns the address, with details that distinguish listeners at the same address.
fn title(listener: &TraceListener) -> String {
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
    let jain = || format!("Jain's index of the workers {}", index(listener.jain));
    present([
        Some(format!("{} accepted of {} queued", count(listener.accepts), count(listener.queued))),
        Some(match listener.queued {
            0 => format!("queue depth {max}, backlog {backlog}"),
            _ => format!("queue depth {} on average, {max} at most, backlog {backlog}", quantity(depth.mean)),
        }),
        some(depth.full, "times full"),
        some(listener.other_accepts, "accepted by threads outside the filters"),
        some(listener.retried_handshakes, "handshakes with a retransmitted SYN-ACK"),
        some(
            listener.other_drops,
            match listener.ignored {
                Some(_) => "packets dropped for other reasons",
                None => "packets dropped for other reasons or ignored",
            },
        ),
        some(
            listener.ignored.unwrap_or(0),
            "packets ignored (sent again, or before data with TCP_DEFER_ACCEPT)",
        ),
        some(listener.never_accepted, "closed before they were accepted"),
        some(listener.closed_first, "closed by the workers first (TIME_WAIT here)"),
        some(listener.closed_by_peer, "closed by the peer first"),
        some(listener.reset, "reset"),
        (listener.workers.len() > 1).then(jain),
    ])
}

fn workers(workers: &[TraceWorker]) -> Table {
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
        assert_eq!(facts(&settings), ["every TCP accept() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace accept");
    }
}
