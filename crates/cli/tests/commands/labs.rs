//! The labs: `accept` and `keepalive` (consistent counts, the ladder, skipped combinations, refused arguments), `locks` (consistent figures,
//! missing lock waits, refusal by `compare`), `planes` (distribution over planes, order of packets, refused flags).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::child;
use fourtuple_testing::process::until_expected;
use serde_json::Value;

use crate::program::{
    Ended, Running, TempDir, fourtuple, list, measure, measure_with, number, record, refused, require_valid,
    run, text,
};

fn sum(cell: &Value, key: &str) -> u64 {
    cell[key].as_array().unwrap_or_else(|| panic!("no list {key}")).iter().map(|n| n.as_u64().unwrap()).sum()
}

/// Returns the only cell with these parameters.
fn cell<'a>(record: &'a Value, policy: &str, family: &str, close_every: u64, load: &str) -> &'a Value {
    let is_it = |cell: &&Value| {
        (text(cell, "policy"), text(cell, "family"), text(cell, "load")) == (policy, family, load)
            && number(cell, "close_every") == close_every
    };
    let found: Vec<&Value> = list(record, "/results/cells").iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{policy} {family} {close_every} {load}: {record:#}");
    found[0]
}

/// Checks the sums that hold in every cell.
fn require_sums(cell: &Value, workers: usize) {
    let operations = number(cell, "operations");
    assert!(operations > 0, "{cell:#}");
    assert_eq!(sum(cell, "requests"), operations, "workers and clients count the same responses: {cell:#}");
    assert!(cell["errors"].as_object().unwrap().is_empty(), "{cell:#}");
    for key in ["accepts", "requests", "sockets", "busy_ns"] {
        assert_eq!(cell[key].as_array().unwrap().len(), workers, "{key}: {cell:#}");
    }
    assert!(sum(cell, "busy_ns") > 0 && number(cell, "cpu_ns_per_request") > 0, "{cell:#}");
    let (jain, most) = (cell["jain"].as_f64().unwrap(), cell["max_over_mean"].as_f64().unwrap());
    let count = workers as f64;
    assert!((1.0 / count - 1e-9..=1.0 + 1e-9).contains(&jain), "{jain}");
    assert!((1.0 - 1e-9..=count + 1e-9).contains(&most), "{most}");
    let wait = &cell["wait_ns"];
    let steps = ["p50", "p99", "p999", "max"].map(|key| number(wait, key));
    assert!(steps.is_sorted(), "{cell:#}");
    // The misplaced part of a wait is at most the longest wait.
    assert!(number(cell, "misplaced_wait_ns") <= steps[3], "{cell:#}");
}

/// Returns whether requests were answered in each cell: on a busy machine its time may be over before the clients begin.
fn is_answered(ended: &Ended) -> bool {
    !ended.stdout.contains("no-answers")
}

/// Runs a lab until requests were answered in each cell, and returns its record.
fn answered(test: &str, arguments: &str) -> Option<Value> {
    let once = || measure(test, &format!("{arguments} --json"));
    let ended = until_expected(20, once, |ended| ended.as_ref().is_none_or(is_answered))?;
    ended.require_silence();
    Some(ended.json())
}

#[test]
fn light_load_is_uneven_under_exclusive_alone() {
    let command = "lab accept --policy exclusive,rotate,blocking --family unix,tcp4,tcp6 --load light --workers 4 \
                   --connections 40 --repeats 1";
    let once = || record("labs::light_load", command);
    // A blocking worker that has waited for 50 ms waits anew, behind the others: on a busy machine it may lose its turns in a run.
    let are_even = |record: &Value| {
        let mut blocking =
            list(record, "/results/cells").iter().filter(|cell| text(cell, "policy") == "blocking");
        blocking.all(|cell| cell["jain"].as_f64().unwrap() >= 0.9)
    };
    let Some(record) = until_expected(5, once, |record| record.as_ref().is_none_or(are_even)) else { return };
    require_valid(&record);
    assert_eq!(text(&record, "command"), "lab accept");
    assert_eq!(list(&record, "/results/cells").len(), 9);
    for family in ["unix", "tcp4", "tcp6"] {
        for policy in ["exclusive", "rotate", "blocking"] {
            let cell = cell(&record, policy, family, 1, "light");
            require_sums(cell, 4);
            assert_eq!((number(cell, "operations"), sum(cell, "accepts")), (40, 40), "{cell:#}");
            // Only a worker that blocks closes at once.
            assert_eq!(sum(cell, "sockets"), if policy == "blocking" { 0 } else { 40 }, "{cell:#}");
            let jain = cell["jain"].as_f64().unwrap();
            if policy == "exclusive" {
                assert!(jain < 0.75, "exclusive must be uneven: {cell:#}");
            } else {
                assert!(jain >= 0.9, "the distribution must be even: {cell:#}");
            }
        }
    }
    assert!(list(&record, "/results/skipped").is_empty());
    let advice = list(&record, "/results/advice")[0].as_str().unwrap();
    assert!(advice.starts_with("This kernel distributes connections as a ladder"), "{advice}");
}

#[test]
fn heavy_load_accepts_once_per_request() {
    let command = "lab accept --policy rotate,shared-oneshot --family unix,tcp4 --load heavy --workers 2 --clients 4 \
                   --for 300ms --repeats 2 --work 0ns";
    let Some(record) = answered("labs::heavy_load", command) else { return };
    require_valid(&record);
    for cell in list(&record, "/results/cells") {
        require_sums(cell, 2);
        assert_eq!(
            sum(cell, "accepts"),
            number(cell, "operations"),
            "every request has its connection: {cell:#}"
        );
        assert_eq!((number(cell, "repeats"), number(cell, "clients")), (2, 4));
        assert!(cell["wakeups_per_accept"].as_f64().unwrap() > 0.0, "{cell:#}");
        assert!(cell["probe"].is_null());
    }
}

#[test]
fn kept_connections_are_few_and_closed_ones_are_many() {
    let command = "lab keepalive --policy exclusive,shared-oneshot --close-every 1,never --family unix --workers 3 \
                   --clients 6 --for 250ms --long 2ms --pause 1ms --repeats 3 --seed 7";
    let Some(record) = answered("labs::kept_connections", command) else { return };
    require_valid(&record);
    assert_eq!(text(&record, "command"), "lab keepalive");
    let settings = &record["settings"];
    assert_eq!((number(settings, "short_ns"), number(settings, "long_ns")), (100_000, 2_000_000));
    assert_eq!(settings["close_every"], serde_json::json!([1, 0]));
    assert_eq!(list(&record, "/results/cells").len(), 4);
    for policy in ["exclusive", "shared-oneshot"] {
        let closed = cell(&record, policy, "unix", 1, "sleep");
        let kept = cell(&record, policy, "unix", 0, "sleep");
        for cell in [closed, kept] {
            require_sums(cell, 3);
            assert_eq!(number(cell, "repeats"), 3);
            let wait = &cell["wait_ns"];
            assert!(number(wait, "p999_low") <= number(wait, "p999_high"), "{cell:#}");
            let probe = number(&cell["probe"], "requests");
            assert!(probe > 0 && probe < number(cell, "operations"), "{cell:#}");
        }
        assert_eq!(sum(closed, "accepts"), number(closed, "operations"));
        // Six clients and the probe in three runs; a client without a request has no connection.
        assert!((1..=21).contains(&sum(kept, "accepts")), "{kept:#}");
        assert!((1..=7).contains(&sum(kept, "sockets")), "{kept:#}");
        assert_eq!(sum(closed, "sockets"), 0, "{closed:#}");
    }
    let found = &record["results"]["break_even"];
    assert!(number(found, "fresh_connection_ns") > 0, "{found:#}");
    assert!(number(found, "requests") > 0, "workers that keep connections count their requests: {found:#}");
    assert!(found["closes"].is_boolean() && found["misplaced_wait_ns"].is_u64(), "{found:#}");
    let said = list(&record, "/results/advice").last().unwrap().as_str().unwrap();
    assert!(said.starts_with("Break-even of exclusive over unix: a fresh connection costs "), "{said}");
}

/// Under these policies no worker owns a connection, so closing connections gains nothing.
#[test]
fn without_pinned_connections_there_is_no_break_even() {
    let command = "lab keepalive --policy shared-oneshot,dispatcher --close-every never --workers 2 --clients 2 --for 300ms \
                   --repeats 1";
    let Some(record) = answered("labs::without_pinned_connections", command) else { return };
    require_valid(&record);
    assert_eq!(list(&record, "/results/cells").len(), 2);
    assert!(record["results"]["break_even"].is_null(), "{record:#}");
    assert!(
        !list(&record, "/results/advice").iter().any(|line| line.as_str().unwrap().contains("Break-even"))
    );
}

#[test]
fn impossible_default_cells_are_listed_as_skipped() {
    let one = "--workers 2 --clients 2 --for 300ms --repeats 1";
    let command = format!("lab keepalive --policy blocking --close-every 1,never {one}");
    let Some(record) = answered("labs::what_cannot_be", &command) else { return };
    require_valid(&record);
    let [skipped] = list(&record, "/results/skipped") else { panic!("one is skipped: {record:#}") };
    assert_eq!((text(skipped, "policy"), number(skipped, "close_every")), ("blocking", 0));
    assert!(text(skipped, "why").contains("one connection's"), "{skipped:#}");
    assert_eq!(list(&record, "/results/cells").len(), 1);
    let command = format!("lab accept --policy reuseport --load light --connections 4 {one} --json");
    let Some(ended) = measure("labs::what_cannot_be", &command) else { return };
    let record = ended.json();
    let skipped: Vec<&str> =
        list(&record, "/results/skipped").iter().map(|cell| text(cell, "family")).collect();
    assert_eq!(skipped, ["unix"], "the families were not named: {record:#}");
    assert_eq!(list(&record, "/results/cells").len(), 2);
}

#[test]
fn impossible_named_policies_are_bad_usage() {
    for (command, line) in [
        (
            "lab accept --policy reuseport --family unix,tcp4",
            "'reuseport' for '--policy': reuseport is not possible",
        ),
        ("lab keepalive --policy reuseport", "AF_UNIX has no SO_REUSEPORT"),
        ("lab keepalive --policy blocking --close-every never", "'blocking' for '--policy'"),
    ] {
        let Some(ended) = measure_with("labs::what_was_named", &mut fourtuple(command)) else { return };
        ended.require_line(2, &[line]);
    }
}

/// The server ignores ?work= and does not name its workers in responses.
#[test]
fn an_external_server_is_measured_and_checked() {
    let temp = TempDir::new();
    let path = temp.join("socket");
    let mut server =
        Running::start(&mut fourtuple(&format!("serve http --listen unix:{path} --workers 2 --json")));
    assert!(server.until("listening", |_| UnixStream::connect(&path).is_ok()), "the server ended early");
    let ask = |more: &str| {
        let clients = "--clients 3 --for 300ms --repeats 1 --pause 1ms --close-every 2,never";
        run(&mut fourtuple(&format!("lab keepalive --server unix:{path} {clients} {more} --json")))
    };
    let honest = until_expected(20, || ask("--short 0ns --long-share 0%"), is_answered);
    // Work that takes longer than an answer on a busy machine.
    let ignored = until_expected(20, || ask("--short 5s --long-share 0%"), is_answered);
    child::interrupt(server.id()).unwrap();
    assert_eq!(server.end().code, 0);
    let record = honest.record(0);
    for cell in list(&record, "/results/cells") {
        assert_eq!((text(cell, "policy"), text(cell, "family")), ("external", "unix"));
        assert!(number(cell, "operations") > 0 && cell["wakeups_per_accept"].is_null(), "{cell:#}");
        assert!(text(cell, "server").ends_with(&path), "{cell:#}");
    }
    assert_eq!(ignored.code, 3, "responses come before the work can be done: {ignored:?}");
    let record = ignored.json();
    assert_eq!(text(&list(&record, "/validity")[0], "id"), "work-not-done");
    let ended_server = ask("--short 0ns --long-share 0%");
    assert_eq!(ended_server.code, 3, "{ended_server:?}");
    assert_eq!(text(&list(&ended_server.json(), "/validity")[0], "id"), "no-answers");
}

#[test]
fn ctrl_c_keeps_the_interrupted_cell() {
    for command in [
        "lab keepalive --policy rotate,exclusive --close-every never --for 300s --workers 2 --json",
        "lab accept --policy rotate,exclusive --family unix --load heavy --clients 64 --for 300s --workers 2 --json",
    ] {
        let mut attempt = 0;
        let ended = loop {
            let mut running = Running::start(&mut fourtuple(command));
            // Most clients are connected: the process holds both ends of their connections. While a program is being started, it has
            // the descriptors of this process, but one thread.
            let connected = running.until("connected", |id| {
                let has = |entries: &str, more_than: usize| {
                    fs::read_dir(format!("/proc/{id}/{entries}")).is_ok_and(|found| found.count() > more_than)
                };
                has("fd", 50) && has("task", 10)
            });
            if !connected {
                let ended = running.end();
                assert!(ended.is_without_namespaces(), "{ended:?}");
                let test = "labs::ctrl_c_keeps_the_interrupted_cell";
                return fourtuple_testing::skip(test, "netns", ended.line());
            }
            thread::sleep(Duration::from_millis(50) * attempt);
            child::interrupt(running.id()).unwrap();
            let ended = running.end();
            attempt += 1;
            // On a busy machine the first request may come later.
            if ended.code != 130 || attempt == 20 {
                break ended;
            }
        };
        let record = ended.record(3);
        assert_eq!(text(&list(&record, "/validity")[0], "id"), "interrupted");
        let [cell] = list(&record, "/results/cells") else { panic!("one cell had begun: {record:#}") };
        require_sums(cell, 2);
    }
}

#[test]
fn report_prints_the_saved_record_alike() {
    let temp = TempDir::new();
    for command in [
        "lab accept --policy exclusive --family unix --load light --workers 2 --connections 4 --repeats 1",
        "lab keepalive --policy exclusive --close-every never --workers 2 --clients 4 --for 300ms --repeats 1",
    ] {
        let page = temp.join("page.html");
        let once = || measure("labs::a_report_of_it", &format!("{command} --html {page}"));
        // On a busy machine the time may be over before the clients begin.
        let has_answers = |ended: &Option<Ended>| ended.as_ref().is_none_or(|ended| ended.code != 3);
        let Some(first) = until_expected(20, once, has_answers) else { return };
        assert_eq!((first.code, first.stderr), (0, format!("wrote {page}\n")));
        let html = fs::read_to_string(&page).unwrap();
        let (_, rest) = html.split_once("<script type=\"application/json\" id=\"data-0\">").unwrap();
        let path = temp.file("record.json", rest.split_once("</script>").unwrap().0);
        let again = run(&mut fourtuple(&format!("report {path}")));
        assert_eq!((again.code, again.stdout), (0, first.stdout));
    }
}

#[test]
fn each_change_has_a_before_and_an_after() {
    let command =
        "lab locks --change sources,reuseport --queries 400 --repeats 2 --workers 2 --clients 3 --sources 5";
    let Some(record) = record("labs::before_and_after", command) else { return };
    require_valid(&record);
    assert_eq!(text(&record, "command"), "lab locks");
    let pairs = list(&record, "/results/pairs");
    let changes: Vec<&str> = pairs.iter().map(|pair| text(pair, "change")).collect();
    assert_eq!(changes, ["sources", "reuseport"]);
    for pair in pairs {
        for side in ["before", "after"].map(|side| &pair[side]) {
            assert_eq!(number(side, "queries"), 800, "{pair:#}");
            assert!(side["errors"].as_object().unwrap().is_empty(), "{pair:#}");
            for figure in ["queries_per_s", "cpu_ns_per_query"] {
                let at = |end: &str| side[&format!("{figure}{end}")].as_f64().unwrap();
                assert!(0.0 < at("_low") && at("_low") <= at("") && at("") <= at("_high"), "{side:#}");
            }
            // Without tracing the record gives the reason, and has all other figures.
            let counted = !side["waits_per_query"].is_null();
            assert_ne!(counted, !record["results"]["untraced"].is_null(), "{record:#}");
        }
        assert!(pair["ratio"]["value"].as_f64().unwrap() > 0.0 && pair["ratio"]["low"].is_null(), "{pair:#}");
        assert!(text(pair, "verdict").contains("too noisy to say"), "two pairs decide nothing: {pair:#}");
    }
    let [sources, reuseport] = pairs else { unreachable!() };
    assert_eq!((number(&sources["before"], "sources"), number(&sources["after"], "sources")), (1, 5));
    assert_eq!(text(&reuseport["before"], "policy"), "exclusive");
    assert_eq!(text(&reuseport["after"], "policy"), "reuseport");
}

#[test]
fn compare_refuses_lab_locks() {
    refused(
        fourtuple("compare --").args(["lab locks", "lab locks --repeats 1"]),
        &["lab locks compares by itself"],
    );
    let command = "lab locks --change sources --queries 100 --repeats 1 --no-trace";
    let Some(record) = record("labs::compare_refuses", command) else { return };
    let temp = TempDir::new();
    let path = temp.file("a.json", &record.to_string());
    refused(fourtuple("compare").args([&path, &path]), &["are compared, no others"]);
}

/// Returns the record of a run, also if the machine was too busy for a valid result.
fn planes(test: &str, flags: &str) -> Option<Value> {
    let ended = measure(test, &format!("lab planes {flags} --packets 2000 --repeats 1 --json"))?;
    assert!([0, 3].contains(&ended.code) && ended.stderr.is_empty(), "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    Some(record)
}

fn shares(cell: &Value) -> Vec<f64> {
    list(cell, "/share").iter().map(|share| share.as_f64().unwrap()).collect()
}

/// Checks the sums that hold in every cell, also on a busy machine.
fn require_plane_sums(cell: &Value) {
    let planes = number(cell, "planes") as usize;
    assert_eq!(number(cell, "packets"), 2000, "{cell:#}");
    assert_eq!(shares(cell).len(), planes, "{cell:#}");
    assert!((shares(cell).iter().sum::<f64>() - 1.0).abs() < 1e-6, "{cell:#}");
    assert!(number(cell, "cpu_ns_per_packet") > 0 && cell["pps"].as_f64().unwrap() > 0.0, "{cell:#}");
    let dropped: u64 =
        cell["dropped"].as_object().unwrap().values().map(|number| number.as_u64().unwrap()).sum();
    assert!(dropped >= number(cell, "lost"), "every lost packet has a reason: {cell:#}");
}

#[test]
fn one_tuple_is_spread_by_flow_and_random_not_by_hash() {
    let flags = "--plane batched,offload --planes 1,4 --bytes 64 --spread hash,random,flow --flows 1";
    let Some(record) = planes("labs::one_tuple", flags) else { return };
    let cells = list(&record, "/results/cells");
    assert_eq!(cells.len(), 2 * 2 * 3);
    assert!(
        record["results"]["planes_help_above_ns"].is_null(),
        "the record compares works, and has one only"
    );
    for cell in cells {
        require_plane_sums(cell);
        let (shares, lost) = (shares(cell), number(cell, "lost"));
        if number(cell, "planes") == 1 {
            assert_eq!(shares, [1.0], "{cell:#}");
            continue;
        }
        match text(cell, "spread") {
            "hash" => assert!(shares.contains(&1.0), "{cell:#}"),
            // On a busy machine the planes may lose different numbers of packets.
            _ if lost > 0 => {}
            // The bounds are 12 standard deviations from a quarter.
            "random" => assert!(shares.iter().all(|share| (0.13..0.37).contains(share)), "{cell:#}"),
            _ => assert_eq!(shares, [0.25; 4], "{cell:#}"),
        }
        if text(cell, "spread") == "flow" {
            assert_eq!(number(cell, "reordered"), 0, "a plane keeps the order of a flow: {cell:#}");
        }
    }
}

#[test]
fn veth_and_loopback_carry_many_tuples_and_long_packets() {
    for over in ["veth", "loopback"] {
        let flags =
            format!("--over {over} --plane one-by-one --planes 2 --bytes 16,2972 --flows 64 --work 0us,6us");
        let Some(record) = planes("labs::many_tuples", &flags) else { return };
        let cells = list(&record, "/results/cells");
        assert_eq!(cells.len(), 4);
        for cell in cells {
            require_plane_sums(cell);
            assert_eq!(number(cell, "inner_flows"), 128);
            let mtu = if number(cell, "packet_bytes") == 16 { 1500 } else { 3000 };
            assert_eq!(number(cell, "mtu"), mtu);
            // The plane spends its own CPU time on the work; the bound of half the work allows for preemption.
            assert!(number(cell, "work_ns") == 0 || number(cell, "cpu_ns_per_packet") > 3_000, "{cell:#}");
        }
    }
}

#[test]
fn ten_planes_are_all_busy() {
    let Some(record) = planes("labs::ten", "--plane batched --planes 10 --spread flow") else { return };
    let [cell] = list(&record, "/results/cells") else { panic!("one cell: {record:#}") };
    // On a busy machine the planes may lose different numbers of packets.
    let least = if number(cell, "lost") == 0 { 0.05 } else { 0.0 };
    assert!(shares(cell).iter().all(|share| *share > least), "{cell:#}");
}

#[test]
fn ctrl_c_keeps_complete_runs() {
    let command =
        "lab planes --plane batched --planes 1 --bytes 64 --packets 1000 --repeats 100 --work 100us --json";
    let mut running = Running::start(&mut fourtuple(command));
    // Each run starts a thread named plane-0: after the fifth start, four runs are complete.
    let mut seen = BTreeSet::new();
    let begun = running.until("measured", |id| {
        let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
        let is_plane = |task: &fs::DirEntry| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("plane-"))
        };
        seen.extend(tasks.filter(is_plane).map(|task| task.file_name()));
        seen.len() >= 5
    });
    if !begun {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "the lab ended before the signal: {ended:?}");
        return fourtuple_testing::skip("labs::ctrl_c", "netns", ended.line());
    }
    child::interrupt(running.id()).unwrap();
    let ended = running.end();
    let record = ended.record(3);
    assert!(list(&record, "/validity").iter().any(|remark| remark["id"] == "interrupted"), "{record:#}");
    let [cell] = list(&record, "/results/cells") else { panic!("one cell: {record:#}") };
    assert!((1..100).contains(&number(cell, "repeats")), "{cell:#}");
}

#[test]
fn bad_input_names_the_flag() {
    for (flags, said) in [
        ("--plane teleport", "'--plane"),
        ("--planes 0", "'--planes"),
        ("--planes 65", "from 1 to 64"),
        ("--bytes 10", "'10' for '--bytes': accepted are 16 to 9000"),
        ("--spread alphabet", "hash, random, flow or cpu"),
        ("--flows 257", "from 1 to 256"),
        ("--work 2ms", "up to 1ms"),
        ("--packets 10", "1000 to 100000000"),
        ("--over pigeon", "veth or loopback"),
    ] {
        refused(&mut fourtuple(&format!("lab planes {flags}")), &[said]);
    }
    refused(
        fourtuple("compare").arg("--").args(["lab planes", "lab planes --planes 2"]),
        &["lab planes compares by itself"],
    );
}
