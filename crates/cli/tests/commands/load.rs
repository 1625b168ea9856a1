//! `fourtuple load`: its record, exit codes, refused arguments, and the end of a run, also against peers that keep sending: by SIGINT, and a
//! measurement of the ends by all limits.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bench::serve::{Protocol, Serve, ServeError};
use fourtuple_syscalls::{child, netns};
use fourtuple_testing::process::until_expected;
use fourtuple_testing::{in_namespace, keep_time_wait, set_sysctl};
use serde_json::{Value, json};

use crate::program::situation::{has, nginx, wait_for};
use crate::program::{
    DEADLINE, Running, TempDir, fourtuple, fourtuple_at, is_root, list, loaded, number, refused,
    remarks_but_of_haste, require_valid, run, tcp_sockets, text, unanswered,
};

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
            let begun = number(&record["results"], "operations") + unanswered(&record);
            assert_eq!(begun, operations, "{line}: {record:#}");
            running.stop();
        }
    });
}

#[test]
fn the_table_names_engine_and_close_and_files_are_written() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let temp = TempDir::new();
        let (page, log) = (temp.join("load.html"), temp.join("load.hdr"));
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
        assert_eq!(temp.names(), ["load.hdr", "load.html"], "no temporary file stays");
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
        (format!("{tcp} --expect p98<1ms"), ["p98<1ms' for '--expect", "p99.9"]),
        (format!("{tcp} --expect errors<0.1"), ["errors<0.1' for '--expect", "errors<0.1%"]),
        (format!("{tcp} --warm-up 0s"), ["'--warm-up", "a time above 0"]),
        (format!("{tcp} --warm-up 10"), ["'--warm-up", "ns, us, ms, s, m or h"]),
        (format!("{tcp} --hold 5 --warm-up 1s"), ["--warm-up", "nothing is done beside --hold"]),
        (format!("{tcp} --ramp 1k/s"), ["1k/s' for '--ramp", "LOW..HIGH"]),
        (format!("{tcp} --ramp 2k/s..1k/s"), ["2k/s..1k/s' for '--ramp", "the higher one last"]),
        (format!("{tcp} --ramp 1..2:1"), ["1..2:1' for '--ramp", "2 to 100 steps"]),
        (format!("{tcp} --ramp 1..2 --rate 5"), ["--ramp", "--rate"]),
        (format!("{tcp} --ramp 1..2 --operations 5"), ["--ramp", "--operations"]),
        (format!("{tcp} --ramp 1..2 --csv rows"), ["--ramp", "--csv"]),
        (format!("{tcp} --requests /nowhere/x"), ["'--requests'", "http"]),
        (format!("{http} --requests /nowhere/x"), ["'/nowhere/x' for '--requests'", "cannot read"]),
        (format!("{http} --requests /dev/null"), ["'/dev/null' for '--requests'", "one JSON object a line"]),
        (format!("{http} --requests /nowhere/x --body x"), ["--requests", "--body"]),
        (format!("{http} --order turn"), ["required", "--requests"]),
        (format!("{http} --requests x --order sorted"), ["'--order", "turn, random"]),
        (format!("{http} --sni example.org"), ["'--sni'", "https://"]),
        (format!("{http} --no-resumption"), ["'--no-resumption'", "https://"]),
        ("https://127.0.0.1:9 --sni a_b!".to_owned(), ["a_b!' for '--sni", "a host name"]),
        ("https://127.0.0.1:9 --alpn h2,".to_owned(), ["h2,' for '--alpn", "or none"]),
        ("https://127.0.0.1:9 --cert /nowhere/x".to_owned(), ["required", "--key"]),
        (
            "https://127.0.0.1:9 --insecure --cert /nowhere/x --key /nowhere/y".to_owned(),
            ["'/nowhere/x' for '--cert'", "No such file"],
        ),
        (
            "https://127.0.0.1:9 --insecure --cert /dev/null --key /dev/null".to_owned(),
            ["'/dev/null' for '--cert'", "expected a certificate in PEM"],
        ),
        ("unix:/nowhere/x:/a --workload crr".to_owned(), ["unix:/nowhere/x:/a", "only HTTP has paths"]),
        ("unix:/nowhere/x:/a%20b\u{7f}".to_owned(), ["no blanks", "write %20"]),
    ] {
        refused(&mut fourtuple(&format!("load {line}")), &parts);
    }
}

#[test]
fn thresholds_decide_the_exit_code() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let line = "load http://127.0.0.1:4000 --operations 50";
        let record = loaded(&mut fourtuple(&format!(
            "{line} --json --expect p99<10m --expect errors<=0% --expect rate>0.001"
        )));
        let met = |record: &Value| -> Vec<bool> {
            list(&record["results"], "/expectations")
                .iter()
                .map(|one| one["met"].as_bool().unwrap())
                .collect()
        };
        assert_eq!(met(&record), [true; 3]);
        assert_eq!(record["settings"]["expect"][0], "p99<10m");
        let ended =
            run(&mut fourtuple(&format!("{line} --json --quiet --expect p99.9<1ns --expect max<10m")));
        let record = ended.json();
        require_valid(&record);
        assert_eq!((ended.code, met(&record)), (1, vec![false, true]), "{ended:?}");
        assert!(
            ended.line().starts_with("expected p99.9<1ns: ") && ended.line().contains(", off by "),
            "{ended:?}"
        );
        let ended = run(&mut fourtuple(&format!("{line} --expect rate>1M/s")));
        assert_eq!((ended.code, ended.stderr.as_str()), (1, ""), "{ended:?}");
        assert!(ended.stdout.contains("not met") && ended.stdout.contains("off by"), "{ended:?}");
        running.stop();
        // Nothing listens: the threshold takes the place of the remark.
        for (threshold, code) in [("errors<=100%", 0), ("errors<0.1%", 1), ("errors<10", 1), ("p99<1h", 3)] {
            let line = format!("load tcp://127.0.0.1:4000 --operations 10 --json --expect {threshold}");
            let ended = run(&mut fourtuple(&line));
            require_valid(&ended.json());
            assert_eq!(ended.code, code, "{threshold}: {ended:?}");
        }
    });
}

#[test]
fn a_row_for_each_second() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let temp = TempDir::new();
        let rows = temp.join("load.csv");
        let line = format!("load http://127.0.0.1:4000 --rate 200/s --for 2500ms --json --csv {rows}");
        let record = loaded(&mut fourtuple(&line));
        let text = fs::read_to_string(&rows).unwrap();
        let mut lines = text.lines();
        assert_eq!(
            lines.next(),
            Some("second,operations,connections,errors,p50_ns,p99_ns,max_ns,ports_left")
        );
        let rows: Vec<Vec<u64>> =
            lines.map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect()).collect();
        let seconds = list(&record["results"], "/seconds");
        assert_eq!(rows.len(), seconds.len());
        for (number, (row, second)) in rows.iter().zip(seconds).enumerate() {
            assert_eq!(
                (row[0], row[1], row[5]),
                (
                    number as u64,
                    crate::program::number(second, "operations"),
                    crate::program::number(second, "p99_ns")
                )
            );
        }
        let answered = rows.iter().map(|row| row[1]).sum::<u64>();
        let requests = requests(running);
        assert!((answered..=answered + unanswered(&record)).contains(&requests), "{requests} {record:#}");
    });
}

#[test]
fn a_file_of_requests_is_read_before_anything_is_sent() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let temp = TempDir::new();
        let body = temp.file("body", "0123456789");
        let good = format!(
            "{{\"path\": \"/a\"}}\n\n{{\"method\": \"PUT\", \"path\": \"/b\", \"headers\": {{\"X-A\": \"1\"}}, \"body_file\": \"{body}\"}}\n"
        );
        let line =
            |file: &str| format!("load http://127.0.0.1:4000 --operations 30 --json --requests {file}");
        for (bad, number, part) in [
            ("{\"path\": \"a\"}", 4, "begins with /"),
            ("{\"path\": \"/a b\"}", 4, "no blanks"),
            ("{\"url\": \"/a\"}", 4, "url"),
            ("{\"method\": \"G T\"}", 4, "a name of HTTP"),
            ("{\"headers\": {\"A\": \"1\\n2\"}}", 4, "on one line"),
            ("{\"body\": \"x\", \"body_file\": \"y\"}", 4, "not both"),
            ("{\"body_file\": \"/nowhere/x\"}", 4, "cannot read /nowhere/x"),
            ("{\"path\"", 4, "expected an object"),
            ("[]", 4, "expected an object"),
        ] {
            let file = temp.file("bad", &format!("{good}{bad}\n"));
            refused(&mut fourtuple(&line(&file)), &["for '--requests'", &format!("line {number}: "), part]);
        }
        assert_eq!(running.counts().iter().map(|worker| worker.accepted).sum::<u64>(), 0, "nothing was sent");
        let file = temp.file("good", &good);
        let record = loaded(&mut fourtuple(&line(&file)));
        let counts: Vec<u64> =
            list(&record["results"], "/requests").iter().map(|one| number(one, "responses")).collect();
        assert_eq!((counts, requests(running)), (vec![15, 15], 30), "{record:#}");
        assert_eq!(record["settings"]["requests"]["count"], 2);
    });
}

#[test]
fn resolve_and_the_path_of_a_unix_socket_are_as_with_curl() {
    in_namespace(|| {
        let running = serve(Protocol::Http { body: 10 });
        let line = "load http://name.test:4000/ --resolve name.test:4000:127.0.0.1 --operations 20 --json";
        let record = loaded(&mut fourtuple(line));
        assert_eq!((number(&record["results"], "operations"), requests(running)), (20, 20));
        let temp = TempDir::new();
        let socket = temp.join("app.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let seen = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 1000];
            while !request.ends_with(b"\r\n\r\n") {
                let count = stream.read(&mut buffer).unwrap();
                assert!(count > 0, "{request:?}");
                request.extend_from_slice(&buffer[..count]);
            }
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
            String::from_utf8(request).unwrap()
        });
        let line = format!("load unix:{socket}:/a/b?c=d --operations 1 --connections 1 --json");
        let ended = run(&mut fourtuple(&line));
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(seen.join().unwrap().starts_with("GET /a/b?c=d HTTP/1.1\r\nHost: localhost\r\n"));
    });
}

#[test]
fn too_few_ports_are_refused_without_anyway() {
    in_namespace(|| {
        let line = "load tcp://127.0.0.1:4000 --operations 200 --for 2s --json";
        let once = || {
            // The ports of a run stay in TIME_WAIT.
            netns::enter_new().expect("a network namespace in a network namespace");
            keep_time_wait();
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20063");
            set_sysctl("net.ipv4.tcp_tw_reuse", "0");
            let running = serve(CRR);
            let ended = run(&mut fourtuple(line));
            ended.require_line(3, &["64", "200", "--source", "--close server", "--anyway"]);
            assert_eq!(
                running.counts().iter().map(|worker| worker.accepted).sum::<u64>(),
                0,
                "before the first packet"
            );
            let ended = run(&mut fourtuple(&format!("{line} --anyway --quiet")));
            (ended.record(3), requests(running))
        };
        // A run that stands still for its 2 s leaves operations unanswered, or ends before the ports do.
        let is_whole = |(record, _): &(Value, u64)| {
            unanswered(record) == 0 && !record["results"]["errors"]["EADDRNOTAVAIL"].is_null()
        };
        let (record, served) = until_expected(20, once, is_whole);
        let ids: Vec<&str> = list(&record, "/validity").iter().map(|remark| text(remark, "id")).collect();
        assert_eq!(ids[..2], ["anyway", "ports-ran-out"], "{record:#}");
        let results = &record["results"];
        let done = number(results, "operations");
        assert!((60..=64).contains(&done), "{record:#}");
        assert!(number(&results["errors"], "EADDRNOTAVAIL") >= 1);
        assert!(number(&results["ports"], "stalled_ns") < number(results, "elapsed_ns"), "{record:#}");
        assert_eq!((served, record["settings"]["anyway"].as_bool()), (done, Some(true)));
    });
}

#[test]
fn without_a_free_tuple_every_run_is_refused() {
    in_namespace(|| {
        keep_time_wait();
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20015");
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        let running = serve(CRR);
        let line = "load tcp://127.0.0.1:4000 --json";
        let filled = run(&mut fourtuple(&format!("{line} --operations 16 --connections 1")));
        assert_eq!(number(&filled.json()["results"], "operations"), 16, "{filled:?}");
        for flags in
            ["--close server --rate 200/s", "--close rst --rate 200/s", "--close server --connections 4"]
        {
            let ended = run(&mut fourtuple(&format!("{line} {flags} --for 1s")));
            assert_eq!((ended.code, ended.stdout.as_str()), (3, ""), "{flags}: {ended:?}");
            assert!(ended.line().contains("there are 16, 16 of them taken"), "{flags}: {ended:?}");
        }
        assert_eq!(requests(running), 16, "nothing was sent");
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
            // The server has counted what the run before left unanswered.
            fourtuple_testing::process::until_others_sleep();
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
            let record = ended.record(3);
            assert_eq!(record["validity"][0]["id"], "interrupted");
            let done: u64 = running.counts().iter().map(|worker| worker.requests).sum::<u64>() - before;
            let results = &record["results"];
            // A stopping server waits only briefly: on a machine under load, the last responses may come after the stop.
            let operations = number(results, "operations");
            assert!(
                (operations..=operations + unanswered(&record)).contains(&done),
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
        // As early as possible: the run lasts for a second.
        assert!(load.until("asked", |_| asked() > 0), "it ended by itself");
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
            let mut buffer = [0; 1000];
            while !request.ends_with(b"\r\n\r\nhello") {
                let count = stream.read(&mut buffer).unwrap();
                assert!(count > 0, "{request:?}");
                request.extend_from_slice(&buffer[..count]);
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
    let temp = TempDir::new();
    let mut command = std::process::Command::new("bash");
    command
        .args(["-c", "ulimit -u 1; exec \"$0\" load tcp://127.0.0.1:4000 --operations 1 --anyway --quiet"]);
    let ended = run(command.arg(temp.program()).uid(UNPRIVILEGED).gid(UNPRIVILEGED).current_dir("/"));
    ended.require_line(4, &["cannot create a thread"]);
}

#[test]
fn an_unprivileged_user_can_generate() {
    in_namespace(|| {
        let running = serve(CRR);
        let temp = TempDir::new();
        let program = temp.program();
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

/// The part of a response that a peer repeats, and the pause after each.
type Rest = (Vec<u8>, Duration);

fn endless_body() -> Rest {
    (vec![b'x'; 65_536], Duration::ZERO)
}

fn drip() -> Rest {
    (b"x".to_vec(), Duration::from_millis(50))
}

/// Starts a peer in this namespace that reads a request and sends a response without end. Returns its address and the number of
/// requests that it has read.
fn peer((piece, pause): Rest) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, requests) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let talk = move |mut stream: TcpStream, piece: &[u8]| -> io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut buffer = [0; 1000];
            match stream.read(&mut buffer)? {
                0 => return Ok(()),
                count => head.extend_from_slice(&buffer[..count]),
            }
        }
        counted.fetch_add(1, Ordering::Relaxed);
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        loop {
            stream.write_all(piece)?;
            thread::sleep(pause);
        }
    };
    thread::spawn(move || {
        // The threads end with the process of the test.
        while let Ok((stream, _)) = listener.accept() {
            let (talk, piece) = (talk.clone(), piece.clone());
            thread::spawn(move || talk(stream, &piece));
        }
    });
    (address, requests)
}

/// Neither `--for` nor `--timeout` ends these runs before the deadline of the test.
#[test]
fn ctrl_c_ends_a_load_whose_peer_keeps_sending() {
    in_namespace(|| {
        for rest in [endless_body, drip] {
            for engine in ["auto", "epoll"] {
                let (address, requests) = peer(rest());
                let flags = "--connections 64 --for 1h --timeout 1h --json";
                let line = format!("load http://{address}/ --engine {engine} {flags}");
                let mut load = Running::start(&mut fourtuple(&line));
                assert!(
                    load.until("asked", |_| requests.load(Ordering::Relaxed) == 64),
                    "it ended by itself"
                );
                child::interrupt(load.id()).unwrap();
                let ended = load.end();
                let record = ended.record(3);
                assert_eq!(record["validity"][0]["id"], "interrupted", "{record:#}");
                let results = &record["results"];
                assert_eq!(
                    (&results["operations"], &results["errors"]),
                    (&json!(0), &json!({ "unanswered": 64 })),
                    "{record:#}"
                );
            }
        }
    });
}

#[test]
fn ctrl_c_ends_a_load_that_waits_for_a_name_server() {
    in_namespace(|| {
        if !has("load::ctrl_c_ends_a_load_that_waits_for_a_name_server", &["unshare"]) {
            return;
        }
        // It never answers.
        let server = UdpSocket::bind("127.0.0.1:53").unwrap();
        let temp = TempDir::new();
        let settings = temp.file("resolv.conf", "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n");
        let load = fourtuple("load http://slow.example/");
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "sh",
            "-c",
            // A shell that starts the tests in the background makes its children ignore SIGINT.
            "mount --bind \"$0\" /etc/resolv.conf && exec env --default-signal=INT \"$@\"",
            &settings,
        ]);
        let mut load = Running::start(command.arg(load.get_program()).args(load.get_args()));
        server.set_nonblocking(true).unwrap();
        assert!(load.until("asked", |_| server.recv(&mut [0; 512]).is_ok()), "{:?}", load.end());
        child::interrupt(load.id()).unwrap();
        let ended = load.end();
        assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (130, "", ""), "{ended:?}");
    });
}

/// The limits of a run: flags, the time after which the run should end, and whether SIGINT ends it.
const LIMITS: [(&str, Duration, bool); 3] = [
    ("--for 3s", Duration::from_secs(3), false),
    ("--timeout 1s --operations 64", Duration::from_secs(1), false),
    ("--for 1h --timeout 1h", Duration::from_secs(1), true),
];

/// Prints for each peer, limit and engine how much later than its limit the process has ended, with its start, in ms: median and
/// maximum of 10 runs, for docs/load.md. The connections are the default, 64.
#[test]
#[ignore = "a measurement of five minutes on an idle machine"]
fn ends_after_limits() {
    in_namespace(|| {
        if !has("load::ends_after_limits", &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let file = std::fs::File::create(temp.join("large")).unwrap();
        file.set_len(2 << 30).unwrap();
        let server = format!("server {{ listen 127.0.0.1:8080; root {}; }}", temp.path().display());
        let _nginx = nginx(&temp, "nginx", 1, None, &server);
        wait_for("127.0.0.1", 8080);
        let peers = [
            ("endless body", peer(endless_body()).0.to_string()),
            ("drip", peer(drip()).0.to_string()),
            ("2 GiB from nginx", "127.0.0.1:8080/large".to_owned()),
        ];
        for (peer, address) in &peers {
            for (flags, limit, by_signal) in LIMITS {
                for engine in ["uring", "epoll"] {
                    let mut late: Vec<u64> = (0..10)
                        .map(|_| {
                            let line =
                                format!("load http://{address} --engine {engine} {flags} --json --quiet");
                            let mut begun = Instant::now();
                            let mut load = Running::start(&mut fourtuple(&line));
                            if by_signal {
                                thread::sleep(limit);
                                begun = Instant::now() - limit;
                                child::interrupt(load.id()).unwrap();
                            }
                            let record: Value = load.end().json();
                            let took = begun.elapsed();
                            assert_eq!(record["results"]["operations"], 0, "{line}: {record:#}");
                            took.checked_sub(limit).expect("not before the limit").as_millis() as u64
                        })
                        .collect();
                    late.sort_unstable();
                    println!("{peer:>16} {flags:>28} {engine} median {} max {}", late[5], late[9]);
                }
            }
        }
    });
}
