//! A lock trace, on the terminal and as a page.

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use fourtuple_record::Saved;
use fourtuple_report::html::page;
use fourtuple_report::terminal::render;
use samples::trace_locks as record;

const WORDS: [&str; 10] = [
    "54,554",
    "0.0229",
    "2 events of 54,554 were lost: no room for their stack",
    "3.46us",
    "below 0.01%",
    "a listener for each worker",
    "__lock_sock",
    "inet_csk_accept",
    "unknown",
    "paravirtual",
];

#[test]
fn the_terminal_shows_classes_paths_and_ports() {
    let text = render(&Saved::TraceLocks(record()), 120, false);
    for expected in WORDS.into_iter().chain(["and 28 ports more"]) {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
}

#[test]
fn the_page_shows_classes_paths_and_ports() {
    let page = page(&[Saved::TraceLocks(record())]);
    for expected in WORDS.into_iter().chain(["9039", "fourtuple trace locks --pid 7 --comm"]) {
        assert!(page.contains(expected), "{expected} is missing");
    }
    assert!(!page.contains("</script>paravirtual"));
}

#[test]
fn a_trace_without_waits_is_stated() {
    let mut record = record();
    record.results.classes.clear();
    record.results.paths.clear();
    record.results.ports.clear();
    record.results.waits_per_connection = None;
    assert!(render(&Saved::TraceLocks(record), 120, false).contains("no lock waits"));
}
