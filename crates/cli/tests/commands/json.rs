//! The JSON interface for other programs, and saved records that `report` renders.

use std::fs;

use crate::program::{Room, fourtuple, list, measure, number, record, require_valid, run, text};
use serde_json::Value;

const PORTS: &str = "lab ports --range 20000-20127";
const TIME_WAIT: &str = "lab time-wait --patience 200ms --range 20000-20127";
const PLAN: &str = "plan --kernel linear --strategy full-range --rate 20k/s --hold 1s";

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

fn require_keys(value: &Value, wanted: &[&str]) {
    let found = keys(value);
    for key in wanted {
        assert!(found.contains(key), "no {key} among {found:?}");
    }
}

fn require_envelope(record: &Value, command: &str) {
    require_valid(record);
    require_keys(record, &["schema", "command", "started", "host", "settings", "validity", "results"]);
    assert_eq!((text(record, "schema"), text(record, "command")), ("fourtuple/1", command));
    assert!(list(record, "/validity").is_empty(), "{record:#}");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(text(&record["host"], "kernel"), kernel.trim());
    assert!(number(&record["host"], "cpus") >= 1);
    let found = text(&record["host"]["capabilities"], "ip_local_port_range");
    assert!(["absent", "parity", "linear"].contains(&found), "{found}");
}

#[test]
fn lab_ports() {
    let Some(record) = record("json::lab_ports", PORTS) else { return };
    require_envelope(&record, "lab ports");
    let settings = &record["settings"];
    assert_eq!((number(settings, "low"), number(settings, "high")), (20_000, 20_127));
    assert_eq!((text(settings, "protocol"), number(settings, "family")), ("tcp", 4));
    let names: Vec<&str> = list(settings, "/strategies").iter().map(|name| name.as_str().unwrap()).collect();
    let runs = list(&record, "/results/strategies");
    assert_eq!(runs.iter().map(|run| text(run, "strategy")).collect::<Vec<_>>(), names, "as asked");
    for name in ["kernel-default", "select-test-repeat", "auto"] {
        assert!(names.contains(&name), "{names:?}");
    }
    for run in runs {
        require_keys(
            run,
            &[
                "strategy",
                "connections",
                "errors",
                "elapsed_ns",
                "rate_per_s",
                "connect_ns",
                "by_fill",
                "floor_ns",
            ],
        );
        let spreads = &run["connect_ns"];
        for parity in ["all", "even", "odd"] {
            let of = |key| number(&spreads[parity], key);
            let steps = [of("p50"), of("p99"), of("p999"), of("max")];
            assert!(steps.is_sorted() && steps[0] > 0 && of("mean") <= of("max"), "{spreads:#}");
        }
        let counted = |parity: &str| number(&spreads[parity], "count");
        assert_eq!(counted("all"), number(run, "connections"));
        assert_eq!(counted("even") + counted("odd"), counted("all"));
        let parts = list(run, "/by_fill");
        assert!(parts.iter().all(|part| number(part, "mean_ns") > 0 || number(part, "connections") == 0));
        let held: u64 = parts.iter().map(|part| number(part, "connections")).sum();
        assert_eq!(held, number(run, "connections"), "every connection is in one part of the fill");
        let rate = run["rate_per_s"].as_f64().unwrap() * number(run, "elapsed_ns") as f64 / 1e9;
        assert!((rate / held as f64 - 1.0).abs() < 1e-6, "rate x time = connections");
    }
}

#[test]
fn lab_time_wait() {
    let Some(record) = record("json::lab_time_wait", TIME_WAIT) else { return };
    require_envelope(&record, "lab time-wait");
    assert_eq!(number(&record["settings"], "patience_ns"), 200_000_000);
    assert_eq!(number(&record["results"], "time_wait_ns"), 60_000_000_000);
    assert_eq!(record["results"]["ceiling_per_s"].as_f64(), Some(128.0 / 60.0));
    for run in list(&record, "/results/runs") {
        require_keys(
            run,
            &["remedy", "transactions", "elapsed_ns", "predicted_stall_ns", "stall_ns", "errors"],
        );
        let points = list(run, "/time_wait");
        assert!(points.iter().map(|point| number(point, "at_ns")).is_sorted());
        assert!(points.iter().map(|point| number(point, "completed")).is_sorted());
    }
}

#[test]
fn plan() {
    let ended = run(&mut fourtuple(&format!("{PLAN} --range 20000-20127 --json")));
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    let results = &record["results"];
    require_keys(
        results,
        &["capacity", "cliff_connections", "exhausted_after_ns", "sources_needed", "by_fill"],
    );
    assert_eq!(number(results, "capacity"), 128);
    assert_eq!(results["cliff_connections"], Value::Null, "a linear search has no cliff");
    // 128 ports at 20,000 connections per second; no port can be reused in this time.
    assert_eq!(number(results, "exhausted_after_ns"), 6_400_000);
    // The run needs 20,000/s x 61 s tuples, and each source has 128.
    assert_eq!(number(results, "sources_needed"), (20_000_u64 * 61).div_ceil(128));
    assert_eq!(list(&record, "/results/by_fill").len(), 16);
    let others = list(&record, "/results/others");
    let ordinary = &others[0];
    assert_eq!(
        (text(ordinary, "strategy"), number(ordinary, "cliff_connections"), others.len()),
        ("kernel-default", 64, 1)
    );
    let over_time: Vec<_> =
        list(&record, "/results/over_time").iter().map(|moment| number(moment, "tuples")).collect();
    assert_eq!(over_time, [0, 128, 128]);
}

#[test]
fn plan_by_parity_has_a_cliff() {
    let plan =
        "plan --kernel parity --strategy kernel-default --range 20000-20127 --reserved 20000-20003 --json";
    let record = run(&mut fourtuple(plan)).json();
    require_valid(&record);
    assert_eq!(number(&record["results"], "capacity"), 124);
    let cliff = number(&record["results"], "cliff_connections");
    assert!((62..=64).contains(&cliff), "half of the ports: {cliff}");
    assert_eq!(record["results"]["exhausted_after_ns"], Value::Null, "without a rate nothing runs out");
}

#[test]
fn plan_for_this_kernel_is_calibrated() {
    let Some(record) = record("json::plan_for_this_kernel", "plan --range 20000-20511") else { return };
    require_envelope(&record, "plan");
    assert_eq!(text(&record["settings"], "costs"), "calibrated");
    assert!(list(&record, "/results/by_fill").iter().all(|point| number(point, "mean_ns") > 0));
}

/// Returns the record that is embedded in a page.
fn embedded(page: &str) -> &str {
    let (_, rest) =
        page.split_once("<script type=\"application/json\" id=\"data-0\">").expect("data in the page");
    rest.split_once("</script>").expect("an end of the data").0
}

#[test]
fn a_report_equals_the_printed_table() {
    for experiment in [PORTS, TIME_WAIT, PLAN] {
        let room = Room::new();
        let page = room.join("first.html");
        let test = "json::a_report_equals_the_printed_table";
        let Some(first) = measure(test, &format!("{experiment} --html {page}")) else { return };
        assert_eq!((first.code, first.stderr), (0, format!("wrote {page}\n")));
        let json = embedded(&fs::read_to_string(&page).unwrap()).to_owned();
        let path = room.file("record.json", &json);
        let again = run(&mut fourtuple(&format!("report {path}")));
        assert_eq!((again.code, again.stderr.as_str()), (0, ""), "{again:?}");
        assert_eq!(again.stdout, first.stdout, "{experiment}");
        let page = room.join("second.html");
        let third = run(&mut fourtuple(&format!("report {path} --html {page}")));
        assert_eq!((third.code, &third.stdout), (0, &first.stdout), "{experiment}");
        let carried: Value = serde_json::from_str(embedded(&fs::read_to_string(&page).unwrap())).unwrap();
        assert_eq!(carried, serde_json::from_str::<Value>(&json).unwrap(), "{experiment}");
        assert_eq!(room.names(), ["first.html", "record.json", "second.html"], "no temporary file stays");
    }
}

#[test]
fn a_record_survives_a_round_trip() {
    let room = Room::new();
    let mut all = String::new();
    let mut paths = Vec::new();
    for (index, experiment) in [PORTS, TIME_WAIT, PLAN].into_iter().enumerate() {
        let Some(ended) = measure("json::a_record_read_back", &format!("{experiment} --json")) else {
            return;
        };
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
        paths.push(room.file(&format!("{index}.json"), &ended.stdout));
        all.push_str(&ended.stdout);
    }
    let again = run(&mut fourtuple(&format!("report --json {}", paths.join(" "))));
    assert_eq!((again.code, again.stderr.as_str()), (0, ""));
    assert!(again.stdout == all, "not the same bytes:\n{all}\n{}", again.stdout);
}
