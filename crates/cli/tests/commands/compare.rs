//! `fourtuple compare`: trials in turn, saved records, servers of trials, refused command lines.

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;

use crate::program;
use crate::program::{
    Ended, Running, TempDir, children, fourtuple, list, measure_with, number, refused, require_valid, run,
    tcp_sockets, text, until,
};
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_testing::process::until_expected;
use serde_json::Value;

const A: &str = "lab ports --range 20000-20127 --strategy full-range";
const TIME_WAIT: &str = "lab time-wait --remedy none-under --range 20000-20127 --patience 1ms";
const B: &str = "fourtuple lab ports --range '20000-20127' --strategy \"kernel-default\"";

/// Returns `compare` with two commands, each as one argument.
fn compare(flags: &str, a: &str, b: &str) -> Command {
    let mut command = fourtuple(&format!("compare {flags} --"));
    command.args([a, b]);
    command
}

fn samples<'a>(record: &'a Value, side: &str) -> &'a [Value] {
    let samples = list(record, &format!("/results/samples_{side}"));
    assert!(samples.iter().all(|sample| sample.as_f64().unwrap() > 0.0), "{record:#}");
    samples
}

#[test]
fn two_labs_give_a_ratio_and_samples() {
    let test = "compare::two_labs_give_a_ratio_and_samples";
    let mut command = compare("--trials 2 --warmup 0 --for 5m --json", A, B);
    let Some(ended) = measure_with(test, &mut command) else { return };
    let record = ended.record(0);
    let (settings, results) = (&record["settings"], &record["results"]);
    assert_eq!((text(settings, "a"), text(settings, "b")), (A, B), "as typed");
    assert_eq!((text(settings, "metric"), number(settings, "trials")), ("rate", 2));
    assert_eq!((number(results, "trials"), number(results, "pairs")), (4, 2));
    assert_eq!((samples(&record, "a").len(), samples(&record, "b").len()), (2, 2));
    assert!(results["ratio"].as_f64().unwrap() > 0.0);
    assert_eq!((&results["low"], &results["high"]), (&Value::Null, &Value::Null));
    assert_eq!(text(results, "verdict"), "too noisy to say: 2 pairs, 8 are needed");
    assert!(!text(&record["host"], "kernel").is_empty());
    let temp = TempDir::new();
    let again = run(&mut fourtuple(&format!("report {}", temp.file("record.json", &ended.stdout))));
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stdout.contains("Is B faster than A?"), "{again:?}");
}

#[test]
fn eight_pairs_have_an_interval_around_the_ratio() {
    let mut command = compare("--metric cpu --trials 8 --narrow 0.001% --for 5m --json --quiet", A, A);
    let Some(ended) = measure_with("compare::eight_pairs_have_an_interval_around_the_ratio", &mut command)
    else {
        return;
    };
    let record = ended.record(0);
    let figure = |key: &str| record["results"][key].as_f64().unwrap();
    assert!(figure("low") <= figure("ratio") && figure("ratio") <= figure("high"), "{record:#}");
    assert_eq!(number(&record["results"], "pairs"), 8);
}

/// Returns a line with the record of `lab ports`, with another rate.
fn with_rate(record: &Value, rate: f64) -> String {
    let mut record = record.clone();
    record["results"]["strategies"][0]["rate_per_s"] = rate.into();
    format!("{record}\n")
}

#[test]
fn saved_records_are_compared_and_checked() {
    let Some(record) = program::record("compare::saved_records_are_compared_and_checked", A) else { return };
    let temp = TempDir::new();
    let saved = |flags: &str, a: &str, b: &str| -> Ended {
        let (a, b) = (temp.file("a.json", a), temp.file("b.json", b));
        run(&mut fourtuple(&format!("compare {a} {b} {flags}")))
    };
    let ended = saved("--json", &with_rate(&record, 50_000.0), &with_rate(&record, 55_000.0));
    let one = ended.record(0);
    let results = &one["results"];
    assert!((results["ratio"].as_f64().unwrap() - 1.1).abs() < 1e-9);
    assert_eq!((&results["low"], &results["high"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (text(results, "verdict"), number(results, "trials")),
        ("too noisy to say: one trial each", 2)
    );

    let many = |middle: f64| -> String {
        (0..20).map(|at| with_rate(&record, middle * (1.0 + 0.001 * f64::from(at % 5)))).collect()
    };
    let ended = saved("--json", &many(52_000.0), &many(55_016.0));
    let faster = ended.json();
    require_valid(&faster);
    assert!(text(&faster["results"], "verdict").starts_with("B is 5.8% faster, "), "{faster:#}");
    assert_eq!((number(&faster["results"], "trials"), number(&faster["results"], "pairs")), (40, 0));
    // Every record has the same mean time.
    let ended = saved("--metric mean", &many(52_000.0), &many(55_016.0));
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stdout.contains("no difference larger than 2%"), "{ended:?}");

    let mut cut = record.clone();
    cut["validity"] = serde_json::json!([{ "id": "interrupted", "message": "cut short" }]);
    let ended = saved("--json", &many(52_000.0), &format!("{cut}\n{}", many(52_000.0)));
    assert_eq!(ended.code, 3, "{ended:?}");
    let dropped = ended.json();
    require_valid(&dropped);
    assert_eq!(dropped["validity"][0]["id"], "dropped");
    assert_eq!(samples(&dropped, "b").len(), 20);
    // Differences of host and workload become remarks.
    let mut other = record.clone();
    other["host"]["kernel"] = "4.19.0".into();
    other["host"]["cpus"] = 4_096.into();
    other["settings"]["fill"] = 0.125.into();
    let unlike = saved("--json", &record.to_string(), &other.to_string());
    assert_eq!(unlike.code, 3, "{unlike:?}");
    let unlike = unlike.json();
    require_valid(&unlike);
    let ids: Vec<&str> = list(&unlike, "/validity").iter().map(|remark| text(remark, "id")).collect();
    assert_eq!(ids, ["unlike-kernels", "unlike-hosts", "unlike-workloads"]);
    // Rates of different commands measure different things.
    let Some(time_wait) = program::record("compare::saved_records_are_compared_and_checked", TIME_WAIT)
    else {
        return;
    };
    let ended = saved("--json", &record.to_string(), &time_wait.to_string());
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(ended.line().contains("lab time-wait") && ended.line().contains("lab ports"), "{ended:?}");
    let ended = saved("", &many(52_000.0), &cut.to_string());
    ended.require_line(3, &["no record of B is valid"]);
}

#[test]
fn invalid_command_lines_are_refused() {
    let mut one = fourtuple("compare --");
    refused(one.arg(A), &["two commands"]);
    refused(&mut fourtuple("compare"), &["two commands"]);
    refused(&mut fourtuple("compare a.json"), &["as many of A as of B"]);
    refused(
        &mut compare("--metric beauty", A, B),
        &["'beauty'", "--metric", "rate, mean, p50, p99, p999, cpu"],
    );
    refused(&mut compare("--narrow 2", A, B), &["--narrow", "such as 2%"]);
    refused(&mut compare("--for 2", A, B), &["--for", "such as 10s"]);
    refused(&mut compare("--trials 0", A, B), &["--trials", "from 1 to"]);
    refused(&mut compare("--warmup 101", A, B), &["--warmup", "from 0 to 100"]);
    refused(&mut compare("", "lab ports --strategy 'auto", B), &["A, ", "a ' is not closed"]);
    refused(&mut compare("", A, "ls -l"), &["B, 'ls -l'", "'ls'"]);
    refused(&mut compare("", A, "plan"), &["B, 'plan'", "no other command"]);
    refused(&mut compare("", A, "compare a b"), &["no other command"]);
    refused(&mut compare("", A, "lab"), &["a bare lab"]);
    refused(&mut compare("", A, "lab ports --help"), &["nothing to measure"]);
    refused(&mut compare("", "lab ports", B), &["'--strategy' of one name"]);
    refused(&mut compare("", "lab ports --strategy auto,full-range", B), &["'--strategy' of one name"]);
    refused(&mut compare("", "lab ports --strategy auto --repeats 3", B), &["'--repeats'"]);
    refused(&mut compare("", "lab time-wait", B), &["'--remedy' of one name"]);
    refused(&mut compare("--metric p99", "lab time-wait --remedy keep-alive", A), &["'--metric'", "p99"]);
    refused(&mut compare("", "lab ports --strategy auto --range 9-8", B), &["--range", "9-8"]);
}

/// Returns `compare` of two loads with their servers; without `server_b` both sides use `server`.
fn compare_loads(flags: &str, server: &str, server_b: Option<&str>, a: &str, b: &str) -> Command {
    let mut command = fourtuple(&format!("compare {flags} --server"));
    command.arg(server);
    if let Some(server_b) = server_b {
        command.args(["--server-b", server_b]);
    }
    command.args(["--", a, b]);
    command
}

const LOAD: &str = "load tcp://127.0.0.1:8080 --operations 300 --close rst";
const SERVER: &str = "serve crr --listen 127.0.0.1:8080 --workers 1";

#[test]
fn invalid_loads_and_servers_are_refused() {
    let loads = |flags: &str, server: &str, load: &str| compare_loads(flags, server, None, load, LOAD);
    refused(&mut loads("", SERVER, "load"), &["A, 'load'", "<TARGET>"]);
    refused(&mut loads("", SERVER, "load tcp://127.0.0.1"), &["A, ", "the port is missing"]);
    refused(&mut loads("", SERVER, "load tcp://127.0.0.1:80 --method PUT"), &["A, ", "--method"]);
    refused(&mut loads("", SERVER, "load tcp://192.0.2.1:80 --operations 1"), &["'--server'", "127.0.0.0/8"]);
    refused(&mut loads("", SERVER, A), &["a load and a lab"]);
    refused(&mut compare_loads("", SERVER, None, A, B), &["'--server' is for load", "makes its own"]);
    refused(&mut loads("", "", LOAD), &["''", "--server", "a program"]);
    refused(&mut loads("", "serve crr", LOAD), &["--server", "--listen"]);
    refused(&mut loads("", "fourtuple plan", LOAD), &["--server", "serve alone"]);
    refused(&mut compare_loads("", SERVER, Some("serve ftp"), LOAD, LOAD), &["--server-b", "'ftp'"]);
    refused(&mut loads("--server-wait 2", SERVER, LOAD), &["--server-wait", "such as 10s"]);
    let long = "load tcp://127.0.0.1:8080";
    refused(
        &mut compare_loads("", SERVER, None, long, long),
        &["'--for'", "a pair of these loads takes 20s"],
    );
    for flags in ["--server-b x", "--server-wait 1s", "--pin"] {
        refused(&mut compare(flags, LOAD, LOAD), &["--server <COMMAND>"]);
    }
    let mut files = fourtuple("compare a.json b.json --server");
    refused(files.arg(SERVER), &["--server"]);
}

#[test]
fn a_missing_server_program_is_bad_usage() {
    let mut command = compare_loads("", "/nowhere/server --port 80", None, LOAD, LOAD);
    let Some(ended) = measure_with("compare::a_missing_server_program_is_bad_usage", &mut command) else {
        return;
    };
    ended.require_line(2, &["'/nowhere/server --port 80' for '--server': cannot start it"]);
}

/// Compares loads until no trial is dropped for a second without an answer, and no server is silent until its time is over: on a busy machine
/// a process may wait that long for a processor.
fn undisturbed(test: &str, command: &mut Command) -> Option<Ended> {
    let is_disturbed = |ended: &Ended| match ended.code {
        3 => ended.stdout.contains("nothing was answered"),
        4 => ended.stderr.contains("; it said nothing"),
        _ => false,
    };
    until_expected(20, || measure_with(test, command), |ended| !ended.as_ref().is_some_and(is_disturbed))
}

#[test]
fn a_slower_server_lowers_the_ratio() {
    let test = "compare::a_slower_server_lowers_the_ratio";
    let slow = format!("fourtuple {SERVER} --service 5ms");
    let flags = "--trials 2 --warmup 0 --for 5m --json";
    let mut command = compare_loads(flags, SERVER, Some(&slow), LOAD, LOAD);
    // The only worker of the slow server serves at most 200 connections a second.
    let is_faster = |sample: &Value| sample.as_f64().unwrap() > 201.0;
    // On a busy machine the other server may be no faster for a while.
    let once = || undisturbed(test, &mut command);
    let is_meant = |ended: &Ended| samples(&ended.record(0), "a").iter().any(is_faster);
    let Some(ended) = until_expected(20, once, |ended| ended.as_ref().is_none_or(is_meant)) else { return };
    let record = ended.record(0);
    let (settings, results) = (&record["settings"], &record["results"]);
    assert_eq!((text(settings, "server_a"), text(settings, "server_b")), (SERVER, slow.as_str()), "as typed");
    assert_eq!((number(settings, "server_wait_ns"), &settings["pinned"]), (10_000_000_000, &false.into()));
    assert_eq!(settings["fresh_namespace"], true);
    assert_eq!((samples(&record, "a").len(), samples(&record, "b").len()), (2, 2));
    assert!(samples(&record, "a").iter().any(is_faster), "{results:#}");
    assert!(
        !samples(&record, "b").iter().any(is_faster),
        "a service time of 5 ms must lower the rate: {results:#}"
    );
    let product =
        |side: &str| samples(&record, side).iter().map(|sample| sample.as_f64().unwrap()).product::<f64>();
    // The geometric mean of the ratios of both pairs.
    let ratio = (product("b") / product("a")).sqrt();
    assert!((results["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-6, "{results:#}");
    let temp = TempDir::new();
    let again = run(&mut fourtuple(&format!("report {}", temp.file("record.json", &ended.stdout))));
    assert!(again.stdout.contains(&format!("server: {SERVER}")), "{again:?}");
}

/// Runs one trial per side over a Unix socket, over UDP, and with a server started by its path.
#[test]
fn unix_udp_and_foreign_servers_are_awaited() {
    let temp = TempDir::new();
    let path = temp.join("socket");
    let unix = format!("load unix:{path} --operations 100 --close-every 1");
    let udp = "load udp://[::1]:5353 --operations 100";
    let program = format!("{} {SERVER}", env!("CARGO_BIN_EXE_fourtuple"));
    for (server, load) in [
        (format!("serve http --listen unix:{path} --workers 1"), unix.as_str()),
        ("serve udp --listen [::]:5353 --workers 1".to_owned(), udp),
        (program, LOAD),
    ] {
        let mut command = compare_loads("--trials 1 --warmup 0 --json", &server, None, load, load);
        let test = "compare::unix_udp_and_foreign_servers_are_awaited";
        let Some(ended) = undisturbed(test, &mut command) else { return };
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{server}: {ended:?}");
        assert_eq!(number(&ended.json()["results"], "pairs"), 1);
    }
}

#[test]
fn pin_separates_client_and_server() {
    let mut command = compare_loads("--trials 1 --warmup 0 --pin --json", SERVER, None, LOAD, LOAD);
    let test = "compare::pin_separates_client_and_server";
    let Some(ended) = undisturbed(test, &mut command) else { return };
    if ended.stderr.contains("may use one CPU only") {
        return fourtuple_testing::skip(test, "cpus", ended.line());
    }
    ended.require_silence();
    assert_eq!(ended.json()["settings"]["pinned"], true);
}

#[test]
fn a_server_that_fails_is_named_with_its_output() {
    let temp = TempDir::new();
    let script = |name: &str, content: &str| format!("sh {}", temp.file(name, content));
    let cases = [
        // The server ends before it listens, and prints the reason.
        (
            script("early", "echo out of order >&2; exit 7"),
            "30s",
            "ended (exit status: 7) before it listened on 127.0.0.1:8080; it said: out of order",
        ),
        // The server listens on another port.
        (
            "serve crr --listen 127.0.0.1:8081 --workers 1".to_owned(),
            "5s",
            "does not listen on 127.0.0.1:8080 after 5.00s (--server-wait); it said: listening on 127.0.0.1:8081",
        ),
    ];
    for (server, wait, says) in cases {
        let mut command = compare_loads(&format!("--server-wait {wait}"), &server, None, LOAD, LOAD);
        let test = "compare::a_server_that_fails_is_named_with_its_output";
        let Some(ended) = undisturbed(test, &mut command) else { return };
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        assert!(ended.line().contains(says) && ended.line().contains("the server of A"), "{ended:?}");
    }
    // The server ends during the load: as soon as it has a connection.
    let program = env!("CARGO_BIN_EXE_fourtuple");
    let brief = format!(
        "{program} {SERVER} --service 50ms --quiet &\n\
         until grep -q ' 0100007F:1F90 0100007F:.* 01 ' /proc/self/net/tcp; do sleep 0.01; done\nkill $!; exit 5"
    );
    let long = "load tcp://127.0.0.1:8080 --for 8s --connections 1 --pause 10ms --close rst";
    // After one trial the time of the comparison is over.
    let flags = "--warmup 0 --trials 1 --for 5s";
    let mut command = compare_loads(flags, &script("brief", &brief), None, long, long);
    let ended = run(&mut command);
    ended.require_line(3, &["its server ended (exit status: 5)"]);
}

/// The preflight of every further trial would refuse the load too.
#[test]
fn a_refused_load_is_not_repeated() {
    // The load needs more descriptors than the limit allows.
    let load = "load tcp://127.0.0.1:8080 --operations 9000000 --connections 3000";
    let mut command = compare_loads("--json", SERVER, None, load, load);
    child::limit_descriptors(&mut command, 1000);
    let test = "compare::a_refused_load_is_not_repeated";
    let Some(ended) = undisturbed(test, &mut command) else { return };
    assert_eq!((ended.code, ended.stdout.as_str()), (3, ""), "{ended:?}");
    assert!(ended.line().starts_with("A was not started, and no more trials were made: "), "{ended:?}");
    assert!(ended.line().contains("--anyway"), "{ended:?}");
}

#[test]
fn loads_without_server_share_the_namespace() {
    let temp = TempDir::new();
    let path = temp.join("socket");
    let mut server = Running::start(&mut fourtuple(&format!("serve http --listen unix:{path} --workers 1")));
    // The path is there before the socket listens.
    assert!(server.until("listened", |_| UnixStream::connect(&path).is_ok()), "{:?}", server.end());
    let load = format!("load unix:{path} --operations 100 --close-every 1");
    let mut command = compare("--trials 1 --warmup 0 --metric p999 --json", &load, &load);
    let test = "compare::loads_without_server_share_the_namespace";
    let Some(ended) = undisturbed(test, &mut command) else { return };
    let record = ended.record(0);
    assert_eq!(record["settings"]["fresh_namespace"], false);
    assert_eq!(record["settings"]["server_a"], Value::Null);

    // Saved records of the same load: a saturated client does not make a record invalid. Remarks that other load on the machine causes would.
    let mut record = run(&mut fourtuple(&format!("{load} --json --quiet"))).json();
    record["validity"] = serde_json::json!([]);
    let a = temp.file("a.json", &record.to_string());
    record["validity"] = serde_json::json!([{ "id": "client-saturated", "message": "busy" }]);
    let b = temp.file("b.json", &record.to_string());
    let ended = run(&mut fourtuple(&format!("compare {a} {b} --metric p99 --json")));
    ended.require_silence();
    assert!(number(&ended.json()["results"], "client_saturated") >= 1, "{ended:?}");
}

#[test]
fn loads_to_different_targets_have_a_remark() {
    let temp = TempDir::new();
    let paths = [temp.join("one"), temp.join("other")];
    let _servers = paths.each_ref().map(|path| {
        let mut server =
            Running::start(&mut fourtuple(&format!("serve http --listen unix:{path} --workers 1")));
        assert!(server.until("listened", |_| UnixStream::connect(path).is_ok()), "{:?}", server.end());
        server
    });
    let load = |target: &str| {
        let ended = run(&mut fourtuple(&format!("load {target} --operations 100 --json --quiet")));
        let mut record = ended.json();
        assert_eq!(number(&record["results"], "operations"), 100, "{ended:?}");
        // Remarks that other load on the machine causes would exclude the record.
        record["validity"] = serde_json::json!([]);
        record.to_string()
    };
    let [one, other] = paths.map(|path| format!("unix:{path}"));
    let (a, b) = (temp.file("a.json", &load(&one)), temp.file("b.json", &load(&other)));
    let ended = run(&mut fourtuple(&format!("compare {a} {b} --json")));
    let record = ended.record(3);
    let [remark] = list(&record, "/validity") else { panic!("one remark: {record:#}") };
    assert_eq!(text(remark, "id"), "unlike-targets");
    assert!(text(remark, "message").contains(&one) && text(remark, "message").contains(&other), "{remark}");
    // Two records of one target have no remark.
    let again = temp.file("again.json", &load(&one));
    let ended = run(&mut fourtuple(&format!("compare {a} {again} --json")));
    assert_eq!((ended.code, list(&ended.json(), "/validity").len()), (0, 0), "{ended:?}");
}

/// Returns the processes that have `word` as an argument.
fn processes_with(word: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("procfs");
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let has = |id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes())
    };
    ids.filter(has).collect()
}

/// The server ignores SIGINT and has a child process that listens. Ctrl-C must end both; SIGKILL of compare must end its
/// direct children.
#[test]
fn no_server_outlives_compare() {
    let temp = TempDir::new();
    let program = env!("CARGO_BIN_EXE_fourtuple");
    let path = temp.join("socket");
    let server = format!(
        "trap '' INT\n{program} serve http --listen unix:{path} --workers 1 --quiet &\nwhile :; do sleep 0.1; done"
    );
    let server = format!("sh {}", temp.file("stubborn", &server));
    let load = format!("load unix:{path} --operations 50000000 --close-every 1");
    let mut command = compare_loads("--for 5m --quiet", &server, None, &load, &load);
    let listening = format!("unix:{path}");
    let mut running = Running::start(&mut command);
    let begun = running.until("loaded", |_| processes_with(&listening).len() >= 2);
    if !begun {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "compare ended before the signal: {ended:?}");
        return fourtuple_testing::skip("compare::no_server_outlives_compare", "netns", ended.line());
    }
    child::interrupt(running.id()).unwrap();
    let ended = running.end();
    ended.require_line(3, &["interrupted"]);
    let left = || [processes_with(&listening), processes_with(&temp.join("stubborn"))].concat();
    until("the server has ended", || left().is_empty());

    // SIGKILL leaves compare no time to clean up; the kernel ends the server and the load.
    let ours = format!("serve http --listen unix:{path} --workers 1");
    let mut running = Running::start(&mut compare_loads("--for 5m --quiet", &ours, None, &load, &load));
    assert!(running.until("loaded", |_| processes_with(&listening).len() >= 2));
    running.kill();
    drop(running);
    until("the server has ended", || processes_with(&listening).is_empty());
}

/// An error that only the trial detects has the same line and exit code as without compare.
#[test]
fn errors_of_a_trial_keep_text_and_code() {
    let ended = run(&mut compare("", "lab ports --strategy auto --range 20000-20003", B));
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    let alone = run(&mut fourtuple("lab ports --strategy auto --range 20000-20003"));
    assert_eq!(ended.line(), alone.line());
}

#[test]
fn a_refused_namespace_ends_with_code_4() {
    let mut command = compare("", A, B);
    child::refuse(&mut command, Facility::Namespaces);
    let ended = run(&mut command);
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(ended.line().starts_with("cannot make a network namespace"), "{ended:?}");
}

#[test]
fn an_interrupted_trial_is_repeated() {
    let test = "compare::an_interrupted_trial_is_repeated";
    // A trial of A waits for 10 s with all ports in TIME_WAIT: waiting takes no processor time, of which a busy host has little.
    let remedy = "lab time-wait --remedy none-over --range 20000-20127 --patience";
    let (long, short) = (format!("{remedy} 10s"), format!("{remedy} 1ms"));
    let mut running = Running::start(&mut compare("--for 5m --warmup 0 --trials 1 --json", &long, &short));
    let mut trial = None;
    let begun = running.until("waited", |id| {
        let waits = |child: &u32| tcp_sockets(*child, "tw").iter().any(|(_, waiting)| *waiting > 120);
        trial = children(id).into_iter().find(waits);
        trial.is_some()
    });
    if !begun {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "compare ended before the signal: {ended:?}");
        return fourtuple_testing::skip(test, "netns", ended.line());
    }
    child::interrupt(trial.expect("`until` found it")).unwrap();
    let ended = running.end();
    let record = ended.record(3);
    let remarks: Vec<&str> = list(&record, "/validity").iter().map(|remark| text(remark, "id")).collect();
    assert_eq!(remarks, ["trial-not-valid", "dropped"]);
    assert_eq!(number(&record["results"], "pairs"), 1);
}

#[test]
fn files_without_comparable_records_are_refused() {
    let temp = TempDir::new();
    let prose = temp.file("prose.json", "hello");
    refused(&mut fourtuple(&format!("compare {prose} {prose}")), &["not a fourtuple record"]);
    let missing = temp.join("missing.json");
    refused(&mut fourtuple(&format!("compare {missing} {missing}")), &["cannot read", "missing.json"]);
    let plan = run(&mut fourtuple("plan --kernel linear --range 20000-20127 --json"));
    let plan = temp.file("plan.json", &plan.stdout);
    refused(&mut fourtuple(&format!("compare {plan} {plan}")), &["no others"]);
}

#[test]
fn ctrl_c_keeps_complete_pairs() {
    let mut running = Running::start(&mut compare("--for 5m --narrow 0.001% --json --quiet", A, A));
    // Each trial is a process. After two trials of warm-up and a pair, the fifth process belongs to the second pair.
    let mut seen = Vec::new();
    let begun = running.until("ran five trials", |id| {
        seen.extend(children(id));
        seen.sort_unstable();
        seen.dedup();
        seen.len() >= 5
    });
    if !begun {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "compare ended before the signal: {ended:?}");
        return fourtuple_testing::skip("compare::ctrl_c_keeps_complete_pairs", "netns", ended.line());
    }
    child::interrupt(running.id()).unwrap();
    let ended = running.end();
    let record = ended.record(3);
    assert_eq!(record["validity"][0]["id"], "interrupted");
    assert!(number(&record["results"], "pairs") >= 1);
}
