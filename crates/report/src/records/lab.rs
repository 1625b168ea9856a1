use fourtuple_record::LabRecord;

use crate::document::Document;
use crate::records::accept::{self, Lab};
use crate::records::{ports, time_wait};
use crate::words::CommandLine;

pub(super) fn document(record: &LabRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    // The only setting of a `lab` without a subcommand is the seed.
    let line = CommandLine::new("lab").set("--seed", settings.ports.seed).finish();
    let mut document = Document::untitled(
        "What connect() costs on this kernel, how long the ports last, and which worker gets the connection",
        line,
        &[],
    );
    document.part = "ports";
    document.terminal(|document| document.heading(ports::TITLE));
    ports::body(&mut document, &settings.ports, &results.ports);
    document.part = "time_wait";
    document.terminal(|document| document.heading(time_wait::TITLE));
    time_wait::body(&mut document, &settings.time_wait, &results.time_wait);
    document.advice = [results.ports.advice.as_slice(), &results.time_wait.advice].concat();
    if let (Some(settings), Some(results)) = (&settings.accept, &results.accept) {
        document.part = "accept";
        document.heading(Lab::Accept.question());
        accept::body(&mut document, Lab::Accept, settings, results);
        document.advice.extend_from_slice(&results.advice);
    }
    document
}
