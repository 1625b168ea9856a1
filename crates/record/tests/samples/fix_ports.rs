//! A fix of one busy destination, and a dry run that saw nothing.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::record;

pub(crate) fn fix_ports() -> FixPortsRecord {
    let settings = FixPortsSettings {
        cgroup: "/sys/fs/cgroup/system.slice/nginx.service".into(),
        source: Some("192.0.2.0/28".into()),
        to: Some("198.51.100.0/24:443".into()),
        past: 0.25,
        for_ns: Some(60_000_000_000),
        dry_run: false,
    };
    let tuple = |source: &str, connects, drawn| FixPortsTuple {
        namespace: 1,
        source: source.into(),
        destination: "198.51.100.7:443".into(),
        connects,
        drawn,
        fallbacks: 2,
        share: 0.9,
    };
    let results = FixPortsResults {
        elapsed_ns: 60_000_000_000,
        connects: 18_420,
        connects_per_s: 307.0,
        left: BTreeMap::from([("below".into(), 4_990), ("udp".into(), 11), ("source-unknown".into(), 3)]),
        drawn: 13_000,
        spread: 414,
        fallbacks: 2,
        would_draw: 0,
        probes: 65_117,
        probes_per_draw: Some(5.008),
        refused: 7,
        in_order: 21,
        time_wait_used: 4,
        hook_ns: 41_000_000,
        hook_ns_per_draw: Some(3_153),
        avoided_probes: 97_200_000,
        probe_ns: Some(51.4),
        floor_ns: Some(15_900),
        saved_ns: Some(4_955_080_000),
        namespaces: vec![FixNamespace { cookie: 1, low: 20_000, high: 39_999, usable: 19_990 }],
        tuples: vec![tuple("192.0.2.1", 12_000, 9_000), tuple("192.0.2.2", 6_406, 4_000)],
        tuples_left_out: 0,
    };
    record("fix ports", settings, results)
}

/// A dry run without connects: every field that may be null is null.
pub(crate) fn bare_fix_ports() -> FixPortsRecord {
    let mut record = fix_ports();
    record.settings =
        FixPortsSettings { source: None, to: None, for_ns: None, dry_run: true, ..record.settings };
    record.results = FixPortsResults {
        elapsed_ns: 1_000_000_000,
        connects: 0,
        connects_per_s: 0.0,
        left: BTreeMap::new(),
        drawn: 0,
        spread: 0,
        fallbacks: 0,
        would_draw: 0,
        probes: 0,
        probes_per_draw: None,
        refused: 0,
        in_order: 0,
        time_wait_used: 0,
        hook_ns: 0,
        hook_ns_per_draw: None,
        avoided_probes: 0,
        probe_ns: None,
        floor_ns: None,
        saved_ns: None,
        namespaces: Vec::new(),
        tuples: Vec::new(),
        tuples_left_out: 0,
    };
    record
}

/// Numbers and texts that no command writes.
pub(crate) fn hostile_fix_ports() -> FixPortsRecord {
    let mut record = fix_ports();
    record.settings.cgroup = "</script><b>it's".into();
    record.settings.past = f64::MAX;
    let results = &mut record.results;
    results.connects = u64::MAX;
    results.drawn = u64::MAX;
    results.left = BTreeMap::from([("</script>".into(), u64::MAX), ("below".into(), u64::MAX)]);
    results.namespaces[0] = FixNamespace { cookie: u64::MAX, low: 9, high: 3, usable: u32::MAX };
    results.tuples[0].destination = "<i>".into();
    results.tuples[0].share = -1.0;
    results.saved_ns = Some(u64::MAX);
    record
}
