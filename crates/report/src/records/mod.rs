//! Turns each record into a document: one file per record, and files with shared parts.

mod accept;
mod compare;
mod doctor;
mod fix;
mod fleet;
mod forward;
mod lab_locks;
mod load;
mod plan;
mod planes;
mod ports;
mod serve;
mod time_wait;
mod trace;

use fourtuple_record::{Host, LabRecord, Saved};

use crate::document::Document;
use crate::records::accept::Lab;
use crate::words::{CommandLine, plural};

/// Returns the document of any record.
pub(crate) fn document(saved: &Saved) -> Document {
    match saved {
        Saved::Lab(record) => lab(record),
        Saved::Ports(record) => ports::document(record),
        Saved::TimeWait(record) => time_wait::document(record),
        Saved::LabAccept(record) => accept::document(Lab::Accept, record),
        Saved::LabKeepalive(record) => accept::document(Lab::Keepalive, record),
        Saved::LabLocks(record) => lab_locks::document(record),
        Saved::LabPlanes(record) => planes::document(record),
        Saved::Plan(record) => plan::document(record),
        Saved::Compare(record) => compare::document(record),
        Saved::Load(record) => load::document(record),
        Saved::Serve(record) => serve::document(record),
        Saved::Forward(record) => forward::document(record),
        Saved::GuardStatus(record) => fix::guard_status(record),
        Saved::Doctor(record) => doctor::document(record),
        Saved::FixAccept(record) => fix::fix_accept(record),
        Saved::FixPorts(record) => fix::fix_ports(record),
        Saved::Run(record) => fix::run(record),
        Saved::Fleet(record) => fleet::document(record),
        Saved::TraceConnect(record) => trace::trace_connect(record),
        Saved::TraceAccept(record) => trace::trace_accept(record),
        Saved::TraceLocks(record) => trace::trace_locks(record),
    }
}

/// Formats `kernel 6.18.5`, `2 CPUs`, `kvm`.
pub(crate) fn host_facts(host: &Host) -> Vec<String> {
    let machine = match host.virtualization.as_str() {
        "" => "virtualization unknown",
        "none" => "bare metal",
        other => other,
    };
    vec![format!("kernel {}", host.kernel), plural(host.cpus.into(), "CPU"), machine.to_owned()]
}

fn lab(record: &LabRecord) -> Document {
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
