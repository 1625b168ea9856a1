//! `fourtuple load`: its record, exit codes, refused arguments, and the end of a run.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::program::{
    DEADLINE, Room, Running, fourtuple, fourtuple_at, is_root, list, loaded, number, remarks_but_of_haste,
    require_valid, run, tcp_sockets, text,
};
use fourtuple_bench::serve::{Protocol, Serve, ServeError};
use fourtuple_syscalls::child;
use fourtuple_testing::{in_namespace, set_sysctl};
use serde_json::Value;

/// The user id of an unprivileged user on every Linux.
const UNPRIVILEGED: u32 = 65_534;

const CRR: Protocol = Protocol::Crr { request: 1, response: 1 };

fn serve(protocol: Protocol) -> fourtuple_bench::serve::Running {
    let address: SocketAddr = "127.0.0.1:4000".parse().unwrap();
    let begun = Instant::now();
    loop {
        match (Serve { workers: 2, ..Serve::new(protocol, address.into()) }).start() {
            // A process that another test has just forked has the listener of the former server open until exec().
            Err(ServeError::Listen { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse && begun.elapsed() < DEADLINE =>
            {
                thread::sleep(Duration::from_millis(1));
            }
            result => return result.unwrap(),
        }
    }
}

fn requests(running: fourtuple_bench::serve::Running) -> u64 {
    running.stop().workers.iter().map(|worker| worker.requests).sum()
}

fn require_keys(value: &Value, wanted: &[&str]) {
    for key in wanted {
        assert!(value.get(key).is_some(), "no {key} in {value:#}");
    }
}

#[test]
fn the_json_has_the_documented_fields() {
    in_namespace(|| {
        let running = serve(CRR);
        let line = "load tcp://127.0.0.1:4000 --operations 500 --threads 3 --threshold 1ns --json";
        let record = loaded(&mut fourtuple(line));
        assert_eq!(requests(running), 500);
        let results = &record["results"];
        require_keys(
            results,
            &["errors", "elapsed_ns", "rate_per_s", "offered_per_s", "client_cpu_ns_per_operation"],
        );
        require_keys(results, &["syscalls_per_connection", "engine", "close", "latency_ns", "slow", "ports"]);
        assert_eq!((number(results, "operations"), number(results, "connections")), (500, 500));
        assert!(results["errors"].as_object().unwrap().is_empty());
        for part in ["search", "handshake", "first_byte", "total"] {
            let times = &results["latency_ns"][part];
            let of = |key| number(times, key);
            let steps = [of("p50"), of("p99"), of("p999"), of("max")];
            assert!(steps.is_sorted() && of("mean") <= of("max"), "{part}: {times:#}");
        }
        let ports = &results["ports"];
        require_keys(ports, &["predicted_stall_ns", "stalled_ns"]);
        assert_eq!((number(ports, "used"), &ports["stalled_ns"]), (500, &Value::Null));
        assert!(number(ports, "budget") > 10_000);
        assert_eq!((list(results, "/slow").len(), number(results, "slow_count")), (500, 500));
        assert!(["uring", "epoll"].contains(&text(results, "engine")));
        assert_eq!(text(results, "close"), "client");
        let rate = results["rate_per_s"].as_f64().unwrap() * number(results, "elapsed_ns") as f64 / 1e9;
        assert!((rate / 500.0 - 1.0).abs() < 1e-6, "rate x time = operations");
        let settings = &record["settings"];
        assert_eq!((number(settings, "operations"), &settings["for_ns"]), (500, &Value::Null));
        assert_eq!((number(settings, "threads"), number(settings, "connections")), (3, 64));
        assert_eq!((text(settings, "workload"), text(settings, "arrival")), ("crr", "closed"));
    });
}

#[test]
fn http_and_udp_and_hold_are_valid_records_too() {
    in_namespace(|| {
        for (protocol, line, workload) in [
            (
                Protocol::Http { body: 10 },
                "http://127.0.0.1:4000/x --operations 100 --close-every 10",
                "http",
            ),
            (
                Protocol::Http { body: 10 },
                "http://127.0.0.1:4000 --rate 500/s --arrival even --operations 100",
                "http",
            ),
            (Protocol::Udp { request: 1 }, "udp://127.0.0.1:4000 --operations 100 --request 20", "udp"),
            (CRR, "tcp://127.0.0.1:4000 --workload crr --hold 20 --connections 2 --operations 100", "crr"),
            (
                Protocol::Sink,
                "tcp://127.0.0.1:4000 --workload connect --operations 100 --close rst",
                "connect",
            ),
            (Protocol::Sink, "tcp://127.0.0.1:4000 --hold 20 --connections 2 --operations 100", "hold"),
        ] {
            for engine in ["auto", "epoll"] {
                let running = serve(protocol);
                let record = loaded(&mut fourtuple(&format!("load {line} --engine {engine} --json")));
                assert_eq!(text(&record["settings"], "workload"), workload);
                assert!(number(&record["results"], "operations") == 100, "{line}: {record:#}");
                running.stop();
            }
        }
    });
}

/// The operation that would begin at the end of the run, or a first one at its end and its start, makes 7.
#[test]
fn even_arrivals_of_two_seconds_are_six() {
    in_namespace(|| {
        for (rate, seconds, threads, operations) in
            [("3/s", "2s", 1, 6), ("3/s", "2s", 2, 6), ("7/s", "1s", 3, 7)]
        {
            let running = serve(Protocol::Http { body: 10 });
            let line = format!(
                "load http://127.0.0.1:4000 --arrival even --rate {rate} --for {seconds} --threads {threads} --json"
            );
            let record = loaded(&mut fourtuple(&line));
            assert_eq!(number(&record["results"], "operations"), operations, "{line}: {record:#}");
            assert_eq!(record["results"]["errors"], serde_json::json!({}), "{line}: {record:#}");
            running.stop();
        }
    });
}

#[test]
fn the_table_names_engine_and_close_and_files_are_written() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let room = Room::new();
        let (page, log) = (room.join("load.html"), room.join("load.hdr"));
        let line = "load http://127.0.0.1:4000 --operations 200 --close-every 1 --close rst --engine epoll";
        let ended = run(&mut fourtuple(&format!("{line} --html {page} --hdr {log}")));
        assert_eq!((ended.code, ended.stderr), (0, format!("wrote {page}\n")));
        for part in ["epoll", "rst", "no errors", "p99.9", "127.0.0.1:4000"] {
            assert!(ended.stdout.contains(part), "no {part} in {}", ended.stdout);
        }
        let page = fs::read_to_string(&page).unwrap();
        assert!(page.contains("<script type=\"application/json\"") && page.contains("Latency"));
        let log = fs::read_to_string(&log).unwrap();
        assert!(log.starts_with('#') && log.lines().count() > 3, "{log}");
        assert_eq!(room.names(), ["load.hdr", "load.html"], "no temporary file stays");
        let ended = run(&mut fourtuple(&format!("{line} --quiet")));
        assert_eq!((ended.code, ended.stdout.contains("p99.9"), ended.stderr.as_str()), (0, true, ""));
        assert_eq!(requests(running), 400);
    });
}

#[test]
fn contradictory_flags_are_refused_in_one_line() {
    let tcp = "tcp://127.0.0.1:4000";
    let http = "http://127.0.0.1:4000";
    for (line, parts) in [
        ("127.0.0.1:80".to_owned(), ["127.0.0.1:80", "expected http://"]),
        ("http://a:0".to_owned(), ["http://a:0", "a port is 1 to 65535"]),
        ("tcp://127.0.0.1".to_owned(), ["tcp://127.0.0.1", "the port is missing"]),
        ("http://[::1/".to_owned(), ["http://[::1/", "an IPv6 address stands in brackets"]),
        ("http://user:pw@127.0.0.1/".to_owned(), ["user:pw@", "credentials are not supported"]),
        (format!("{tcp} --for 0s"), ["'--for", "a time above 0"]),
        (format!("{tcp} --timeout 0s"), ["'--timeout", "a time above 0"]),
        (format!("{tcp} --workload dance"), ["'--workload", "connect, crr, http, udp, hold"]),
        (format!("{tcp} --workload http"), ["http", "needs http://"]),
        (format!("{tcp} --workload hold"), ["'--hold'", "the connections to keep"]),
        (format!("{tcp} --connections 0"), ["'--connections", "from 1 to 1000000"]),
        (format!("{tcp} --hold 5 --operations 5"), ["--operations", "--connections"]),
        (format!("{tcp} --rate 0"), ["'--rate", "above 0"]),
        (format!("{tcp} --rate fast"), ["'--rate", "20k/s"]),
        (format!("{tcp} --arrival even"), ["required", "--rate"]),
        (format!("{tcp} --rate 5/s --pause 1s"), ["--rate", "--pause"]),
        (format!("{tcp} --close-every 0"), ["'--close-every", "from 1, or never"]),
        (format!("{tcp} --close neither"), ["'--close", "client, rst, server"]),
        (format!("{http} --close server"), ["--close", "--close-every"]),
        (format!("{tcp} --workload connect --close server"), ["connect", "no server knows when to close"]),
        ("udp://127.0.0.1:9 --close server --close-every 1".to_owned(), ["UDP server", "--close client"]),
        ("unix:/nowhere/x --workload crr --close rst".to_owned(), ["no RST", "--close client or server"]),
        ("unix:/nowhere/x --source 127.0.0.1".to_owned(), ["unix", "source addresses"]),
        ("unix:/nowhere/x --all-addresses".to_owned(), ["unix socket", "one address"]),
        (format!("{tcp} --resolve other:4000:127.0.0.1"), ["'--resolve'", "expected host and port"]),
        (format!("{tcp} --resolve 127.0.0.1:4001:127.0.0.1"), ["'--resolve'", "expected host and port"]),
        (format!("{tcp} --resolve 127.0.0.1"), ["'--resolve", "HOST:PORT:ADDR"]),
        (format!("{tcp} --operations many"), ["'--operations", "many"]),
        (format!("{tcp} --for 10"), ["'--for", "ns, us, ms, s, m or h"]),
        (format!("{tcp} --timeout 10"), ["'--timeout", "ns, us, ms, s, m or h"]),
        (format!("{tcp} --engine steam"), ["'--engine", "auto, uring, epoll"]),
        (format!("{tcp} --threads 0"), ["'--threads", "from 1 to 1024"]),
        (format!("{tcp} --strategy guess"), ["'--strategy", "random-window"]),
        (format!("{tcp} --source 127.0.0.0/40"), ["'--source'", "127.0.0.0/40"]),
        (format!("{tcp} --source 192.0.2.1 --operations 1"), ["'--source'", "192.0.2.1"]),
        (format!("{http} --request 5"), ["'--request'", "crr and udp"]),
        ("udp://127.0.0.1:9 --request 65508".to_owned(), ["'--request'", "65507"]),
        (format!("{http} --response 5"), ["'--response'", "crr"]),
        (format!("{tcp} --method GET"), ["'--method'", "http"]),
        (format!("{http} --method G/T"), ["'--method", "letters"]),
        (format!("{http} --header nonsense"), ["'--header", "Name: value"]),
        (format!("{http} --body @/nowhere/x"), ["'--body'", "cannot read /nowhere/x"]),
        (format!("{http} --insecure"), ["'--insecure'", "https://"]),
        ("https://127.0.0.1:9 --ca /nowhere/x --operations 1".to_owned(), ["'--ca'", "/nowhere/x"]),
        ("https://127.0.0.1:9 --ca /nowhere/x --insecure".to_owned(), ["--ca", "--insecure"]),
        (format!("{tcp} --workload connect --close-every 5"), ["'--close-every'", "nothing is said"]),
    ] {
        let ended = run(&mut fourtuple(&format!("load {line}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{line}: {ended:?}");
        for part in parts {
            assert!(ended.line().contains(part), "{line}: {part:?} is not in {ended:?}");
        }
    }
}

#[test]
fn too_few_ports_are_refused_without_anyway() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let running = serve(CRR);
        let line = "load tcp://127.0.0.1:4000 --operations 200 --for 2s --json";
        let ended = run(&mut fourtuple(line));
        assert_eq!((ended.code, ended.stdout.as_str()), (3, ""), "{ended:?}");
        for part in ["64", "200", "--source", "--close server", "--anyway"] {
            assert!(ended.line().contains(part), "no {part} in {ended:?}");
        }
        assert_eq!(
            running.counts().iter().map(|worker| worker.accepted).sum::<u64>(),
            0,
            "before the first packet"
        );
        let ended = run(&mut fourtuple(&format!("{line} --anyway --quiet")));
        assert_eq!((ended.code, ended.stderr.as_str()), (3, ""), "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        let ids: Vec<&str> = list(&record, "/validity").iter().map(|remark| text(remark, "id")).collect();
        assert_eq!(ids[..2], ["anyway", "ports-ran-out"], "{record:#}");
        let results = &record["results"];
        let done = number(results, "operations");
        assert!((60..=64).contains(&done), "{record:#}");
        assert!(number(&results["errors"], "EADDRNOTAVAIL") >= 1);
        assert!(number(&results["ports"], "stalled_ns") < number(results, "elapsed_ns"), "{record:#}");
        assert_eq!((requests(running), record["settings"]["anyway"].as_bool()), (done, Some(true)));
    });
}

#[test]
fn more_sources_are_ports_enough() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let running = serve(CRR);
        let line = "load tcp://127.0.0.1:4000 --operations 300 --source 127.0.0.0/28 --json";
        let record = loaded(&mut fourtuple(line));
        assert_eq!((number(&record["results"], "operations"), requests(running)), (300, 300));
    });
}

#[test]
fn failures_are_named_and_end_with_3() {
    in_namespace(|| {
        for (line, name) in [
            ("tcp://127.0.0.1:4000 --operations 10 --engine epoll", "ECONNREFUSED"),
            ("tcp://127.0.0.1:4000 --operations 10", "ECONNREFUSED"),
            ("unix:/nowhere/at/all --operations 10", "ENOENT"),
            ("unix:/nowhere/at/all --operations 10 --engine epoll", "ENOENT"),
        ] {
            let ended = run(&mut fourtuple(&format!("load {line} --json --quiet")));
            assert_eq!((ended.code, ended.stderr.as_str()), (3, ""), "{line}: {ended:?}");
            let record = ended.json();
            require_valid(&record);
            assert_eq!(record["results"]["errors"], serde_json::json!({ name: 10 }), "{line}");
            assert_eq!(remarks_but_of_haste(&record), ["errors"]);
        }
        // The server does not speak TLS.
        let running = serve(Protocol::Http { body: 1 });
        let ended = run(&mut fourtuple("load https://127.0.0.1:4000 --insecure --operations 5 --json"));
        assert_eq!((ended.code, &ended.json()["results"]["errors"]), (3, &serde_json::json!({ "tls": 5 })));
        let ended = run(&mut fourtuple("load https://127.0.0.1:4000 --insecure --operations 5"));
        assert!(ended.code == 3 && ended.stdout.contains("5 tls"), "{ended:?}");
        running.stop();
    });
}

#[test]
fn a_name_that_does_not_resolve_is_one_line() {
    let ended = run(&mut fourtuple("load http://no-such-host.invalid/ --operations 1"));
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(ended.line().contains("no-such-host.invalid") && ended.line().contains("resolve"), "{ended:?}");
}

#[test]
fn ctrl_c_and_a_lost_terminal_keep_what_was_measured() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let signals: [fn(u32) -> std::io::Result<()>; 2] = [child::interrupt, child::hang_up];
        for (engine, signal) in ["auto", "epoll"].into_iter().zip(signals) {
            let line = format!("load http://127.0.0.1:4000 --for 60s --engine {engine} --json");
            let before: u64 = running.counts().iter().map(|worker| worker.requests).sum();
            // The tests may run under nohup(1), with which SIGHUP has no effect.
            let mut command = std::process::Command::new("env");
            command.arg("--default-signal=HUP").arg(fourtuple("").get_program()).args(line.split(' '));
            let mut load = Running::start(&mut command);
            let begun = load.until("asked", |_| {
                running.counts().iter().map(|worker| worker.requests).sum::<u64>() > before + 500
            });
            assert!(begun, "it ended by itself");
            signal(load.id()).unwrap();
            let ended = load.end();
            assert_eq!((ended.code, ended.stderr.as_str()), (3, ""), "{ended:?}");
            let record = ended.json();
            require_valid(&record);
            assert_eq!(record["validity"][0]["id"], "interrupted");
            let done: u64 = running.counts().iter().map(|worker| worker.requests).sum::<u64>() - before;
            let results = &record["results"];
            // A stopping server waits only briefly: on a machine under load, the last responses may come after the stop.
            let unanswered = results["errors"].get("unanswered").map_or(0, |count| count.as_u64().unwrap());
            let operations = number(results, "operations");
            assert!(
                (operations..=operations + unanswered).contains(&done),
                "to the request: {done} {record:#}"
            );
        }
        running.stop();
    });
}

#[test]
fn with_nohup_a_lost_terminal_does_not_end_the_run() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let asked = || running.counts().iter().map(|worker| worker.requests).sum::<u64>();
        let mut command = std::process::Command::new("sh");
        let program = fourtuple("").get_program().to_owned();
        command
            .args(["-c", "trap '' HUP; exec \"$0\" load http://127.0.0.1:4000 --for 1s --json --quiet"])
            .arg(program);
        let mut load = Running::start(&mut command);
        assert!(load.until("asked", |_| asked() > 100), "it ended by itself");
        child::hang_up(load.id()).unwrap();
        let record = load.end().json();
        assert_ne!(record["validity"][0]["id"], "interrupted");
        assert!(number(&record["results"], "elapsed_ns") >= 1_000_000_000);
        running.stop();
    });
}

/// SIGINT ends the run also while it waits for connections that are never established.
#[test]
fn ctrl_c_ends_a_ramp() {
    in_namespace(|| {
        let (_socket, address) = fourtuple_testing::listener("127.0.0.1", 1);
        let line = format!("load tcp://{address} --hold 500 --for 1s --timeout 30s --json");
        let mut load = Running::start(&mut fourtuple(&line));
        assert!(load.until("dialed", |id| tcp_sockets(id, "inuse").iter().any(|(_, inuse)| *inuse > 3)));
        child::interrupt(load.id()).unwrap();
        let ended = load.end();
        assert_eq!(ended.code, 3, "{ended:?}");
        assert_eq!(ended.json()["validity"][0]["id"], "interrupted");
    });
}

#[test]
fn headers_method_and_body_arrive() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:4000").unwrap();
        let seen = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            let mut request = Vec::new();
            let mut room = [0; 1000];
            while !request.ends_with(b"\r\n\r\nhello") {
                let count = stream.read(&mut room).unwrap();
                assert!(count > 0, "{request:?}");
                request.extend_from_slice(&room[..count]);
            }
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
            String::from_utf8(request).unwrap()
        });
        let mut command = fourtuple(
            "load http://127.0.0.1:4000/a?b --operations 1 --connections 1 --body hello --method PUT --json",
        );
        command.args(["--header", "X-Test: a b"]);
        let ended = run(&mut command);
        let request = seen.join().unwrap();
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(request.starts_with("PUT /a?b HTTP/1.1\r\nHost: 127.0.0.1:4000\r\n"), "{request}");
        assert!(
            request.contains("\r\nX-Test: a b\r\n") && request.contains("\r\nContent-Length: 5\r\n"),
            "{request}"
        );
    });
}

#[test]
fn no_threads_are_one_line() {
    if !is_root() {
        return fourtuple_testing::skip("load::no_threads", "root", "the limit counts what this user runs");
    }
    let room = Room::new();
    let mut command = std::process::Command::new("bash");
    command
        .args(["-c", "ulimit -u 1; exec \"$0\" load tcp://127.0.0.1:4000 --operations 1 --anyway --quiet"]);
    let ended = run(command.arg(room.program()).uid(UNPRIVILEGED).gid(UNPRIVILEGED).current_dir("/"));
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(ended.line().contains("cannot create a thread"), "{ended:?}");
}

#[test]
fn an_unprivileged_user_can_generate() {
    in_namespace(|| {
        let running = serve(CRR);
        let room = Room::new();
        let program = room.program();
        let mut command = fourtuple_at(
            Path::new(&program),
            "load tcp://127.0.0.1:4000 --operations 300 --threads 2 --json",
        );
        if is_root() {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        let record = loaded(command.current_dir("/"));
        assert_eq!((number(&record["results"], "operations"), requests(running)), (300, 300));
    });
}
