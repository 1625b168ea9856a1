use std::collections::BTreeMap;

use fourtuple_record::*;

use super::record;

fn side(policy: &str, queries_per_s: f64, waits_per_query: f64) -> LocksSide {
    let cpu = 1.6e9 / queries_per_s;
    LocksSide {
        policy: policy.into(),
        sources: 4,
        strategy: "kernel-default".into(),
        low: 1_024,
        high: 65_535,
        queries: 80_000,
        queries_per_s,
        queries_per_s_low: queries_per_s * 0.97,
        queries_per_s_high: queries_per_s * 1.03,
        cpu_ns_per_query: cpu,
        cpu_ns_per_query_low: cpu * 0.98,
        cpu_ns_per_query_high: cpu * 1.01,
        waits_per_query: Some(waits_per_query),
        wait_ns_per_query: Some(waits_per_query * 3_000.0),
        classes: vec![LocksClass {
            class: "listener".into(),
            waits_per_query,
            wait_ns_per_query: waits_per_query * 3_000.0,
        }],
        errors: BTreeMap::new(),
    }
}

/// Returns a record of one change, which has an effect.
pub(crate) fn lab_locks() -> LabLocksRecord {
    let settings = LabLocksSettings {
        changes: vec!["reuseport".into()],
        workers: 2,
        clients: 4,
        queries: 10_000,
        sources: 4,
        repeats: 8,
        traced: 2,
        closer: "client".into(),
        narrow: 0.05,
        seed: 1,
    };
    let advice = "A listener for each worker helps on this host.";
    let pair = LocksPair {
        change: "reuseport".into(),
        before: side("exclusive", 20_000.0, 0.025),
        after: side("reuseport", 22_000.0, 0.001),
        pairs: 8,
        ratio: LocksRatio { value: 1.1, low: Some(1.07), high: Some(1.13) },
        verdict: "10.0% more queries per second, 7.0 to 13.0".into(),
        cpu_ratio: LocksRatio { value: 0.909, low: Some(0.89), high: Some(0.93) },
        cpu_verdict: "9.1% less CPU time per query, 7.0 to 11.0".into(),
        advice: advice.into(),
    };
    let results = LabLocksResults {
        pairs: vec![pair],
        untraced: None,
        blind_spots: vec!["spinlocks of guests".into()],
        advice: vec![advice.into()],
    };
    record("lab locks", settings, results)
}

/// Returns a record without permission to trace, with one pair only.
pub(crate) fn untraced_lab_locks() -> LabLocksRecord {
    let mut record = lab_locks();
    record.settings.traced = 0;
    record.results.untraced = Some("BPF is refused".into());
    record.results.blind_spots.clear();
    let pair = &mut record.results.pairs[0];
    pair.pairs = 1;
    pair.ratio = LocksRatio { value: 1.1, low: None, high: None };
    pair.cpu_ratio = pair.ratio;
    for side in [&mut pair.before, &mut pair.after] {
        (side.waits_per_query, side.wait_ns_per_query) = (None, None);
        side.classes.clear();
        side.errors.insert("ECONNRESET".into(), 1);
    }
    record
}

/// Returns a hostile record: markup in every text, and impossible numbers.
pub(crate) fn hostile_lab_locks() -> LabLocksRecord {
    let mut record = lab_locks();
    let evil = || "</script><b onclick=x>\u{1b}[2J".to_owned();
    let mut pair = record.results.pairs[0].clone();
    (pair.change, pair.verdict, pair.cpu_verdict, pair.advice) = (evil(), evil(), evil(), evil());
    pair.before.policy = evil();
    pair.before.classes[0].class = evil();
    (pair.before.queries_per_s, pair.before.queries_per_s_high) = (0.0, 1e300);
    pair.before.waits_per_query = Some(1e300);
    pair.after.cpu_ns_per_query = 1e300;
    pair.after.errors = BTreeMap::from([(evil(), u64::MAX), ("ECONNRESET".into(), u64::MAX)]);
    pair.ratio.value = 1e300;
    let mut empty = record.results.pairs[0].clone();
    for side in [&mut empty.before, &mut empty.after] {
        (side.queries_per_s, side.queries_per_s_low, side.queries_per_s_high) = (0.0, 0.0, 0.0);
    }
    record.results.pairs = vec![pair, empty];
    record.results.blind_spots = vec![evil()];
    record.results.untraced = Some(evil());
    record.results.advice = vec![evil()];
    record
}
