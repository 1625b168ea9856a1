//! Rules that find faults in a [`Snapshot`].
//!
//! The rules of a family are a file in `rules`. A rule is what it looks for, where its figures come from, its threshold, its
//! explanation, and a function from a snapshot to findings. The module reads nothing itself.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

mod accepting;
mod attribute;
mod budget;
mod causes;
mod command;
mod counters;
mod datagram;
mod draft;
mod remedies;
mod rules;
mod symptom;
mod words;

use fourtuple_record::snapshot::{FailedCall, Owner, Snapshot};
use fourtuple_record::{Advice, Finding, Proof, Severity, TraceSymptom, Unchecked};

use crate::doctor::command::{Step, settings_in};
use crate::doctor::draft::{Action, Draft, Remedy, Subject};
use crate::doctor::rules::x01_unexplained::unexplained;
use crate::doctor::symptom::Account;

pub use attribute::with_callers;
pub use budget::{Budget, Shortage, shortages};
pub use causes::causes;
pub use command::{Cure, Place};
pub use rules::balance::{Imbalance, ImbalanceKind, imbalances};
pub use rules::{ALL, LimitError, Limits, Rule, Threshold, about, explain, named};
pub use symptom::Unexplained;

/// The findings of all rules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diagnosis {
    /// Findings, the most severe first; findings of equal severity in the order of cause and effect, then of the rules. Findings of X01,
    /// failures without a known cause, come last.
    pub findings: Vec<Finding>,
    /// Rules that were checked, by id.
    pub checked: Vec<String>,
    /// Rules that could not be checked.
    pub unchecked: Vec<Unchecked>,
    /// Symptoms that no finding of another rule explains, in the order of the account. X01 has findings about the first of them.
    pub unexplained: Vec<Unexplained>,
    /// Symptoms other than failed calls, explained or not.
    pub symptoms: Vec<TraceSymptom>,
    /// Failed calls and the verdicts of findings that are their cause.
    pub explained: Vec<(FailedCall, String)>,
}

/// Rules whose findings are the cause of findings of other rules that are as severe: a process without descriptors or a stopped worker
/// does not empty its accept queue, and a search is long because of the ports that it passes over. The closest cause is the first.
const CAUSES: [&str; 9] = ["F01", "B03", "B04", "A06", "P04", "P01", "P02", "P08", "P06"];

/// The rule that reports what the findings of all others leave unexplained.
const UNEXPLAINED: &str = "X01";

/// Applies all rules to a snapshot. The commands are for root of the examined network namespace.
pub fn diagnose(snapshot: &Snapshot, limits: &Limits) -> Diagnosis {
    diagnose_at(snapshot, limits, &Place::default())
}

/// Applies all rules to a snapshot. The commands can be pasted at this place.
pub fn diagnose_at(snapshot: &Snapshot, limits: &Limits, place: &Place<'_>) -> Diagnosis {
    let attributed = with_callers(snapshot);
    let snapshot = attributed.as_ref().unwrap_or(snapshot);
    let mut diagnosis = Diagnosis::default();
    let mut account = Account::of(snapshot);
    let mut findings = Vec::new();
    // X01 is the last rule.
    for rule in ALL {
        let limit = limits.of(rule);
        let drafts = match rule.id {
            UNEXPLAINED => unexplained(snapshot, &account, &diagnosis.checked),
            _ => (rule.check)(snapshot, limit),
        };
        match drafts {
            Ok(drafts) => {
                diagnosis.checked.push(rule.id.to_owned());
                for draft in &drafts {
                    for (what, amount) in &draft.explained {
                        account.explain(rule.id, what, *amount);
                        // A finding about the calls themselves is not their cause.
                        let is_cause =
                            rule.id != UNEXPLAINED && !matches!(draft.subject, Subject::Connects(..));
                        let calls = account.calls(what).filter(|_| is_cause);
                        let verdict = || format!("{} ({})", place.sentence(&draft.verdict), rule.id);
                        diagnosis.explained.extend(calls.map(|call| (call.clone(), verdict())));
                    }
                }
                findings.extend(drafts.into_iter().map(|draft| finding(rule, limit, snapshot, place, draft)));
            }
            Err(reason) => diagnosis.unchecked.push(Unchecked {
                id: rule.id.to_owned(),
                title: rule.title.to_owned(),
                reason: place.sentence(&reason),
            }),
        }
    }
    diagnosis.unexplained = account.unexplained();
    diagnosis.symptoms = account.beside_calls();
    absorb_failures(&mut findings, snapshot);
    absorb_effects(&mut findings, snapshot);
    diagnosis.findings = findings.into_iter().map(|found| found.finding).collect();
    // A stable sort keeps the order of the rules.
    diagnosis
        .findings
        .sort_by_key(|finding| (finding.id == UNEXPLAINED, finding.severity, cause(&finding.id)));
    join_causes(&mut diagnosis.findings);
    diagnosis
}

/// Refers findings to the first one with the same cause: one about the same subject, or one that the same setting ends.
fn join_causes(findings: &mut [Finding]) {
    // Commands that only show something have nothing to undo, and they say nothing about the cause.
    let settings = |finding: &Finding| -> Vec<String> {
        let advice = finding.now.iter().filter(|advice| advice.undo.is_some());
        advice.map(|advice| advice.action.clone()).collect()
    };
    for place in 1..findings.len() {
        let (earlier, [finding, ..]) = findings.split_at_mut(place) else { continue };
        let own = settings(finding);
        let is_same = |other: &Finding| {
            other.subject == finding.subject || settings(other).iter().any(|setting| own.contains(setting))
        };
        let first = earlier.iter().position(|other| finding.id != UNEXPLAINED && is_same(other));
        finding.same_cause_as = first.map(|first| earlier[first].same_cause_as.unwrap_or(first as u32));
    }
}

/// Returns the place of a rule among the causes; all other rules come after them.
fn cause(id: &str) -> usize {
    CAUSES.iter().position(|cause| *cause == id).unwrap_or(CAUSES.len())
}

/// Rules whose findings explain findings of other rules about the same listener, the closest cause first: what a full queue drops, and how
/// long connections wait in it.
const EFFECTS: [(&str, &[&str]); 4] = [
    ("F01", &["A01", "A02", "A07"]),
    ("B03", &["A01", "A02", "A07"]),
    ("B04", &["A01", "A02", "A07"]),
    ("A01", &["A02", "A07"]),
];

/// A finding with its subject as a value.
struct Found {
    subject: Subject,
    finding: Finding,
}

impl Found {
    fn is_of(&self, id: &str) -> bool {
        self.finding.id == id
    }
}

/// Makes the effects of a fault of a listener facts of its cause: one finding for one fault.
fn absorb_effects(findings: &mut Vec<Found>, snapshot: &Snapshot) {
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
    // F01 names a process, the other rules name a listener.
    let unix = snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default();
    let unix = unix.iter().map(|listener| (Subject::Unix(listener.path.clone()), &listener.owners));
    let owners: Vec<(Subject, &Vec<Owner>)> =
        listeners.iter().map(|listener| (listener.into(), &listener.owners)).chain(unix).collect();
    let holds = |holder: &Subject, held: &Subject| {
        let found = owners.iter().find(|(subject, _)| subject == held);
        let is_holder = |only: &Owner| matches!(holder, Subject::Process(pid, _) if *pid == only.pid);
        found.is_some_and(|(_, owners)| matches!(&owners[..], [only] if is_holder(only)))
    };
    for (id, effects) in EFFECTS {
        // A process that has descriptors left accepts.
        let is_cause =
            |found: &&Found| found.is_of(id) && (id != "F01" || found.finding.severity == Severity::Critical);
        let causes: Vec<Subject> =
            findings.iter().filter(is_cause).map(|found| found.subject.clone()).collect();
        for subject in causes {
            let is_effect = |found: &mut Found| {
                let is_same = found.subject == subject || id == "F01" && holds(&subject, &found.subject);
                is_same && effects.contains(&found.finding.id.as_str())
            };
            let absorbed: Vec<Found> = findings.extract_if(.., is_effect).collect();
            let cause = findings.iter_mut().find(|found| found.is_of(id) && found.subject == subject);
            let cause = &mut cause.expect("a rule is not among its own effects").finding;
            for Found { finding: effect, .. } in absorbed {
                cause.severity = cause.severity.min(effect.severity);
                cause.evidence.push(effect.verdict);
            }
        }
    }
}

/// Makes failed calls of connect() (P07) a fact of the exhausted tuple (P01), instead of a finding with the same remedies, if the program
/// that failed is the program that has the ports.
fn absorb_failures(findings: &mut Vec<Found>, snapshot: &Snapshot) {
    let tuples =
        snapshot.connections.seen().map(|connections| connections.tuples.as_slice()).unwrap_or_default();
    let explains = |exhausted: &Found, failure: &Found| {
        let Subject::Connects(pid, name, destination) = &failure.subject else { return false };
        let own = tuples.iter().find(|own| Subject::from(*own) == exhausted.subject);
        exhausted.is_of("P01")
            && own.is_some_and(|own| {
                let mut owners = own.owners.iter();
                // Several processes of a name have no number.
                own.destination == *destination
                    && owners.any(|owner| [owner.pid, 0].contains(pid) && owner.name == *name)
            })
    };
    let failures: Vec<Found> = findings.extract_if(.., |found| found.is_of("P07")).collect();
    for failure in failures {
        match findings.iter_mut().find(|exhausted| explains(exhausted, &failure)) {
            Some(Found { finding: exhausted, .. }) => {
                exhausted.severity = exhausted.severity.min(failure.finding.severity);
                exhausted.evidence.insert(0, failure.finding.verdict);
            }
            None => findings.push(failure),
        }
    }
}

fn finding(rule: &Rule, limit: f64, snapshot: &Snapshot, place: &Place<'_>, draft: Draft) -> Found {
    let Draft { severity, subject, verdict, evidence, now, proper, explained: _ } = draft;
    // What remains with the change of a remedy; an error: the finding remains as severe as it is.
    let remains = |remedy: &Remedy| -> Result<Option<Severity>, ()> {
        let Some(change) = &remedy.change else { return Ok(None) };
        let mut changed = snapshot.clone();
        change(&mut changed);
        // A rule that has sources which are not visible, and finds nothing in the others, counts as unchecked.
        let again = (rule.check)(&changed, limit).unwrap_or_default();
        let rest = again.iter().filter(|draft| draft.subject == subject).map(|draft| draft.severity).min();
        if rest.is_some_and(|rest| rest <= severity) { Err(()) } else { Ok(rest) }
    };
    let advice = |remedies: Vec<Remedy>| {
        let shown = |remedy: Remedy| {
            let remains = remains(&remedy).ok()?;
            Some(Advice { remains, ..rendered(remedy, snapshot, place)? })
        };
        remedies.into_iter().filter_map(shown).collect()
    };
    let (now, proper) = (advice(now), advice(proper));
    let verdict = place.sentence(&verdict);
    let evidence = evidence.iter().map(|fact| place.sentence(fact)).collect();
    let text = subject.to_string();
    Found {
        subject,
        finding: Finding {
            id: rule.id.to_owned(),
            severity,
            subject: text,
            verdict,
            evidence,
            now,
            proper,
            same_cause_as: None,
        },
    }
}

/// Returns a remedy as text, or `None` if its command has no meaning at this place, or no effect on this kernel.
fn rendered(remedy: Remedy, snapshot: &Snapshot, place: &Place<'_>) -> Option<Advice> {
    let Remedy { action, effect, condition, change, is_tested, cure, undo } = remedy;
    let tried = cure.and_then(|cure| (place.try_cure)(cure));
    if tried == Some(false) {
        return None;
    }
    let is_tested = is_tested || tried.is_some();
    let proof = match (is_tested, change.is_some()) {
        (true, _) => Proof::Test,
        (false, true) => Proof::Calculation,
        (false, false) => Proof::None,
    };
    let is_command = matches!(action, Action::Steps(_));
    let (action, rendered) = match action {
        Action::Words(words) => {
            let settings = settings_in(&words);
            let set = (!settings.is_empty()).then_some(Step::Set(settings));
            (place.sentence(&words), set.and_then(|set| place.render(&[set], snapshot)))
        }
        Action::Steps(steps) => {
            let rendered = place.render(&steps, snapshot)?;
            (rendered.command.clone(), Some(rendered))
        }
    };
    let undo = undo.and_then(|step| place.render(&[step], snapshot)).map(|undo| undo.command);
    Some(Advice {
        action,
        is_command,
        effect: place.sentence(&effect),
        condition: condition.map(|condition| place.sentence(&condition)),
        proof,
        remains: None,
        needs_root: rendered.as_ref().is_some_and(|rendered| rendered.needs_root),
        until: rendered.as_ref().and_then(|rendered| rendered.until.clone()),
        undo: undo.or_else(|| rendered.as_ref().and_then(|rendered| rendered.undo.clone())),
        lasting: rendered.and_then(|rendered| rendered.lasting),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sysctl_in_a_sentence_can_be_undone() {
        let mut snapshot = Snapshot::default();
        snapshot.sysctls.insert("net.ipv4.tcp_fastopen".to_owned(), "1".to_owned());
        let advice = |words: &str| {
            let remedy = Remedy::advice(words, "an effect");
            rendered(remedy, &snapshot, &Place { is_root: true, ..Place::default() }).expect("shown")
        };
        let set = advice("`sysctl -w net.ipv4.tcp_fastopen=0` on clients");
        assert!(!set.is_command && set.needs_root);
        assert_eq!(set.until.as_deref(), Some("the next boot"));
        let (undo, lasting) = (set.undo.expect("an undo line"), set.lasting.expect("a lasting form"));
        assert!(undo.starts_with("sysctl -w net.ipv4.tcp_fastopen=1"), "{undo}");
        assert!(lasting.contains("net.ipv4.tcp_fastopen = 0"), "{lasting}");
        let open = advice("`sysctl -w net.ipv4.ip_unprivileged_port_start=PORT`");
        assert_eq!((open.undo, open.lasting, open.until), (None, None, None));
    }
}
