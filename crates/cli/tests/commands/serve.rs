//! `fourtuple serve`: the reported address, the responses, the end of a run, and refused arguments.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::num::NonZeroU32;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::program::servers::Server;
use crate::program::{
    DEADLINE, Ended, TempDir, fourtuple, list, loaded, number, queues, refused, require_valid, run, text,
    until,
};
use fourtuple::listen::AcceptPolicy;
use fourtuple_syscalls::child;
use fourtuple_testing::in_namespace;
use fourtuple_testing::process::until_expected;
use serde_json::Value;

/// Waits until every thread sleeps although the accept queue is not empty: accept() has failed.
fn wait_until_it_accepts_no_more(server: &Server) {
    let port: u16 = server.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let tasks = format!("/proc/{}/task", server.child.id());
    let begun = Instant::now();
    while queues(port) == [0] || fs::read_dir(&tasks).unwrap().any(|task| is_running(&task.unwrap().path())) {
        assert!(begun.elapsed() < DEADLINE, "{:?} clients are queued", queues(port));
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns whether a thread is running or waiting for a processor.
fn is_running(task: &Path) -> bool {
    let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'))
}

fn exchange(stream: &mut (impl Read + Write), request: &[u8]) -> String {
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn sum(record: &Value, key: &str) -> u64 {
    list(record, "/results/workers").iter().map(|worker| number(worker, key)).sum()
}

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

#[test]
fn http_until_ctrl_c() {
    in_namespace(|| {
        let server =
            Server::start(&mut fourtuple("serve http --listen 127.0.0.1:0 --workers 2 --body 5 --json"));
        assert_eq!(server.workers, "2 workers (SO_REUSEPORT)");
        let mut sent = 0;
        for _ in 0..7 {
            let answer = exchange(&mut server.connect(), REQUEST);
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nxxxxx"), "{answer}");
            sent += answer.len() as u64;
        }
        let address = server.address.clone();
        let ended = server.interrupt();
        let record = ended.record(0);
        let (settings, results) = (&record["settings"], &record["results"]);
        assert_eq!((text(settings, "listen"), text(results, "listen")), ("127.0.0.1:0", address.as_str()));
        assert_eq!((text(results, "protocol"), text(results, "policy")), ("http", "reuseport"));
        assert_eq!((number(settings, "workers"), number(settings, "response_bytes")), (2, 5));
        assert_eq!((sum(&record, "accepted"), sum(&record, "requests")), (7, 7));
        assert_eq!(
            (sum(&record, "received_bytes"), sum(&record, "sent_bytes")),
            (7 * REQUEST.len() as u64, sent)
        );
        let jain = results["jain"].as_f64().unwrap();
        assert!((0.5..=1.0).contains(&jain), "{jain}");
        assert!(list(&record, "/validity").is_empty());
        // `report` renders the saved record.
        let temp = TempDir::new();
        let saved = temp.file("serve.json", &record.to_string());
        let drawn = run(&mut fourtuple(&format!("report {saved}")));
        assert_eq!(drawn.code, 0, "{drawn:?}");
        assert!(drawn.stdout.contains("What each worker of the server did"), "{}", drawn.stdout);
    });
}

/// Runs the server under each policy against `fourtuple load`: the server's count of responses equals the client's.
#[test]
fn both_sides_count_the_same_under_every_policy() {
    in_namespace(|| {
        let mut served = 0;
        let every = NonZeroU32::new(16).unwrap();
        let others = [AcceptPolicy::Rotate { every }, AcceptPolicy::Auto];
        for accept in AcceptPolicy::ALL.into_iter().chain(others) {
            let policy = accept.to_string();
            let line = format!("serve http --listen 127.0.0.1:0 --workers 4 --policy {policy} --json");
            let mut command = fourtuple(&line);
            // The server ends at once where it lacks a right; the tests of the library check which rights it needs.
            if let Some(facility) = accept.facility() {
                let refused = run(fourtuple(&line).args(["--for", "1ms"]));
                if refused.code == 4 {
                    fourtuple_testing::skip(
                        "both_sides_count_the_same_under_every_policy",
                        facility,
                        refused.line(),
                    );
                    continue;
                }
            }
            let server = Server::start(&mut command);
            let (mut requests, mut connections) = (0, 0);
            // A blocking worker serves one connection at a time: the run opens no more connections than workers.
            for close in ["--close-every 1", "--close-every 7", ""] {
                let load = format!(
                    "load http://{}/ --connections 4 --threads 1 --operations 200 {close} --json --anyway",
                    server.address
                );
                let results = loaded(&mut fourtuple(&load))["results"].clone();
                assert_eq!(number(&results, "operations"), 200, "{policy}, {close}");
                requests += number(&results, "operations");
                connections += number(&results, "connections");
            }
            let ended = server.interrupt();
            assert_eq!(ended.code, 0, "{policy}: {ended:?}");
            let record = ended.json();
            require_valid(&record);
            assert_eq!(sum(&record, "requests"), requests, "{policy}");
            assert_eq!(sum(&record, "accepted"), connections, "{policy}");
            if policy != "auto" {
                assert_eq!(text(&record["results"], "policy"), policy);
            }
            served += 1;
        }
        assert!(served >= 9);
    });
}

#[test]
fn crr_for_a_time_and_a_page() {
    in_namespace(|| {
        let temp = TempDir::new();
        let page = temp.join("serve.html");
        let line =
            "serve crr --listen [::1]:0 --workers 1 --request 2 --response 3 --close server --for 3s --html";
        // The server may end before a client that stands still has asked.
        let once = || {
            let server = Server::start(&mut fourtuple(&format!("{line} {page}")));
            assert_eq!(server.workers, "1 worker (SO_REUSEPORT)");
            let mut answer = String::new();
            let asked = TcpStream::connect(&server.address).and_then(|mut stream| {
                stream.set_read_timeout(Some(DEADLINE))?;
                stream.write_all(b"ab")?;
                stream.read_to_string(&mut answer)
            });
            (asked.is_ok(), answer, server.end())
        };
        let is_answered = |(is_asked, answer, _): &(bool, String, Ended)| *is_asked && !answer.is_empty();
        let (_, answer, ended) = until_expected(20, once, is_answered);
        assert_eq!(answer, "xxx");
        assert_eq!(ended.code, 0, "{ended:?}");
        assert!(ended.stdout.contains("[::1]:") && ended.stdout.contains("served for "), "{}", ended.stdout);
        assert!(fs::read_to_string(&page).unwrap().contains("Each worker"));
    });
}

#[test]
fn udp_is_an_echo() {
    in_namespace(|| {
        let server =
            Server::start(&mut fourtuple("serve udp --listen 127.0.0.1:0 --workers 2 --request 3 --json"));
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(&server.address).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut buffer = [0; 16];
        // The short datagram precedes the second one in the same queue: a response to the second proves that the server
        // has read the short one.
        socket.send(b"ab").unwrap();
        for message in [&b"abc"[..], b"hello"] {
            socket.send(message).unwrap();
            let count = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..count], message);
        }
        let record = server.interrupt().json();
        require_valid(&record);
        assert_eq!((sum(&record, "accepted"), sum(&record, "requests")), (0, 2));
        assert_eq!((sum(&record, "received_bytes"), sum(&record, "sent_bytes")), (10, 8));
        let errors: Vec<&Value> = list(&record, "/results/workers")
            .iter()
            .filter_map(|worker| worker["errors"].get("short-datagram"))
            .collect();
        assert_eq!(errors, [1]);
    });
}

#[test]
fn a_sink_reads_and_never_responds() {
    in_namespace(|| {
        let server = Server::start(&mut fourtuple("serve sink --listen 127.0.0.1:0 --workers 1 --json"));
        let mut streams = [server.connect(), server.connect()];
        for stream in &mut streams {
            stream.write_all(&[0; 1000]).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it closes when we have closed");
        }
        let record = server.interrupt().json();
        require_valid(&record);
        assert_eq!((sum(&record, "accepted"), sum(&record, "requests")), (2, 0));
        assert_eq!((sum(&record, "received_bytes"), sum(&record, "sent_bytes")), (2000, 0));
        assert_eq!(record["results"]["jain"], 1.0, "of connections: there are no requests");
    });
}

#[test]
fn a_unix_path_is_replaced_used_and_removed() {
    let temp = TempDir::new();
    let path = temp.join("socket");
    let line = format!("serve http --listen unix:{path} --workers 2");
    // A killed server leaves its socket file behind.
    drop(UnixListener::bind(&path).unwrap());
    // A process that another test has just forked has the listener open until exec().
    until("nobody listens", || UnixStream::connect(&path).is_err());
    let server = Server::start(&mut fourtuple(&format!("{line} --json")));
    assert_eq!(
        (server.address.as_str(), server.workers.as_str()),
        (&*format!("unix:{path}"), "2 workers (EPOLLEXCLUSIVE)")
    );
    assert!(exchange(&mut UnixStream::connect(&path).unwrap(), REQUEST).starts_with("HTTP/1.1 200 "));
    refused(&mut fourtuple(&line), &["'--listen'", path.as_str(), "another program listens there"]);
    let record = server.interrupt().json();
    require_valid(&record);
    assert_eq!((sum(&record, "requests"), text(&record["results"], "policy")), (1, "exclusive"));
    assert!(temp.names().is_empty(), "the path is free again");
    let file = temp.file("precious", "words");
    let refused = run(&mut fourtuple(&format!("serve http --listen unix:{file}")));
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.line().contains("something else than a socket"), "{refused:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "words");
}

#[test]
fn too_few_descriptors_are_counted_and_survived() {
    in_namespace(|| {
        for (policy, error) in [
            ("", "accept: EMFILE"),
            ("--policy exclusive", "accept: EMFILE"),
            ("--policy shared-oneshot", "accept: EMFILE"),
            ("--policy dispatcher", "dispatcher accept: EMFILE"),
        ] {
            let mut command =
                fourtuple(&format!("serve crr --listen 127.0.0.1:0 --workers 1 --json {policy}"));
            child::limit_descriptors(&mut command, 24);
            let server = Server::start(&mut command);
            let mut streams: Vec<TcpStream> = (0..40).map(|_| server.connect()).collect();
            for stream in &mut streams {
                stream.write_all(b"a").unwrap();
            }
            wait_until_it_accepts_no_more(&server);
            // A client that was served closes and frees a descriptor, so that finally all clients are served.
            for mut stream in streams {
                let mut answer = [0];
                stream.read_exact(&mut answer).unwrap();
            }
            let ended = server.interrupt();
            assert_eq!(ended.code, 3, "{policy}: {ended:?}");
            let record = ended.json();
            require_valid(&record);
            assert_eq!(sum(&record, "requests"), 40, "{policy}");
            assert!(
                number(&list(&record, "/results/workers")[0]["errors"], error) > 0,
                "{policy}: {record:#}"
            );
            let [remark] = list(&record, "/validity") else { panic!("said once: {record:#}") };
            assert_eq!(text(remark, "id"), "accept-failed");
            assert!(text(remark, "message").contains("ulimit -n"));
        }
    });
}

#[test]
fn a_backlog_that_the_kernel_cuts_is_remarked() {
    in_namespace(|| {
        fs::write("/proc/sys/net/core/somaxconn", "10").unwrap();
        for (policy, backlog, code) in [("", 11, 3), ("--policy rotate", 11, 3), ("", 10, 0)] {
            let flags =
                format!("serve crr --listen 127.0.0.1:0 --for 10ms --json --backlog {backlog} {policy}");
            let ended = run(&mut fourtuple(&flags));
            assert_eq!(ended.code, code, "{flags}: {ended:?}");
            let ids: Vec<_> =
                list(&ended.json(), "/validity").iter().map(|remark| text(remark, "id").to_owned()).collect();
            assert_eq!(ids, if code == 3 { vec!["backlog-cut"] } else { Vec::new() }, "{flags}");
        }
    });
}

#[test]
fn an_address_in_use_is_refused() {
    in_namespace(|| {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let server = Server::start(&mut fourtuple("serve crr --listen 127.0.0.1:0"));
        for (listen, errno) in [
            (address.to_string(), "Address already in use"),
            // Both servers set SO_REUSEPORT: without a check the bind would succeed, and each server would get half of the
            // connections.
            (server.address.clone(), "Address already in use"),
            ("192.0.2.1:80".to_owned(), "Cannot assign requested address"),
        ] {
            let ended = run(&mut fourtuple(&format!("serve http --listen {listen}")));
            assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
            for part in [listen.as_str(), errno] {
                assert_eq!(ended.line().matches(part).count(), 1, "{part:?} in {ended:?}");
            }
        }
    });
}

#[test]
fn wrong_flags() {
    let tcp = "--listen 127.0.0.1:0";
    for (line, parts) in [
        (format!("smtp {tcp}"), ["smtp", "crr, http, udp, sink"]),
        ("http".to_owned(), ["--listen", "not provided"]),
        ("http --listen localhost".to_owned(), ["'--listen", "such as 127.0.0.1:8080"]),
        ("http --listen unix:".to_owned(), ["'--listen", "1 to 107 bytes"]),
        ("udp --listen unix:/nowhere/x".to_owned(), ["'--listen'", "an address and a port"]),
        (format!("http {tcp} --workers 0"), ["'--workers", "from 1 to 4096"]),
        (format!("http {tcp} --request 5"), ["'--request'", "accepted with crr and udp"]),
        (format!("http {tcp} --response 5"), ["'--response'", "accepted with crr"]),
        (format!("crr {tcp} --body 5"), ["'--body'", "accepted with http"]),
        (format!("crr {tcp} --request 0"), ["'--request", "from 1 to 67108864"]),
        (format!("udp {tcp} --request 65508"), ["'--request'", "65507"]),
        (format!("crr {tcp} --close neither"), ["'--close", "client, server, rst"]),
        (format!("crr {tcp} --close-every 5"), ["'--close-every'", "with --close server"]),
        (format!("sink {tcp} --close server"), ["'--close'", "expected client"]),
        ("crr --listen unix:/nowhere/x --close rst".to_owned(), ["'--close'", "has no RST"]),
        (format!("http {tcp} --service fast"), ["'--service", "pareto:MEAN:SHAPE"]),
        (format!("http {tcp} --service pareto:1ms:1"), ["'--service", "above 1"]),
        (format!("http {tcp} --service 60%:1s,60%:2s"), ["'--service", "more than 100%"]),
        (format!("http {tcp} --spin"), ["'--spin'", "'--service'"]),
        (format!("http {tcp} --idle 0s"), ["'--idle'", "more than 0"]),
        (format!("udp {tcp} --idle 5s"), ["'--idle'", "no connections"]),
        (format!("http {tcp} --stall 2s"), ["'--stall", "such as 2s:200ms"]),
        (format!("http {tcp} --backlog 0"), ["'--backlog", "from 1 to 1000000"]),
        (format!("http {tcp} --policy nonsense"), ["'--policy", "shared-oneshot"]),
        (format!("http {tcp} --policy rotate:0"), ["'--policy", "from 1 to 4294967295"]),
        (format!("http {tcp} --policy uring-multishot"), ["'--policy", "use uring-oneshot"]),
        (format!("udp {tcp} --policy rotate"), ["'rotate' for '--policy'", "no connections to wait for"]),
        (
            "http --listen unix:/nowhere/x --policy reuseport".to_owned(),
            ["'reuseport' for '--policy'", "AF_UNIX has no SO_REUSEPORT"],
        ),
        (
            "http --listen unix:/nowhere/x --policy reuseport-least-busy".to_owned(),
            ["'reuseport-least-busy' for '--policy'", "AF_UNIX has no SO_REUSEPORT"],
        ),
        (format!("http {tcp} --for 10"), ["'--for", "ns, us, ms, s, m or h"]),
    ] {
        refused(&mut fourtuple(&format!("serve {line}")), &parts);
    }
}
