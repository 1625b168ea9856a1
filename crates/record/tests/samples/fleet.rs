//! Commands that each host performs by itself.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::{bare_serve, blind_doctor, doctor, plan, ports, record, trace_connect};

/// Returns the record of a command over two hosts with these records; a third host has none.
fn each(words: &str, one: Saved, two: Saved) -> FleetRecord {
    let host = |name: &str, kernel: &str, record: Option<Saved>| FleetHost {
        name: name.into(),
        labels: BTreeMap::from([("zone".into(), "eu".into())]),
        kernel: kernel.into(),
        cpus: 2,
        failed: record.is_none().then(|| "no reply within 60 s".into()),
        record,
    };
    let settings =
        FleetSettings { labels: vec!["zone=eu".into()], command: words.split(' ').map(Into::into).collect() };
    let results = FleetResults {
        hosts: vec![
            host("web-3", "6.18.5", None),
            host("web-1", "6.18.5", Some(one)),
            host("web-2", "6.1.0", Some(two)),
        ],
        differences: vec!["The kernels differ: 6.1.0 on web-2; 6.18.5 on web-3, web-1.".into()],
    };
    let mut record = record("", settings, results);
    record.validity = vec![Remark::new("host-failed", "web-3: no reply within 60 s")];
    record
}

fn of(command: &str, record: FleetRecord) -> FleetRecord {
    FleetRecord { command: command.into(), ..record }
}

pub(crate) fn fleet_doctor() -> FleetRecord {
    let mut ill = doctor();
    ill.results.snapshot = blind_doctor().results.snapshot;
    of("fleet doctor", each("doctor", Saved::Doctor(ill), Saved::Doctor(blind_doctor())))
}

pub(crate) fn fleet_lab_ports() -> FleetRecord {
    let one = |dials| Saved::Ports(ports(&["kernel-default", "auto"], 1, dials));
    let words = "lab ports --repeats 1 --range 32768-33791";
    of("fleet lab ports", each(words, one(1_000), one(1_024)))
}

pub(crate) fn fleet_trace_connect() -> FleetRecord {
    let short = || {
        let mut record = trace_connect();
        record.results.samples.truncate(1);
        record.results.tuples.truncate(1);
        record.results.histogram.truncate(1);
        Saved::TraceConnect(record)
    };
    of("fleet trace connect", each("trace connect --for 10s", short(), short()))
}

pub(crate) fn fleet_plan() -> FleetRecord {
    let words = "plan --hold=4s --sources=2 --destinations=1000 --rate=850000/s";
    of("fleet plan", each(words, Saved::Plan(plan()), Saved::Plan(plan())))
}

pub(crate) fn fleet_serve() -> FleetRecord {
    let words = "serve http --listen 10.1.2.3:8080 --for 60s";
    of("fleet serve", each(words, Saved::Serve(bare_serve()), Saved::Serve(bare_serve())))
}

/// Returns a record with texts that no command writes, and records of other commands than its own.
pub(crate) fn hostile_fleet() -> FleetRecord {
    let mut record = fleet_doctor();
    record.settings.command = vec!["</script><b>it's".into()];
    record.settings.labels = vec!["<i>=\u{1b}[31m".into()];
    record.results.hosts[0].name = "</script><b>".into();
    record.results.hosts[0].kernel = "<i>".into();
    record.results.hosts[1].record = Some(Saved::Fleet(fleet_plan()));
    record.results.differences = vec!["<script>alert(1)</script>".into()];
    record
}
