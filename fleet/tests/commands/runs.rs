//! `fourtuple fleet` and `fourtuple agent` with a real nats-server: one result of several hosts, and faults.

use std::fs;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::program;
use crate::program::{Ended, Running, fourtuple, list, number, remarks_but_of_haste, run, text};
use crate::{LocalFleet, Process, RawClient, TARGET, delaying_proxy, fleet, hosts, nats_server, with_fleet};
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_testing::in_namespace;
use serde_json::{Value, json};

/// Number of times that each test of a fault runs: FOURTUPLE_FAULTS, by default once.
fn times() -> usize {
    std::env::var("FOURTUPLE_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A coordinator in the background.
struct Coordinator(Running);

impl Coordinator {
    fn start(arguments: &str) -> Coordinator {
        let mut command = fourtuple(&format!("fleet {arguments} --json"));
        child::end_with_this_thread(&mut command);
        Coordinator(Running::start(&mut command))
    }

    fn end(self) -> (i32, Value, Ended) {
        let ended = self.0.end();
        assert!(!ended.stdout.is_empty(), "{ended:?}");
        let record = ended.json();
        program::require_valid(&record);
        (ended.code, record, ended)
    }
}

/// Returns the name of the run that a coordinator printed.
fn run_name(stderr: &str) -> String {
    let (_, rest) = stderr.split_once("run ").unwrap_or_else(|| panic!("no run in {stderr}"));
    rest.chars().take_while(char::is_ascii_alphanumeric).collect()
}

/// Asserts that the merged record agrees with its hosts: every operation counts once.
fn require_sums(record: &Value) {
    let of_hosts: u64 = list(record, "/results/hosts").iter().map(|host| number(host, "operations")).sum();
    let of_seconds: u64 =
        list(record, "/results/seconds").iter().map(|second| number(second, "operations")).sum();
    let results = &record["results"];
    assert_eq!(of_hosts, number(results, "operations"));
    assert_eq!(of_seconds, of_hosts);
    assert_eq!(number(&results["latency_ns"]["total"], "samples"), of_hosts);
    for host in list(record, "/results/hosts") {
        let seconds = host["seconds"].as_array().unwrap();
        assert_eq!(number(host, "intervals"), seconds.len() as u64);
        let sum: u64 = seconds.iter().map(|second| number(second, "operations")).sum();
        assert_eq!(sum, number(host, "operations"));
    }
}

/// Returns an agent whose monotonic clock is ahead by `seconds`; `None` if the host has no time namespaces.
fn skewed_agent(fleet: &LocalFleet, name: &str, seconds: i64, flags: &str) -> Process {
    let agent = fleet.agent_command(name, flags);
    let mut command = Command::new("unshare");
    command.args(["--time", &format!("--monotonic={seconds}"), "--fork", "--kill-child"]);
    command.arg(agent.get_program()).args(agent.get_args()).stdin(Stdio::null());
    let agent = Process::start(command);
    agent.until_said("is ready");
    agent
}

#[test]
fn skewed_clocks_start_together_and_merge_exactly() {
    with_fleet(|local| {
        let test = "runs::skewed_clocks_start_together_and_merge_exactly";
        if !Command::new("unshare").args(["--time", "--fork", "true"]).status().is_ok_and(|end| end.success())
        {
            return fourtuple_testing::skip(test, "root", "no time namespace to be had");
        }
        delaying_proxy("127.0.0.1:4223", Duration::from_millis(5));
        // The clock must not become negative, on a host that has just booted.
        let uptime = fourtuple_syscalls::resource::monotonic_time().as_secs() as i64;
        let skews = [("a", 0), ("b", 37), ("c", -(uptime / 2).min(2_000)), ("d", 86_400)];
        let _agents: Vec<Process> = skews
            .iter()
            .map(|(name, skew)| {
                let flags = if *name == "b" { "--nats nats://127.0.0.1:4223" } else { "" };
                skewed_agent(&local, name, *skew, flags)
            })
            .collect();
        // Every operation is over a threshold of 1 ns, so that the record lists the time of each of up to 1,000.
        let line = format!(
            "load --workers 4 --max-skew 2s -- load {TARGET} --rate 200/s --operations 800 --threshold 1ns --seed 7"
        );
        let (_, record) = fleet(&line);
        assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
        require_sums(&record);
        let hosts = hosts(&record);
        for (name, skew) in skews {
            let host = &hosts[name];
            let offset = host["clock_offset_ns"].as_i64().unwrap();
            let bound = number(host, "clock_bound_ns");
            // All clocks are one clock with a known offset, so the error of the estimate is known.
            assert!(offset.abs_diff(skew * 1_000_000_000) <= bound, "{name}: {offset} with bound {bound}");
            assert!(host["start_error_ns"].is_u64(), "{host}");
        }
        assert!(number(&hosts["b"], "clock_bound_ns") >= 5_000_000, "the proxy delays both directions");
        let mut raw: Vec<u64> =
            list(&record, "/results/slow").iter().map(|slow| number(slow, "total_ns")).collect();
        let results = &record["results"];
        assert_eq!(raw.len() as u64, number(results, "operations"));
        assert_eq!(raw.len(), 800);
        raw.sort_unstable();
        let total = &results["latency_ns"]["total"];
        for (share, name) in [(0.5, "p50"), (0.99, "p99"), (0.999, "p999"), (1.0, "max")] {
            let exact = raw[((raw.len() as f64 * share).ceil() as usize).max(1) - 1];
            let found = number(total, name);
            assert!(found >= exact && found - exact <= exact / 1_000, "{name}: {found}, exactly {exact}");
        }
        let mean = raw.iter().sum::<u64>() / raw.len() as u64;
        assert_eq!(number(total, "mean"), mean);
    });
}

#[test]
fn the_offered_rate_is_split_exactly() {
    with_fleet(|local| {
        let _agents = ["a", "b", "c"].map(|name| local.agent(name, ""));
        let (_, record) =
            fleet(&format!("load --workers 3 -- load {TARGET} --rate 100/s --operations 31 --arrival even"));
        assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
        require_sums(&record);
        assert_eq!(number(&record["results"], "operations"), 31);
        let rates: Vec<f64> = list(&record, "/results/hosts")
            .iter()
            .map(|host| host["offered_per_s"].as_f64().unwrap())
            .collect();
        let micro: Vec<u64> = rates.iter().map(|rate| (rate * 1e6).round() as u64).collect();
        assert_eq!(micro, [33_333_334, 33_333_333, 33_333_333]);
        let operations: Vec<u64> =
            list(&record, "/results/hosts").iter().map(|host| number(host, "operations")).collect();
        assert_eq!(operations, [11, 10, 10]);
    });
}

#[test]
fn thresholds_and_rows_are_those_of_the_merged_result() {
    with_fleet(|local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        let rows = local.directory.join("rows.csv");
        let load = format!("load {TARGET} --rate 200/s --operations 60 --arrival even --csv {rows}");
        let (code, record) =
            fleet(&format!("load --workers 2 -- {load} --expect errors<1 --expect rate>1M/s"));
        // 3: on a busy machine the rate that is offered may not be reached.
        assert!([1, 3].contains(&code) && remarks_but_of_haste(&record).is_empty(), "{code}: {record:#}");
        let judged = list(&record["results"], "/expectations").iter();
        let met: Vec<(&str, bool)> = judged.map(|one| (text(one, "expect"), one["met"] == true)).collect();
        assert_eq!(met, [("errors<1", true), ("rate>1M/s", false)], "{record:#}");
        let rows = fs::read_to_string(rows).unwrap();
        let sum: u64 =
            rows.lines().skip(1).map(|row| row.split(',').nth(1).unwrap().parse::<u64>().unwrap()).sum();
        assert_eq!((sum, number(&record["results"], "operations")), (60, 60), "{rows}");
    });
}

#[test]
fn a_warm_up_and_a_list_of_requests_are_those_of_each_worker() {
    with_fleet(|local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        let _server = Process::start(fourtuple("serve http --listen 127.0.0.1:8080 --quiet"));
        program::until("the server listens", || TcpStream::connect("127.0.0.1:8080").is_ok());
        local.directory.file("list", "{\"path\": \"/one\"}\n{\"path\": \"/two\", \"body\": \"x\"}\n");
        let list = local.directory.join("list");
        let url = "http://127.0.0.1:8080/";
        let load = format!("load {url} --rate 200/s --arrival even --for 2s --warm-up 2s --requests {list}");
        let (_, record) = fleet(&format!("load --workers 2 --max-skew 2s -- {load}"));
        assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
        require_sums(&record);
        let results = &record["results"];
        let (operations, warm_up) = (number(results, "operations"), &results["warm_up"]);
        // 400 are due in each half; a busy machine begins fewer.
        assert!((1..=450).contains(&operations), "{record:#}");
        assert_eq!(number(warm_up, "for_ns"), 2_000_000_000);
        assert!((1..=450).contains(&number(warm_up, "operations")), "{record:#}");
        let sent: Vec<(&str, u64)> = program::list(results, "/requests")
            .iter()
            .map(|request| (text(request, "path"), number(request, "responses")))
            .collect();
        let [("/one", one), ("/two", two)] = sent[..] else { panic!("{record:#}") };
        // Each worker takes the requests in turn, from the first of its warm-up on.
        assert!(one + two == operations && one.abs_diff(two) <= 2, "{record:#}");
        assert!(
            program::list(results, "/seconds").len() <= 3,
            "those of the warm-up do not count: {record:#}"
        );
        local.directory.file("list", &format!("{{\"body\": \"{}\"}}\n", "x".repeat(300_000)));
        let ended = run(&mut fourtuple(&format!("fleet load --workers 2 -- {load}")));
        assert_eq!(ended.code, 2, "{ended:?}");
        assert!(ended.stderr.contains("at most 262144"), "{ended:?}");
    });
}

#[test]
fn a_killed_agent_is_reported_and_not_replaced() {
    with_fleet(|local| {
        let _a = local.agent("a", "");
        for _ in 0..times() {
            let mut b = local.agent("b", "");
            let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --arrival even --for 10s");
            let run = local.under_way(2, || Coordinator::start(&line));
            b.kill();
            let (code, record, _) = run.end();
            assert_eq!(code, 3);
            assert_eq!(remarks_but_of_haste(&record), ["worker-lost"], "{record:#}");
            require_sums(&record);
            let hosts = hosts(&record);
            assert!(hosts["b"]["lost_at_ns"].is_u64());
            let total = &hosts["b"]["total_ns"];
            assert_eq!(number(total, "samples"), number(&hosts["b"], "operations"));
            assert!(number(total, "p50") > 0 && number(total, "p50") <= number(total, "max"), "{total}");
            assert!(number(&hosts["b"], "intervals") >= 1, "its complete seconds count");
            assert!(number(&hosts["b"], "intervals") < 10);
            // The load of the lost worker was not given to the other one.
            assert_eq!(hosts["a"]["offered_per_s"], 50.0);
            assert!(number(&hosts["a"], "operations") < 600, "{record:#}");
        }
    });
}

#[test]
fn a_pause_of_two_seconds_loses_no_worker() {
    with_fleet(|local| {
        let (_a, b) = (local.agent("a", ""), local.agent("b", ""));
        for _ in 0..times() {
            let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --for 10s");
            let run = local.under_way(1, || Coordinator::start(&line));
            b.signal("STOP");
            thread::sleep(Duration::from_secs(2));
            b.signal("CONT");
            let (_, record, _) = run.end();
            assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
            require_sums(&record);
            let paused = &hosts(&record)["b"];
            assert!(
                number(&paused["total_ns"], "max") > 1_000_000_000,
                "the pause is in the times: {paused:#}"
            );
        }
    });
}

#[test]
fn a_pause_of_ten_seconds_loses_the_worker() {
    with_fleet(|local| {
        let (_a, b) = (local.agent("a", ""), local.agent("b", ""));
        for _ in 0..times() {
            let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --for 14s");
            let run = local.under_way(1, || Coordinator::start(&line));
            b.signal("STOP");
            thread::sleep(Duration::from_secs(10));
            b.signal("CONT");
            let (code, record, ended) = run.end();
            assert_eq!(code, 3);
            assert_eq!(remarks_but_of_haste(&record), ["worker-lost"], "{record:#}");
            require_sums(&record);
            let lost = number(&hosts(&record)["b"], "lost_at_ns") / 1_000_000_000;
            assert_eq!(number(&hosts(&record)["b"], "intervals"), lost, "only seconds before the loss count");
            // The messages that the worker sent after the pause do not change the result.
            let (code, again) = fleet(&format!("collect {}", run_name(&ended.stderr)));
            assert_eq!((code, &again["results"]["hosts"][1]), (3, &record["results"]["hosts"][1]));
        }
    });
}

#[test]
fn a_restart_of_nats_loses_nothing() {
    with_fleet(|mut local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        for _ in 0..times() {
            let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --for 9s");
            let run = local.under_way(1, || Coordinator::start(&line));
            local.nats.kill();
            thread::sleep(Duration::from_secs(4));
            local.restart_nats();
            let (_, record, _) = run.end();
            assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
            require_sums(&record);
            for (name, host) in hosts(&record) {
                assert_eq!(number(&host, "missing"), 0, "{name}");
                assert!(number(&host, "intervals") >= 9, "{name}: {host:#}");
            }
        }
    });
}

#[test]
fn a_run_outlives_its_coordinator() {
    with_fleet(|local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        for _ in 0..times() {
            let mut command = fourtuple("fleet load --workers 2 --");
            command.args(format!("load {TARGET} --rate 100/s --for 5s").split(' '));
            let mut coordinator = local.under_way(1, || Process::start(command));
            coordinator.until_said("run ");
            coordinator.kill();
            let name = run_name(&coordinator.said());
            // In the middle of the run, and again after its end: the same result.
            let (_, during) = fleet(&format!("collect {name}"));
            assert_eq!(remarks_but_of_haste(&during), [""; 0], "{during:#}");
            require_sums(&during);
            let (_, after) = fleet(&format!("collect {name}"));
            assert_eq!(during["results"], after["results"]);
            assert!(number(&hosts(&during)["a"], "intervals") >= 5);
        }
    });
}

#[test]
fn summaries_alone_give_the_same_record() {
    with_fleet(|local| {
        let agents = ["a", "b"].map(|name| local.agent(name, ""));
        let run = Coordinator::start(&format!("load --workers 2 -- load {TARGET} --rate 300/s --for 3s"));
        let (_, followed, ended) = run.end();
        let run = run_name(&ended.stderr);
        let mut client = RawClient::connect();
        for slot in 0..2 {
            let last = json!({ "last_by_subj": format!("fourtuple.run.{run}.end.{slot}.0") }).to_string();
            program::until("the summary is stored", || {
                let (_, reply) = client.request("$JS.API.STREAM.MSG.GET.FOURTUPLE", last.as_bytes());
                !String::from_utf8(reply).unwrap().contains("error")
            });
        }
        // Without intervals in the stream and on a disk, only the summaries are left.
        agents.into_iter().for_each(|mut agent| agent.kill());
        let purge = json!({ "filter": format!("fourtuple.run.{run}.slot.>") }).to_string();
        let (_, reply) = client.request("$JS.API.STREAM.PURGE.FOURTUPLE", purge.as_bytes());
        let reply: Value = serde_json::from_slice(&reply).unwrap();
        assert!(number(&reply, "purged") >= 8, "{reply}");
        let (_, collected) = fleet(&format!("collect {run}"));
        assert_eq!(collected, followed);
        require_sums(&collected);
    });
}

#[test]
fn results_on_disk_are_collected_after_the_stream_is_gone() {
    with_fleet(|mut local| {
        let (_a, mut b) = (local.agent("a", ""), local.agent("b", ""));
        let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --for 5s");
        let run = local.under_way(1, || Coordinator::start(&line));
        // The agent cannot send its last seconds: NATS is gone until its end, and then the agent is gone.
        local.nats.kill();
        b.until_said("has ended");
        b.kill();
        local.restart_nats();
        let (code, _, ended) = run.end();
        assert_eq!(code, 3);
        let _b = local.agent("b", "");
        let lost = run_name(&ended.stderr);
        let (_, record) = fleet(&format!("collect {lost}"));
        require_sums(&record);
        // The coordinator decided that the worker was lost, and a later one does not decide otherwise.
        assert_eq!(remarks_but_of_haste(&record), ["worker-lost"]);
    });
}

#[test]
fn ctrl_c_stops_all_workers() {
    with_fleet(|local| {
        let (a, b) = (local.agent("a", ""), local.agent("b", ""));
        // The run is longer than all deadlines of the test.
        let line = format!("load --workers 2 -- load {TARGET} --rate 100/s --for 10m");
        let mut run = local.under_way(1, || Coordinator::start(&line));
        child::interrupt(run.0.id()).unwrap();
        a.until_said("has ended");
        b.until_said("has ended");
        let (code, record, _) = run.end();
        assert_eq!((code, remarks_but_of_haste(&record)), (3, vec!["interrupted".to_owned()]));
        require_sums(&record);
    });
}

#[test]
fn the_deadline_stops_workers_when_nats_is_gone() {
    with_fleet(|mut local| {
        let a = local.agent("a", "");
        let line = format!("load --workers 1 --deadline 4s -- load {TARGET} --rate 50/s --operations 100000");
        let mut command = fourtuple(&format!("fleet {line}"));
        child::end_with_this_thread(&mut command);
        let mut coordinator = Running::start(&mut command);
        a.until_said("accepted start");
        thread::sleep(Duration::from_secs(2));
        coordinator.kill();
        local.nats.kill();
        a.until_said("has ended");
    });
}

#[test]
fn a_host_without_ports_refuses_the_run() {
    with_fleet(|local| {
        let (_a, _b) = (local.agent("a", ""), local.agent("b", ""));
        fourtuple_testing::set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        fourtuple_testing::set_sysctl("net.ipv4.ip_local_port_range", "40000 40063");
        let ended =
            run(&mut fourtuple(&format!("fleet load --workers 2 -- load {TARGET} --rate 1000/s --for 5s")));
        assert_eq!(ended.code, 3, "{ended:?}");
        assert!(ended.line().starts_with("a: ") && ended.line().contains("--anyway"), "{ended:?}");
    });
}

#[test]
fn a_worker_that_runs_out_of_ports_is_named() {
    with_fleet(|local| {
        let (_a, _b) = (local.agent("a", ""), local.agent("b", ""));
        fourtuple_testing::set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        fourtuple_testing::set_sysctl("net.ipv4.ip_local_port_range", "40000 40063");
        for _ in 0..times() {
            let (code, record) =
                fleet(&format!("load --workers 2 -- load {TARGET} --rate 400/s --for 2s --anyway"));
            assert_eq!(code, 3);
            require_sums(&record);
            let remarks = list(&record, "/validity");
            let ports = remarks.iter().find(|remark| text(remark, "id").contains("ports"));
            assert!(ports.is_some_and(|remark| text(remark, "message").contains(": ")), "{remarks:#?}");
        }
    });
}

#[test]
fn another_binary_is_refused() {
    with_fleet(|local| {
        let (_a, _b) = (local.agent("a", ""), local.agent_of_another_binary("b"));
        for _ in 0..times() {
            let ended = run(&mut fourtuple(&format!("fleet load --workers 2 -- load {TARGET} --for 1s")));
            assert_eq!(ended.code, 3, "{ended:?}");
            assert!(ended.line().contains("b runs another program"), "{ended:?}");
        }
    });
}

#[test]
fn too_few_workers_and_bad_command_lines_are_refused() {
    with_fleet(|local| {
        let _a = local.agent("a", "--label zone=eu");
        for (code, line, says) in [
            (3, "load --workers 2 -- load tcp://127.0.0.1:4000 --for 1s", "1 of 2 workers answered (a)"),
            (
                3,
                "load --workers 1 --label zone=us -- load tcp://127.0.0.1:4000 --for 1s",
                "0 of 1 workers answered (none): start more with fourtuple agent",
            ),
            (2, "load --workers 1 -- lab ports", "expected load TARGET"),
            (2, "load --workers 1 -- load tcp://127.0.0.1:4000 --connections 0", "--connections"),
            (2, "load --workers 2 -- load tcp://127.0.0.1:4000 --ca /etc/ssl/x", "--ca"),
            (2, "collect 123456789012", "no run 123456789012"),
            (2, "load --workers 1 --json -- load tcp://127.0.0.1:4000", "behind --: -- load TARGET"),
            (2, "serve --for 5s -- serve crr", "behind --: -- serve PROTOCOL"),
        ] {
            let ended = run(&mut fourtuple(&format!("fleet {line}")));
            assert_eq!(ended.code, code, "{line}: {ended:?}");
            assert!(ended.line().contains(says), "{line}: {ended:?}");
        }
        let (code, record) =
            fleet(&format!("load --workers 1 --label zone=eu -- load {TARGET} --operations 5"));
        assert_eq!((code, number(&record["results"], "operations")), (0, 5));
        assert_eq!(hosts(&record)["a"]["labels"]["zone"], "eu");
    });
}

#[test]
fn reports_and_compare_accept_a_merged_record() {
    with_fleet(|local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        let (log, page) = (local.directory.join("log.hlog"), local.directory.join("page.html"));
        let line =
            format!("load --workers 2 -- load {TARGET} --rate 100/s --for 3s --hdr {log} --html {page}");
        let (_, record) = fleet(&line);
        let log = std::fs::read_to_string(&log).unwrap();
        let lines = log.lines().filter(|line| line.contains("HISTFAAA")).count();
        assert_eq!(lines, list(&record, "/results/seconds").len());
        assert!(std::fs::read_to_string(&page).unwrap().contains("Hosts"));
        let saved = local.directory.file("one.json", &record.to_string());
        let ended = run(&mut fourtuple(&format!("report {saved}")));
        assert!(ended.stdout.contains("Hosts"), "{ended:?}");
        let other = local.directory.file("two.json", &record.to_string());
        let ended = run(&mut fourtuple(&format!("compare {saved} {other}")));
        assert!(matches!(ended.code, 0 | 3), "{ended:?}");
    });
}

#[test]
fn fleet_doctor_shows_every_host() {
    with_fleet(|local| {
        let _agents = [local.agent("a", "--label zone=eu"), local.agent("b", "--allow load")];
        let page = local.directory.join("page.html");
        let (code, record) = fleet(&format!("doctor --html {page}"));
        assert_eq!((code, text(&record, "command")), (3, "fleet doctor"), "{record:#}");
        let hosts = list(&record, "/results/hosts");
        let names: Vec<&str> = hosts.iter().map(|host| text(host, "name")).collect();
        assert_eq!(names, ["b", "a"], "worst first");
        assert!(text(&hosts[0], "failed").contains("--allow doctor"), "{record:#}");
        assert_eq!((&hosts[0]["record"], text(&hosts[1]["record"], "command")), (&Value::Null, "doctor"));
        let remarks = list(&record, "/validity");
        assert!(
            remarks
                .iter()
                .any(|it| text(it, "id") == "host-failed" && text(it, "message").starts_with("b: ")),
            "{remarks:#?}"
        );
        assert!(std::fs::read_to_string(&page).unwrap().contains("Every host, the worst first"));
        let saved = local.directory.file("doctor.json", &record.to_string());
        let ended = run(&mut fourtuple(&format!("report {saved}")));
        let row = |name: &str| ended.stdout.lines().position(|line| line.trim_start().starts_with(name));
        assert!(row("b ").is_some() && row("b ") < row("a "), "{ended:?}");
        let (_, record) = fleet("lab ports --range 20000-20063 --label zone=eu");
        assert_eq!(
            record["settings"],
            json!({ "labels": ["zone=eu"], "command": ["lab", "ports", "--repeats", "1", "--range", "20000-20063"] })
        );
        let hosts = list(&record, "/results/hosts");
        assert_eq!((hosts.len(), text(&hosts[0]["record"], "command")), (1, "lab ports"), "{record:#}");
        assert_eq!(record["results"]["differences"], json!([]), "{record:#}");
        let ended = run(&mut fourtuple("fleet trace connect --for 1s --label zone=eu"));
        assert!(ended.stdout.contains("search p99"), "{ended:?}");
    });
}

/// It came at the time limit of the command, and without the reason.
#[test]
fn why_a_command_failed_on_a_host_comes_at_once() {
    with_fleet(|local| {
        let agent = local.agent_command("a", "");
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-all"]).arg(agent.get_program()).args(agent.get_args());
        let agent = Process::start(command);
        agent.until_said("is ready");
        let (code, record) = fleet("trace connect --for 1s");
        let failed = text(&list(&record, "/results/hosts")[0], "failed");
        assert!(code == 3 && failed.contains("CAP_BPF") && !failed.contains("no process"), "{record:#}");
    });
}

#[test]
fn fleet_plan_calibrates_every_host() {
    with_fleet(|local| {
        let _agents = ["a", "b"].map(|name| local.agent(name, ""));
        fourtuple_testing::set_sysctl("net.ipv4.ip_local_port_range", "40000 40999");
        let (_, all) = fleet("plan --rate 100/s --hold 1s");
        let hosts = list(&all, "/results/hosts");
        assert_eq!(hosts.len(), 2, "{all:#}");
        for host in hosts {
            let settings = &host["record"]["settings"];
            assert_eq!(
                (&settings["costs"], &settings["low"]),
                (&json!("calibrated"), &json!(40_000)),
                "{host:#}"
            );
            assert_eq!(
                (&settings["arrival_per_s"], &settings["hold_ns"]),
                (&json!(100.0), &json!(1_000_000_000))
            );
        }
        let ended = run(&mut fourtuple("fleet plan --rate 100/s"));
        assert!(ended.stdout.lines().count() >= 3 && ended.stdout.contains("40000-40999"), "{ended:?}");
    });
}

/// Returns the child processes of all threads of a process.
pub(crate) fn children(process: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("procfs").map(Result::unwrap);
    // A thread may end meanwhile.
    let children = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let text = children.collect::<Vec<_>>().join(" ");
    text.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

#[test]
fn a_slow_name_server_delays_no_other_request() {
    with_fleet(|local| {
        // It never answers.
        let server = std::net::UdpSocket::bind("127.0.0.1:53").expect("a port of this namespace");
        let settings = "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n";
        let agent = local.agent_command("a", "");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\""]);
        command
            .arg(local.directory.file("resolv.conf", settings))
            .arg(agent.get_program())
            .args(agent.get_args());
        let agent = Process::start(command);
        agent.until_said("is ready");
        let mut command = fourtuple("fleet load --workers 1 --");
        command.args("load tcp://slow.example:9 --for 1s".split(' '));
        let _load = Process::start(command);
        server.recv(&mut [0; 512]).expect("a query of the agent");
        let mut client = RawClient::connect();
        let name = client.agent();
        client.request(&format!("{name}.clock"), b"");
        assert!(!agent.has_said("refused prepare"), "the clock answered after it: {}", agent.said());
        assert!(!client.session(&name).is_empty());
    });
}

#[test]
fn servers_of_a_fleet_end_with_their_coordinator() {
    with_fleet(|local| {
        let agent = local.agent("a", "");
        let listens = || std::net::TcpStream::connect("127.0.0.1:4001").is_ok();
        let serve = |time: &str| {
            let mut command = fourtuple("fleet serve --json --");
            command.args(format!("serve crr --listen 127.0.0.1:4001 --workers 1 --for {time}").split(' '));
            child::end_with_this_thread(&mut command);
            Running::start(&mut command)
        };
        // The deadline.
        let ended = serve("1s").end();
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(ended.stderr.contains("a: listening on 127.0.0.1:4001, 1 worker"), "{ended:?}");
        assert!(!listens());
        // Ctrl-C.
        let mut running = serve("500s");
        program::until("the server listens", listens);
        let load = "load tcp://127.0.0.1:4001 --workload crr --operations 20 --connections 2 --quiet --json";
        program::loaded(&mut fourtuple(load));
        child::interrupt(running.id()).unwrap();
        let ended = running.end();
        let all = ended.json();
        program::require_valid(&all);
        let record = &all["results"]["hosts"][0]["record"];
        assert_eq!(record["command"], "serve", "{ended:?}");
        assert_eq!((number(&record["results"]["workers"][0], "requests"), listens()), (20, false));
        // The agent is stopped for longer than a coordinator may be silent, and then another process ends the server.
        let running = serve("500s");
        program::until("the server listens", listens);
        agent.signal("STOP");
        thread::sleep(Duration::from_secs(11));
        agent.signal("CONT");
        thread::sleep(Duration::from_secs(1));
        assert!(listens());
        let [server] = children(agent.id())[..] else { panic!("one server") };
        child::terminate(server).unwrap();
        let ended = running.end();
        let all = ended.json();
        program::require_valid(&all);
        assert_eq!(
            (ended.code, remarks_but_of_haste(&all)),
            (3, vec!["server-ended".to_owned()]),
            "{ended:?}"
        );
        // A coordinator that is killed.
        let mut running = serve("500s");
        program::until("the server listens", listens);
        running.kill();
        program::until("the server has ended", || !listens());
        let ended = run(&mut fourtuple("fleet serve -- serve crr --listen 127.0.0.1:4001"));
        assert!(ended.code == 2 && ended.line().contains("--for"), "{ended:?}");
        let ended = run(&mut fourtuple("fleet serve -- serve crr --listen 127.0.0.1:4000 --for 9s"));
        let words = ended.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(ended.code == 3 && words.contains("Address already in use"), "{ended:?}");
    });
}

#[test]
fn up_makes_a_fleet_in_namespaces() {
    in_namespace(|| {
        let test = "runs::up_makes_a_fleet_in_namespaces";
        let Some(_) = nats_server(test) else { return };
        let directory = program::TempDir::new();
        let mut command = fourtuple("fleet up --local 2 --listen 127.0.0.1:4222");
        command.env("TMPDIR", directory.path());
        let mut up = Process::start(command);
        // The line promises agents that take part in a run.
        up.until_printed("2 agents are up");
        let (_, record) =
            fleet("load --workers 2 -- load http://10.77.0.1:8080/ --close-every 1 --rate 100/s --for 2s");
        assert_eq!(remarks_but_of_haste(&record), [""; 0], "{record:#}");
        require_sums(&record);
        // Each agent has the ports of its own namespace.
        let budget = number(&record["results"]["ports"], "budget");
        assert_eq!(budget, 2 * 28_232);
        up.signal("INT");
        assert_eq!(up.code(), Some(0));
        assert_eq!(directory.names(), [""; 0], "nothing remains");
    });
}

#[test]
fn without_threads_commands_end_with_one_line() {
    let mut lines = vec![
        "agent --nats nats://localhost:1",
        "fleet agents --nats nats://localhost:1",
        "fleet doctor --quiet --nats nats://localhost:1",
        "fleet load --nats nats://localhost:1 --workers 1 -- load tcp://127.0.0.1:9",
        "fleet serve --nats nats://localhost:1 -- serve crr --listen 127.0.0.1:0 --for 1s",
    ];
    // It starts nats-server first.
    if nats_server("runs::without_threads_commands_end_with_one_line").is_some() {
        lines.push("fleet up --local 1 --listen 127.0.0.1:0");
    }
    for line in lines {
        let mut command = fourtuple(line);
        child::refuse(&mut command, Facility::Threads);
        let ended = run(&mut command);
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{line}: {ended:?}");
        assert!(ended.line().contains("EAGAIN") || ended.line().contains("os error 11"), "{line}: {ended:?}");
    }
}

#[test]
fn the_flags_of_the_unit_are_accepted() {
    let unit = include_str!("../../../contrib/systemd/fourtuple-agent.service");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/fourtuple ")).unwrap();
    let ended = run(&mut fourtuple(&command.replace("$FLAGS", "--help")));
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{command}");
}
