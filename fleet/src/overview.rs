//! The records of a command that each host performed by itself: worst host first, and how the hosts differ.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple_record::{FleetHost, FleetResults, Remark, Saved, Severity, format_duration, format_time};

use crate::merge::Slot;
use crate::protocol::{AgentInfo, Plan};

/// An agent and its record, or the reason why there is none.
pub type HostReply = (AgentInfo, Result<Saved, String>);

/// Returns the results, and the remarks: one for each host without a record, then the remarks of the records with their hosts.
pub fn overview(replies: Vec<HostReply>) -> (FleetResults, Vec<Remark>) {
    let mut hosts: Vec<FleetHost> = replies.into_iter().map(host).collect();
    hosts.sort_by_cached_key(|host| {
        (Reverse(host.record.as_ref().map_or(u128::MAX, badness)), host.name.clone())
    });
    let named = |host: &FleetHost, id: &str, text: &str| Remark::new(id, format!("{}: {text}", host.name));
    let failed = hosts.iter().filter_map(|host| Some(named(host, "host-failed", host.failed.as_ref()?)));
    let own =
        hosts.iter().filter_map(|host| Some((host, host.record.as_ref()?))).flat_map(|(host, record)| {
            let remarks = record.common().validity.iter();
            remarks.map(move |remark| named(host, &remark.id, &remark.message))
        });
    let remarks = failed.chain(own).collect();
    let differences = differences(&hosts);
    (FleetResults { hosts, differences }, remarks)
}

fn host((agent, reply): HostReply) -> FleetHost {
    let AgentInfo { name, labels, kernel, cpus, .. } = agent;
    let (record, failed) = match reply {
        Ok(record) => (Some(record), None),
        // A remark is one line.
        Err(reason) => (None, Some(reason.split_whitespace().collect::<Vec<_>>().join(" "))),
    };
    FleetHost { name, labels, kernel, cpus, record, failed }
}

/// Adds a remark to the record of a server that its coordinator did not stop, if the server ended before its deadline.
pub(crate) fn remark_early_end(mut record: Saved) -> Saved {
    if let Saved::Serve(serve) = &mut record
        && let Some(length) = serve.settings.for_ns.filter(|length| serve.results.elapsed_ns < *length)
    {
        let message = format!(
            "the server ended after {} of {}, and its coordinator did not stop it",
            format_duration(serve.results.elapsed_ns),
            format_duration(length)
        );
        serve.validity.push(Remark::new("server-ended", message));
    }
    record
}

/// Returns the place of a host among records of the same command: a larger number is worse.
fn badness(record: &Saved) -> u128 {
    match record {
        Saved::Doctor(record) => {
            let weight = |severity| -> u128 {
                match severity {
                    Severity::Critical => 1 << 96,
                    Severity::Warning => 1 << 64,
                    Severity::Notice => 1 << 32,
                }
            };
            let findings: u128 = record.results.findings.iter().map(|finding| weight(finding.severity)).sum();
            // A host that could not be examined in full is not as fine as one that was.
            findings + record.results.unchecked.len() as u128
        }
        Saved::Ports(record) => {
            let all = record.results.strategies.iter().filter_map(|run| run.connect_ns.all);
            all.map(|all| all.p99).max().unwrap_or(0).into()
        }
        Saved::TraceConnect(record) => record.results.search_ns.all.map_or(0, |all| all.p99).into(),
        Saved::Plan(record) => record.results.by_fill.last().map_or(0, |step| step.mean_ns).into(),
        Saved::Serve(record) => {
            let errors = record.results.workers.iter().flat_map(|worker| worker.errors.values());
            errors.map(|count| u128::from(*count)).sum()
        }
        _ => 0,
    }
}

/// Names the kernels that differ, and the findings that some hosts have and all others, which were checked for them, do not.
fn differences(hosts: &[FleetHost]) -> Vec<String> {
    let mut kernels: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut findings: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for host in hosts {
        kernels.entry(&host.kernel).or_default().push(&host.name);
        let Some(Saved::Doctor(record)) = &host.record else { continue };
        for finding in &record.results.findings {
            let names = findings.entry(&finding.id).or_default();
            if names.last() != Some(&host.name.as_str()) {
                names.push(&host.name);
            }
        }
    }
    let mut lines = Vec::new();
    if kernels.len() > 1 {
        let part = |(kernel, names): (&&str, &Vec<&str>)| format!("{kernel} on {}", names.join(", "));
        lines.push(format!(
            "The kernels differ: {}.",
            kernels.iter().map(part).collect::<Vec<_>>().join("; ")
        ));
    }
    // A host whose rule was not checked may have the finding too. Those without a record are named as such.
    let lacks_it = |host: &FleetHost, id: &str| match &host.record {
        Some(Saved::Doctor(record)) => record.results.checked.iter().any(|checked| checked == id),
        _ => true,
    };
    let some = findings.iter().filter(|(id, names)| {
        let mut others = hosts.iter().filter(|host| !names.contains(&host.name.as_str()));
        names.len() < hosts.len() && others.all(|host| lacks_it(host, id))
    });
    lines.extend(some.map(|(id, names)| format!("{id} on {} only.", names.join(", "))));
    lines
}

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

    use fourtuple_record::{DoctorResults, DoctorSettings, Finding, Host, Record, SCHEMA, Unchecked};

    use super::*;
    use crate::interval::WorkerEnd;
    use crate::protocol::{AgentInfo, ClockEstimate, PlannedWorker};
    use crate::split;
    use crate::split::tests::whole;

    fn doctor(findings: &[(&str, Severity)]) -> Saved {
        let finding = |(id, severity): &(&str, Severity)| Finding {
            id: (*id).to_owned(),
            severity: *severity,
            subject: String::new(),
            verdict: String::new(),
            evidence: Vec::new(),
            now: Vec::new(),
            proper: Vec::new(),
            same_cause_as: None,
        };
        Saved::Doctor(Record {
            schema: SCHEMA.to_owned(),
            command: "doctor".to_owned(),
            started: String::new(),
            host: Host::default(),
            settings: DoctorSettings {
                pid: None,
                netns: None,
                container: None,
                to: None,
                for_ns: 0,
                thresholds: BTreeMap::new(),
            },
            validity: Vec::new(),
            results: DoctorResults {
                findings: findings.iter().map(finding).collect(),
                checked: vec!["P01".to_owned(), "P02".to_owned()],
                unchecked: Vec::new(),
                snapshot: Default::default(),
                history: None,
            },
        })
    }

    fn agents(replies: Vec<Result<Saved, String>>) -> Vec<HostReply> {
        let agents = plan(replies.len() as u32).workers.into_iter().map(|worker| worker.agent);
        agents.zip(replies).collect()
    }

    #[test]
    fn the_worst_host_comes_first() {
        let many = [("P02", Severity::Warning); 3];
        let (results, remarks) = overview(agents(vec![
            Ok(doctor(&[])),
            Ok(doctor(&many)),
            Ok(doctor(&[("P01", Severity::Critical)])),
            Err("no\nreply".to_owned()),
        ]));
        let names: Vec<&str> = results.hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["host-3", "host-2", "host-1", "host-0"]);
        assert_eq!(remarks, [Remark::new("host-failed", "host-3: no reply")]);
        assert_eq!(results.differences, ["P01 on host-2 only.", "P02 on host-1 only."]);
    }

    #[test]
    fn a_rule_that_was_not_checked_is_not_fine() {
        let Saved::Doctor(mut partial) = doctor(&[]) else { panic!() };
        partial.results.checked.retain(|id| id != "P02");
        partial.results.unchecked.push(Unchecked {
            id: "P02".to_owned(),
            title: String::new(),
            reason: String::new(),
        });
        let notice = [("P01", Severity::Notice), ("P02", Severity::Notice)];
        let (results, _) =
            overview(agents(vec![Ok(doctor(&[])), Ok(Saved::Doctor(partial)), Ok(doctor(&notice))]));
        let names: Vec<&str> = results.hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["host-2", "host-1", "host-0"]);
        assert_eq!(results.differences, ["P01 on host-2 only."]);
    }

    #[test]
    fn remarks_of_a_record_have_the_name_of_its_host() {
        let Saved::Doctor(mut record) = doctor(&[("P01", Severity::Notice)]) else { panic!() };
        record.validity = vec![Remark::new("interrupted", "stopped")];
        let (results, remarks) = overview(agents(vec![Ok(Saved::Doctor(record))]));
        assert_eq!(remarks, [Remark::new("interrupted", "host-0: stopped")]);
        assert_eq!(results.differences, [""; 0], "a finding of all hosts is not a difference");
    }

    #[test]
    fn kernels_that_differ_are_named() {
        let mut replies = agents(vec![Ok(doctor(&[])), Ok(doctor(&[]))]);
        replies[1].0.kernel = "6.12".to_owned();
        let (results, _) = overview(replies);
        assert_eq!(results.differences, ["The kernels differ: 6.1 on host-0; 6.12 on host-1."]);
    }

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
