use fourtuple_record::{FixAcceptListener, FixAcceptRecord, FixAcceptResults, FixAcceptSettings};

use crate::document::{Block, Document, Tone};
use crate::number::{NOTHING, count, duration, maybe, rate, share};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, typed, word};

/// The maximum number of listeners on a terminal.
const ROWS: usize = 24;

pub(super) fn document(record: &FixAcceptRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let title = if settings.dry_run { "What the kernel's hash chose" } else { "What fix accept chose" };
    let mut document = Document::new(title, command_line(settings), &[]);
    document.page_heading("All groups");
    document.facts(facts(settings, results));
    document.push(Block::Figures(figures(settings, results)));
    if results.listeners.is_empty() {
        document.note(Tone::Plain, "no listeners");
    } else {
        document.heading("By listener");
        document.table(listeners(results));
    }
    if results.listeners_left_out > 0 {
        document.note(Tone::Dim, format!("{} not listed", plural(results.listeners_left_out, "listener")));
    }
    document
}

fn facts(settings: &FixAcceptSettings, results: &FixAcceptResults) -> Vec<String> {
    let mut facts = Vec::new();
    facts.extend(settings.listen.as_ref().map(|address| format!("sockets at {address}")));
    facts.extend(settings.pid.map(|process| format!("sockets of process {process} and its descendants")));
    facts.push(if settings.dry_run {
        "nothing changed".to_owned()
    } else {
        format!("selector {}", settings.select)
    });
    facts.extend(settings.control.as_ref().map(|control| format!("control packets {control}")));
    facts.push(plural(results.groups, "group"));
    facts.push(format!("attached for {}", duration(results.elapsed_ns)));
    facts
}

fn command_line(settings: &FixAcceptSettings) -> String {
    CommandLine::new("fix accept")
        .maybe("--listen", settings.listen.as_ref().map(|address| word(address)))
        .maybe("--pid", settings.pid)
        .set("--select", word(&settings.select))
        .maybe("--control", settings.control.as_ref().map(|control| word(control)))
        .maybe("--for", settings.for_ns.map(typed))
        .flag("--dry-run", settings.dry_run)
        .finish()
}

/// Events that did not occur are omitted.
fn figures(settings: &FixAcceptSettings, results: &FixAcceptResults) -> Vec<(&'static str, String)> {
    let mut figures = Vec::new();
    if !settings.dry_run {
        figures.push(("connections or datagrams chosen for", count(results.choices)));
        figures.push(("choices per second", rate(results.choices_per_s)));
    }
    figures.push(("TCP connections", count(results.connections)));
    let events = [
        ("packets left to the hash without a heartbeat", results.lapsed),
        ("packets left to the hash by closed listeners", results.strays),
        ("listeners that joined", results.joined),
        ("listeners that were closed", results.closed),
        ("events that the counters missed", results.missed),
    ];
    figures.extend(
        events.into_iter().filter(|(_, number)| *number > 0).map(|(name, number)| (name, count(number))),
    );
    figures
}

fn listeners(results: &FixAcceptResults) -> Table {
    let most = results.listeners.iter().map(|listener| bar(results, listener)).max().unwrap_or(0);
    Table::of(&results.listeners)
        .text("address", 1, |listener| format!("{} {}", listener.transport, listener.address))
        .text("process", 0, |listener| format!("{} {}", listener.process, listener.command))
        .number("cookie", 4, |listener| listener.cookie.to_string())
        .number("chosen|Chosen for", 0, |listener| count(listener.choices))
        .number("connections", 2, |listener| count(listener.connections))
        .number("share", 0, |listener| maybe(listener.share, share))
        .text("distribution", 3, |listener| Cell::bar(bar(results, listener), most))
        .number("open", 1, |listener| count(listener.open))
        .number("queue", 1, |listener| {
            listener.queue.map_or_else(|| format!("{NOTHING} closed"), |queue| count(queue.into()))
        })
        .limit(ROWS, usize::MAX, "listener")
        .into()
}

/// Returns the number that the bar of a listener shows. In a dry run nothing was chosen.
fn bar(results: &FixAcceptResults, listener: &FixAcceptListener) -> u64 {
    if results.choices > 0 { listener.choices } else { listener.connections }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_repeats_the_settings() {
        let settings = FixAcceptSettings {
            listen: Some("[::1]:53".into()),
            pid: None,
            select: "flow:0:4".into(),
            control: Some("ttl=255".into()),
            for_ns: Some(2_000_000_000),
            dry_run: true,
        };
        assert_eq!(
            command_line(&settings),
            "fourtuple fix accept --listen '[::1]:53' --select flow:0:4 --control ttl=255 --for 2s --dry-run"
        );
    }
}
