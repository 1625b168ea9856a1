//! Programs of the examples. `prefork` tests worker processes, because the test's own process has too many threads to fork.

use std::env;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use fourtuple::listen::AcceptPolicy;
use fourtuple_syscalls::{child, option};
use fourtuple_testing::{in_namespace, set_sysctl, skip};

use crate::adopt::activate;
use crate::policies::is_available;

/// A running `prefork` example.
pub(crate) struct Prefork {
    process: Child,
    orders: ChildStdin,
    said: BufReader<ChildStdout>,
    pub(crate) address: String,
}

/// Returns the path of an example beside the test binary. `None`, reported as a skip, if only the test was copied to a guest.
pub(crate) fn example(test: &str) -> Option<PathBuf> {
    let mut path = env::current_exe().unwrap();
    path.pop();
    path.set_file_name("examples");
    path.push("prefork");
    let found = path.exists();
    if !found {
        skip(test, "examples", "the example prefork is not beside the test");
    }
    found.then_some(path)
}

impl Prefork {
    pub(crate) fn start(example: &Path, policy: &str, workers: usize) -> Prefork {
        let mut command = Command::new(example);
        command
            .args([policy, "127.0.0.1:0", &workers.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        child::end_with_this_thread(&mut command);
        let mut process = command.spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let mut said = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let address = line.split_whitespace().nth(2).expect("an address").to_owned();
        Prefork { process, orders, said, address }
    }

    pub(crate) fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Parses the reply to an order that asks for the counters of every seat.
    pub(crate) fn counts(&mut self, order: &str) -> Vec<u64> {
        self.order(order).split_whitespace().skip(1).map(|count| count.parse().unwrap()).collect()
    }

    fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        BufReader::new(stream)
    }

    pub(crate) fn stop(mut self) {
        drop(self.orders);
        assert!(self.process.wait().unwrap().success());
    }
}

/// Returns the worker's seat and the number of the line on its connection.
fn ask(stream: &mut BufReader<TcpStream>) -> (usize, usize) {
    stream.get_mut().write_all(b"?\n").unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let (seat, served) = line.trim_end().split_once(' ').expect("two numbers");
    (seat.parse().unwrap(), served.parse().unwrap())
}

fn policies(test: &str) -> Vec<&'static str> {
    let mut policies = vec!["exclusive", "plain", "rotate", "reuseport", "auto", "dispatcher"];
    policies.extend(is_available(AcceptPolicy::UringOneshot, test).then_some("uring-oneshot"));
    policies
}

#[test]
fn processes_share_and_hand_over_connections() {
    let Some(example) = example("processes_share_and_hand_over_connections") else { return };
    in_namespace(move || {
        for policy in policies("processes_share_and_hand_over_connections") {
            let mut prefork = Prefork::start(&example, policy, 3);
            let mut kept: Vec<_> = (0..6).map(|_| prefork.connect()).collect();
            for stream in &mut kept {
                assert_eq!(ask(stream).1, 1, "{policy}");
            }
            assert_eq!(prefork.order("reload"), "reloaded", "{policy}");
            for stream in &mut kept {
                assert_eq!(ask(stream).1, 2, "{policy}: another process goes on with the count");
            }
            assert_eq!(prefork.counts("stats").iter().sum::<u64>(), 12, "{policy}");
            prefork.stop();
        }
    });
}

/// A worker that joins takes the listener of a worker that left in another process.
#[test]
fn reloads_open_one_more_listener() {
    let test = "reloads_open_one_more_listener";
    let Some(example) = example(test) else { return };
    in_namespace(move || {
        let policies = [AcceptPolicy::Reuseport, AcceptPolicy::ReuseportLeastBusy];
        for policy in policies.into_iter().filter(|policy| is_available(*policy, test)) {
            let mut prefork = Prefork::start(&example, policy.name(), 3);
            let mut kept: Vec<_> = (0..6).map(|_| prefork.connect()).collect();
            for round in 1..=4 {
                for stream in &mut kept {
                    assert_eq!(ask(stream).1, round, "{policy}");
                }
                assert_eq!(prefork.order("reload"), "reloaded", "{policy}");
                let mut listeners = 0;
                fourtuple_syscalls::sock_diag::each_listener(|_| listeners += 1).unwrap();
                assert_eq!(listeners, 4, "{policy}: 3 workers, round {round}");
            }
            for _ in 0..20 {
                assert_eq!(ask(&mut prefork.connect()).1, 1, "{policy}: each listener is attended");
            }
            prefork.stop();
        }
    });
}

#[test]
fn a_killed_worker_loses_only_its_connections() {
    let Some(example) = example("a_killed_worker_loses_only_its_connections") else { return };
    in_namespace(move || {
        for policy in policies("a_killed_worker_loses_only_its_connections") {
            let mut prefork = Prefork::start(&example, policy, 3);
            let mut kept: Vec<_> = (0..12).map(|_| prefork.connect()).collect();
            let seats: Vec<_> = kept.iter_mut().map(|stream| ask(stream).0).collect();
            let killed = seats[0];
            assert_eq!(
                prefork.order(&format!("kill {killed}")),
                format!("killed {killed}, signal: 9 (SIGKILL)"),
                "{policy}"
            );
            for (stream, seat) in kept.iter_mut().zip(seats) {
                // The dispatcher holds kept connections, and any worker serves them.
                if policy == "dispatcher" {
                    assert_eq!(ask(stream).1, 2, "{policy}");
                } else if seat == killed {
                    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "{policy}");
                } else {
                    assert_eq!(ask(stream), (seat, 2), "{policy}");
                }
            }
            for _ in 0..10 {
                assert_eq!(ask(&mut prefork.connect()).1, 1, "{policy}");
            }
            prefork.stop();
        }
    });
}

/// A second dispatcher serves all clients after the first was killed, and the end of the group waits for no connection of the first.
#[test]
fn a_killed_dispatcher_loses_only_its_connections() {
    let Some(example) = example("a_killed_dispatcher_loses_only_its_connections") else { return };
    in_namespace(move || {
        let mut prefork = Prefork::start(&example, "dispatcher", 2);
        let mut earlier: Vec<_> = (0..4).map(|_| prefork.connect()).collect();
        assert_eq!(ask(&mut earlier[0]).1, 1);
        let said = prefork.order("kill dispatcher");
        assert_eq!(said, "killed the dispatcher, signal: 9 (SIGKILL)");
        // A connection that the first held is closed. One in the accept queue or in a message is served by the second.
        for stream in &mut earlier {
            let mut line = String::new();
            let answer = stream.get_mut().write_all(b"?\n").and_then(|()| stream.read_line(&mut line));
            let is_kind = |kind| answer.as_ref().is_err_and(|error| error.kind() == kind);
            assert!(
                answer.is_ok() || is_kind(ErrorKind::ConnectionReset) || is_kind(ErrorKind::BrokenPipe),
                "{answer:?}"
            );
        }
        drop(earlier);
        // Workers take turns, also for the end of each connection; a random choice in eight gives a request to each.
        let mut found = [false; 2];
        for _ in 0..1000 {
            found[ask(&mut prefork.connect()).0] = true;
            if found == [true; 2] {
                break;
            }
        }
        assert_eq!(found, [true; 2], "the second dispatcher has found both workers");
        assert_eq!(prefork.order("hand-over"), "handed over before the deadline, 0 open");
        prefork.stop();
    });
}

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);
/// Number of connections. An example that ended at the first reset did so after 35 to 131 connections.
const RESETS: usize = 1000;
const LISTEN: &str = include_str!("../../examples/listen.rs");

/// Returns the code of an example from its first `use`.
fn code(example: &str) -> &str {
    &example[example.find("\nuse ").expect("a use") + 1..]
}

#[test]
fn the_docs_contain_the_tested_example() {
    let page = include_str!("../../../../docs/listen.md");
    assert!(page.contains(code(LISTEN)), "docs/listen.md has not got this text:\n{}", code(LISTEN));
}

/// Opens connections and resets them: before a request, after a request, and after a part of the response.
fn reset(address: SocketAddr, request: &[u8]) {
    for number in 0..RESETS {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        // The write fails if the kernel has already reported a reset.
        if number % 4 != 0 {
            let _ = stream.write_all(request);
        }
        if number % 4 == 3 {
            let read = stream.read(&mut [0]);
            assert!(!read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "no answer in time");
        }
        option::set_reset_on_close(stream.as_fd()).unwrap();
    }
}

/// Sends as many requests at the same time as there are workers, each on its own connection, and expects an answer to each.
fn all_workers_answer(address: SocketAddr, request: &[u8], workers: usize) {
    let mut streams: Vec<_> = (0..workers).map(|_| TcpStream::connect(address).unwrap()).collect();
    for stream in &mut streams {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(request).unwrap();
        assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
    }
}

fn spawn(example: &PathBuf, arguments: &[&str]) -> Child {
    let mut command = Command::new(example);
    command.args(arguments).stdout(Stdio::piped());
    child::end_with_this_thread(&mut command);
    command.spawn().unwrap()
}

/// Waits until a server listens.
fn until_it_listens(address: SocketAddr) {
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(begun.elapsed() < DEADLINE, "no process listens on {address}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn beside(test: &str, name: &str) -> Option<PathBuf> {
    let path = example(test)?.with_file_name(name);
    if !path.exists() {
        skip(test, "examples", &format!("{name} is not beside the test"));
        return None;
    }
    Some(path)
}

#[test]
fn the_examples_survive_clients_that_reset() {
    let test = "the_examples_survive_clients_that_reset";
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 60000");
        let address: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        for name in ["listen", "drain"] {
            let Some(path) = beside(test, name) else { continue };
            let mut server = spawn(&path, &[]);
            until_it_listens(address);
            reset(address, b"?");
            all_workers_answer(address, b"?", 4);
            assert_eq!(server.try_wait().unwrap(), None, "{name} goes on");
            if name == "drain" {
                let terminated = Command::new("kill").arg(server.id().to_string()).status().unwrap();
                assert!(terminated.success());
                let output = server.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success() && said.contains("open: 0, queued: 0"), "{output:?}");
            } else {
                server.kill().unwrap();
                server.wait().unwrap();
            }
        }
        // `accept` is an example of the tokio form.
        let policies: &[&str] = if cfg!(feature = "tokio") { &["exclusive", "rotate"] } else { &[] };
        for &policy in policies {
            let Some(path) = beside(test, "accept") else { break };
            let mut server =
                spawn(&path, &["--policy", policy, "--listen", "127.0.0.1:8080", "--workers", "2"]);
            until_it_listens(address);
            reset(address, b"GET / HTTP/1.1\r\n\r\n");
            all_workers_answer(address, b"GET / HTTP/1.1\r\n\r\n", 2);
            assert_eq!(server.try_wait().unwrap(), None, "accept goes on");
            server.kill().unwrap();
            server.wait().unwrap();
        }
        // `activated` needs the feature `tokio`.
        let policies: &[_] = if cfg!(feature = "tokio") {
            &[AcceptPolicy::SharedOneshot, AcceptPolicy::Exclusive, AcceptPolicy::Dispatcher]
        } else {
            &[]
        };
        for &policy in policies {
            let Some(path) = beside(test, "activated") else { break };
            // A process that another test forks meanwhile may hold a copy of the last listener, so each has a port of its own.
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let mut server = activate(&path, &listener, policy);
            reset(address, b"?");
            all_workers_answer(address, b"?", 3);
            assert_eq!(server.try_wait().unwrap(), None, "activated goes on with {policy}");
            child::terminate(server.id()).unwrap();
            let output = server.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && said.contains("open: 0"), "{policy}: {output:?}");
        }
        if let Some(path) = beside(test, "prefork") {
            let prefork = Prefork::start(&path, "rotate", 2);
            let address = prefork.address.parse().unwrap();
            reset(address, b"?\n");
            all_workers_answer(address, b"?\n", 2);
            prefork.stop();
        }
    });
}
