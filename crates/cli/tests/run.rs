//! `fourtuple run`: programs under each way, what their calls return, what stays behind, and refusals.

mod program;

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fourtuple::capabilities::{self, Capabilities, LocalPortRange};
use fourtuple_bpf::FixAccept;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::{child, netns};
use fourtuple_testing::{in_namespace, set_sysctl};
use program::clients::{LOW, bare, client, clients, listener, run_of};
use program::{
    Ended, TempDir, binary, children, fourtuple, in_own_namespace, require_valid, run, stat, until,
};
use serde_json::Value;

const PORTS: u16 = 500;

/// Runs a program via a way, and returns its end and the record; `None` after a skip.
fn recorded(test: &str, way: &str, program: &Path, words: &str) -> Option<(Ended, Value)> {
    let temp = TempDir::new();
    let file = temp.join("record.json");
    let ended = run(&mut run_of(&format!("--via {way} --quiet --json {file}"), program, words));
    if !Path::new(&file).exists() && is_refused(test, way, &ended) {
        return None;
    }
    assert_eq!(ended.stderr, "", "{way}: {ended:?}");
    let record: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    require_valid(&record);
    assert_eq!(record["results"]["way"], way);
    Some((ended, record["results"].clone()))
}

/// Returns whether the host does not allow the way, after a skip. Exit code 4 is not a reason to skip on its own: the host itself must lack
/// what the way needs.
fn is_refused(test: &str, way: &str, ended: &Ended) -> bool {
    if ended.code != 4 {
        return false;
    }
    let (need, is_there) = match way {
        "cgroup" => ("bpf", FixAccept::attach().is_ok()),
        _ => ("ip_local_port_range", has_linear_search()),
    };
    assert!(!is_there, "the host has what {way} needs: {ended:?}");
    fourtuple_testing::skip(test, need, ended.line());
    true
}

/// Returns whether IP_LOCAL_PORT_RANGE makes the search of this kernel linear (Linux 6.8).
fn has_linear_search() -> bool {
    let is_linear = |found: Capabilities| {
        matches!(found.local_port_range, LocalPortRange::Linear | LocalPortRange::Unproven)
    };
    capabilities::probe().is_ok_and(is_linear)
}

const WAYS: [&str; 3] = ["preload", "supervise", "cgroup"];

#[test]
fn every_port_is_found_via_each_way() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        for way in ["cgroup", "preload", "supervise"] {
            // A namespace for each way: connections stay behind, as long as a process that another test has just forked has the listener.
            netns::enter_new().expect("a network namespace in a network namespace");
            let (_listener, destination) = listener(PORTS);
            let number = PORTS + 3;
            let words = format!("fill {} {number}", destination.port());
            let Some((ended, results)) = recorded(test, way, client, &words) else { return };
            assert_eq!(ended.code, 0);
            let mut numbers = ended.stdout.split_whitespace().map(|word| word.parse::<u16>().unwrap());
            assert_eq!((numbers.next(), numbers.next()), (Some(3), Some(3)), "{way}: EADDRNOTAVAIL");
            let mut ports: Vec<u16> = numbers.collect();
            let first = &ports[..usize::from(PORTS) / 4];
            let odd = first.iter().filter(|port| **port & 1 == 1).count();
            // The kernel's own search begins with 250 ports of one parity. The way cgroup leaves connects below its share alone.
            assert!(way == "cgroup" || odd > 10 && odd < first.len() - 10, "{way}: {odd} odd ports");
            ports.sort_unstable();
            assert_eq!(ports, (LOW..LOW + PORTS).collect::<Vec<_>>(), "{way}: every port once");
            assert_eq!(results["connects"], number, "{results}");
            if way == "preload" {
                assert_eq!((&results["unavailable"], &results["changed"]), (&3.into(), &number.into()));
                let even = results["even"].as_u64().unwrap();
                assert_eq!(even + results["odd"].as_u64().unwrap(), u64::from(PORTS));
            }
        }
    });
}

#[test]
fn sockets_that_bind_first_share_ports_by_destination() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_first, one) = listener(PORTS);
        let (_second, two) = fourtuple_testing::listener("127.0.0.1", 4096);
        // Every port is in use, for another destination.
        let held: Vec<TcpStream> = (0..PORTS).map(|_| TcpStream::connect(two).unwrap()).collect();
        let number = PORTS / 4;
        let words = format!("bound {} {number}", one.port());
        let ended = run(&mut bare(client, &words));
        assert!(ended.stdout.starts_with(&format!("{number} 0\n")), "EADDRINUSE of bind(): {ended:?}");
        for way in ["preload", "supervise"] {
            let Some((ended, results)) = recorded(test, way, client, &words) else { return };
            assert!(ended.stdout.starts_with("0 0 "), "{way}: {}", ended.stdout);
            assert_eq!((&results["bound"], &results["named"]), (&number.into(), &0.into()), "{results}");
            assert_eq!(results["avoided"], number, "{results}");
        }
        drop(held);
    });
}

/// The way `cgroup`, which root gets, cannot cover sockets that were bound: squid, or a proxy with a source address.
#[test]
fn bound_sockets_left_alone_are_reported_at_once() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(PORTS);
        let path = client.display();
        let script = |what: &str| format!("{path} {what} {} 10 > /dev/null; read line", destination.port());
        let start = |flags: &str, what: &str| {
            let mut command = fourtuple(&format!("run {flags} --"));
            command.args(["/bin/sh", "-c", &script(what)]).stdin(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let mut child = start("", "bound");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let way = lines.next().unwrap();
        if !way.ends_with(" runs via cgroup") {
            drop(child.stdin.take());
            child.wait().unwrap();
            assert!(FixAccept::attach().is_err(), "the host has what cgroup needs: {way}");
            return fourtuple_testing::skip(test, "bpf", &way);
        }
        // While the program runs.
        let line = lines.next().unwrap();
        let covers = format!("`{} run --via bound` covers sockets bound to port 0", binary().display());
        if has_linear_search() {
            assert!(line.ends_with(&covers), "{line}");
        } else {
            assert!(line.contains(" no way covers them: "), "{line}");
        }
        let part = "connects of sockets that it had bound proceeded unchanged: ";
        assert!(line.starts_with("fourtuple: /bin/sh: ") && line.contains(part), "{line}");
        drop(child.stdin.take());
        let rest: Vec<String> = lines.collect();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{rest:?}");
        // The total, if the first line did not have it.
        let total = rest.last().unwrap_or(&line);
        assert!(
            total.starts_with("fourtuple: /bin/sh: 10 connects of ") && rest.len() <= 1,
            "{line}: {rest:?}"
        );
        let mut covering = vec![("", "fill"), ("--quiet", "bound")];
        if has_linear_search() {
            covering.push(("--via bound", "bound"));
        }
        for (flags, what) in covering {
            let mut child = start(flags, what);
            drop(child.stdin.take());
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert!(!stderr.contains("proceeded unchanged"), "{flags} {what}: {stderr}");
        }
    });
}

#[test]
fn a_user_without_rights_can_run_programs() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(PORTS);
        for way in ["preload", "supervise"] {
            let words = format!("fill {} 50", destination.port());
            let mut command = run_of(&format!("--via {way} --report"), client, &words);
            command.uid(65_534).gid(65_534).stdin(Stdio::null());
            let output = match command.output() {
                Ok(output) => output,
                Err(error) => return fourtuple_testing::skip(test, "root", &error.to_string()),
            };
            let stderr = String::from_utf8(output.stderr).unwrap();
            if output.status.code() == Some(4) {
                assert!(!has_linear_search(), "{way}: {stderr}");
                return fourtuple_testing::skip(test, "ip_local_port_range", &stderr);
            }
            if output.status.code() == Some(126) {
                return fourtuple_testing::skip(test, "root", "the user cannot read the client");
            }
            assert!(output.status.success() && output.stdout.starts_with(b"0 0 "), "{way}: {stderr}");
            assert!(!stderr.contains("no-permission"), "{stderr}");
            let figure = "with a search of the whole range";
            let line = stderr.lines().find(|line| line.starts_with(figure)).unwrap_or_default();
            assert!(line.ends_with(" 50"), "{way}: {stderr}");
        }
    });
}

#[test]
fn calls_return_the_same_with_and_without_run() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(40_000);
        for what in ["names", "errors", "options", "kinds", "threads", "races", "signals", "children"] {
            let words = format!("{what} {}", destination.port());
            let expected = run(&mut bare(client, &words));
            assert_eq!(expected.code, 0, "{what}: {expected:?}");
            let programs = [Some(client), clients().static_one.as_deref()];
            for (way, program) in [("preload", 0), ("supervise", 0), ("supervise", 1), ("cgroup", 0)] {
                let Some(program) = programs[program] else { continue };
                let Some((ended, _)) = recorded(test, way, program, &words) else { return };
                assert_eq!((ended.code, &ended.stdout), (0, &expected.stdout), "{what} via {way}");
            }
        }
    });
}

#[test]
fn mptcp_connections_stay_mptcp() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        // The connections take more than the share from which the way cgroup acts.
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + 199));
        if !fourtuple_testing::has_mptcp(test) {
            return;
        }
        let words = "multipath 4000 150";
        let bare = run(&mut bare(client, words));
        let expected = "clients 150, servers 150, answered 150\n";
        assert_eq!((bare.code, bare.stdout.as_str()), (0, expected), "{bare:?}");
        for way in WAYS {
            let Some((ended, results)) = recorded(test, way, client, words) else { return };
            assert_eq!((ended.code, ended.stdout.as_str()), (0, expected), "{way}: {ended:?}");
            if way == "cgroup" {
                // The kernel runs the programs for the first subflow, which is a TCP socket. On a busy machine the source address is
                // unknown for longer.
                let number = |value: &Value| value.as_u64().unwrap_or(0);
                let (connects, left) = (number(&results["connects"]), &results["left"]);
                let unknown = number(&left["source-unknown"]) + number(&left["namespace-unknown"]);
                assert!(number(&results["changed"]) > 0 || unknown * 2 >= connects, "{results}");
            } else {
                assert_eq!(results["left"]["protocol"], 150, "{way}: {results}");
            }
        }
    });
}

#[test]
fn exit_code_and_streams_belong_to_the_program() {
    let shell = Path::new("/bin/sh");
    for way in ["preload", "supervise"] {
        let status = |script: &str| {
            let mut command = fourtuple(&format!("run --quiet --via {way} --"));
            run(command.arg(shell).args(["-c", script]))
        };
        let ended = status("echo out; echo err >&2; exit 7");
        if is_refused("run::exit_code_and_streams_belong_to_the_program", way, &ended) {
            return;
        }
        assert_eq!((ended.code, &*ended.stdout, &*ended.stderr), (7, "out\n", "err\n"), "{way}");
        assert_eq!(status("kill -KILL $$").code, 128 + 9);
        assert_eq!(status("read line; echo $line").stdout, "\n");
        // Signals that a program has not blocked before are not blocked, and no descriptor is left open.
        assert_eq!(status("grep SigBlk /proc/self/status").stdout, "SigBlk:\t0000000000000000\n");
        let bare = run(Command::new(shell).args(["-c", "ls /proc/self/fd"]).stdin(Stdio::null())).stdout;
        assert_eq!(status("ls /proc/self/fd").stdout, bare, "{way}: descriptors");
    }
}

/// The counters are memory of a file. Access beyond its end would be SIGBUS, in the program and in the main process.
#[test]
fn a_program_cannot_truncate_the_counters() {
    let script = "test -n \"$FOURTUPLE_RUN_COUNTERS\" || exit 8; true 2>/dev/null > \"$FOURTUPLE_RUN_COUNTERS\" && exit 9; exit 7";
    let mut command = fourtuple("run --quiet --report --via preload -- /bin/sh -c");
    let ended = run(command.arg(script));
    if is_refused("run::a_program_cannot_truncate_the_counters", "preload", &ended) {
        return;
    }
    assert_eq!(ended.code, 7, "{ended:?}");
    // No file that others could open or change is left of them.
    let mut command = fourtuple("run --quiet --via preload -- /bin/sh -c");
    let ended = run(command.arg("ls ${LD_PRELOAD%/*}"));
    assert_eq!(ended.stdout, "fourtuple-preload.so\n", "{ended:?}");
}

/// The number of the main process may belong to another process when a program executes the next one.
#[test]
fn counters_of_another_size_are_not_used() {
    in_own_namespace(|test| {
        if !fourtuple_testing::process::Python::is_installed(test) {
            return;
        }
        let next =
            "import socket; raise SystemExit(7 if socket.socket().connect_ex((\"127.0.0.1\", 1)) else 8)";
        let first = format!(
            "import fcntl, os, sys\n\
             empty = os.memfd_create('fourtuple-counters', 2)\n\
             fcntl.fcntl(empty, 1033, 7)\n\
             os.environ['FOURTUPLE_RUN_COUNTERS'] = f'/proc/self/fd/{{empty}}'\n\
             os.execvp('python3', ['python3', '-c', '{next}'])"
        );
        let mut command = fourtuple("run --quiet --via preload -- python3 -c");
        let ended = run(command.arg(first));
        if !is_refused(test, "preload", &ended) {
            assert_eq!(ended.code, 7, "{ended:?}");
        }
    });
}

/// The main process leaves a process behind if the supervisor was killed and descendants still wait for answers.
#[test]
fn the_process_that_stays_behind_has_no_rights() {
    let test = "run::the_process_that_stays_behind_has_no_rights";
    // A number that only the command lines of this test have.
    let time = format!("1000.{}", std::process::id());
    let with = |word: &str| -> Vec<u32> {
        let processes = fs::read_dir("/proc").unwrap();
        let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let line = |id: u32| fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let has = |id: &u32| {
            let line = String::from_utf8_lossy(&line(*id)).replace('\0', " ");
            line.contains(word) && line.contains(&time) && !is_gone(*id)
        };
        ids.filter(has).collect()
    };
    let mut command = fourtuple("run --via supervise -- /bin/sh -c");
    command.arg(format!("setsid sleep {time} > /dev/null 2>&1 & echo ready; read line"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut main = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(main.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        let mut stderr = String::new();
        main.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = main.wait().unwrap().code().unwrap();
        let ended = Ended { code, stdout: line, stderr };
        assert!(is_refused(test, "supervise", &ended), "{ended:?}");
        return;
    }
    // The shell has the same words in its command line.
    let sleeper = || {
        with(&format!("sleep {time}"))
            .into_iter()
            .find(|id| fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|line| line.starts_with(b"sleep")))
    };
    until("the descendant runs", || sleeper().is_some());
    let supervisor = children(main.id())[0];
    child::kill(supervisor).unwrap();
    until("killed", || is_gone(supervisor));
    drop(main.stdin.take());
    main.wait().unwrap();
    let left = with("fourtuple run");
    // It drops them after main has ended.
    let has_none = |id: &u32| {
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let lines = ["CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1"];
        lines.iter().all(|line| status.contains(line))
    };
    assert_eq!(left.len(), 1, "a process stays behind");
    until("it has no capabilities", || left.iter().all(has_none));
    child::kill(sleeper().expect("the descendant")).unwrap();
    until("it ends with the last descendant", || with("fourtuple run").is_empty());
}

#[test]
fn the_way_is_named_on_stderr() {
    let ended = run(&mut run_of("--via preload", Path::new("/bin/true"), ""));
    if is_refused("run::the_way_is_named_on_stderr", "preload", &ended) {
        return;
    }
    assert_eq!((ended.code, ended.line()), (0, "/bin/true runs via preload"));
    let ended = run(&mut run_of("--via preload --report", Path::new("/bin/true"), ""));
    assert!(ended.stderr.contains("EADDRNOTAVAIL avoided"), "{ended:?}");
    assert_eq!(ended.stdout, "");
}

#[test]
fn the_way_fits_program_and_host() {
    let test = "run::the_way_fits_program_and_host";
    let Some(client) = client(test) else { return };
    let without_bpf = |program: &Path| {
        let mut command = run_of("", program, "once 1");
        child::refuse(&mut command, Facility::Bpf);
        run(&mut command)
    };
    let ended = without_bpf(client);
    if is_refused(test, "preload", &ended) {
        return;
    }
    let line = ended.line();
    assert!(line.contains(" runs via preload (not cgroup: "), "{line}");
    // The program has connected to a port on which no socket listens.
    assert_eq!(ended.code, 1);
    if let Some(program) = &clients().static_one {
        let ended = without_bpf(program);
        let line = ended.line();
        assert!(line.contains(" runs via supervise (not cgroup: "), "{line}");
        assert!(line.contains("not preload: ") && line.contains("is a static executable"), "{line}");
        let ended = run(&mut run_of("--via preload", program, "once 1"));
        assert_eq!(ended.code, 4);
        assert!(ended.line().starts_with("cannot run the program via preload: "), "{ended:?}");
    }
}

/// A client that connects until its input ends, and the processes around it.
struct Endless {
    main: Child,
    supervisor: u32,
    program: u32,
}

impl Endless {
    /// Starts the client and waits until it connects; `None` after a skip.
    fn start(test: &str, way: &str, client: &Path, port: u16) -> Option<Endless> {
        let mut command = run_of(&format!("--via {way}"), client, &format!("until-end {port}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut main = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(main.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        if !line.contains(" runs via ") {
            let code = main.wait().unwrap().code().unwrap();
            let ended = Ended { code, stdout: String::new(), stderr: line };
            assert!(is_refused(test, way, &ended), "{ended:?}");
            return None;
        }
        let mut ready = [0; 6];
        main.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        assert_eq!(&ready, b"ready\n");
        let supervisor = children(main.id())[0];
        let program = children(supervisor)[0];
        Some(Endless { main, supervisor, program })
    }

    /// Ends the input of the client, and returns what it prints.
    fn end(&mut self) -> String {
        drop(self.main.stdin.take());
        let mut text = String::new();
        self.main.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

/// Returns whether a process has ended; a zombie has.
fn is_gone(process: u32) -> bool {
    stat(process).is_none_or(|(state, _)| state == 'Z')
}

#[test]
fn a_killed_process_of_run_breaks_no_connect() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(20_000);
        for way in WAYS {
            for kills_supervisor in [true, false] {
                let Some(mut endless) = Endless::start(test, way, client, destination.port()) else { return };
                let victim = if kills_supervisor { endless.supervisor } else { endless.main.id() };
                child::kill(victim).unwrap();
                until("killed", || is_gone(victim));
                thread::sleep(Duration::from_millis(20));
                assert!(!is_gone(endless.program), "{way}: the program runs");
                assert_eq!(endless.end(), "failed 0 of 1\n", "{way}, supervisor {kills_supervisor}");
                let code = endless.main.wait().unwrap().code();
                let mut said = String::new();
                endless.main.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                assert_eq!(code, kills_supervisor.then_some(0), "{way}: {said}");
                let main = endless.main.id();
                until(&format!("{way}: the program ends"), || is_gone(endless.program));
                until(&format!("{way}: the supervisor ends"), || is_gone(endless.supervisor));
                until(&format!("{way}: the cgroup is removed"), || {
                    let made = |root: PathBuf| root.join(format!("fourtuple-run-{main}")).exists();
                    !fourtuple_testing::cgroup_root().is_ok_and(made)
                });
                let directory = std::env::temp_dir().join(format!("fourtuple-run-{main}-0"));
                until(&format!("{way}: the directory is removed"), || !directory.exists());
            }
        }
    });
}

/// The cgroup is there before the supervisor is, and the way of the program is looked for in between.
#[test]
fn a_signal_at_the_start_leaves_nothing() {
    in_namespace(|| {
        let cgroups = fourtuple_testing::cgroup_root();
        for delay_ms in (0..160).step_by(8) {
            let mut command = fourtuple("run -- sleep 60");
            let mut main = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            thread::sleep(Duration::from_millis(delay_ms));
            child::terminate(main.id()).unwrap();
            let status = main.wait().unwrap();
            assert!(!status.success(), "after {delay_ms} ms: {status}");
            let name = format!("fourtuple-run-{}", main.id());
            let is_left = cgroups.as_ref().is_ok_and(|root| root.join(&name).exists());
            assert!(!is_left, "after {delay_ms} ms: {name}");
        }
    });
}

/// The supervisor may be killed before it has told the main process that the program runs.
#[test]
fn a_supervisor_killed_at_the_start_breaks_no_connect() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(PORTS);
        for way in WAYS {
            for _ in 0..4 {
                let arguments = format!("orphan {}", destination.port());
                let ended = run(&mut run_of(&format!("--via {way}"), client, &arguments));
                if is_refused(test, way, &ended) {
                    return;
                }
                assert_eq!(ended.code, 0, "{way}: {ended:?}");
            }
        }
    });
}

/// A duplicate of a socket takes a descriptor, and a descriptor of the thread of the call.
#[test]
fn a_supervisor_with_few_descriptors_answers_each_call() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(PORTS);
        let temp = TempDir::new();
        let mut has_some = false;
        for limit in 8..=24 {
            let file = temp.join(&limit.to_string());
            let flags = format!("--via supervise --quiet --json {file}");
            let mut command = run_of(&flags, client, &format!("fill {} 2", destination.port()));
            child::limit_descriptors(&mut command, limit);
            let ended = run(&mut command);
            // Too few for the start.
            if !Path::new(&file).exists() {
                let too_few = ended.code == 1 || ended.stderr.contains("Too many open files");
                assert!(too_few || is_refused(test, "supervise", &ended), "{limit}: {ended:?}");
                continue;
            }
            assert_eq!((ended.code, &ended.stdout[..4]), (0, "0 0 "), "{limit}: {ended:?}");
            let record: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
            assert_eq!(record["validity"], serde_json::json!([]), "{limit}");
            // The start needs as many descriptors as a call.
            let results = &record["results"];
            assert!(results["changed"] == 2 || results["left"]["no-permission"] == 2, "{limit}: {results}");
            has_some |= results["changed"] == 2;
        }
        assert!(has_some || !has_linear_search());
    });
}

#[test]
fn a_supervisor_without_descriptors_lets_calls_proceed() {
    in_own_namespace(|test| {
        if Command::new("prlimit").arg("--version").output().is_err() {
            return fourtuple_testing::skip(test, "programs", "prlimit is not in PATH");
        }
        let Some(client) = client(test) else { return };
        let (listener, destination) = listener(20_000);
        let listener = TcpListener::from(listener);
        let temp = TempDir::new();
        let file = temp.join("record.json");
        let way = format!("supervise --json {file}");
        let Some(mut endless) = Endless::start(test, &way, client, destination.port()) else { return };
        let mut limit = Command::new("prlimit");
        limit.args(["--pid", &endless.supervisor.to_string(), "--nofile=0:"]);
        assert!(limit.status().unwrap().success());
        // Connections of the time before the limit.
        listener.set_nonblocking(true).unwrap();
        while listener.accept().is_ok() {}
        listener.set_nonblocking(false).unwrap();
        // The supervisor may have been within the first two calls.
        for _ in 0..4 {
            listener.accept().unwrap();
        }
        assert_eq!(endless.end(), "failed 0 of 1\n");
        assert_eq!(endless.main.wait().unwrap().code(), Some(0));
        let record: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(record["validity"], serde_json::json!([]));
        let left = record["results"]["left"]["no-permission"].as_u64();
        assert!(left >= Some(2), "{}", record["results"]);
    });
}

#[test]
fn signals_reach_the_program_and_stops_are_passed_on() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(20_000);
        for way in ["preload", "supervise"] {
            let Some(mut endless) = Endless::start(test, way, client, destination.port()) else { return };
            let state = |process| stat(process).map(|(state, _)| state);
            child::stop(endless.program).unwrap();
            let main = endless.main.id();
            until("stopped", || state(main) == Some('T') && state(endless.program) == Some('T'));
            assert_ne!(state(endless.supervisor), Some('T'));
            let mut resume = Command::new("kill");
            assert!(resume.args(["-CONT", &endless.program.to_string()]).status().unwrap().success());
            until("continued", || state(main) != Some('T'));
            if way == "supervise" {
                // The main process takes the place of its supervisor. SIGCONT as from a shell, to the whole group.
                child::kill(endless.supervisor).unwrap();
                until("without supervisor", || {
                    stat(endless.supervisor).is_none_or(|(state, _)| state == 'Z')
                });
                child::stop(endless.program).unwrap();
                until("stopped", || state(main) == Some('T') && state(endless.program) == Some('T'));
                for process in [endless.program, main] {
                    let mut resume = Command::new("kill");
                    assert!(resume.args(["-CONT", &process.to_string()]).status().unwrap().success());
                }
                until("continued", || state(main) != Some('T'));
            }
            child::terminate(main).unwrap();
            until("ended by SIGTERM", || endless.main.try_wait().unwrap().is_some());
            assert_eq!(endless.main.wait().unwrap().code(), Some(128 + 15), "{way}");
            assert_eq!(endless.end(), "", "{way}");
        }
    });
}

#[test]
fn descendants_that_outlive_the_program_connect() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let (_listener, destination) = listener(20_000);
        let temp = TempDir::new();
        let file = temp.join("result");
        for way in WAYS {
            let script = format!(
                "(sleep 0.3; {} fill {} 20 > {file}.new; mv {file}.new {file}) > /dev/null 2>&1 &",
                client.display(),
                destination.port()
            );
            let mut command = fourtuple(&format!("run --quiet --via {way} --"));
            let ended = run(command.args(["/bin/sh", "-c", &script]));
            if is_refused(test, way, &ended) {
                return;
            }
            assert_eq!(ended.code, 0, "{ended:?}");
            until("finished", || Path::new(&file).exists());
            assert!(fs::read_to_string(&file).unwrap().starts_with("0 0 "), "{way}");
            fs::remove_file(&file).unwrap();
        }
    });
}

/// Returns the script that executes its arguments with a check of each access, where the library of `run` is loaded; `None` after a skip.
/// .ci/asan has the runtime of AddressSanitizer of this compiler, for a library that is instrumented. Elsewhere valgrind runs the program.
fn checked(test: &str, temp: &TempDir) -> Option<String> {
    let Some(runtime) = env::var_os("FOURTUPLE_ASAN_RUNTIME") else {
        if let Err(error) = Command::new("valgrind").arg("--version").output() {
            fourtuple_testing::skip(test, "valgrind", &error.to_string());
            return None;
        }
        return Some("exec valgrind --quiet --error-exitcode=99 \"$@\"\n".to_owned());
    };
    let library = temp.join("instrumented.so");
    let mut rustc = Command::new("rustc");
    let flags = "--crate-name instrumented --crate-type cdylib --edition 2024 -C panic=abort -C opt-level=3 -A dead_code";
    rustc.args(flags.split(' ')).args(["-Zsanitizer=address", "-o", &library]);
    rustc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../fix/preload/preload.rs"));
    assert!(rustc.env("RUSTC_BOOTSTRAP", "1").status().unwrap().success());
    // The library comes before the runtime, which also wraps getsockname(). The client frees less than it allocates.
    let libraries = format!("{library}:{}", runtime.display());
    let options = "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0";
    Some(format!("exec env LD_PRELOAD={libraries} {options} \"$@\"\n"))
}

#[test]
fn the_library_makes_no_invalid_access() {
    in_own_namespace(|test| {
        let Some(client) = client(test) else { return };
        let temp = TempDir::new();
        let Some(script) = checked(test, &temp) else { return };
        let script = temp.file("script", &script);
        let (_listener, destination) = listener(20_000);
        // `errors` passes addresses to which no memory belongs. `children` executes /proc/self/exe, which is valgrind there.
        for (what, connects) in [
            ("cost", 50),
            ("names", 2),
            ("options", 2),
            ("kinds", 2),
            ("threads", 160),
            // A socket that the other thread has closed before the library looks at it is not a connect.
            ("races", 1),
            ("signals", 200),
        ] {
            let words = format!("{what} {} 50", destination.port());
            let words = format!("{script} {} {words}", client.display());
            let Some((ended, results)) = recorded(test, "preload", Path::new("/bin/sh"), &words) else {
                return;
            };
            assert_eq!(ended.code, 0, "{what}: {ended:?}");
            assert!(results["connects"].as_u64() >= Some(connects), "{what}: {results}");
        }
    });
}

#[test]
fn the_library_needs_libc_only() {
    let test = "run::the_library_needs_libc_only";
    let mut command = fourtuple("run --quiet --via preload -- /bin/sh -c");
    let ended = run(command.arg("readelf -d ${LD_PRELOAD%%:*}"));
    if is_refused(test, "preload", &ended) {
        return;
    }
    // The shell finds no readelf.
    if ended.code == 127 {
        return fourtuple_testing::skip(test, "cc", &format!("{ended:?}"));
    }
    assert_eq!(ended.code, 0, "{ended:?}");
    let needed: Vec<&str> = ended.stdout.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert_eq!(needed.len(), 1, "{}", ended.stdout);
    assert!(needed[0].contains("[libc.so"), "{}", needed[0]);
}

#[test]
fn bad_values_and_programs_are_refused_in_one_line() {
    for (words, code, text) in [
        ("", 2, "<PROGRAM>"),
        ("--via magic -- true", 2, "--via"),
        ("true", 2, "unexpected argument 'true' found; write -- before the program"),
        ("-- no-such-program-at-all", 127, "cannot run no-such-program-at-all: no such program"),
        ("-- /etc/passwd", 126, "cannot run /etc/passwd: permission denied"),
    ] {
        let ended = run(&mut fourtuple(&format!("run {words}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (code, ""), "{words}: {ended:?}");
        assert!(ended.line().contains(text), "{words}: {ended:?}");
    }
}

#[test]
fn setuid_programs_are_refused_in_one_line() {
    let temp = TempDir::new();
    let path = temp.copy("/bin/true", "program");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    for way in ["preload", "supervise"] {
        let ended = run(&mut run_of(&format!("--via {way}"), Path::new(&path), ""));
        assert_eq!(ended.code, 4, "{ended:?}");
        let line = ended.line();
        assert!(line.contains("is setuid") || line.contains("IP_LOCAL_PORT_RANGE"), "{line}");
    }
}

#[test]
fn a_kernel_without_the_option_is_refused_in_one_line() {
    for way in ["preload", "supervise"] {
        let mut command = run_of(&format!("--via {way}"), &binary(), "--version");
        child::refuse(&mut command, Facility::LocalPortRange);
        let ended = run(&mut command);
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.line().contains("lacks IP_LOCAL_PORT_RANGE (Linux 6.3)"), "{ended:?}");
    }
}

#[test]
fn a_second_supervisor_is_refused_in_one_line() {
    let program = binary();
    let words = format!("run --via supervise --quiet -- {} --version", program.display());
    let ended = run(&mut run_of("--via supervise --quiet", &program, &words));
    assert_eq!(ended.code, 4, "{ended:?}");
    let line = ended.line();
    assert!(line.contains("is supervised already") || line.contains("IP_LOCAL_PORT_RANGE"), "{line}");
}
