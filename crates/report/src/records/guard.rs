use fourtuple_record::{GuardEvent, GuardRecord, GuardResults, GuardState, GuardTotals};

use crate::document::{Document, Tone};
use crate::number::{count, duration, maybe_duration};
use crate::table::{Cell, Table};
use crate::words::{CommandLine, plural, present, word};

/// The maximum number of fixes on a terminal.
const ROWS: usize = 20;
/// The maximum number of events on a terminal.
const EVENTS: usize = 8;

pub(super) fn document(record: &GuardRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let line = CommandLine::new("guard status").set("--socket", word(&settings.socket)).finish();
    let mut document = Document::new("What the guard does", line, &[]);
    document.facts(facts(results));
    if results.fixes.is_empty() {
        document.note(Tone::Plain, "no fix is attached");
    } else {
        document.page_heading("Fixes");
        document.table(fixes(results));
    }
    document.note(Tone::Plain, totals(&results.totals));
    let last = results.events.len().saturating_sub(EVENTS);
    document.terminal(|document| {
        document.list("Last events", Tone::Plain, results.events[last..].iter().map(event))
    });
    document.page(|document| document.list("Last events", Tone::Plain, results.events.iter().map(event)));
    document
}

/// `active`, `policy /etc/fourtuple/guard.toml`, `every 5.00s`, `3 network namespaces`, `for 2h50m`.
fn facts(results: &GuardResults) -> Vec<String> {
    let state = match (results.state, results.paused_for_ns) {
        (GuardState::Paused, Some(time)) => format!("paused for another {}", duration(time)),
        (GuardState::Paused, None) => "paused until `fourtuple guard resume`".to_owned(),
        (state, _) => state.to_string(),
    };
    let policy = match &results.policy {
        Some(path) => format!("policy {path}"),
        None => "no policy, changes nothing".to_owned(),
    };
    present([
        Some(state),
        Some(policy),
        Some(format!("reads every {}", duration(results.every_ns))),
        (results.namespaces > 1).then(|| plural(results.namespaces, "network namespace")),
        Some(format!("has run for {}", duration(results.uptime_ns))),
    ])
}

fn fixes(results: &GuardResults) -> Table {
    Table::of(&results.fixes)
        .text("fix", 0, |fix| fix.action.name().trim_start_matches("fix-"))
        .text("target", 0, |fix| Cell::from(fix.target.clone()).note(fix.reason.clone()))
        .text("to|Destination", 4, |fix| fix.to.clone().unwrap_or_default())
        .number("pid|Process", 6, |fix| fix.pid.map_or_else(String::new, |pid| pid.to_string()))
        .text("source", 5, |fix| fix.source.clone().unwrap_or_default())
        .number("for|Attached for", 1, |fix| duration(fix.since_ns))
        .text("effect", 1, |fix| fix.effect.name())
        .number("connects", 2, |fix| count(fix.connects))
        .number("drawn", 3, |fix| count(fix.drawn))
        .number("fallbacks", 4, |fix| Cell::bad_count(fix.fallbacks))
        .number("saved", 4, |fix| maybe_duration(fix.saved_ns))
        .limit(ROWS, usize::MAX, "fix")
        .into()
}

fn totals(totals: &GuardTotals) -> String {
    let saved = match totals.saved_ns {
        0 => String::new(),
        saved => format!(", an estimated {} saved", duration(saved)),
    };
    format!(
        "Since the start: {} attached, {} released, {} refused, {} reported; {} during fixes, {} drawn and {} left to the kernel{saved}.",
        plural(totals.attached, "fix"),
        count(totals.released),
        count(totals.refused),
        plural(totals.notified, "finding"),
        plural(totals.connects, "connect"),
        count(totals.drawn),
        count(totals.fallbacks),
    )
}

/// Returns an event with its time of day as name.
fn event(event: &GuardEvent) -> (String, String) {
    // 2026-03-01T12:00:00Z
    let time = event.at.get(11..19).unwrap_or(&event.at);
    (time.to_owned(), event.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_agree_with_their_numbers() {
        let one = GuardTotals { attached: 1, notified: 1, connects: 1, drawn: 1, ..GuardTotals::default() };
        assert_eq!(
            totals(&one),
            "Since the start: 1 fix attached, 0 released, 0 refused, 1 finding reported; 1 connect during fixes, 1 drawn and 0 left to \
             the kernel."
        );
        assert!(
            totals(&GuardTotals { saved_ns: 1_500_000_000, ..one }).ends_with("an estimated 1.50s saved.")
        );
    }
}
