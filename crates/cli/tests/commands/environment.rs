//! Errors of the environment: one line, exit code 4, and no measurement is lost. Without root a user namespace made by the program
//! is enough.

use std::fs::{self, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use fourtuple_record::Saved;
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;

use crate::program::{
    Ended, TempDir, fourtuple, fourtuple_at, is_root, list, measure_with, number, require_valid, run,
};

#[test]
fn without_permission_for_namespaces() {
    for command in ["lab", "lab ports", "lab time-wait", "plan"] {
        let temp = TempDir::new();
        let mut command = fourtuple(command);
        child::refuse(&mut command, Facility::Namespaces);
        let ended = run(command.current_dir(temp.path()));
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        let line = ended.line();
        for part in ["cannot make a network namespace", "Operation not permitted", "user.max_user_namespaces"]
        {
            assert_eq!(line.matches(part).count(), 1, "{part:?} in {line:?}");
        }
        assert!(temp.names().is_empty(), "no file is written");
    }
    let mut command = fourtuple("plan --kernel linear --range 20000-20127 --json");
    child::refuse(&mut command, Facility::Namespaces);
    let ended = run(&mut command);
    assert_eq!(ended.code, 0, "a plan without calibration needs no namespace: {ended:?}");
    assert_eq!(ended.json()["results"]["capacity"], 128);
}

#[test]
fn with_too_few_descriptors() {
    for command in ["lab ports", "lab time-wait", "plan"] {
        let mut command = fourtuple(command);
        child::limit_descriptors(&mut command, 64);
        let ended = run(&mut command);
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        let line = ended.line();
        assert!(line.contains("RLIMIT_NOFILE") && line.contains("is 64") && line.contains("512"), "{line}");
    }
}

/// More sockets than RLIMIT_NOFILE: io_uring instances hold them, or child processes where io_uring is refused.
#[test]
fn with_fewer_descriptors_than_sockets() {
    for rings in [true, false] {
        let mut command = fourtuple("lab ports --range 20000-21999 --strategy full-range --json");
        child::limit_descriptors(&mut command, 512);
        if !rings {
            child::refuse(&mut command, Facility::IoUring);
        }
        let Some(ended) = measure_with("environment::with_fewer_descriptors_than_sockets", &mut command)
        else {
            return;
        };
        assert_eq!(ended.code, 0, "{ended:?}");
        assert_eq!(number(&list(&ended.json(), "/results/strategies")[0], "connections"), 2000);
    }
}

const SMALL: &str = "lab ports --range 20000-20127";

/// Reads the record that a command saved because its page or its output could not be written.
fn saved(ended: &Ended) -> Saved {
    assert_eq!(ended.code, 4, "{ended:?}");
    let (_, path) =
        ended.line().rsplit_once("fourtuple report --html FILE ").expect("the path of the record");
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let redrawn = run(&mut fourtuple(&format!("report {path}")));
    redrawn.require_silence();
    if !ended.stdout.is_empty() {
        assert_eq!(redrawn.stdout, ended.stdout, "the printed table equals the table of the saved record");
    }
    Saved::parse(&text).unwrap()
}

fn connections(saved: &Saved) -> u64 {
    let Saved::Ports(record) = saved else { panic!("the record is not of lab ports") };
    record.results.strategies.iter().map(|run| run.connections).sum()
}

#[test]
fn an_unwritable_page_keeps_the_record() {
    let temp = TempDir::new();
    let mut command = fourtuple(&format!("{SMALL} --html /dev/full"));
    command.env("TMPDIR", temp.path());
    let test = "environment::an_unwritable_page_keeps_the_record";
    let Some(ended) = measure_with(test, &mut command) else { return };
    assert!(ended.line().contains("cannot write /dev/full"), "{ended:?}");
    assert!(ended.stdout.contains("kernel-default") && ended.stdout.contains("full-range"), "{ended:?}");
    assert!(connections(&saved(&ended)) >= 128);
    assert_eq!(temp.names().len(), 1, "a record and no other file: {:?}", temp.names());
}

#[test]
fn an_unwritable_page_keeps_the_printed_json() {
    let temp = TempDir::new();
    let mut command = fourtuple("plan --kernel linear --range 20000-20127 --json --html /dev/full");
    let ended = run(command.env("TMPDIR", temp.path()));
    assert_eq!(ended.code, 4);
    assert!(ended.line().contains("/dev/full"), "{ended:?}");
    assert_eq!(ended.json()["results"]["capacity"], 128);
    assert!(temp.names().is_empty(), "the printed JSON is the record");
}

#[test]
fn a_report_prints_despite_a_failed_page() {
    let temp = TempDir::new();
    let plan = run(&mut fourtuple("plan --kernel linear --range 20000-20127 --json"));
    let path = temp.file("plan.json", &plan.stdout);
    let ended = run(&mut fourtuple(&format!("report {path} --html /dev/full")));
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(ended.line().contains("/dev/full") && ended.stdout.contains("fourtuple plan"), "{ended:?}");
}

#[test]
fn unwritable_output_keeps_the_record() {
    let temp = TempDir::new();
    for json in ["", "--json"] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = fourtuple(&format!("{SMALL} {json}"));
        let child = command.env("TMPDIR", temp.path()).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let ended = Ended {
            code: output.status.code().unwrap(),
            stdout: String::new(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        if ended.skips_without_namespaces("environment::unwritable_output_keeps_the_record", "netns") {
            return;
        }
        assert!(ended.line().contains("cannot write to stdout"), "{ended:?}");
        assert!(connections(&saved(&ended)) >= 128);
    }
}

/// A file system that fills up while the page is written.
#[test]
fn a_full_disk_keeps_the_record() {
    let test = "environment::a_full_disk_keeps_the_record";
    if !is_root() {
        return fourtuple_testing::skip(test, "root", "mounting a small disk takes root");
    }
    // First only the file system of the page is full; then also the directory for temporary files, and the record goes to the
    // working directory.
    for temporary in ["elsewhere", "disk"] {
        let temp = TempDir::new();
        for directory in ["disk", "elsewhere", "work"] {
            fs::create_dir(temp.join(directory)).unwrap();
        }
        let disk = temp.join("disk");
        let mut command = fourtuple(&format!("{SMALL} --html {disk}/report.html"));
        command.env("TMPDIR", temp.join(temporary)).current_dir(temp.join("work"));
        child::mount_small_disk(&mut command, Path::new(&disk), 4096).unwrap();
        let ended = match command.output() {
            Err(error) => return fourtuple_testing::skip(test, "root", &error.to_string()),
            Ok(output) => Ended {
                code: output.status.code().unwrap(),
                stdout: String::from_utf8(output.stdout).unwrap(),
                stderr: String::from_utf8(output.stderr).unwrap(),
            },
        };
        if ended.skips_without_namespaces(test, "netns") {
            return;
        }
        assert!(ended.line().contains("No space left on device"), "{ended:?}");
        let file = ended.line().rsplit('/').next().unwrap().to_owned();
        let (kept, path) = match temporary {
            "disk" => ("work", format!("./{file}")),
            _ => ("elsewhere", temp.join(&format!("elsewhere/{file}"))),
        };
        assert!(ended.line().ends_with(&path), "{ended:?}");
        let text = fs::read_to_string(temp.join(&format!("{kept}/{file}"))).unwrap();
        assert!(connections(&Saved::parse(&text).unwrap()) >= 128);
    }
}

/// A requested policy is never replaced by another.
#[test]
fn a_refused_policy_is_not_replaced() {
    let test = "environment::a_refused_policy_is_not_replaced";
    let temp = TempDir::new();
    let few = "--load light --workers 2 --connections 2 --repeats 1";
    for (policy, facility, reason) in [
        ("uring-oneshot", Facility::IoUring, "EPERM; it takes the sysctl kernel.io_uring_disabled"),
        ("reuseport-least-busy", Facility::Bpf, "EPERM; BPF needs CAP_BPF"),
    ] {
        for start in [
            format!("lab accept --policy {policy} {few}"),
            format!(
                "lab keepalive --policy {policy} --family tcp4 --workers 2 --clients 2 --for 50ms --repeats 1"
            ),
            format!("serve http --policy {policy} --listen 127.0.0.1:0 --workers 2 --for 1ms"),
        ] {
            let mut command = fourtuple(&start);
            child::refuse(&mut command, facility);
            let Some(ended) = measure_with(test, command.current_dir(temp.path())) else { return };
            assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{start}: {ended:?}");
            let line = ended.line();
            assert!(line.starts_with(&format!("{policy} is not permitted here: ")), "{start}: {line}");
            assert!(line.contains(reason), "{start}: {reason:?} in {line}");
        }
    }
    assert!(temp.names().is_empty(), "no file is written");
}

#[test]
fn a_refused_policy_is_listed_as_skipped() {
    let mut command =
        fourtuple("lab accept --family unix --load light --workers 2 --connections 2 --repeats 1 --json");
    child::refuse(&mut command, Facility::IoUring);
    let test = "environment::a_refused_policy_is_listed_as_skipped";
    let Some(ended) = measure_with(test, &mut command) else { return };
    let record = ended.record(0);
    let skipped = list(&record, "/results/skipped");
    let found = skipped.iter().find(|cell| cell["policy"] == "uring-oneshot").expect("the skipped policy");
    assert!(found["why"].as_str().unwrap().contains("io_uring_setup(): EPERM"), "{found:#}");
    assert!(!list(&record, "/results/cells").iter().any(|cell| cell["policy"] == "uring-oneshot"));
}

#[test]
fn planes_of_io_uring_need_permission() {
    let test = "environment::planes_of_io_uring_need_permission";
    for start in [
        "forward --listen 127.0.0.1:0 --to 127.0.0.1:9 --planes 1 --plane uring --for 1ms",
        "lab planes --plane uring --planes 1 --packets 1000 --repeats 1",
    ] {
        let mut command = fourtuple(start);
        child::refuse(&mut command, Facility::IoUring);
        let Some(ended) = measure_with(test, &mut command) else { return };
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{start}: {ended:?}");
        let line = ended.line();
        assert!(line.contains("uring is not permitted here: io_uring_setup(): EPERM ("), "{start}: {line}");
        assert!(line.contains("the sysctl kernel.io_uring_disabled"), "{start}: {line}");
    }
    let mut command = fourtuple("lab planes --planes 1 --packets 1000 --repeats 1 --json");
    child::refuse(&mut command, Facility::IoUring);
    let Some(ended) = measure_with(test, &mut command) else { return };
    assert!([0, 3].contains(&ended.code) && ended.stderr.is_empty(), "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    let [skipped] = list(&record, "/results/skipped") else { panic!("only uring is skipped: {record:#}") };
    assert_eq!(skipped["plane"], "uring");
    assert!(skipped["why"].as_str().unwrap().contains("io_uring_setup(): EPERM"), "{skipped:#}");
    let planes: Vec<_> = list(&record, "/results/cells").iter().map(|cell| &cell["plane"]).collect();
    assert_eq!(planes, ["one-by-one", "batched", "offload"]);
}

#[test]
fn lab_ports_without_ip_local_port_range() {
    let test = "lab_ports_without_ip_local_port_range";
    let mut command = fourtuple("lab ports --range 20000-20127 --json");
    child::refuse(&mut command, Facility::LocalPortRange);
    let Some(ended) = measure_with(test, &mut command) else { return };
    let record = ended.record(0);
    assert_eq!(record["host"]["capabilities"]["ip_local_port_range"], "absent");
    let strategies = record["results"]["strategies"].as_array().unwrap();
    let names: Vec<&str> = strategies.iter().map(|run| run["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["kernel-default", "select-test-repeat", "auto"]);
    assert_eq!(
        strategies[2]["chosen"],
        "kernel-default up to half of the ports, then select-test-repeat steered by its port ledger"
    );
    assert_eq!(strategies[2]["connections"], 128);

    let mut command = fourtuple("lab ports --range 20000-20127 --strategy full-range");
    child::refuse(&mut command, Facility::LocalPortRange);
    let ended = run(&mut command);
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""));
    assert!(ended.line().contains("needs IP_LOCAL_PORT_RANGE, which this kernel has not got"), "{ended:?}");
}

/// The user id of an unprivileged user on every Linux.
const UNPRIVILEGED: u32 = 65_534;

/// Runs the program as an unprivileged user.
fn run_unprivileged(program: &str, arguments: &str) -> Ended {
    let mut command = fourtuple_at(Path::new(program), arguments);
    if is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    run(command.current_dir("/"))
}

/// A user namespace gives no right to load a BPF program, even with all capabilities.
#[test]
fn a_policy_without_bpf_rights_is_refused_not_replaced() {
    let temp = TempDir::new();
    let program = temp.program();
    for start in [
        "lab accept --policy reuseport-least-busy --load light --workers 2 --connections 2 --repeats 1",
        "serve http --policy reuseport-least-busy --listen 127.0.0.1:0 --workers 2 --for 1ms",
    ] {
        let ended = run_unprivileged(&program, start);
        if ended.skips_without_namespaces(
            "environment::a_policy_without_bpf_rights_is_refused_not_replaced",
            "userns",
        ) {
            return;
        }
        ended.require_line(4, &["reuseport-least-busy is not permitted here: ", "CAP_BPF"]);
    }
}

#[test]
fn doctor_probes_the_port_search_without_root() {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--net", "true"]);
    if is_root() {
        unshare.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    if !unshare.status().is_ok_and(|status| status.success()) {
        let test = "environment::doctor_probes_the_port_search_without_root";
        return fourtuple_testing::skip(test, "userns", "unshare --user --net true fails");
    }
    let temp = TempDir::new();
    let record = run_unprivileged(&temp.program(), "doctor --for 1ms --json --quiet").json();
    let search = record.pointer("/results/snapshot/search").unwrap();
    assert!(search.pointer("/seen/default").is_some(), "{search:#}");
}

#[test]
fn lab_planes_runs_without_root() {
    let temp = TempDir::new();
    let program = temp.program();
    for over in ["veth", "loopback"] {
        let flags = "--plane offload --planes 2 --bytes 64 --packets 1000 --repeats 1 --json";
        let ended = run_unprivileged(&program, &format!("lab planes --over {over} {flags}"));
        if ended.skips_without_namespaces("environment::lab_planes_runs_without_root", "userns") {
            return;
        }
        assert!([0, 3].contains(&ended.code) && ended.stderr.is_empty(), "{over}: {ended:?}");
        let record = ended.json();
        require_valid(&record);
        let [cell] = list(&record, "/results/cells") else { panic!("one cell: {record:#}") };
        assert_eq!(number(cell, "packets"), 1000, "{cell:#}");
    }
}

#[test]
fn lab_ports_and_time_wait_run_without_root() {
    let temp = TempDir::new();
    let program = temp.program();
    for experiment in ["ports", "time-wait --patience 1ms"] {
        let ended = run_unprivileged(&program, &format!("lab {experiment} --range 20000-20063 --json"));
        if ended.skips_without_namespaces("environment::lab_ports_and_time_wait_run_without_root", "userns") {
            return;
        }
        let record = ended.record(0);
        let (runs, counted) = if experiment == "ports" {
            ("/results/strategies", "connections")
        } else {
            ("/results/runs", "completed")
        };
        let runs = list(&record, runs);
        assert!(runs.len() >= 3, "{record:#}");
        for run in runs.iter().filter(|run| run["strategy"] != "select-test-repeat") {
            assert!(number(run, counted) >= 63, "{run:#}");
        }
    }
}
