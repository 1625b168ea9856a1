//! `fourtuple fix ports`: programs that run while it is attached, refusals, and what stays behind.

use std::fs;
use std::io::{BufRead, Read, Write};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::program::fixing::Cgroup;
use crate::program::fixing::{Client, attached, record_of};
use crate::program::{DEADLINE, fourtuple, in_own_namespace, refused, run, until};
use fourtuple_bpf::Objects;
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_testing::set_sysctl;
use serde_json::Value;

const LOW: u16 = 20_000;
const PORTS: u16 = 500;

/// Returns a cgroup with a client in it, in a namespace with a small range; `None` after a skip.
fn client(test: &str, name: &str) -> Option<(Client, Cgroup)> {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
    let cgroup = Cgroup::new(test, name)?;
    Some((Client::start(test, &cgroup)?, cgroup))
}

#[test]
fn a_running_program_gets_every_port_for_two_destinations() {
    in_own_namespace(|test| {
        let (_first, one) = fourtuple_testing::listener("127.0.0.1", 4096);
        let (_second, two) = fourtuple_testing::listener("127.0.0.1", 4096);
        let Some((mut client, cgroup)) = client(test, "fill") else { return };
        // 90% of the range are in use or will be; the connections from before are without the hook.
        let (failed, before) = client.connect("127.0.0.1", one.port(), PORTS / 10);
        assert_eq!(failed, 0);
        // The destination of an open connection is known from the start.
        let (failed, mut shared) = client.connect("127.0.0.1", two.port(), 1);
        assert_eq!(failed, 0);
        let Some(child) = attached(test, &cgroup.flags("--json --past 20%")) else { return };
        let (failed, mut ports) = client.connect("127.0.0.1", one.port(), PORTS - PORTS / 10);
        assert_eq!(failed, 0);
        ports.extend(before);
        ports.sort_unstable();
        assert_eq!(ports, (LOW..LOW + PORTS).collect::<Vec<_>>(), "every port once");
        // Ports that were bound by number are shared by destination, ports from before the start are found by the kernel.
        let (failed, ports) = client.connect("127.0.0.1", two.port(), PORTS - 1);
        assert_eq!(failed, 0);
        shared.extend(ports);
        shared.sort_unstable();
        shared.dedup();
        assert_eq!(shared.len(), usize::from(PORTS));
        let (failed, _) = client.connect("127.0.0.1", two.port(), 3);
        assert_eq!(failed, 3, "EADDRNOTAVAIL with all ports in use");
        let results = record_of(child)["results"].clone();
        let number = |name: &str| results[name].as_u64().unwrap();
        assert!(number("drawn") > u64::from(PORTS), "{results}");
        let left: u64 =
            results["left"].as_object().unwrap().values().map(|value| value.as_u64().unwrap()).sum();
        let connects = u64::from(PORTS) * 2 + 3 - u64::from(PORTS / 10) - 1;
        assert_eq!(number("drawn") + number("fallbacks") + left, number("connects"), "{results}");
        assert_eq!(number("connects"), connects, "{results}");
        assert_eq!(results["namespaces"][0]["usable"], u64::from(PORTS));
        drop(client);
    });
}

#[test]
fn attaching_and_detaching_under_load_fails_no_connect() {
    in_own_namespace(|test| {
        let (_listener, destination) = fourtuple_testing::listener("127.0.0.1", 4096);
        let Some((mut client, cgroup)) = client(test, "cycles") else { return };
        let mut all = Vec::new();
        for cycle in 0..8 {
            let Some(child) = attached(test, &cgroup.flags("--json --past 1%")) else { return };
            writeln!(client.input, "127.0.0.1 {} 60", destination.port()).unwrap();
            record_of(child);
            let mut line = String::new();
            client.output.read_line(&mut line).unwrap();
            let mut numbers = line.split_whitespace();
            assert_eq!(numbers.next(), Some("0"), "cycle {cycle}: {line}");
            all.extend(numbers.map(str::to_owned));
        }
        let connected = all.len();
        all.sort();
        all.dedup();
        assert_eq!((connected, all.len()), (480, 480));
        drop(client);
    });
}

#[test]
fn a_killed_fix_leaves_nothing_and_other_links_stay() {
    in_own_namespace(|test| {
        let (_listener, destination) = fourtuple_testing::listener("127.0.0.1", 4096);
        let Some((mut client, cgroup)) = client(test, "killed") else { return };
        let Some(other) = attached(test, &cgroup.flags("--json --dry-run")) else { return };
        let Some(mut child) = attached(test, &cgroup.flags("--json")) else { return };
        let held = Objects::of_process(child.id()).unwrap();
        assert_eq!((held.programs.len() >= 2, held.links.len()), (true, 2), "{held:?}");
        child::kill(child.id()).unwrap();
        child.wait().unwrap();
        let deadline = Instant::now() + DEADLINE;
        loop {
            match held.remaining() {
                Err(error) => return fourtuple_testing::skip(test, "root", &error.to_string()),
                Ok(left) if left.is_empty() => break,
                Ok(left) => assert!(Instant::now() < deadline, "{left:?} of {held:?}"),
            }
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(client.connect("127.0.0.1", destination.port(), 50).0, 0);
        let results = record_of(other)["results"].clone();
        assert_eq!(results["connects"], 50, "the other link still runs: {results}");
        assert_eq!((&results["drawn"], &results["probes"]), (&0.into(), &0.into()));
        drop(client);
    });
}

#[test]
fn a_process_and_its_container_are_found() {
    in_own_namespace(|test| {
        let id = format!("{:016x}fedcba9876543210", std::process::id());
        let (_listener, destination) = fourtuple_testing::listener("::1", 4096);
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
        let Some(parent) = Cgroup::new(test, "container") else { return };
        let cgroup = Cgroup(parent.0.join(format!("docker-{id}.scope")));
        fs::create_dir(&cgroup.0).unwrap();
        let Some(mut client) = Client::start(test, &cgroup) else { return };
        // Far more connections than the share are open before the start.
        for (before, flag) in
            [(150, format!("--pid {}", client.child.id())), (1, format!("--container {id}"))]
        {
            // The destination of a connection is known from the start.
            assert_eq!(client.connect("::1", destination.port(), before).0, 0);
            let to = format!("--to [::1]:{}", destination.port());
            let Some(child) = attached(test, &format!("fix ports {flag} --json --past 1% {to}")) else {
                return;
            };
            assert_eq!(client.connect("::1", destination.port(), 99).0, 0);
            let record = record_of(child);
            assert_eq!(record["settings"]["cgroup"].as_str(), cgroup.0.to_str());
            assert!(record["results"]["drawn"].as_u64().unwrap() > 50, "{record}");
        }
        drop(client);
        cgroup.remove();
    });
}

#[test]
fn a_process_of_the_root_cgroup_gets_a_cgroup_meanwhile() {
    in_own_namespace(|test| {
        let (_listener, destination) = fourtuple_testing::listener("::1", 4096);
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
        let root = fourtuple_testing::cgroup_root();
        let may_move =
            |root: &PathBuf| fs::File::options().write(true).open(root.join("cgroup.procs")).is_ok();
        let Some(root) = root.ok().filter(may_move) else {
            return fourtuple_testing::skip(test, "cgroup", "no process can be moved");
        };
        // The root is not removed at the end.
        let root = ManuallyDrop::new(Cgroup(root));
        let Some(mut client) = Client::start(test, &root) else { return };
        let pid = client.child.id();
        let own = || fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        if !own().lines().any(|line| line == "0::/") {
            return fourtuple_testing::skip(test, "cgroup", "the root cgroup is not visible");
        }
        assert_eq!(client.connect("::1", destination.port(), 150).0, 0);
        let flags = format!("fix ports --pid {pid} --past 1% --to [::1]:{}", destination.port());
        let Some(child) = attached(test, &format!("{flags} --json")) else { return };
        let made = root.0.join(format!("fourtuple-fix-{}", child.id()));
        assert!(made.exists() && own().contains("0::/fourtuple-fix-"), "{}", own());
        assert_eq!(client.connect("::1", destination.port(), 99).0, 0);
        let record = record_of(child);
        assert_eq!(record["settings"]["cgroup"].as_str(), made.to_str());
        assert!(record["results"]["drawn"].as_u64().unwrap() > 50, "{record}");
        assert!(!made.exists() && own().lines().any(|line| line == "0::/"), "{}", own());
        refused(&mut fourtuple(&format!("{flags} --dry-run")), &["a dry run moves no process"]);
        // The guard process moves the client back when the command is killed.
        let Some(mut child) = attached(test, &format!("{flags} --json")) else { return };
        let made = root.0.join(format!("fourtuple-fix-{}", child.id()));
        assert!(made.exists() && own().contains("0::/fourtuple-fix-"), "{}", own());
        child::kill(child.id()).unwrap();
        child.wait().unwrap();
        until("moved back", || !made.exists());
        assert!(own().lines().any(|line| line == "0::/"), "{}", own());
        assert_eq!(client.connect("::1", destination.port(), 20).0, 0);
    });
}

#[test]
fn a_unit_is_found_by_its_name() {
    in_own_namespace(|test| {
        let Some(slice) = Cgroup::new(test, "slice") else { return };
        let name = format!("fourtuple-{}", std::process::id());
        let unit = Cgroup(slice.0.join(format!("{name}.service")));
        fs::create_dir(&unit.0).unwrap();
        for value in [name.clone(), format!("{name}.service")] {
            let ended = run(&mut fourtuple(&format!("fix ports --unit {value} --for 1ms --json --quiet")));
            if ended.code == 4 {
                return fourtuple_testing::skip(test, "bpf", ended.line());
            }
            assert_eq!(ended.code, 0, "{ended:?}");
            assert_eq!(ended.json()["settings"]["cgroup"].as_str(), unit.0.to_str());
        }
        unit.remove();
    });
}

#[test]
fn a_removed_cgroup_ends_the_fix() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "removed") else { return };
        let Some(mut child) = attached(test, &cgroup.flags("--json")) else { return };
        cgroup.remove();
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(3), "{text}");
        let record: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(record["validity"][0]["id"], "cgroup-removed");
    });
}

#[test]
fn bad_values_are_refused_in_one_line() {
    for (flags, words) in [
        ("", "--cgroup"),
        ("--cgroup /proc", "it is not in a cgroup2 file system"),
        ("--cgroup /nowhere", "invalid value '/nowhere' for '--cgroup'"),
        ("--cgroup /proc --pid 1", "--pid"),
        ("--pid 0", "--pid"),
        ("--pid 2147483647", "there is no such process"),
        ("--unit no-such-unit-at-all", "no cgroup has the name of the unit"),
        ("--container 0123456789ab", "no cgroup has this container ID"),
        ("--cgroup /proc --past 0%", "--past"),
        ("--cgroup /proc --past 25", "percentage"),
        ("--cgroup /proc --to localhost:80", "is not a destination"),
        ("--cgroup /proc --source 192.0.2.0/33", "is not a prefix"),
        ("--cgroup /proc --for soon", "--for"),
    ] {
        refused(&mut fourtuple(&format!("fix ports {flags}")), &[words]);
    }
}

#[test]
fn without_permission_the_error_is_one_line() {
    let test = "fix::without_permission_the_error_is_one_line";
    let Some(cgroup) = Cgroup::new(test, "refused") else { return };
    let mut command = fourtuple(&cgroup.flags("--for 1s"));
    child::refuse(&mut command, Facility::Bpf);
    let ended = run(&mut command);
    ended.require_line(4, &["cannot fix ports"]);
}

#[test]
fn an_additional_source_must_be_local() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "source") else { return };
        let ended = || run(&mut fourtuple(&cgroup.flags("--for 1s --source 192.0.2.0/30")));
        // A service that is restarted: its next process may have another network namespace.
        let empty = ended();
        assert_eq!(empty.code, 3, "{empty:?}");
        assert!(empty.line().contains("the cgroup has no process"), "{empty:?}");
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        fs::write(cgroup.0.join("cgroup.procs"), process.id().to_string()).unwrap();
        let used = ended();
        let _ = process.kill();
        let _ = process.wait();
        assert_eq!(used.code, 2, "{used:?}");
        assert!(used.line().contains("no address of it is local"), "{used:?}");
    });
}
