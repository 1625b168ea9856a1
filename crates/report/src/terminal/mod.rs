//! A record as text for a terminal, a log or a mail.

mod accept;
mod compare;
mod forward;
mod heat;
mod lab_locks;
mod load;
mod plan;
mod planes;
mod ports;
mod serve;
mod sheet;
mod spark;
mod table;
mod time_wait;
mod trace;
mod trace_accept;
mod trace_locks;

use fourtuple_record::{Saved, TraceHeat};

use crate::accept::Lab;
use crate::envelope::{envelope, host_words};
use sheet::{Sheet, Tone};

/// The record as lines of at most `width` columns (20 at least), with ANSI colours when `color` is true.
///
/// Remarks on validity come first. When a table does not fit, its less important columns are left out and named below
/// it; no line is ever longer than `width`. Control characters of the record are replaced, so that a record from
/// elsewhere cannot steer the terminal.
pub fn render(saved: &Saved, width: usize, color: bool) -> String {
    let envelope = envelope(saved);
    let mut sheet = Sheet::new(width, color);
    for remark in envelope.validity {
        sheet.item("! ", &format!("{}: {}", remark.id, remark.message), Tone::Bad);
    }
    if !envelope.validity.is_empty() {
        sheet.gap();
    }
    sheet.list(&host_words(envelope.host), Tone::Dim);
    sheet.list(&[format!("fourtuple {}", envelope.command), envelope.started.to_owned()], Tone::Dim);
    let settings = &envelope.settings;
    let advice = match saved {
        Saved::Lab(record) => {
            ports::body(&mut sheet, &settings[0], &record.results.ports);
            time_wait::body(&mut sheet, &settings[1], &record.results.time_wait);
            let mut advice =
                [record.results.ports.advice.as_slice(), record.results.time_wait.advice.as_slice()].concat();
            if let Some(results) = &record.results.accept {
                accept::body(&mut sheet, Lab::Accept, &settings[2], results);
                advice.extend_from_slice(&results.advice);
            }
            advice
        }
        Saved::Ports(record) => {
            ports::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::TimeWait(record) => {
            time_wait::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::LabAccept(record) => {
            accept::body(&mut sheet, Lab::Accept, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::LabKeepalive(record) => {
            accept::body(&mut sheet, Lab::Keepalive, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::LabLocks(record) => {
            lab_locks::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::LabPlanes(record) => {
            planes::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::Plan(record) => {
            plan::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::Compare(record) => {
            compare::body(&mut sheet, &settings[0], &record.settings, &record.results);
            Vec::new()
        }
        Saved::Load(record) => {
            load::body(&mut sheet, &settings[0], &record.settings, &record.results);
            record.results.advice.clone()
        }
        Saved::Serve(record) => {
            serve::body(&mut sheet, &settings[0], &record.results);
            Vec::new()
        }
        Saved::Forward(record) => {
            forward::body(&mut sheet, &settings[0], &record.results);
            record.results.advice.clone()
        }
        Saved::TraceConnect(record) => {
            trace::body(&mut sheet, &settings[0], &record.results);
            Vec::new()
        }
        Saved::TraceAccept(record) => {
            trace_accept::body(&mut sheet, &settings[0], &record.results);
            Vec::new()
        }
        Saved::TraceLocks(record) => {
            trace_locks::body(&mut sheet, &settings[0], &record.results);
            Vec::new()
        }
    };
    if !advice.is_empty() {
        sheet.heading("In plain words");
        for line in &advice {
            sheet.item("- ", line, Tone::Plain);
        }
    }
    sheet.finish()
}

/// The heat map of what has just been, as it moves while a trace goes on: its last columns, in lines of at most `width`
/// columns, with two rows to a factor of ten. Empty without searches.
pub fn moving_heat(heat: &TraceHeat, width: usize, color: bool) -> String {
    let mut sheet = Sheet::new(width, color);
    let first = heat.columns.len().saturating_sub(heat::columns(width));
    let last = TraceHeat { columns: heat.columns[first..].to_vec(), ..heat.clone() };
    heat::map(&mut sheet, &last, 2, heat::Ends::Now);
    sheet.finish()
}
