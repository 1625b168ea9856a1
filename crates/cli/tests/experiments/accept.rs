//! Faults of listeners, workers, descriptors and UDP sockets, rebuilt with real servers: the first line of `doctor` names the cause.
//!
//! `FOURTUPLE_WRITE=1 cargo test --test experiments accept::` writes the rows of docs/doctor.md.

use std::fs;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use crate::program;
use crate::program::situation::{
    Daemon, PROXY, actions, diagnose, diagnose_during, diagnose_until, do_now, experiment, finds, first, has,
    nginx, paste, php_fpm, verdicts, wait_for,
};
use crate::program::{TempDir, children, in_own_namespace, queues, stat, text, until};
use crate::row;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::process::Python;
use fourtuple_testing::set_sysctl;
use serde_json::Value;

const WEB: &str = "listen 127.0.0.1:4020 reuseport backlog=512; keepalive_timeout 60; return 200 ok;";

/// Opens connections and sends a request on each.
fn requests(number: usize) -> Vec<TcpStream> {
    let open = |_| {
        let mut stream = TcpStream::connect(("127.0.0.1", PROXY)).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        stream
    };
    (0..number).map(open).collect()
}

/// The answers that connections got.
#[derive(Debug, Default, PartialEq)]
struct Answers {
    answered: usize,
    reset: usize,
    waiting: usize,
}

fn answers(streams: &mut [TcpStream]) -> Answers {
    let mut answers = Answers::default();
    for stream in streams {
        // A response that was read before is in no buffer any more: peek() leaves the response there.
        match stream.peek(&mut [0; 16]) {
            Ok(1..) => answers.answered += 1,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                answers.waiting += 1
            }
            _ => answers.reset += 1,
        }
    }
    answers
}

/// Waits until no connection waits for an answer.
fn settled(streams: &mut [TcpStream]) -> Answers {
    until("all connections have an answer", || answers(streams).waiting == 0);
    answers(streams)
}

/// Waits until the server answers, so that no earlier connection is in its queue.
fn serves() {
    wait_for("127.0.0.1", PROXY);
    settled(&mut requests(1));
}

/// Sends SYNs without waiting for an answer.
fn attempt(port: u16, number: usize) -> Vec<OwnedFd> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let open = |_| {
        let client = socket::open(Transport::Tcp, address, true).unwrap();
        socket::connect(client.as_fd(), address).unwrap();
        client
    };
    (0..number).map(open).collect()
}

pub(crate) fn stop(process: u32) {
    assert!(Command::new("kill").args(["-STOP", &process.to_string()]).status().unwrap().success());
    until("the process is stopped", || stat(process).is_some_and(|(state, _)| state == 'T'));
}

#[test]
fn a_stuck_reuseport_worker_of_nginx_is_named_and_continues() {
    experiment(&["nginx"], |temp| {
        let server = nginx(temp, "web", 4, None, &format!("server {{ {WEB} }}"));
        until("4 workers", || children(server.pid()).len() == 4);
        wait_for("127.0.0.1", PROXY);
        let stuck = children(server.pid())[1];
        stop(stuck);
        let mut streams = requests(100);
        until("the other workers accept", || queues(PROXY).iter().filter(|queue| **queue > 0).count() == 1);
        let record = diagnose(temp);
        let before = answers(&mut streams);
        let finding = first(
            &record,
            "B03",
            &["1 of 4 listeners at 127.0.0.1:4020 is stuck", &format!("nginx[{stuck}]")],
        );
        let command = do_now(finding);
        assert_eq!(command, format!("kill -CONT {stuck}"));
        paste(&command);
        let after = settled(&mut streams);
        row(
            finding,
            "a stopped worker with `reuseport`",
            "nginx",
            &format!("{} of 100 requests wait", before.waiting),
            &command,
            &format!("{} wait", after.waiting),
        );
        assert!(before.waiting > 5 && after.answered == 100, "{before:?} {after:?}");
        assert!(!finds(&diagnose(temp), "B03"));
    });
}

#[test]
fn a_full_accept_queue_of_nginx_is_named_and_emptied() {
    experiment(&["nginx"], |temp| {
        let server =
            nginx(temp, "web", 0, None, "server { listen 127.0.0.1:4020 backlog=16; return 200 ok; }");
        serves();
        stop(server.pid());
        let mut streams = requests(17);
        let record = diagnose_during(temp, || {
            drop(attempt(PROXY, 1));
            std::thread::sleep(Duration::from_millis(10));
        });
        let before = answers(&mut streams);
        let finding = first(
            &record,
            "A01",
            &[
                "the accept queue of 127.0.0.1:4020 is full",
                &format!("nginx[{}]", server.pid()),
                "the backlog is 16",
            ],
        );
        assert!(actions(finding, "proper").iter().any(|action| action.contains("find what stopped it")));
        let command = do_now(finding);
        assert_eq!(command, format!("kill -CONT {}", server.pid()));
        paste(&command);
        let after = settled(&mut streams);
        row(
            finding,
            "a full accept queue, `backlog=16`, process stopped",
            "nginx",
            &format!("{} of 17 connections wait, further SYNs are dropped", before.waiting),
            &command,
            &format!("{} wait", after.waiting),
        );
        assert_eq!((before.waiting, after.answered), (17, 17));
        until("the queue is empty", || !finds(&diagnose(temp), "A01"));
    });
}

/// Starts php-fpm with one process and this backlog at a unix listener, and nginx in front of it. It answers no request while the file `hold` is
/// there.
fn php(temp: &TempDir, program: &str, backlog: u32) -> (Daemon, Daemon) {
    let socket = temp.join("php.sock");
    let script = format!(
        "<?php usleep(200000); while (file_exists('{}')) {{ usleep(10000); clearstatcache(); }} echo 'ok';",
        temp.join("hold")
    );
    temp.file("slow.php", &script);
    let text = format!(
        "[global]\ndaemonize = no\nerror_log = {}\n[www]\nuser = root\nlisten = {socket}\nlisten.backlog = {backlog}\n\
         pm = static\npm.max_children = 1\n",
        temp.join("fpm.log")
    );
    let fpm = Daemon::start(None, &[program, "-R", "-y", &temp.file("fpm.conf", &text)]);
    until("php-fpm listens", || UnixStream::connect(&socket).is_ok());
    let server = format!(
        "server {{ listen 127.0.0.1:4020; location / {{ fastcgi_pass unix:{socket}; fastcgi_param REQUEST_METHOD GET;\n\
         fastcgi_read_timeout 10m; fastcgi_param SCRIPT_FILENAME {}; }} }}",
        temp.join("slow.php")
    );
    let nginx = nginx(temp, "front", 0, None, &server);
    wait_for("127.0.0.1", PROXY);
    (fpm, nginx)
}

/// Returns how many of these requests nginx answers with 502.
fn bad_gateways(mut streams: Vec<TcpStream>) -> usize {
    settled(&mut streams);
    let is_bad = |stream: &TcpStream| {
        let mut head = [0; 12];
        stream.peek(&mut head).is_ok_and(|length| head[..length].ends_with(b" 502"))
    };
    streams.iter().filter(|stream| is_bad(stream)).count()
}

#[test]
fn a_full_unix_queue_of_php_fpm_is_named_and_a_backlog_helps() {
    in_own_namespace(|test| {
        let Some(program) = php_fpm(test).filter(|_| has(test, &["nginx"])) else { return };
        let temp = TempDir::new();
        let servers = php(&temp, program, 8);
        let before = bad_gateways(requests(60));
        // The queue is full at both readings, also if no client runs meanwhile.
        let hold = temp.file("hold", "");
        let mut waiting = requests(20);
        until("the queue is full", || answers(&mut waiting).answered > 0);
        let mut open = Vec::new();
        let record = diagnose_until(&temp, "A01", &["failed with EAGAIN"], || {
            open.extend(requests(1));
            if open.len() > 300 {
                open.remove(0);
            }
            std::thread::sleep(Duration::from_millis(5));
        });
        fs::remove_file(hold).unwrap();
        let path = temp.join("php.sock");
        let finding = first(
            &record,
            "A01",
            &[
                &format!("the accept queue of {path} is full"),
                "for php-fpm",
                "the backlog is 8",
                "failed with EAGAIN",
            ],
        );
        let advice = actions(finding, "proper");
        assert!(advice.iter().any(|action| action.contains("`listen.backlog = 511`")), "{advice:?}");
        assert!(advice.iter().any(|action| action.contains("`pm.max_children = 2`")), "{advice:?}");
        let evidence = finding["evidence"].to_string();
        assert!(evidence.contains("the connections are of nginx["), "{evidence}");
        let master = format!("[{}] is the master of these processes", servers.0.pid());
        assert!(evidence.contains(&master), "{evidence}");
        assert!(!finds(&record, "X01"), "{:#?}", verdicts(&record));
        drop(servers);
        let _servers = php(&temp, program, 511);
        let after = bad_gateways(requests(60));
        let mut finding = finding.clone();
        let verdict = text(&finding, "verdict").replace(&path, "/run/php.sock");
        finding["verdict"] = verdict.into();
        row(
            &finding,
            "one busy process behind nginx, `listen.backlog = 8` at a unix listener",
            "php-fpm",
            &format!("{before} of 60 requests get 502"),
            "listen.backlog = 511",
            &format!("{after} get 502"),
        );
        assert!(before > 0 && after == 0, "{before} before, {after} after");
    });
}

#[test]
fn a_blocking_server_with_a_short_backlog_is_named() {
    experiment(&["python3"], |temp| {
        set_sysctl("net.core.somaxconn", "8");
        let mut server = Python::start();
        server.run("s = socket.socket(); s.bind(('127.0.0.1', 4020)); s.listen(1000)");
        let _clients = attempt(PROXY, 30);
        // On a busy machine the kernel handles the SYNs later, in a thread of its own.
        until("the queue is full", || queues(PROXY) == [9]);
        let record = diagnose(temp);
        let name = format!("[{}]", server.pid());
        let finding =
            first(&record, "A01", &["the accept queue of 127.0.0.1:4020 is full", &name, "the backlog is 8"]);
        let now = actions(finding, "now");
        assert_eq!(now[0], format!("cat /proc/{}/stack", server.pid()));
        assert_eq!(now[1], "fourtuple trace accept --port 4020 --for 10s");
        assert_eq!(now[2], "sysctl -w net.core.somaxconn=4096");
        assert!(actions(finding, "proper").iter().any(|action| action.contains("no blocking work")));
        // The blocked thread goes on.
        let accepted = server.number(
            "s.setblocking(False)\nn = 0\ntry:\n  while s.accept(): n += 1\nexcept BlockingIOError: print(n)",
        );
        assert!(accepted >= 9, "{accepted}");
    });
}

#[test]
fn resets_by_abort_on_overflow_are_named_and_end() {
    experiment(&["python3"], |temp| {
        set_sysctl("net.ipv4.tcp_abort_on_overflow", "1");
        let mut server = Python::start();
        server.run(
            "s = socket.socket(); s.bind(('127.0.0.1', 4020)); s.setblocking(False)\n\
             s.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 60); s.listen(20)",
        );
        // TCP_DEFER_ACCEPT: the handshakes end when data arrives. The second 20 began before the queue was full.
        let mut bursts = || {
            let mut held = Vec::new();
            for _ in 0..2 {
                let mut streams: Vec<TcpStream> =
                    attempt(PROXY, 20).into_iter().map(TcpStream::from).collect();
                for stream in &mut streams {
                    // On a busy machine the kernel handles the SYN later, in a thread of its own.
                    stream.set_nonblocking(false).unwrap();
                    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
                    let _ = stream.write_all(b"x");
                    stream.set_nonblocking(true).unwrap();
                }
                held.extend(streams);
            }
            std::thread::sleep(Duration::from_millis(5));
            let reset = answers(&mut held).reset;
            server.run("try:\n  while True: s.accept()[0].close()\nexcept BlockingIOError: pass");
            reset
        };
        let mut before = 0;
        let verdict = ["net.ipv4.tcp_abort_on_overflow is 1", "accept queues were full"];
        let record = diagnose_until(temp, "A06", &verdict, || before = bursts().max(before));
        let finding = first(&record, "A06", &verdict);
        let command = do_now(finding);
        assert_eq!(command, "sysctl -w net.ipv4.tcp_abort_on_overflow=0");
        // A reset may arrive after its burst was read.
        until("connections are reset", || {
            before = bursts().max(before);
            before > 0
        });
        paste(&command);
        let after = bursts();
        row(
            finding,
            "net.ipv4.tcp_abort_on_overflow = 1",
            "python3",
            &format!("{before} of 40 connections reset"),
            &command,
            &format!("{after} reset"),
        );
        assert!(before > 0 && after == 0, "{before} before, {after} after");
    });
}

#[test]
fn a_reload_with_a_queue_is_named_and_loses_nothing() {
    experiment(&["nginx"], |temp| {
        let start = |name: &str| nginx(temp, name, 0, None, &format!("server {{ {WEB} }}"));
        let mut lost = Vec::new();
        let mut command = String::new();
        let mut made = Value::Null;
        for round in ["before", "after"] {
            let old = start(&format!("{round}-old"));
            wait_for("127.0.0.1", PROXY);
            // The rule tells generations apart by a second between their starts.
            std::thread::sleep(Duration::from_millis(1_100));
            stop(old.pid());
            let new = start(&format!("{round}-new"));
            until("both listen", || queues(PROXY).len() == 2);
            let mut streams = requests(60);
            until("the new process accepts its share", || {
                queues(PROXY).iter().filter(|queue| **queue > 0).count() == 1
            });
            let record = diagnose(temp);
            if command.is_empty() {
                let names = [format!("nginx[{}], which is older than nginx[{}]", old.pid(), new.pid())];
                let finding = first(&record, "B04", &[&names[0], "connections at 127.0.0.1:4020 wait"]);
                command = do_now(finding);
                made = finding.clone();
                assert_eq!(command, "sysctl -w net.ipv4.tcp_migrate_req=1");
            } else {
                assert!(!finds(&record, "B04"), "{:#?}", verdicts(&record));
            }
            old.end();
            let ended = settled(&mut streams);
            lost.push(ended.reset);
            if round == "before" {
                paste(&command);
            }
        }
        row(
            &made,
            "a reload, the old generation stopped with connections in its queue",
            "nginx",
            &format!("{} of 60 connections reset", lost[0]),
            &command,
            &format!("{} reset", lost[1]),
        );
        assert!(lost[0] > 5 && lost[1] == 0, "{lost:?}");
    });
}

#[test]
fn a_proxy_without_descriptors_is_named_and_fixed() {
    experiment(&["nginx", "prlimit"], |temp| {
        let config = program::situation::nginx_config(
            temp,
            "proxy",
            0,
            "server { listen 127.0.0.1:4000; return 200 ok; }\n\
             server { listen 127.0.0.1:4020; location / { proxy_pass http://127.0.0.1:4000; } }",
        );
        let proxy = Daemon::start(None, &["sh", "-c", "ulimit -S -n 128; exec nginx -c \"$0\"", &config]);
        wait_for("127.0.0.1", PROXY);
        let mut streams = requests(200);
        // nginx closes idle connections after a time and answers waiting requests then.
        until("nginx answers as many as it has descriptors for", || answers(&mut streams).answered >= 50);
        let before = answers(&mut streams);
        // Now and then nginx has closed an idle connection when it is read.
        let mut record = Value::Null;
        until("nginx is at its limit", || {
            record = diagnose(temp);
            verdicts(&record)
                .iter()
                .any(|verdict| verdict.contains(" and may open no more: its limit is 128"))
        });
        let finding = first(&record, "F01", &[&format!("nginx[{}] has ", proxy.pid())]);
        let command = do_now(finding);
        assert!(command.starts_with(&format!("prlimit --pid {} --nofile=4096", proxy.pid())), "{command}");
        paste(&command);
        let after = settled(&mut streams);
        row(
            finding,
            "a proxy with RLIMIT_NOFILE of 128",
            "nginx",
            &format!("{} of 200 requests wait", before.waiting),
            &command,
            &format!("{} wait", after.waiting),
        );
        assert!(before.waiting > 0 && after.answered == 200, "{before:?} {after:?}");
        assert!(!finds(&diagnose(temp), "F01"));
    });
}
