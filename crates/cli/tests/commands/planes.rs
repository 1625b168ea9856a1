//! `fourtuple lab planes`: distribution over planes, order of packets, refused flags.

use crate::program::{Running, fourtuple, list, measure, number, require_valid, run, text};
use serde_json::Value;

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
fn require_sums(cell: &Value) {
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
    let Some(record) = planes("planes::one_tuple", flags) else { return };
    let cells = list(&record, "/results/cells");
    assert_eq!(cells.len(), 2 * 2 * 3);
    assert!(
        record["results"]["planes_help_above_ns"].is_null(),
        "the record compares works, and has one only"
    );
    for cell in cells {
        require_sums(cell);
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
        let Some(record) = planes("planes::many_tuples", &flags) else { return };
        let cells = list(&record, "/results/cells");
        assert_eq!(cells.len(), 4);
        for cell in cells {
            require_sums(cell);
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
    let Some(record) = planes("planes::ten", "--plane batched --planes 10 --spread flow") else { return };
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
    // Each run starts threads named plane-*: after the fifth start, four runs are complete.
    let mut seen = (false, 0);
    let begun = running.until("measured", |id| {
        let tasks = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let is_plane = names.into_iter().any(|name| name.starts_with("plane-"));
        seen = (is_plane, seen.1 + u32::from(is_plane && !seen.0));
        seen.1 >= 5
    });
    if !begun {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "the lab ended before the signal: {ended:?}");
        return fourtuple_testing::skip("planes::ctrl_c", "netns", ended.line());
    }
    fourtuple_syscalls::child::interrupt(running.id()).unwrap();
    let ended = running.end();
    assert_eq!((ended.code, ended.stderr.as_str()), (3, ""), "{ended:?}");
    let record = ended.json();
    require_valid(&record);
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
        let ended = run(&mut fourtuple(&format!("lab planes {flags}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{flags}: {ended:?}");
        assert!(ended.line().contains(said), "{flags}: {ended:?}");
    }
    let ended = run(fourtuple("compare").arg("--").args(["lab planes", "lab planes --planes 2"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(ended.line().contains("lab planes compares by itself"), "{ended:?}");
}
