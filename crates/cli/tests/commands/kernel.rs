//! The experiments `lab ports` and `lab time-wait` on the running kernel, with ranges of about a hundred ports.

use crate::program::{list, number, record, text};
use fourtuple_bench::lab::time_wait::Remedy;
use serde_json::Value;

fn runs(test: &str, flags: &str) -> Option<Vec<Value>> {
    let record = record(test, &format!("lab ports {flags}"))?;
    Some(list(&record, "/results/strategies").to_vec())
}

/// Requires that the run filled the range and measured each sixteenth of it.
fn require_full(run: &Value, connections: u64) {
    assert_eq!((number(run, "connections"), number(run, "dials")), (connections, connections), "{run:#}");
    assert_eq!(run["errors"], Value::Object(Default::default()));
    require_measured(run);
}

fn require_measured(run: &Value) {
    assert_eq!(list(run, "/by_fill").len(), 16, "{run:#}");
    assert!(number(run, "floor_ns") > 0, "{run:#}");
}

/// Requires a nearly full range. A dial makes a hundred attempts, which may all meet a port in use: few dials fail, with the
/// errno of the last call.
fn require_nearly_full(run: &Value, dials: u64, errno: &str) {
    let connections = number(run, "connections");
    let failed = run["errors"][errno].as_u64().unwrap_or(0);
    assert_eq!((number(run, "dials"), connections + failed), (dials, dials), "{run:#}");
    assert!(connections >= dials * 3 / 4, "{run:#}");
    require_measured(run);
}

fn require_each_full(runs: &[Value], connections: u64, errno: &str) {
    assert!(runs.len() >= 3, "{runs:#?}");
    for run in runs {
        match text(run, "strategy") {
            "select-test-repeat" => require_nearly_full(run, connections, errno),
            _ => require_full(run, connections),
        }
    }
}

#[test]
fn every_strategy_fills_the_range() {
    let Some(runs) = runs("kernel::every_strategy", "--range 20000-20127") else { return };
    require_each_full(&runs, 128, "EADDRNOTAVAIL");
    let auto = runs.iter().find(|run| run["strategy"] == "auto").unwrap();
    assert!(!text(auto, "chosen").is_empty());
    assert!(runs.iter().filter(|run| run["strategy"] != "auto").all(|run| run.get("chosen").is_none()));
}

#[test]
fn every_strategy_fills_the_range_of_ipv6() {
    let Some(runs) = runs("kernel::ipv6", "--range 20000-20127 --family 6") else { return };
    require_each_full(&runs, 128, "EADDRNOTAVAIL");
}

#[test]
fn every_strategy_fills_the_range_of_udp() {
    for family in [4, 6] {
        let flags = format!("--range 20000-20127 --protocol udp --family {family}");
        let Some(runs) = runs("kernel::udp", &flags) else { return };
        require_each_full(&runs, 128, "EADDRINUSE");
    }
}

#[test]
fn the_smallest_range() {
    let Some(runs) = runs("kernel::smallest", "--range 1024-1031 --strategy kernel-default,auto") else {
        return;
    };
    for run in &runs {
        assert_eq!((number(run, "connections"), list(run, "/by_fill").len()), (8, 8), "{run:#}");
    }
}

#[test]
fn windows_without_fallback_fail_before_exhaustion() {
    let Some(record) = record("kernel::windows", "lab ports --windows --range 20000-21999 --fill 1") else {
        return;
    };
    if record["host"]["capabilities"]["ip_local_port_range"] == "absent" {
        return fourtuple_testing::skip(
            "kernel::windows",
            "option-51",
            "this kernel has no IP_LOCAL_PORT_RANGE",
        );
    }
    assert_eq!(record["settings"]["windows"], true);
    let runs = list(&record, "/results/strategies");
    let names: Vec<&str> = runs.iter().map(|run| text(run, "strategy")).collect();
    assert_eq!(
        names,
        ["random-window:500", "random-window:1000", "random-window:5000", "random-window:10000"]
    );
    let mut failed = Vec::new();
    for run in runs {
        let errors = run["errors"].as_object().unwrap();
        assert!(errors.keys().all(|errno| errno == "EADDRNOTAVAIL"), "{errors:?}");
        failed.push(errors.values().map(|count| count.as_u64().unwrap()).sum::<u64>());
        assert_eq!(number(run, "connections") + failed[failed.len() - 1], 2000);
        assert_eq!(number(run, "retries"), 0, "one try each");
        require_measured(run);
    }
    assert!(failed[0] > 0 && failed[1] > 0, "a window that is full has no way out: {failed:?}");
    assert_eq!(failed[2..], [0, 0], "a window wider than the range is the range");
}

#[test]
fn requested_windows_run_once() {
    let flags = "--windows --range 20000-20127 --strategy kernel-default,random-window:1000";
    let Some(runs) = runs("kernel::windows_once", flags) else { return };
    let names: Vec<&str> = runs.iter().map(|run| text(run, "strategy")).collect();
    assert_eq!(
        names,
        [
            "kernel-default",
            "random-window:1000",
            "random-window:500",
            "random-window:5000",
            "random-window:10000"
        ]
    );
}

#[test]
fn windows_with_fallback_fill_the_range() {
    let flags = "--range 20000-20255 --strategy random-window:16,random-window:1,full-range";
    let Some(runs) = runs("kernel::way_out", flags) else { return };
    for run in &runs {
        require_full(run, 256);
    }
    assert!(number(&runs[0], "retries") > 0, "full windows were met: {:#}", runs[0]);
}

#[test]
fn several_sources_have_their_own_ports() {
    for family in [4, 6] {
        let flags = format!("lab ports --range 20000-20127 --sources 4 --strategy auto --family {family}");
        let Some(record) = record("kernel::sources", &flags) else { return };
        assert_eq!(number(&record["results"], "tuples"), 512);
        require_full(&list(&record, "/results/strategies")[0], 512);
    }
}

#[test]
fn repeats_are_interleaved() {
    let flags = "--range 20000-20127 --strategy kernel-default,auto --repeats 2";
    let Some(runs) = runs("kernel::repeats", flags) else { return };
    let order: Vec<(&str, u64)> =
        runs.iter().map(|run| (text(run, "strategy"), number(run, "repeat"))).collect();
    assert_eq!(order, [("kernel-default", 1), ("auto", 1), ("auto", 2), ("kernel-default", 2)]);
    runs.iter().for_each(|run| require_full(run, 128));
}

#[test]
fn half_a_fill() {
    let flags = "--range 20000-20127 --strategy kernel-default,auto --fill 0.5";
    let Some(runs) = runs("kernel::half", flags) else { return };
    for run in &runs {
        require_full(run, 64);
        let fills: Vec<f64> =
            list(run, "/by_fill").iter().map(|part| part["fill"].as_f64().unwrap()).collect();
        assert!(fills.is_sorted() && fills[15] == 0.5, "{fills:?}");
    }
    let odd = number(&runs[0]["connect_ns"]["even"], "count");
    assert!(odd == 0 || odd == 64, "the default takes one half of the ports first: {odd} of 64 even");
}

#[test]
fn time_wait_stalls_as_predicted_and_remedies_help() {
    let command = "lab time-wait --range 20000-20127 --patience 200ms";
    let Some(record) = record("kernel::time_wait", command) else { return };
    let runs = list(&record, "/results/runs");
    let names: Vec<&str> = runs.iter().map(|run| text(run, "remedy")).collect();
    assert_eq!(names, Remedy::ALL.map(Remedy::name));
    let find = |name: &str| runs.iter().find(|run| run["remedy"] == name).unwrap();

    let under = find("none-under");
    assert_eq!((number(under, "transactions"), number(under, "completed")), (127, 127));
    let last = list(under, "/time_wait").last().unwrap();
    assert_eq!(
        (number(last, "count"), number(last, "completed")),
        (127, 127),
        "one each, and all still there"
    );

    let over = find("none-over");
    assert_eq!((number(over, "transactions"), number(over, "completed")), (136, 128));
    assert_eq!((number(over, "predicted_stall_at"), number(over, "stalled_at")), (129, 129));
    assert_eq!(over["cut"], true, "60 s are not sat out");
    let stall = number(over, "stall_ns");
    assert!((200_000_000..60_000_000_000).contains(&stall), "{stall}");
    assert!(number(over, "predicted_stall_ns") > stall);
    assert!(number(&over["errors"], "EADDRNOTAVAIL") > 1, "{over:#}");

    for remedy in ["none-under", "more-sources", "wider-range", "server-closes-first", "keep-alive"] {
        let run = find(remedy);
        assert_eq!(number(run, "completed"), number(run, "transactions"), "{run:#}");
        assert_eq!((run.get("predicted_stall_at"), run.get("stalled_at")), (None, None), "{run:#}");
        assert_eq!((number(run, "stall_ns"), number(run, "predicted_stall_ns")), (0, 0), "{run:#}");
        assert_eq!(run["errors"], Value::Object(Default::default()));
    }
    for remedy in ["more-sources", "wider-range"] {
        let last = list(find(remedy), "/time_wait").last().unwrap();
        assert_eq!(number(last, "count"), 136, "{remedy}");
    }
    let kept = list(find("keep-alive"), "/time_wait").last().unwrap();
    assert_eq!(number(kept, "count"), 2, "136 transactions took two connections");
}
