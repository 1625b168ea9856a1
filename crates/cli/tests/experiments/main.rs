//! Rules as experiments: each fault is made by a real program, `fourtuple doctor` names it, and its cure is tried. The rows are the table of
//! docs/doctor.md, which every experiment compares with what it made. The healthy neighbours of the faults run together, in `soak`.
#![forbid(unsafe_code)]

mod accept;
mod kernel;
mod limits;
mod listeners;
mod ports;
#[path = "../program/mod.rs"]
mod program;
mod services;
mod settings;
mod soak;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::program::{fourtuple, run, text};

const BEGIN: &str = "<!-- experiments -->\n";
const END: &str = "<!-- end of experiments -->\n";

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/doctor.md")
}

/// Returns the rows of the table in the page, and the text before and after them.
fn read() -> (String, Vec<String>, String) {
    // A virtual machine (limits.rs) has no sources.
    let text =
        fs::read_to_string(page()).unwrap_or_else(|_| include_str!("../../../../docs/doctor.md").to_owned());
    let (before, rest) = text.split_once(BEGIN).expect("the begin of the table");
    let (table, after) = rest.split_once(END).expect("the end of the table");
    let (head, rows) = table.split_at(table.match_indices('\n').nth(1).expect("a head").0 + 1);
    let rows = rows.lines().filter(|line| line.starts_with('|')).map(str::to_owned).collect();
    (format!("{before}{BEGIN}{head}"), rows, format!("{END}{after}"))
}

/// Returns the cells of a row: rule and severity, fault, program, finding, before, cure, after.
fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split(" | ").map(str::trim).collect()
}

/// Returns the rule, the fault and the program of a row.
fn key(row: &str) -> (&str, Vec<&str>) {
    (row.split('`').nth(1).unwrap_or_default(), cells(row).into_iter().skip(1).take(2).collect())
}

/// Returns what the row of a run must have in common with the page. Of the first line this is what stands before the first semicolon, and
/// before a comma: what follows are figures that a short run does not always have.
fn facts(row: &str) -> Vec<String> {
    let cells = cells(row);
    assert_eq!(cells.len(), 7, "{row}");
    let mut facts: Vec<String> = cells.iter().map(|cell| mask(cell)).collect();
    let first = facts[3].split([';', ',']).next().unwrap_or_default();
    // Restarts of a program are one process or several.
    facts[3] = first.replace("[PID]", "").replace(" (N processes)", "");
    facts
}

/// Replaces numbers and units of time, which differ from run to run.
fn mask(row: &str) -> String {
    let mut masked = String::new();
    let mut in_number = false;
    for (at, character) in row.char_indices() {
        let digit = character.is_ascii_digit();
        let inside = in_number
            && matches!(character, '.' | ',')
            && row[at + 1..].starts_with(|next: char| next.is_ascii_digit());
        if digit && !in_number {
            masked.push('N');
        }
        in_number = digit || inside;
        if !in_number {
            masked.push(character);
        }
    }
    // The unit comes with the number.
    ["N ms", "N us"].iter().fold(masked, |text, unit| text.replace(unit, "N s"))
}

/// Replaces the process IDs of `name[ID]` and `--pid ID`, which differ from run to run, wherever they stand as a word of their own: a small
/// ID (of a process in a namespace of processes) may be a part of a port. It may be equal to a figure, so figures of a row are not such a
/// text.
fn without_process_ids(text: &str) -> String {
    let in_brackets = text.split('[').skip(1).filter_map(|rest| rest.split(']').next());
    let of_flags = text.split("--pid ").skip(1).filter_map(|rest| rest.split([' ', '`']).next());
    let ids: BTreeSet<&str> =
        in_brackets.chain(of_flags).filter(|text| text.parse::<u32>().is_ok()).collect();
    let is_figure = |character: char| character.is_ascii_digit() || ".,:".contains(character);
    let mut masked = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|other| is_figure(other) != is_figure(first)).unwrap_or(rest.len());
        let word = rest[..end].trim_end_matches(['.', ',', ':']);
        masked += if ids.contains(word) { "PID" } else { word };
        masked += &rest[word.len()..end];
        rest = &rest[end..];
    }
    masked
}

/// Compares the row of an experiment with the table of docs/doctor.md; with FOURTUPLE_WRITE=1 writes the row instead.
#[track_caller]
pub(crate) fn row(finding: &Value, fault: &str, program: &str, before: &str, cure: &str, after: &str) {
    static WRITING: Mutex<()> = Mutex::new(());
    let words = format!("{}\n{cure}", text(finding, "verdict")).replace('|', "\\|");
    let words = without_process_ids(&words);
    let (verdict, cure) = words.split_once('\n').expect("two lines");
    // As `situation::behind` has asserted.
    let behind = finding["behind"].as_str().map_or_else(String::new, |rule| format!(", after `{rule}`"));
    let row = format!(
        "| `{}` {}{behind} | {fault} | {program} | {verdict} | {before} | `{cure}` | {after} |",
        text(finding, "id"),
        text(finding, "severity"),
    );
    let _turn = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let (head, mut rows, tail) = read();
    if env::var_os("FOURTUPLE_WRITE").is_some() {
        rows.retain(|other| key(other) != key(&row));
        rows.push(row);
        rows.sort();
        fs::write(page(), format!("{head}{}\n{tail}", rows.join("\n"))).expect("docs/doctor.md");
        return;
    }
    let documented = rows.iter().find(|other| key(other) == key(&row));
    assert_eq!(
        documented.map(|row| facts(row)),
        Some(facts(&row)),
        "docs/doctor.md has another row (FOURTUPLE_WRITE=1 writes it); made here:\n{row}"
    );
    if documented.is_some_and(|documented| mask(documented) != mask(&row)) {
        eprintln!("docs/doctor.md has other words (FOURTUPLE_WRITE=1 writes them); made here:\n{row}");
    }
}

#[test]
fn every_rule_has_an_experiment() {
    let explained = run(&mut fourtuple("explain")).stdout;
    let rules: BTreeSet<&str> = explained.lines().filter_map(|line| line.split(' ').next()).collect();
    let (_, rows, _) = read();
    let tried: BTreeSet<&str> = rows.iter().filter_map(|row| row.split('`').nth(1)).collect();
    assert_eq!(rules, tried);
}

#[test]
fn figures_of_rows_are_masked() {
    let masked = without_process_ids("nginx[40] at 127.0.0.1:4000, 40 times: `kill 40`, and 1.40 of 404.");
    assert_eq!(masked, "nginx[PID] at 127.0.0.1:4000, PID times: `kill PID`, and 1.40 of 404.");
    assert_eq!(mask("nginx[812] uses 28,232 of 1.5 ms, then 7."), "nginx[N] uses N of N s, then N.");
}
