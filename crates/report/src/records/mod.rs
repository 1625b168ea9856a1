//! Turns each record into a document: one file per record, and files with shared parts.

mod accept;
mod accept_timeline;
mod compare;
mod doctor;
mod fix_accept;
mod fix_ports;
mod fleet;
mod forward;
mod lab;
mod lab_locks;
mod load;
mod load_hosts;
mod plan;
mod planes;
mod ports;
mod run;
mod serve;
mod strategies;
mod time_wait;
mod times;
mod trace;
mod trace_accept;
mod trace_connect;
mod trace_locks;

use fourtuple_record::{Host, Saved};

use crate::document::Document;
use crate::words::plural;
use accept::Lab;

/// Returns the document of any record.
pub(crate) fn document(saved: &Saved) -> Document {
    match saved {
        Saved::Lab(record) => lab::document(record),
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
        Saved::Doctor(record) => doctor::document(record),
        Saved::FixAccept(record) => fix_accept::document(record),
        Saved::FixPorts(record) => fix_ports::document(record),
        Saved::Run(record) => run::document(record),
        Saved::Fleet(record) => fleet::document(record),
        Saved::TraceConnect(record) => trace_connect::document(record),
        Saved::TraceAccept(record) => trace_accept::document(record),
        Saved::TraceLocks(record) => trace_locks::document(record),
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
