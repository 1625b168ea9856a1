//! The verdict of a run: remarks that limit what it proves.

use fourtuple_record::{Remark, format_duration, format_time};
use std::time::Duration;

use crate::merge::Slot;
use crate::protocol::Plan;

/// Returns the remarks of a run, first about the fleet, then the remarks of its workers with their names. A valid run has none.
pub fn verdict(plan: &Plan, slots: &[Slot], interrupted: bool) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if interrupted {
        remarks.push(Remark::new("interrupted", "ended from outside: what was measured until then is shown"));
    }
    for (worker, slot) in plan.workers.iter().zip(slots) {
        let name = &worker.agent.name;
        let mut add = |id: &str, message: String| remarks.push(Remark::new(id, format!("{name}: {message}")));
        if let Some(lost) = slot.lost_at {
            let at = format_time(Duration::from_secs(lost));
            add(
                "worker-lost",
                format!(
                    "the worker was lost after {at}; its seconds before count, and its load was not replaced"
                ),
            );
            continue;
        }
        let Some(end) = &slot.end else {
            add("worker-unfinished", "the end of the worker has not arrived".to_owned());
            continue;
        };
        if let Some(failed) = &end.failed {
            add("worker-failed", failed.clone());
        }
        let skew = end.start_error_ns.saturating_add(worker.clock.bound_ns);
        if skew > plan.most_skew_ns && end.failed.is_none() {
            add(
                "start-skew",
                format!(
                    "began up to {} from the common start ({} late on its clock, which is known to {}); at most {} are accepted",
                    format_duration(skew),
                    format_duration(end.start_error_ns),
                    format_duration(worker.clock.bound_ns),
                    format_duration(plan.most_skew_ns)
                ),
            );
        }
        let absent = end.dropped.saturating_add(slot.missing());
        if absent > 0 {
            add("intervals-missing", format!("{absent} of its intervals are missing from the result"));
        }
        let own = end.record.iter().flat_map(|record| &record.validity);
        // One remark about the whole run suffices when all workers were stopped.
        for remark in own.filter(|remark| !(interrupted && remark.id == "interrupted")) {
            add(&remark.id, remark.message.clone());
        }
    }
    remarks
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use fourtuple_record::{Host, SCHEMA};

    use super::*;
    use crate::clock::ClockEstimate;
    use crate::interval::WorkerEnd;
    use crate::protocol::{AgentInfo, PlannedWorker};
    use crate::split::{self, tests::whole};

    pub(crate) fn plan(slots: u32) -> Plan {
        let worker = |slot| PlannedWorker {
            agent: AgentInfo {
                name: format!("host-{slot}"),
                instance: format!("i{slot}"),
                labels: BTreeMap::new(),
                binary: "b".into(),
                schema: SCHEMA.into(),
                allow: "load".into(),
                kernel: "6.1".into(),
                cpus: 2,
            },
            settings: split::settings(&whole(), "r", slot, slots).unwrap(),
            clock: ClockEstimate { offset_ns: 5, rtt_ns: 200_000, bound_ns: 100_000 },
        };
        Plan {
            run: "r".into(),
            started: "2026-01-01T00:00:00Z".into(),
            started_ns: 0,
            settings: whole(),
            deadline_ns: 30_000_000_000,
            most_skew_ns: 1_000_000,
            host: Host::default(),
            workers: (0..slots).map(worker).collect(),
        }
    }

    fn ended(change: impl FnOnce(&mut WorkerEnd)) -> Slot {
        let mut end =
            WorkerEnd { record: None, failed: None, start_error_ns: 50_000, intervals: 0, dropped: 0 };
        change(&mut end);
        Slot { end: Some(Box::new(end)), ..Slot::default() }
    }

    fn ids(slots: &[Slot]) -> Vec<String> {
        let remarks = verdict(&plan(slots.len() as u32), slots, false);
        remarks.into_iter().map(|remark| remark.id).collect()
    }

    #[test]
    fn a_run_without_faults_is_valid() {
        assert_eq!(ids(&[ended(|_| ()), ended(|_| ())]), [""; 0]);
    }

    #[test]
    fn each_fault_is_a_remark_with_its_host() {
        assert_eq!(ids(&[ended(|_| ()), Slot { lost_at: Some(3), ..Slot::default() }]), ["worker-lost"]);
        assert_eq!(ids(&[Slot::default()]), ["worker-unfinished"]);
        assert_eq!(ids(&[ended(|end| end.failed = Some("no".into()))]), ["worker-failed"]);
        assert_eq!(ids(&[ended(|end| end.dropped = 1)]), ["intervals-missing"]);
        assert_eq!(ids(&[ended(|end| end.intervals = 2)]), ["intervals-missing"]);
        let lost = verdict(&plan(1), &[Slot { lost_at: Some(3), ..Slot::default() }], false);
        assert!(lost[0].message.starts_with("host-0: ") && lost[0].message.contains("after 3"), "{lost:?}");
    }

    #[test]
    fn the_bound_of_the_clock_is_part_of_the_skew() {
        assert_eq!(ids(&[ended(|end| end.start_error_ns = 900_000)]), [""; 0]);
        assert_eq!(ids(&[ended(|end| end.start_error_ns = 900_001)]), ["start-skew"]);
    }

    #[test]
    fn an_interruption_is_said_once() {
        let remarks = verdict(&plan(2), &[ended(|_| ()), ended(|_| ())], true);
        assert_eq!(remarks.iter().map(|remark| remark.id.as_str()).collect::<Vec<_>>(), ["interrupted"]);
    }
}
