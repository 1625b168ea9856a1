//! What people read stays a sentence at 0, 1, 2 and large numbers: the texts of all sample records, the findings for their snapshots and the
//! advice for their results, with the numbers replaced.

#[path = "../../../record/tests/samples/mod.rs"]
mod samples;

use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};

use fourtuple_bench::lab;
use fourtuple_observe::doctor::{Limits, diagnose};
use fourtuple_record::{Advice, Finding, Saved};
use fourtuple_report::terminal::render_in_full;
use fourtuple_syscalls::socket::Transport;
use serde_json::{Number, Value};

/// A line of a table may have any words beside a number; the width keeps all sentences on one line.
const WIDTH: usize = 100_000;

/// Elements of a list whose numbers are replaced: the others have the same sentences.
const ELEMENTS: usize = 1;

/// The greatest of these that fits in a field: more sockets than a host can have, and all bits of 16 and 8.
const LARGE: [u64; 3] = [100_000_000, 65_535, 255];

/// Words of the singular that end in `s`, and verbs and units after a number.
const SINGULAR: &[&str] = &[
    "access", "address", "across", "as", "bus", "class", "does", "has", "is", "its", "less", "loss", "ms",
    "needs", "ns", "plus", "process", "s", "this", "uses", "us", "was", "waits", "fails", "looks",
];

/// The nouns that sentences count, in the singular.
const NOUNS: &str = "address byte client close connect connection core cpu datagram descriptor destination dial drop \
    error failure handshake host listener packet page plane port process processor request sample search \
    slot socket source symptom thread tuple wait worker";

/// Returns the JSON pointers of all numbers.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.to_owned()),
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate().take(ELEMENTS) {
                numbers(item, &format!("{path}/{at}"), found);
            }
        }
        Value::Object(fields) => {
            for (name, item) in fields {
                numbers(item, &format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), found);
            }
        }
        _ => {}
    }
}

/// Returns the record with one number replaced, or `None` if the field cannot be that number.
fn with(value: &Value, path: &str, number: u64) -> Option<Saved> {
    let mut value = value.clone();
    set(&mut value, path, number);
    Saved::from_value(value).ok()
}

fn set(value: &mut Value, path: &str, number: u64) {
    *value.pointer_mut(path).expect("a number") = Value::Number(Number::from(number));
}

/// Returns the sentences that the command makes of this record.
fn sentences(saved: &Saved) -> Vec<String> {
    let mut texts: Vec<String> = render_in_full(saved, WIDTH, false).lines().map(str::to_owned).collect();
    match saved {
        Saved::Doctor(record) => {
            let found = diagnose(&record.results.snapshot, &Limits::default());
            texts.extend(found.findings.iter().flat_map(of_finding));
            texts.extend(found.unchecked.into_iter().map(|unchecked| unchecked.reason));
        }
        Saved::Ports(record) => texts.extend(lab::ports::advice(&record.results, Transport::Tcp)),
        Saved::TimeWait(record) => texts.extend(lab::time_wait::advice(&record.results)),
        Saved::LabAccept(record) => texts.extend(lab::accept::advice(&record.results)),
        Saved::LabKeepalive(record) => {
            texts.extend(lab::keepalive::advice(&record.results, record.settings.slow_ns));
        }
        Saved::LabPlanes(record) => texts.extend(lab::planes::advice(&record.results)),
        _ => {}
    }
    texts
}

fn of_finding(finding: &Finding) -> Vec<String> {
    let of_advice = |advice: &Advice| {
        let action = (!advice.is_command).then(|| advice.action.clone());
        [action, Some(advice.effect.clone()), advice.condition.clone()]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
    };
    let mut texts = vec![finding.verdict.clone()];
    texts.extend(finding.evidence.iter().cloned());
    texts.extend(finding.now.iter().chain(&finding.proper).flat_map(of_advice));
    texts
}

/// Returns what is wrong with a sentence.
fn faults(text: &str) -> Vec<String> {
    let is_noun = |word: &str| NOUNS.split(' ').any(|noun| noun == word);
    let plain = |word: &str| word.trim_matches(|c: char| "(),;:.\"'`".contains(c)).to_owned();
    // A column of a table is apart from the next by two spaces.
    let words: Vec<&str> = text.split(' ').collect();
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let number = plain(word);
        if ["NaN", "inf", "-inf", "-0"].contains(&number.as_str()) || number.contains("18446744073709551615")
        {
            found.push(number.clone());
        }
        let ends_here = word.ends_with([',', ';', ':', '.', ')']);
        let Some(next) = words.get(at + 1).filter(|next| !ends_here && !next.is_empty()) else { continue };
        // `300 connect() of envoy`: calls by the name of the function.
        if next.ends_with("()") {
            continue;
        }
        let (next, verb) = (plain(next), words.get(at + 2).map(|verb| plain(verb)).unwrap_or_default());
        let before = if at == 0 { "" } else { words[at - 1] };
        let is_part = ["of", "the", "its"].contains(&before) || before.parse::<f64>().is_ok();
        let is_count = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == ',');
        if !is_count || is_part {
            continue;
        }
        let is_plural = next.len() > 2
            && next.ends_with('s')
            && next.chars().all(|c| c.is_ascii_lowercase())
            && !SINGULAR.contains(&next.as_str());
        if number == "1" && (is_plural || ["are", "were", "have"].contains(&verb.as_str()) && is_noun(&next))
        {
            found.push(format!("1 {next} {verb}"));
        }
        if number != "1" && is_noun(&next) {
            found.push(format!("{number} {next} {verb}"));
        }
    }
    found
}

#[test]
fn sentences_hold_at_0_1_2_and_large_numbers() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut seen, mut broken) = (0, BTreeSet::new());
    let mut check = |name: &str, what: &str, saved: Option<Saved>| {
        let Some(saved) = saved else { return };
        let Ok(texts) = panic::catch_unwind(AssertUnwindSafe(|| sentences(&saved))) else {
            broken.insert(format!("panicked: {name}, {what}"));
            return;
        };
        for text in texts {
            seen += 1;
            for fault in faults(&text) {
                broken.insert(format!("{fault:30} {name}, {what}: {}", text.trim()));
            }
        }
    };
    // No host has what the hostile records have: control characters in names, and numbers that fill their fields.
    for (name, saved) in samples::all().into_iter().filter(|(name, _)| !name.starts_with("hostile")) {
        let value = serde_json::to_value(&saved).unwrap();
        let mut paths = Vec::new();
        numbers(&value, "", &mut paths);
        for path in &paths {
            for number in [0, 1] {
                check(name, &format!("{path} = {number}"), with(&value, path, number));
            }
            let large = LARGE.iter().find_map(|number| with(&value, path, *number));
            check(name, &format!("{path} is large"), large);
        }
        for round in 0..12 {
            let mut value = value.clone();
            for path in &paths {
                set(&mut value, path, [0, 1, 2, 200][random.usize(0..4)]);
            }
            check(name, &format!("mixture {round}"), Saved::from_value(value).ok());
        }
    }
    let broken: Vec<_> = broken.into_iter().collect();
    assert!(seen > 10_000, "{seen} sentences");
    assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn broken_sentences_are_faults() {
    for text in ["1 ports are free", "found 2 port in use", "1 connection are open", "NaN ms", "(1 requests)"]
    {
        assert_eq!(faults(text).len(), 1, "{text}");
    }
    for text in ["1 port is free", "1 of 1 ports", "2 ports, 1 process", "1   ports", "1.0 ports", "1 is one"]
    {
        assert_eq!(faults(text), Vec::<String>::new(), "{text}");
    }
}
