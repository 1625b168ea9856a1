use fourtuple_record::{Advice, DoctorRecord, DoctorSettings, Finding, Severity};

use crate::document::{Document, Tone};
use crate::words::{CommandLine, plural};

pub(super) fn document(record: &DoctorRecord) -> Document {
    let results = &record.results;
    let mut document =
        Document::untitled("What is wrong with the connections", command_line(&record.settings), &[]);
    for finding in &results.findings {
        show(&mut document, finding);
    }
    if results.findings.is_empty() {
        document.note(
            Tone::Good,
            format!("No finding: {} checked", plural(results.checked.len() as u64, "rule")),
        );
    }
    let unchecked = results.unchecked.iter();
    document.list(
        "Not checked",
        Tone::Dim,
        unchecked.map(|rule| (format!("{} {}", rule.id, rule.title), rule.reason.clone())),
    );
    document
}

fn command_line(settings: &DoctorSettings) -> String {
    CommandLine::new("doctor").maybe("--pid", settings.pid).finish()
}

fn show(document: &mut Document, finding: &Finding) {
    let tone = if finding.severity == Severity::Critical { Tone::Bad } else { Tone::Strong };
    document.note(tone, format!("{}  {}", finding.id, finding.verdict));
    for fact in &finding.evidence {
        document.note(Tone::Dim, fact);
    }
    let item = |advice: &Advice| (advice.action.clone(), advice.effect.clone());
    document.list("Do now", Tone::Plain, finding.now.iter().map(item));
    document.list("Do properly", Tone::Plain, finding.proper.iter().map(item));
}
