//! The records of a command that each host performed by itself: worst host first, and how the hosts differ.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use fourtuple_record::{FleetHost, FleetResults, Remark, Saved, Severity, format_duration};

use crate::protocol::AgentInfo;

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
                    Severity::Critical => 1 << 64,
                    Severity::Warning => 1 << 32,
                    Severity::Notice => 1,
                }
            };
            record.results.findings.iter().map(|finding| weight(finding.severity)).sum()
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

/// Names the kernels that differ, and the findings that some hosts have and others do not.
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
    let some = findings.iter().filter(|(_, names)| names.len() < hosts.len());
    lines.extend(some.map(|(id, names)| format!("{id} on {} only.", names.join(", "))));
    lines
}

#[cfg(test)]
mod tests {
    use fourtuple_record::{DoctorResults, DoctorSettings, Finding, Host, Record, SCHEMA};

    use super::*;
    use crate::verdict::tests::plan;

    fn doctor(findings: &[(&str, Severity)]) -> Saved {
        let finding = |(id, severity): &(&str, Severity)| Finding {
            id: (*id).to_owned(),
            severity: *severity,
            subject: String::new(),
            verdict: String::new(),
            evidence: Vec::new(),
            now: Vec::new(),
            proper: Vec::new(),
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
                checked: Vec::new(),
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
    fn remarks_of_a_record_have_the_name_of_its_host() {
        let Saved::Doctor(mut record) = doctor(&[("P01", Severity::Notice)]) else { panic!() };
        record.validity = vec![Remark::new("interrupted", "stopped")];
        let (results, remarks) = overview(agents(vec![Ok(Saved::Doctor(record))]));
        assert_eq!(remarks, [Remark::new("interrupted", "host-0: stopped")]);
        assert_eq!(results.differences, [""; 0], "a finding of all hosts is no difference");
    }

    #[test]
    fn kernels_that_differ_are_named() {
        let mut replies = agents(vec![Ok(doctor(&[])), Ok(doctor(&[]))]);
        replies[1].0.kernel = "6.12".to_owned();
        let (results, _) = overview(replies);
        assert_eq!(results.differences, ["The kernels differ: 6.1 on host-0; 6.12 on host-1."]);
    }
}
