use fourtuple_record::{ServeRecord, ServeResults, ServeSettings, ServeWorker};

use crate::document::{Block, Document, Tone};
use crate::table::{Cell, Table, numbered};
use crate::words::{
    CommandLine, count, duration, index, plural, present, quantity, rate, reasons, total, typed, word,
};

pub(super) fn document(record: &ServeRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::new("What each worker of the server did", command_line(settings), &[]);
    document.page_heading("All workers");
    document.facts(facts(settings));
    document.facts(vec![
        results.listen.clone(),
        results.protocol.clone(),
        policy(&results.policy).to_owned(),
        format!("served for {}", duration(results.elapsed_ns)),
    ]);
    document.push(Block::Figures(figures(results)));
    document.page_heading("Each worker");
    document.table(
        Table::of(&numbered(&results.workers))
            .text("worker", 0, |(number, _)| number.to_string())
            .number("accepted", 1, |(_, worker)| count(worker.accepted))
            .number("requests", 0, |(_, worker)| count(worker.requests))
            .number("received|Bytes received", 4, |(_, worker)| count(worker.received_bytes))
            .number("sent|Bytes sent", 3, |(_, worker)| count(worker.sent_bytes))
            .text("errors", 2, |(_, worker)| Cell::toned(reasons(&worker.errors), Tone::Bad)),
    );
    document
}

/// Names the mechanism that distributes connections to the workers.
fn policy(name: &str) -> &str {
    match name {
        "reuseport" => "a socket per worker (SO_REUSEPORT)",
        "exclusive" => "one listener (EPOLLEXCLUSIVE)",
        "plain" => "one listener (epoll, wakes all workers)",
        "blocking" => "one listener (accept())",
        "shared-oneshot" => "one epoll for listener and connections (EPOLLONESHOT)",
        "uring-oneshot" => "one listener (io_uring, one-shot accept)",
        "reuseport-least-busy" => "a socket per worker (SO_REUSEPORT, BPF chooses the least busy)",
        "dispatcher" => "a dispatcher (SCM_RIGHTS to an idle worker)",
        rotate if rotate.split(':').next() == Some("rotate") => "one listener (EPOLLEXCLUSIVE, re-added)",
        other => other,
    }
}

fn facts(settings: &ServeSettings) -> Vec<String> {
    let answers = if settings.protocol == "http" { "bodies" } else { "responses" };
    // UDP has neither a close nor an accept queue.
    let stream = settings.protocol != "udp";
    let closing = || match (settings.close.as_str(), settings.close_every) {
        ("client", _) => "the client closes".to_owned(),
        (how, Some(every)) => {
            let how = if how == "rst" { " with RST" } else { "" };
            format!("the server closes after {}{how}", plural(every, "response"))
        }
        (how, None) => format!("closing: {how}"),
    };
    let how = if settings.spin { "spinning" } else { "sleeping" };
    let stall = settings.stall_at_ns.zip(settings.stall_length_ns);
    present([
        Some(plural(settings.workers.into(), "worker")),
        settings.policy.as_ref().map(|policy| format!("policy {policy}")),
        settings.request_bytes.map(|bytes| format!("requests of {}", plural(bytes, "byte"))),
        settings.response_bytes.map(|bytes| format!("{answers} of {}", plural(bytes, "byte"))),
        stream.then(closing),
        (settings.service != "0s").then(|| format!("service time {}, {how}", settings.service)),
        stall.map(|(at, length)| format!("a stall of {} after {}", duration(length), duration(at))),
        stream.then(|| format!("backlog {}", count(settings.backlog.into()))),
        settings.defer_accept.then(|| "TCP_DEFER_ACCEPT".to_owned()),
        settings.pin.then(|| "pinned".to_owned()),
    ])
}

fn command_line(settings: &ServeSettings) -> String {
    let stall = settings.stall_at_ns.zip(settings.stall_length_ns);
    CommandLine::new("serve")
        .words(&settings.protocol)
        .set("--listen", word(&settings.listen))
        .maybe("--policy", settings.policy.as_ref())
        .set("--workers", settings.workers)
        .maybe("--request", settings.request_bytes)
        .maybe(if settings.protocol == "http" { "--body" } else { "--response" }, settings.response_bytes)
        .set("--close", &settings.close)
        .maybe("--close-every", settings.close_every)
        .set("--service", &settings.service)
        .flag("--spin", settings.spin)
        .maybe("--idle", settings.idle_ns.map(typed))
        .maybe("--stall", stall.map(|(at, length)| format!("{}:{}", typed(at), typed(length))))
        .set("--backlog", settings.backlog)
        .flag("--pin", settings.pin)
        .maybe("--for", settings.for_ns.map(typed))
        .set("--seed", settings.seed)
        .finish()
}

/// Returns the totals of all workers; without balance if there was no work.
fn figures(results: &ServeResults) -> Vec<(&'static str, String)> {
    let sum = |field: fn(&ServeWorker) -> &u64| count(total(results.workers.iter().map(field)));
    let balance = results.jain.zip(results.max_over_mean);
    present([
        Some(("connections accepted", sum(|worker| &worker.accepted))),
        Some(("requests", sum(|worker| &worker.requests))),
        Some(("requests per second", rate(results.requests_per_s))),
        balance.map(|(jain, _)| ("Jain's index of the workers (1 is even)", index(Some(jain)))),
        balance.map(|(_, most)| ("busiest worker over the mean", format!("{}x", quantity(most)))),
    ])
}
