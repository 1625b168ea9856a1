//! `fourtuple trace connect`, `trace accept` and `trace locks`: refused values, messages, records and files.

use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::program::situation::{has, paste};
use crate::program::{Ended, TempDir, fourtuple, list, require_valid, run, text};
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, child, netns};
use fourtuple_testing::process::{Python, until_expected};
use fourtuple_testing::wire::Wire;
use fourtuple_testing::{in_namespace, set_sysctl};
use serde_json::Value;

/// Starts a trace and waits for its ready line, which starts with `ready`. Returns `None` and reports a skipped test where BPF is not available.
fn attached(
    test: &str,
    ready: &str,
    command: &mut Command,
) -> Option<(Child, BufReader<std::process::ChildStderr>)> {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("UTF-8");
    if line.starts_with(ready) {
        return Some((child, stderr));
    }
    assert_eq!(child.wait().unwrap().code(), Some(4), "{line:?}");
    fourtuple_testing::skip(test, "bpf", line.trim_end());
    None
}

/// Returns the exit code of a trace of a process with this record. The kernel counts events of the whole host that no program saw: one is more
/// than a hundredth of those of the process.
fn code_of(record: &str) -> i32 {
    if record.contains(r#""id":"events-lost""#) { 3 } else { 0 }
}

#[test]
fn without_permission_the_error_is_one_line() {
    for (arguments, words) in [
        ("connect --for 1s --flame flame.svg", "cannot trace connect()"),
        ("accept --for 1s", "cannot trace accept()"),
        ("locks --for 1s", "cannot trace locks"),
    ] {
        let mut command = fourtuple(&format!("trace {arguments}"));
        child::refuse(&mut command, Facility::Bpf);
        let ended = run(&mut command);
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        assert!(ended.line().contains(words), "{ended:?}");
    }
}

#[test]
fn without_btf_the_error_is_one_line() {
    let test = "trace::without_btf_the_error_is_one_line";
    let directory = Path::new("/sys/kernel/btf");
    if !directory.exists() {
        return fourtuple_testing::skip(test, "bpf", "the kernel has no BTF");
    }
    for tier in ["auto", "tp_btf", "fexit"] {
        let mut command = fourtuple(&format!("trace connect --for 1s --tier {tier}"));
        child::mount_small_disk(&mut command, directory, 4096).unwrap();
        let output = match command.output() {
            Err(error) => return fourtuple_testing::skip(test, "root", &error.to_string()),
            Ok(output) => output,
        };
        let ended = Ended {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        assert!(ended.line().contains("no type information (CONFIG_DEBUG_INFO_BTF)"), "{ended:?}");
    }
}

#[test]
fn a_requested_tier_is_used_or_the_error_is_one_line() {
    let test = "trace::a_requested_tier_is_used_or_the_error_is_one_line";
    for tier in ["tp_btf", "fexit"] {
        let ended =
            run(&mut fourtuple(&format!("trace connect --pid 1 --for 1ms --tier {tier} --json --quiet")));
        if ended.code == 4 {
            assert_eq!(ended.stdout, "", "{ended:?}");
            assert!(
                ended.line().contains(&format!("cannot trace connect() with tier {tier}: ")),
                "{ended:?}"
            );
            let need = if tier == "fexit" { "fexit" } else { "bpf" };
            fourtuple_testing::skip(test, need, ended.line());
            continue;
        }
        assert_eq!((ended.code, ended.stderr.as_str()), (code_of(&ended.stdout), ""), "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        assert_eq!(
            (record["results"]["tier"].as_str(), record["settings"]["tier"].as_str()),
            (Some(tier), Some(tier))
        );
        assert!(record["results"]["tier_reason"].is_null(), "a requested tier needs no reason: {record}");
    }
}

#[test]
fn bad_values_are_named_with_their_flag() {
    let of_all = [
        ("--pid 0", "--pid"),
        ("--pid 2147483647", "there is no such process"),
        ("--comm sixteen-bytes-is-1", "1 to 15 bytes"),
        ("--cgroup /proc", "--cgroup"),
        ("--netns no-such-name", "--netns /run/netns/no-such-name: open(/run/netns/no-such-name): "),
        ("--netns 2147483647", "--netns /proc/2147483647/ns/net: open("),
        ("--for soon", "--for"),
    ];
    let of_connect = [
        ("--dst localhost", "--dst"),
        ("--port 65536", "--port"),
        ("--tier kprobe", "expected auto, tp_btf, fexit"),
        ("--protocol sctp", "expected tcp or udp"),
        ("--protocol udp --tier fexit", "expected auto"),
    ];
    let of_accept = [("--listen localhost", "--listen"), ("--port 65536", "--port")];
    for (trace, more) in [("connect", of_connect.as_slice()), ("accept", &of_accept), ("locks", &[])] {
        for (flags, words) in of_all.iter().chain(more) {
            let ended = run(&mut fourtuple(&format!("trace {trace} {flags}")));
            assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
            assert!(ended.line().contains(words), "{ended:?}");
        }
    }
}

/// Traces the calls of this process while it runs `work`, and returns the failed calls of the record as lines: errno, address, first cause.
fn failed_calls(test: &str, command: &str, work: impl FnOnce()) -> Option<Vec<String>> {
    failed_calls_of(std::process::id(), test, command, work)
}

/// Traces the network namespace of this thread while it runs `work`, and returns the record.
fn traced(pid: u32, test: &str, command: &str, work: impl FnOnce()) -> Option<Value> {
    // The listeners and connections of other tests would fill the tables.
    let thread = Path::new("/proc").join(fs::read_link("/proc/thread-self").unwrap());
    let flags = format!("trace {command} --pid {pid} --netns {}/ns/net --json", thread.display());
    let (mut child, _stderr) = attached(test, "tracing ", &mut fourtuple(&flags))?;
    work();
    child::interrupt(child.id()).unwrap();
    let mut stdout = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut stdout).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(code_of(&stdout)), "{stdout}");
    Some(serde_json::from_str(&stdout).unwrap())
}

/// As [`failed_calls`], of a process.
fn failed_calls_of(pid: u32, test: &str, command: &str, work: impl FnOnce()) -> Option<Vec<String>> {
    let record = traced(pid, test, command, work)?;
    let calls = list(&record, "/results/calls/seen/calls");
    // Of the process, not of the thread of the test.
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    assert!(calls.iter().all(|call| call["owner"]["name"] == comm.trim_end()), "{record:#}");
    let line = |call: &Value| {
        let cause = call["causes"][0].as_str().unwrap_or_default();
        let address = call["address"].as_str().unwrap_or_default();
        format!("{} {} {address} {cause}", text(call, "call"), text(call, "errno"))
    };
    Some(calls.iter().map(line).collect())
}

fn connect(to: &str) -> Option<i32> {
    let to: SocketAddr = to.parse().unwrap();
    TcpStream::connect(to).err().and_then(|error| error.raw_os_error())
}

#[track_caller]
fn has_line(lines: &[String], start: &str, part: &str) {
    let has = lines.iter().any(|line| line.starts_with(start) && line.contains(part));
    assert!(has, "{start} ... {part}: {lines:#?}");
}

#[test]
fn errnos_of_connect_have_the_cause_that_they_have_here() {
    in_namespace(|| {
        let test = "trace::errnos_of_connect_have_the_cause_that_they_have_here";
        if !has(test, &["nft"]) {
            return;
        }
        let Some(_wire) = Wire::open(test) else { return };
        paste(
            "nft 'add table inet t; add chain inet t out { type filter hook output priority 0; }; \
             add rule inet t out tcp dport 4001 reject; add rule inet t out tcp dport 4002 reject with icmpx admin-prohibited'",
        );
        let connects = || {
            let refused = [
                ("10.9.0.2:4001", "ECONNREFUSED"),
                ("10.9.0.2:4002", "EHOSTUNREACH"),
                ("[fd09::2]:4002", "EACCES"),
                ("192.0.2.1:80", "ENETUNREACH"),
                ("[fe80::1]:80", "EINVAL"),
                ("[::1]:80", "EADDRNOTAVAIL"),
            ];
            for (to, errno) in refused {
                if to.starts_with("[::1]") {
                    // At the end: the answer to the connect() before came over IPv6.
                    set_sysctl("net.ipv6.conf.all.disable_ipv6", "1");
                }
                let failed = connect(to).map(|errno| Errno::new(errno).to_string());
                assert_eq!(failed.as_deref(), Some(errno), "{to}");
            }
        };
        let connects_and_binds = || {
            connects();
            let address: SocketAddr = "10.9.0.99:0".parse().unwrap();
            let socket = socket::open(Transport::Tcp, address, false).unwrap();
            assert!(socket::bind(socket.as_fd(), address).is_err(), "EADDRNOTAVAIL");
        };
        let Some(lines) = failed_calls(test, "connect", connects_and_binds) else { return };
        // What a rule of doctor finds.
        let missing = "cannot use 10.9.0.99, which is not an address of this host: 1 call of bind() failed";
        has_line(&lines, "bind EADDRNOTAVAIL 10.9.0.99:0 the cause here: ", missing);
        has_line(
            &lines,
            "connect EACCES [fd09::2]:4002",
            "the cause here: a firewall rule of this host rejects the packet",
        );
        has_line(
            &lines,
            "connect ECONNREFUSED 10.9.0.2:4001",
            "possible: a firewall rule of this host rejects the packet",
        );
        has_line(&lines, "connect EHOSTUNREACH 10.9.0.2:4002", "a router or firewall refuses it");
        has_line(&lines, "connect ENETUNREACH 192.0.2.1:80", "the cause here: there is no route");
        has_line(&lines, "connect EINVAL [fe80::1]:80", "the cause here: a link-local address needs a zone");
        has_line(&lines, "connect EADDRNOTAVAIL [::1]:80", "the cause here: the host has no IPv6 address");
    });
}

#[test]
fn calls_that_find_no_port_have_their_cause() {
    in_namespace(|| {
        let test = "trace::calls_that_find_no_port_have_their_cause";
        if !has(test, &["python3"]) {
            return;
        }
        let mut client = Python::start();
        let pid = client.pid();
        let _servers = ["127.0.0.1:4000", "127.0.0.1:4001"].map(|at| TcpListener::bind(at).unwrap());
        client.run(
            "import struct\ndef opened(ports, kind=socket.SOCK_STREAM):\n  s = socket.socket(type=kind); held.append(s)\n  \
             if ports: s.setsockopt(0, 51, struct.pack('I', ports))\n  return s\n\
             def failed(act, kind=socket.SOCK_STREAM, ports=None):\n  try: act(opened(ports, kind))\n  except OSError: return\n  \
             raise AssertionError('no error')\n\
             def dial(s): s.connect(('127.0.0.1', 4001))",
        );
        let work = || {
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20003");
            // TCP Fast Open. The first bytes of the data look like an address.
            client.run(
                "for _ in range(4): held.append(socket.create_connection(('127.0.0.1', 4000)))\n\
                 failed(lambda s: s.sendto(b'\\x02\\0\\0\\x50\\x7f\\0\\0\\x09' * 4, 0x20000000, ('127.0.0.1', 4000)))",
            );
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
            client.run(
                "PORTS = 20003 << 16 | 20000\nfor _ in range(4): dial(opened(PORTS))\nfailed(dial, ports=PORTS)",
            );
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20003");
            client.run(
                "for _ in range(4):\n  s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('127.0.0.1', 53)); held.append(s)\n\
                 failed(lambda s: s.connect(('127.0.0.1', 54)), socket.SOCK_DGRAM)\n\
                 failed(lambda s: s.sendto(b'', ('127.0.0.1', 55)), socket.SOCK_DGRAM)\n\
                 failed(lambda s: s.bind(('0.0.0.0', 4000)))\nfailed(lambda s: s.bind(('127.0.0.1', 20000)), socket.SOCK_DGRAM)",
            );
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
        };
        let Some(lines) = failed_calls_of(pid, test, "connect", work) else { return };
        has_line(&lines, "connect EAGAIN 127.0.0.1:54", "no UDP port of the range was free");
        has_line(&lines, "send EAGAIN ", "no UDP port of the range was free");
        let holder =
            format!("a socket of python3[{pid}] at 127.0.0.1:20000, connected to 127.0.0.1:53, has the port");
        has_line(&lines, "bind EADDRINUSE 127.0.0.1:20000", &holder);
        // A process that is being started has a copy of the listener: `and 1 more listen`.
        has_line(&lines, "bind EADDRINUSE 0.0.0.0:4000", &format!("[{}]", std::process::id()));
        has_line(&lines, "bind EADDRINUSE 0.0.0.0:4000", " listen");
        has_line(&lines, "bind EADDRINUSE 0.0.0.0:4000", " at 127.0.0.1:4000");
        has_line(&lines, "connect EADDRNOTAVAIL 127.0.0.1:4000", "possible: all ports of the range");
        has_line(&lines, "connect EADDRNOTAVAIL 127.0.0.1:4001", "the ports 20000-20003 are in use");
        assert_eq!(lines.len(), 6, "{lines:#?}");
    });
}

/// A client that does not block reads the errno by SO_ERROR, mostly while the socket is in SYN_SENT, and closes it.
#[test]
fn an_errno_that_was_read_is_not_a_close() {
    in_namespace(|| {
        let test = "trace::an_errno_that_was_read_is_not_a_close";
        if !has(test, &["python3", "nft"]) {
            return;
        }
        let Some(_wire) = Wire::open(test) else { return };
        paste(
            "nft 'add table inet t; add chain inet t out { type filter hook output priority 0; }; \
             add rule inet t out tcp dport 4002 reject with icmpx admin-prohibited'",
        );
        let mut client = Python::start();
        let pid = client.pid();
        let work = || {
            client.run(
                "s = socket.socket(); s.setblocking(False); s.connect_ex(('10.9.0.2', 4002))\n\
                 while not s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR): time.sleep(0.01)\ns.close()",
            );
        };
        let Some(record) = traced(pid, test, "connect", work) else { return };
        let failed = record["results"]["failed"].as_object().expect("errnos");
        // A host that stands still may send the SYN again meanwhile, which the firewall rejects too.
        assert_eq!(failed.keys().collect::<Vec<_>>(), ["EHOSTUNREACH"], "{record:#}");
    });
}

/// The kernel gives new sockets the memory of those that were closed.
#[test]
fn a_socket_does_not_have_the_attempt_of_an_earlier_one() {
    in_namespace(|| {
        let test = "trace::a_socket_does_not_have_the_attempt_of_an_earlier_one";
        if !has(test, &["python3", "nft"]) {
            return;
        }
        let Some(wire) = Wire::open(test) else { return };
        wire.far_away(|| {
            paste("nft 'add table ip t; add chain ip t in { type filter hook input priority 0; }; add rule ip t in tcp dport 9 drop'");
        });
        let mut client = Python::start();
        let pid = client.pid();
        let work = || {
            client.run(
                "def attempts(to):\n  sockets = [socket.socket() for _ in range(300)]\n  \
                 for s in sockets: s.setblocking(False); s.connect_ex(to)\n  for s in sockets: s.close()\n\
                 attempts(('10.9.0.2', 9))\nattempts(('192.0.2.1', 80))",
            );
        };
        let Some(lines) = failed_calls_of(pid, test, "connect", work) else { return };
        // A row for each state in which the calls were: one, before the search for a port.
        let rows = lines.iter().filter(|line| line.starts_with("connect ENETUNREACH 192.0.2.1:80"));
        assert_eq!(rows.count(), 1, "{lines:#?}");
    });
}

/// As a client of `localhost` that takes its first address.
#[test]
fn a_server_at_another_address_of_the_host_is_named() {
    in_namespace(|| {
        let test = "trace::a_server_at_another_address_of_the_host_is_named";
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let to = format!("[::1]:{port}");
        let connects = || assert_eq!(connect(&to), Some(111));
        let Some(lines) = failed_calls(test, "connect", connects) else { return };
        // Also with a copy in a process that is being started: `and 1 more listen`.
        for part in [" listen", &format!(" at 127.0.0.1:{port}, not at ::1")] {
            has_line(&lines, &format!("connect ECONNREFUSED {to}"), part);
        }
    });
}

#[test]
fn a_trace_of_accepts_has_all_failed_calls() {
    in_namespace(|| {
        let test = "trace::a_trace_of_accepts_has_all_failed_calls";
        if !has(test, &["ip"]) {
            return;
        }
        let Some(_wire) = Wire::open(test) else { return };
        // Each answer to the detection would take a second; there are 100.
        set_sysctl("net.ipv6.conf.near.dad_transmits", "100");
        paste("ip -6 address flush dev near; ip -6 address add fd10::1/64 dev near");
        let calls = || {
            let bind =
                |address: &str| TcpListener::bind(address).err().and_then(|error| error.raw_os_error());
            assert_eq!(bind("[fd10::1]:4000"), Some(Errno::EADDRNOTAVAIL.number()));
            // Of all addresses only ::1 can be the source.
            assert!(connect("[fd10::2]:80").is_some());
        };
        let Some(lines) = failed_calls(test, "accept", calls) else { return };
        has_line(
            &lines,
            "bind EADDRNOTAVAIL [fd10::1]:4000",
            "the cause here: the IPv6 address is tentative",
        );
        has_line(
            &lines,
            "connect ",
            "[fd10::2]:80 the cause here: each IPv6 address of the devices is tentative",
        );
    });
}

#[test]
fn traces_have_the_symptoms_of_the_namespace() {
    in_namespace(|| {
        let test = "trace::traces_have_the_symptoms_of_the_namespace";
        set_sysctl("net.core.somaxconn", "1");
        let listener = TcpListener::bind("127.0.0.1:4000").unwrap();
        let connect =
            || TcpStream::connect_timeout(&listener.local_addr().unwrap(), Duration::from_millis(1500));
        let _waiting = [(); 2].map(|()| fourtuple_testing::connect(listener.local_addr().unwrap()));
        for command in ["connect", "accept", "locks"] {
            let Some(record) = traced(std::process::id(), test, command, || assert!(connect().is_err()))
            else {
                return;
            };
            let symptoms = list(&record, "/results/symptoms/seen");
            for sentence in ["TcpExt.ListenOverflows grew by ", "2 connections at 127.0.0.1:4000 of "] {
                let found = symptoms.iter().find(|symptom| text(symptom, "sentence").starts_with(sentence));
                let rules = found.map(|symptom| &symptom["rules"]);
                assert!(rules.is_some_and(|rules| rules[0].is_string()), "{sentence}: {symptoms:#?}");
            }
        }
    });
}

#[test]
fn an_interrupted_trace_has_its_record() {
    let test = "trace::an_interrupted_trace_has_its_record";
    for (trace, ready) in [("connect", "tracing "), ("locks", "tracing locks\n")] {
        let mut command = fourtuple(&format!("trace {trace} --pid 1 --json"));
        let Some((mut child, mut stderr)) = attached(test, ready, &mut command) else { return };
        child::interrupt(child.id()).unwrap();
        let (mut stdout, mut rest) = (String::new(), String::new());
        child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        stderr.read_to_string(&mut rest).unwrap();
        let code = child.wait().unwrap().code().unwrap();
        let ended = Ended { code, stdout, stderr: rest };
        assert_eq!(
            (ended.code, ended.stderr.as_str()),
            (code_of(&ended.stdout), ""),
            "a trace without --for ends by a signal: {ended:?}"
        );
        let record = ended.json();
        require_valid(&record);
        assert_eq!(
            (record["command"].as_str(), record["settings"]["process"].as_u64()),
            (Some(format!("trace {trace}").as_str()), Some(1))
        );
        let results = &record["results"];
        assert_eq!(results["tier"], "tp_btf");
        assert!(trace != "locks" || !results["blind_spots"].as_array().unwrap().is_empty(), "{results}");
    }
}

#[test]
fn an_interrupted_trace_of_accepts_keeps_its_counters() {
    in_namespace(|| {
        // The kernel does not always run a program (recursion_misses), so that the counters may be too low.
        assert!((0..100).any(|_| keeps_its_counters()), "events were lost in 100 attempts");
    });
}

/// Returns whether a trace lost nothing, or was skipped.
fn keeps_its_counters() -> bool {
    let test = "trace::an_interrupted_trace_of_accepts_keeps_its_counters";
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let own = std::process::id();
    let line = format!("trace accept --pid {own} --listen {} --port {} --json", address.ip(), address.port());
    let Some((mut child, _stderr)) = attached(test, "tracing ", &mut fourtuple(&format!("{line} --for 1h")))
    else {
        return true;
    };
    let client = std::net::TcpStream::connect(address).unwrap();
    let server = listener.accept().unwrap();
    child::interrupt(child.id()).unwrap();
    let mut stdout = String::new();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    let code = child.wait().unwrap().code().unwrap();
    let ended = Ended { code, stdout, stderr: String::new() };
    assert_eq!(ended.code, 3, "it ended before --for: {ended:?}");
    let record = ended.json();
    require_valid(&record);
    assert_eq!(record["validity"][0]["id"], "interrupted");
    let results = &record["results"];
    if results["lost"] != 0 {
        return false;
    }
    assert_eq!((&results["tier"], &results["lost"]), (&"tp_btf".into(), &0.into()));
    assert_eq!((&results["accepts"], &results["wait_ns"]["count"]), (&1.into(), &1.into()), "{results}");
    let traced = &results["listeners"][0];
    assert_eq!(traced["address"], address.to_string());
    assert_eq!((&traced["workers"][0]["process"], &traced["workers"][0]["open"]), (&own.into(), &1.into()));
    drop((client, server));
    true
}

#[test]
fn a_trace_of_a_namespace_leaves_others_out() {
    let test = "trace::a_trace_of_a_namespace_leaves_others_out";
    in_namespace(|| {
        let dial = |number: usize| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            // A listener that closes would drop those that are not in its queue yet.
            (0..number).for_each(|_| drop(fourtuple_testing::connect(address)));
        };
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        child::end_with_this_thread(&mut sleep);
        let mut process = sleep.spawn().unwrap();
        // By the process, by the path that doctor prints, and by default.
        let (number, path) = (process.id().to_string(), format!("/proc/{}/ns/net", process.id()));
        let (by_number, by_path) = (format!("--netns {number} "), format!("--netns {path} "));
        for (trace, flag) in
            [("connect", &*by_number), ("locks", &by_path), ("accept", &by_number), ("connect", "")]
        {
            let start = || attached(test, "tracing ", &mut fourtuple(&format!("trace {trace} {flag}--json")));
            // With the flag the trace starts in another namespace, as the shell of a user.
            let elsewhere = || {
                netns::enter_new().unwrap();
                start()
            };
            let once = || {
                let started = match flag {
                    "" => start(),
                    _ => thread::scope(|scope| scope.spawn(elsewhere).join().unwrap()),
                };
                let (mut child, _stderr) = started?;
                dial(3);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        netns::enter_new().unwrap();
                        dial(5);
                    });
                });
                child::interrupt(child.id()).unwrap();
                let mut stdout = String::new();
                child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
                child.wait().unwrap();
                Some(Ended { code: 0, stdout, stderr: String::new() }.json())
            };
            let number = |record: &Value| match trace {
                "connect" => record["results"]["established"].clone(),
                "locks" => record["results"]["connections"].clone(),
                _ => record["results"]["listeners"][0]["queued"].clone(),
            };
            // The kernel does not always run a program (recursion_misses).
            let is_whole = |record: &Option<Value>| {
                record.as_ref().is_none_or(|record| number(record) == 3 || record["results"]["lost"] == 0)
            };
            let Some(record) = until_expected(20, once, is_whole) else { break };
            require_valid(&record);
            let expected = if flag.is_empty() { "/proc/self/ns/net" } else { &path };
            assert_eq!(record["settings"]["netns"], expected, "{record:#}");
            assert_eq!(number(&record), 3, "{trace}: {record:#}");
        }
        process.kill().unwrap();
        process.wait().unwrap();
    });
}

#[test]
fn a_flame_graph_is_one_file_with_samples() {
    let test = "trace::a_flame_graph_is_one_file_with_samples";
    let temp = TempDir::new();
    let path = temp.path().join("flame.svg");
    let arguments =
        format!("trace connect --pid {} --for 1s --json --flame {}", std::process::id(), path.display());
    let once = || {
        let (mut child, mut stderr) = attached(test, "tracing ", &mut fourtuple(&arguments))?;
        // A pipe does not hold the record of a process with many tests.
        let mut pipe = child.stdout.take().unwrap();
        let record = thread::spawn(move || std::io::read_to_string(&mut pipe).unwrap());
        // This thread spins until the trace ends, so that the trace samples it even on a busy machine.
        while !record.is_finished() {
            black_box((0..1_000_000_u64).fold(0, |sum, number| sum ^ black_box(number)));
        }
        let (stdout, code) = (record.join().unwrap(), child.wait().unwrap().code());
        let mut rest = String::new();
        stderr.read_to_string(&mut rest).unwrap();
        Some(Ended { code: code.unwrap(), stdout, stderr: rest })
    };
    // This process may stand still for the second of the trace.
    let has_samples = |ended: &Option<Ended>| {
        ended.as_ref().is_none_or(|ended| ended.json()["results"]["flame"]["samples"] != 0)
    };
    let Some(ended) = until_expected(20, once, has_samples) else { return };
    assert_eq!((ended.code, ended.stderr.as_str()), (code_of(&ended.stdout), ""), "{ended:?}");
    let record = ended.json();
    require_valid(&record);
    let flame = &record["results"]["flame"];
    assert!(flame["samples"].as_u64() > Some(0), "{flame}");
    let svg = fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<?xml") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert!(svg.contains("<title>[user] ("), "{svg}");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "a temporary file remains");
}
