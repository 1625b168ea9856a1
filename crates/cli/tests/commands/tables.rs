//! Every name in a table of the code is in the schema of records and in its page of the docs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::program::{fourtuple, run};
use fourtuple::listen::AcceptPolicy;
use fourtuple::spread::Selector;
use fourtuple_bench::lab::time_wait::Remedy;
use fourtuple_bench::load::Workload;
use fourtuple_bench::serve::Protocol;
use fourtuple_fix::print::Program;
use fourtuple_forward::PlaneKind;
use fourtuple_record::SCHEMA_JSON;
use serde_json::Value;

fn texts<'a>(list: &'a Value, pointer: &str) -> BTreeSet<&'a str> {
    let list = list.pointer(pointer).and_then(Value::as_array).unwrap_or_else(|| panic!("no {pointer}"));
    list.iter().map(|text| text.as_str().unwrap()).collect()
}

fn page(name: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    fs::read_to_string(docs.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Requires that a table of the page has a row that begins with each name.
fn require_rows(name: &str, names: &BTreeSet<&str>) {
    let page = page(name);
    for row in names {
        let begins = |line: &str| {
            let rest = line.strip_prefix("| `").and_then(|line| line.strip_prefix(row));
            rest.is_some_and(|rest| rest.starts_with(['`', ':', '[']))
        };
        assert!(page.lines().any(begins), "docs/{name} has no row for `{row}`");
    }
}

#[test]
fn the_schema_and_the_docs_have_every_name_of_a_table() {
    let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
    let policies = AcceptPolicy::ALL.into_iter().chain([AcceptPolicy::Auto]).map(AcceptPolicy::name);
    for (pointer, page, names) in [
        ("/$defs/Policy/oneOf/0/enum", "listen.md", BTreeSet::from_iter(policies)),
        ("/$defs/Plane/enum", "forward.md", PlaneKind::ALL.into_iter().map(PlaneKind::name).collect()),
        ("/$defs/ServeProtocol/enum", "serve.md", Protocol::all().map(Protocol::name).collect()),
        ("/$defs/LoadSettings/properties/workload/enum", "load.md", Workload::names().collect()),
    ] {
        assert_eq!(texts(&schema, pointer), names, "{pointer}");
        require_rows(page, &names);
    }
    require_rows("lab-time-wait.md", &Remedy::ALL.into_iter().map(Remedy::name).collect());
    require_rows("fix-print.md", &Program::ALL.iter().map(|program| program.name).collect());
    require_rows("spread.md", &Selector::ALL.iter().map(Selector::name).collect());
}

/// The first help page lists the commands in groups, from a table of its own.
#[test]
fn the_help_lists_every_command_once() {
    let help = run(fourtuple("--help").env("COLUMNS", "80")).stdout;
    let groups = help.split("Options:").next().unwrap().lines().filter(|line| line.starts_with("  "));
    let mut listed: Vec<&str> = groups.filter_map(|line| line.split_whitespace().next()).collect();
    listed.sort_unstable();
    let command = fourtuple_cli::command();
    let mut commands: Vec<&str> = command.get_subcommands().map(|command| command.get_name()).collect();
    commands.sort_unstable();
    assert_eq!(listed, commands, "{help}");
    assert!(help.lines().all(|line| line.len() <= 80), "{help}");
}

#[test]
fn every_lab_has_a_record_and_a_page() {
    let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
    let help = run(&mut fourtuple("lab --help")).stdout;
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let indented = commands.take_while(|line| !line.is_empty()).filter_map(|line| line.strip_prefix("  "));
    let labs = indented.filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
    let labs: Vec<_> = labs.filter(|lab| *lab != "help").collect();
    assert!(labs.len() >= 6, "{help}");
    for lab in labs {
        assert!(texts(&schema, "/properties/command/enum").contains(format!("lab {lab}").as_str()), "{lab}");
        page(&format!("lab-{lab}.md"));
    }
}

#[test]
fn names_of_tables_are_read_as_they_are_written() {
    for protocol in Protocol::all() {
        assert_eq!(protocol.name().parse(), Ok(protocol));
    }
    for name in Workload::names().filter(|name| *name != Workload::HOLD) {
        assert_eq!(Workload::named(name).unwrap().name(), name);
    }
    assert!("gopher".parse::<Protocol>().is_err() && Workload::named("gopher").is_none());
}
