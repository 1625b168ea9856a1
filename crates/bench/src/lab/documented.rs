//! The advice in docs/records is the advice that the experiments give today.

use std::fs;
use std::path::Path;

use fourtuple_record::Saved;
use fourtuple_syscalls::socket::Transport;

use crate::lab::{accept, keepalive, planes, ports, time_wait};

/// Returns the advice in a record and the advice for its results today, or `None` for an experiment whose advice needs more than the
/// record.
fn advice(record: Saved) -> Option<(Vec<String>, Vec<String>)> {
    Some(match record {
        Saved::Ports(record) => {
            // The record lacks the single dials, from which the line about IP_LOCAL_PORT_RANGE follows.
            let of_means = |lines: Vec<String>| {
                lines.into_iter().filter(|line| !line.contains("IP_LOCAL_PORT_RANGE")).collect()
            };
            let fresh = ports::advice(&record.results, Transport::Tcp);
            (of_means(record.results.advice), of_means(fresh))
        }
        Saved::TimeWait(record) => {
            let fresh = time_wait::advice(&record.results);
            (record.results.advice, fresh)
        }
        Saved::LabAccept(record) => {
            let fresh = accept::advice(&record.results);
            (record.results.advice, fresh)
        }
        Saved::LabKeepalive(record) => {
            let fresh = keepalive::advice(&record.results, record.settings.slow_ns);
            let mut found = record.results.advice;
            // The break-even point is the last line.
            found.truncate(fresh.len());
            (found, fresh)
        }
        Saved::LabPlanes(record) => {
            let fresh = planes::advice(&record.results);
            (record.results.advice, fresh)
        }
        _ => return None,
    })
}

#[test]
fn the_advice_of_documented_records_is_todays() {
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/records");
    let mut compared = 0;
    for entry in fs::read_dir(records).unwrap() {
        let path = entry.unwrap().path();
        let record = Saved::parse(&fs::read_to_string(&path).unwrap()).unwrap();
        let Some((found, today)) = advice(record) else { continue };
        assert_eq!(found, today, "{}", path.display());
        compared += 1;
    }
    assert_eq!(compared, 5);
}
