//! `fourtuple doctor` and `fourtuple explain`: exit codes, targets, output, and hosts on which little is visible.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;

use crate::program::situation::{
    SERVER, actions, diagnose, finds, first, has, is_of_host, paste, set_range, verdicts,
};
use crate::program::{
    Ended, Running, TempDir, binary, fourtuple, fourtuple_at, is_root, list, refused, run, text, until,
};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{child, netns};
use fourtuple_testing::process::until_expected;
use fourtuple_testing::{in_namespace, set_sysctl, skip};

const QUICK: &str = "doctor --for 100ms";
const TUPLE: &str = "10.0.0.1 → 10.0.0.2:4000 uses 50 of 50 ports";

/// Uses all ports of a small range for one destination.
fn exhaust() -> Vec<OwnedFd> {
    set_range(20_000, 20_049);
    let address = SocketAddr::from(([10, 0, 0, 2], SERVER));
    let server = socket::open(Transport::Tcp, address, false).unwrap();
    socket::bind(server.as_fd(), address).unwrap();
    socket::listen(server.as_fd(), 100).unwrap();
    let connect = |_| {
        let client = socket::open(Transport::Tcp, address, false).unwrap();
        socket::connect(client.as_fd(), address).unwrap();
        client
    };
    let mut held: Vec<OwnedFd> = (0..50).map(connect).collect();
    // The connections must not look like a queue that nothing empties.
    held.extend((0..50).map(|_| socket::accept_nonblocking(server.as_fd()).unwrap()));
    held.push(server);
    held
}

/// Runs `doctor`, and runs it again if it has found a counter of the whole host.
fn undisturbed(doctor: impl FnMut() -> Ended) -> Ended {
    until_expected(20, doctor, |ended| {
        let is_json = ended.stdout.starts_with('{');
        let said = if is_json { verdicts(&ended.json()).concat() } else { ended.stdout.clone() };
        ended.code != 1 || !is_of_host(&said)
    })
}

#[test]
fn an_idle_namespace_has_no_finding() {
    in_namespace(|| {
        let ended = undisturbed(|| run(&mut fourtuple(QUICK)));
        ended.require_silence();
        assert!(
            ended.stdout.contains("No fault found: ") && ended.stdout.contains(" rules over 0 sockets"),
            "{ended:?}"
        );
        let record = undisturbed(|| run(&mut fourtuple(&format!("{QUICK} --json")))).json();
        assert!(list(&record, "/results/findings").is_empty());
        assert_eq!(record["command"], "doctor");
        // Without a trace some rules are not checked: that is not health.
        for (strict, code) in [("", 0), (" --strict", 3)] {
            let unknown = undisturbed(|| run(&mut fourtuple(&format!("{QUICK} --no-trace{strict}"))));
            let line = unknown.stdout.lines().find(|line| line.contains("No fault found: "));
            let is_told = line.is_some_and(|line| line.contains(" could not be checked"));
            assert!(unknown.code == code && is_told, "{unknown:?}");
        }
    });
}

#[test]
fn what_is_not_visible_is_not_called_healthy() {
    let test = "doctor::what_is_not_visible_is_not_called_healthy";
    in_namespace(|| {
        if !is_root() {
            return skip(test, "root", "the test drops privileges, and mounts");
        }
        let temp = TempDir::new();
        let copy = temp.program();
        let user = undisturbed(|| {
            let mut command = fourtuple_at(Path::new(&copy), &format!("{QUICK} --strict"));
            run(command.uid(65_534).gid(65_534).current_dir("/"))
        });
        // What the kernel says is in /proc, but for sock_diag.
        let hidden = "mount -t tmpfs none /proc && exec \"$0\" doctor --for 100ms --strict";
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--propagation", "private", "sh", "-c", hidden, &copy]);
        let without_proc = run(&mut unshare);
        for ended in [&user, &without_proc] {
            let verdict = ended.stdout.split("\n\n").next().unwrap_or_default().replace('\n', " ");
            assert!(
                verdict.starts_with("No fault found: ") && verdict.ends_with(" rules could not be checked"),
                "{ended:?}"
            );
            assert_eq!(ended.code, 3, "{ended:?}");
        }
        assert!(without_proc.stdout.contains("kernel unknown · "), "{without_proc:?}");
        assert!(without_proc.stdout.contains("virtualization unknown"), "{without_proc:?}");
    });
}

#[test]
fn commands_for_another_namespace_act_on_it() {
    in_namespace(|| {
        if !has("doctor::commands_for_another_namespace_act_on_it", &["nsenter"]) {
            return;
        }
        let reserved = "net.ipv4.ip_local_reserved_ports";
        let read = || fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap();
        let _held = exhaust();
        set_sysctl(reserved, "20030-20049");
        let thread = fs::read_link("/proc/thread-self").unwrap();
        let examine = format!("{QUICK} --no-trace --json --netns /proc/{}/ns/net", thread.display());
        thread::scope(|scope| {
            scope.spawn(|| {
                netns::enter_new().unwrap();
                set_sysctl(reserved, "7000-7009");
                let record = run(&mut fourtuple(&examine)).json();
                let findings = list(&record, "/results/findings");
                for action in findings
                    .iter()
                    .flat_map(|finding| [actions(finding, "now"), actions(finding, "proper")])
                    .flatten()
                {
                    assert!(!action.contains("sysctl -p"), "{action}");
                }
                let finding = findings.iter().find(|finding| text(finding, "id") == "P04").unwrap();
                let now = actions(finding, "now");
                paste(now.iter().find(|action| action.contains("echo > ")).expect("a command that clears"));
                assert_eq!(read().trim(), "7000-7009");
            });
        });
        assert_eq!(read().trim(), "");
    });
}

#[test]
fn a_full_tuple_comes_first_and_exits_1() {
    in_namespace(|| {
        let _held = exhaust();
        let ended = run(&mut fourtuple(QUICK));
        assert_eq!((ended.code, ended.stderr.as_str()), (1, ""), "{ended:?}");
        let line = ended.stdout.lines().find(|line| line.contains("P01")).expect("a verdict");
        assert!(line.contains(TUPLE) && line.contains(&format!("[{}]", std::process::id())), "{line}");
        let first = ended.stdout.find("P01").unwrap();
        assert!(ended.stdout[..first].lines().count() < 6, "the verdict is at the top: {}", ended.stdout);
        for part in ["do now", "do properly", "`fourtuple explain P01`"] {
            assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
        }
        // Findings have precedence over rules that were not checked.
        let strict = run(&mut fourtuple(&format!("{QUICK} --no-trace --strict")));
        assert!(strict.code == 1 && strict.stdout.contains("not checked: "), "{strict:?}");
    });
}

/// In a namespace of its own, over loopback, as the examined connections never are.
#[test]
fn proposed_cures_are_tested_on_this_kernel() {
    let proof_of = |record: &serde_json::Value, part: &str| -> Option<(String, String)> {
        let findings = list(record, "/results/findings").iter();
        let advice = findings.flat_map(|finding| list(finding, "/now"));
        let found = advice.into_iter().find(|advice| text(advice, "action").contains(part))?;
        Some((text(found, "proof").to_owned(), text(found, "effect").to_owned()))
    };
    in_namespace(move || {
        let _held = exhaust();
        let once = || run(&mut fourtuple(&format!("{QUICK} --json"))).json();
        let proof =
            |record: &serde_json::Value| proof_of(record, "ip_local_port_range=").expect("a wider range").0;
        // On a busy host the handshakes of its trial may take too long.
        let record = until_expected(5, once, |record| proof(record) == "test");
        assert_eq!(proof(&record), "test", "{record:#}");
        let temp = TempDir::new();
        let saved = temp.file("saved.json", &record.to_string());
        let shown = run(&mut fourtuple(&format!("report --all {saved}"))).stdout;
        // The words may be in two lines.
        let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("tested on this kernel"), "{shown}");
    });
    in_namespace(move || {
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let mut clients = exhaust();
        let servers = clients.split_off(50);
        drop(clients);
        // A process that another test has just started has copies of the sockets until its exec(): the server must not close first,
        // and they are in TIME_WAIT only then.
        for server in &servers[..50] {
            until("the client's FIN has come", || matches!(socket::receive(server.as_fd(), &mut [0]), Ok(0)));
        }
        drop(servers);
        let before = sysctls();
        let reuse = (0..5).find_map(|_| {
            let record = run(&mut fourtuple(&format!("{QUICK} --json"))).json();
            proof_of(&record, "tcp_tw_reuse=1")
        });
        assert_eq!(sysctls(), before, "the examined namespace");
        let (proof, effect) = reuse.expect("reuse");
        // Only the sockets of the examined namespace tell about their peer.
        let is_known = effect.contains("(the peer has TCP timestamps)");
        assert_eq!(proof, if is_known { "test" } else { "calculation" }, "{effect}");
    });
}

fn sysctls() -> Vec<String> {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap();
    ["ip_local_port_range", "tcp_tw_reuse", "tcp_timestamps"].map(read).to_vec()
}

#[test]
fn wrong_flags_are_one_line() {
    let temp = TempDir::new();
    let unknown = temp.file("unknown.toml", "X99 = 1\n");
    let number = temp.file("number.toml", "P01 = \"high\"\n");
    for (flags, part) in [
        ("doctor --pid 999999999".to_owned(), "--pid 999999999: there is no process"),
        ("doctor --pid 0".to_owned(), "--pid"),
        ("doctor --netns /no/such/file".to_owned(), "--netns /no/such/file: open(/no/such/file)"),
        ("doctor --to nonsense".to_owned(), "192.0.2.1:443"),
        ("doctor --for soon".to_owned(), "--for"),
        ("doctor --thresholds /no/such/file".to_owned(), "/no/such/file"),
        (format!("doctor --thresholds {unknown}"), "X99: there is no such rule"),
        (format!("doctor --thresholds {number}"), "such as P01 = 80"),
        ("doctor --pid 1 --netns /proc/1/ns/net".to_owned(), "--netns"),
        ("explain X99".to_owned(), "no rule has this name or this word"),
    ] {
        refused(&mut fourtuple(&flags), &[part]);
    }
}

#[test]
fn a_process_stands_for_its_namespace() {
    in_namespace(|| {
        if !has("doctor::a_process_stands_for_its_namespace", &["nsenter", "sysctl"]) {
            return;
        }
        let _held = exhaust();
        let mut sleep = std::process::Command::new("sleep");
        sleep.arg("600");
        child::end_with_this_thread(&mut sleep);
        let mut process = sleep.spawn().unwrap();
        let pid = process.id();
        let elsewhere = thread::spawn(move || {
            netns::enter_new().unwrap();
            [
                format!("{QUICK} --json"),
                format!("{QUICK} --json --pid {pid}"),
                format!("{QUICK} --json --netns /proc/{pid}/ns/net"),
            ]
            .map(|flags| undisturbed(|| run(&mut fourtuple(&flags))))
        });
        let [own, by_pid, by_path] = elsewhere.join().unwrap();
        // A command from the other namespace acts on this namespace.
        let record = by_pid.json();
        let now = actions(first(&record, "P01", &[TUPLE]), "now");
        let widen =
            now.iter().find(|action| action.contains("ip_local_port_range")).expect("a sysctl").clone();
        assert!(widen.starts_with(&format!("nsenter --target {pid} --net sysctl -w ")), "{widen}");
        thread::spawn(move || {
            netns::enter_new().unwrap();
            paste(&widen)
        })
        .join()
        .unwrap();
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        assert_eq!(range.split_whitespace().collect::<Vec<_>>(), ["1024", "65535"]);
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(own.code, 0, "{own:?}");
        for ended in [by_pid, by_path] {
            assert_eq!(ended.code, 1, "{ended:?}");
            first(&ended.json(), "P01", &[TUPLE]);
        }
    });
}

#[test]
fn a_destination_leaves_other_tuples_out() {
    in_namespace(|| {
        let _held = exhaust();
        for (to, code) in
            [("10.0.0.2", 1), ("10.0.0.2:4000", 1), ("10.0.0.2:4001", 0), ("10.0.0.3", 0), ("[::1]:4000", 0)]
        {
            let ended = run(&mut fourtuple(&format!("{QUICK} --no-trace --json --to {to}")));
            assert_eq!(finds(&ended.json(), "P01"), code == 1, "{to}: {ended:?}");
        }
    });
}

#[test]
fn rules_without_a_trace_are_listed() {
    in_namespace(|| {
        let ended = run(&mut fourtuple(&format!("{QUICK} --no-trace --json")));
        let record = ended.json();
        let unchecked = list(&record, "/results/unchecked");
        let of = |id: &str| {
            unchecked.iter().find(|rule| rule["id"] == id).unwrap_or_else(|| panic!("{id}: {record:#}"))
        };
        for (id, what) in [
            ("P07", "connect"),
            ("P09", "connect"),
            ("L03", "connect"),
            ("A07", "accept"),
            ("L01", "locks"),
            ("X01", "connect"),
        ] {
            let reason = text(of(id), "reason");
            let advice = format!("; `{} trace {what} --for 10s` ", binary().display());
            assert!(reason.starts_with("--no-trace; ") && reason.contains(&advice), "{id}: {reason}");
        }
        let shown = run(&mut fourtuple(&format!("{QUICK} --no-trace --all"))).stdout;
        assert!(
            shown.contains("Not checked") && shown.contains("P07 connect() fails with EADDRNOTAVAIL"),
            "{shown}"
        );
    });
}

/// Without root the processes of other users and the tracers are not visible, and a full tuple is.
#[test]
fn without_root_a_full_tuple_is_still_found() {
    in_namespace(|| {
        if !is_root() {
            return skip(
                "doctor::without_root_a_full_tuple_is_still_found",
                "root",
                "the test drops privileges",
            );
        }
        let _held = exhaust();
        let temp = TempDir::new();
        let copy = temp.program();
        let unprivileged = |flags: &str| {
            let mut command = fourtuple_at(Path::new(&copy), flags);
            run(command.uid(65_534).gid(65_534).current_dir("/"))
        };
        let ended: Ended = unprivileged(&format!("{QUICK} --json"));
        assert_eq!((ended.code, ended.stderr.as_str()), (1, ""), "{ended:?}");
        let record = ended.json();
        let finding = first(&record, "P01", &[TUPLE]);
        assert!(!text(finding, "verdict").contains('['), "no process is visible: {finding:#}");
        for advice in list(finding, "/now") {
            let action = text(advice, "action");
            let needs_root = advice["needs_root"] == true;
            assert_eq!(needs_root, action.starts_with("sudo "), "{advice:#}");
            assert!(!action.contains("fourtuple ") || action.contains(&copy), "{advice:#}");
        }
        let widen = list(finding, "/now")
            .iter()
            .find(|advice| text(advice, "action").contains("ip_local_port_range"));
        let widen = widen.expect("a sysctl");
        assert!(text(widen, "undo").contains("net.ipv4.ip_local_port_range=\"20000 20049\""), "{widen:#}");
        assert_eq!(text(widen, "until"), "the next boot");
        assert!(text(widen, "condition").contains("3306 (mysql)"), "{widen:#}");
        let unchecked = list(&record, "/results/unchecked");
        for (id, start) in [
            ("P07", "cannot count failed system calls: "),
            ("X01", "cannot count failed system calls: "),
            ("P09", "cannot trace connect(): "),
            ("L03", "cannot trace connect(): "),
            ("A07", "cannot trace accept(): "),
            ("L01", "cannot trace locks: "),
            ("P11", "cannot count failed system calls: "),
            ("B01", "some processes are not visible; "),
            ("F01", "some processes are not visible; "),
            ("P12", "some processes are not visible; "),
        ] {
            let rule = unchecked.iter().find(|rule| rule["id"] == id).expect("not checked");
            assert!(text(rule, "reason").starts_with(start), "{rule:#}");
        }
        let shown = unprivileged(QUICK).stdout;
        assert!(shown.contains("not checked: A07, "), "{shown}");
        let last = shown.lines().last().unwrap_or_default();
        let command = "/fourtuple doctor --for 100ms";
        assert!(
            last.contains(" rules were not checked; root sees more: sudo /") && last.ends_with(command),
            "{last}"
        );
        let shown = unprivileged(&format!("{QUICK} --all")).stdout;
        assert!(shown.contains("Not checked"), "{shown}");
        // The words may be in two lines.
        let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("A07, L01, L03, P07, P09, P11, X01: this process lacks CAP_BPF"), "{shown}");
        assert_eq!(words.matches("this process lacks").count(), 1, "{shown}");
    });
}

#[test]
fn sigint_ends_the_reading_early() {
    in_namespace(|| {
        let _held = exhaust();
        let mut running = Running::start(&mut fourtuple("doctor --for 60s --json"));
        // From here on SIGINT ends the interval between the readings, and not the process.
        let handles = |id: u32| {
            let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
            caught.is_some_and(|mask| mask & 1 << (2 - 1) != 0)
        };
        assert!(running.until("handles SIGINT", handles));
        child::interrupt(running.id()).unwrap();
        let ended = running.end();
        let record = ended.json();
        assert_eq!(record["validity"][0]["id"], "interrupted", "{ended:?}");
        assert_eq!(ended.code, 3, "remarks on the validity come before findings: {ended:?}");
        first(&record, "P01", &[TUPLE]);
    });
}

#[test]
fn commands_stay_on_one_line_in_a_narrow_terminal() {
    in_namespace(|| {
        let _held = exhaust();
        let temp = TempDir::new();
        let record = diagnose(&temp);
        let finding = first(&record, "P01", &[TUPLE]);
        // Another reading could have other findings.
        let saved = temp.file("saved.json", &record.to_string());
        let shown = run(fourtuple(&format!("report --all {saved}")).env("COLUMNS", "40")).stdout;
        let commands = list(finding, "/now").iter().chain(list(finding, "/proper"));
        let commands: Vec<&str> = commands
            .filter(|advice| advice["is_command"] == true)
            .map(|advice| text(advice, "action"))
            .collect();
        // Connections that are idle for long on a busy host are a leak, which has fewer.
        assert!(commands.len() >= 2, "{:?}", actions(finding, "now"));
        for command in commands {
            assert!(shown.lines().any(|line| line.contains(command)), "{command} in {shown}");
        }
    });
}

#[test]
fn explain_needs_no_host() {
    let explain = |arguments: &str| {
        let mut command = fourtuple(arguments);
        run(command.env_clear().current_dir("/"))
    };
    let page = explain("explain P02");
    page.require_silence();
    for part in ["P02", "__inet_hash_connect", "IP_LOCAL_PORT_RANGE", "fourtuple fix ports"] {
        assert!(page.stdout.contains(part), "{part} in {}", page.stdout);
    }
    for same in ["p02", "P2", "p2"] {
        assert_eq!(explain(&format!("explain {same}")).stdout, page.stdout, "{same}");
    }
    let found = explain("explain descriptors").stdout;
    assert_eq!(found, "F01  a process runs out of descriptors\n");
    assert!(explain("explain ip_bind_address_no_port").stdout.contains("P08  "), "a word of the explanation");
    let rules = explain("explain").stdout;
    let ids: Vec<&str> = rules.lines().filter_map(|line| line.split_once(' ')).map(|(id, _)| id).collect();
    assert_eq!(ids.len(), fourtuple_observe::doctor::ALL.len(), "{rules}");
    for id in ids {
        assert_eq!(explain(&format!("explain {id}")).code, 0, "{id}");
    }
}
