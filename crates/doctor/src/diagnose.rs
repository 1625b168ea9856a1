//! Applies all rules to a snapshot, and each remedy to the finding that it claims to remove.

use fourtuple_record::snapshot::Snapshot;
use fourtuple_record::{Advice, Finding, Unchecked};

use crate::draft::{Draft, Remedy};
use crate::limits::Limits;
use crate::rule::Rule;
use crate::rules::ALL;

/// The findings of all rules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diagnosis {
    /// Findings, the most severe first; findings of equal severity in the order of the rules.
    pub findings: Vec<Finding>,
    /// Rules that were checked, by id.
    pub checked: Vec<String>,
    /// Rules that could not be checked.
    pub unchecked: Vec<Unchecked>,
}

/// Applies all rules to a snapshot.
pub fn diagnose(snapshot: &Snapshot, limits: &Limits) -> Diagnosis {
    let mut diagnosis = Diagnosis::default();
    for rule in ALL {
        let limit = limits.of(rule);
        match (rule.check)(snapshot, limit) {
            Ok(drafts) => {
                diagnosis.checked.push(rule.id.to_owned());
                let findings = drafts.into_iter().map(|draft| finding(rule, limit, snapshot, draft));
                diagnosis.findings.extend(findings);
            }
            Err(reason) => diagnosis.unchecked.push(Unchecked {
                id: rule.id.to_owned(),
                title: rule.title.to_owned(),
                reason,
            }),
        }
    }
    // A stable sort keeps the order of the rules.
    diagnosis.findings.sort_by_key(|finding| finding.severity);
    diagnosis
}

fn finding(rule: &Rule, limit: f64, snapshot: &Snapshot, draft: Draft) -> Finding {
    let Draft { severity, subject, verdict, evidence, now, proper } = draft;
    let helps = |remedy: &Remedy| match &remedy.change {
        None => true,
        Some(change) => {
            let mut changed = snapshot.clone();
            change(&mut changed);
            let again = (rule.check)(&changed, limit);
            again.is_ok_and(|drafts| {
                drafts.iter().all(|draft| draft.subject != subject || draft.severity > severity)
            })
        }
    };
    let advice = |remedies: Vec<Remedy>| {
        let helpful = remedies.into_iter().filter(helps);
        helpful
            .map(|Remedy { action, is_command, effect, change }| Advice {
                action,
                is_command,
                effect,
                recomputed: change.is_some(),
            })
            .collect()
    };
    let (now, proper) = (advice(now), advice(proper));
    Finding { id: rule.id.to_owned(), severity, subject, verdict, evidence, now, proper }
}
