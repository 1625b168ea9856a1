//! Programs of the examples. `prefork` tests worker processes, because the test's own process has too many threads to fork.

use std::env;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use fourtuple::listen::AcceptPolicy;
use fourtuple_syscalls::{child, option, sock_diag};
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
    answer(stream).expect("two numbers")
}

/// Returns what `ask` does, or `None` if the connection was closed.
fn answer(stream: &mut BufReader<TcpStream>) -> Option<(usize, usize)> {
    stream.get_mut().write_all(b"?\n").ok()?;
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    let (seat, served) = line.trim_end().split_once(' ')?;
    Some((seat.parse().unwrap(), served.parse().unwrap()))
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
                // A process that another test starts holds what this one has closed until its exec().
                let address: SocketAddr = prefork.address.parse().unwrap();
                let mut listeners = 0;
                sock_diag::each_listener(|listener| listeners += usize::from(listener.local == address))
                    .unwrap();
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
            let last = seats.iter().rposition(|seat| *seat == killed);
            assert_eq!(
                prefork.order(&format!("kill {killed}")),
                format!("killed {killed}, signal: 9 (SIGKILL)"),
                "{policy}"
            );
            for (number, (stream, seat)) in kept.iter_mut().zip(seats).enumerate() {
                // The dispatcher holds kept connections, and any worker serves them. The last one that the killed worker has answered
                // may not be back.
                if policy == "dispatcher" {
                    let served = answer(stream).map(|(_, served)| served);
                    assert!(
                        served == Some(2) || served.is_none() && last == Some(number),
                        "{number}: {served:?}"
                    );
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

#[cfg(feature = "bpf")]
mod soak {
    //! Least busy workers under a SYN flood, clients that reset, and killed workers at the same time.
    //! Every assertion is on counters; times only determine the duration.

    use std::env;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
    use std::os::fd::AsFd;
    use std::sync::RwLock;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use fourtuple::listen::AcceptPolicy;
    use fourtuple_syscalls::option;
    use fourtuple_testing::wire::{Raw, SYN};
    use fourtuple_testing::{StopOnDrop, in_namespace, set_sysctl};

    use crate::policies::is_available;
    use crate::processes::{Prefork, example};

    const TEST: &str = "least_busy_workers_survive_floods_resets_and_kills";
    const WORKERS: usize = 4;
    /// The SYNs between two kills, sent in bursts with a pause after each.
    const VOLLEYS: u32 = 25;
    const VOLLEY: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(20);
    /// The requests of the quiet phase, per worker that was killed before.
    const QUIET: u64 = 5000;
    /// A timeout that only a failing test reaches.
    const DEADLINE: Duration = Duration::from_secs(60);

    /// Returns the number of kills: two per second in the first half of the length that FOURTUPLE_SOAK sets.
    fn kills() -> u32 {
        env::var("FOURTUPLE_SOAK").map_or(3, |seconds| seconds.parse().expect("FOURTUPLE_SOAK is in seconds"))
    }

    /// The state that honest clients share.
    #[derive(Default)]
    struct HonestClients {
        stop: AtomicBool,
        answers: AtomicU64,
        /// Clients hold it for reading during a connection. The test holds it for writing while it kills a worker, because the request
        /// that this worker serves is lost under every policy.
        connection_lock: RwLock<()>,
    }

    /// Opens connections of `requests` requests each until it is stopped. Returns the first failed request.
    fn honest(address: &str, requests: u64, seen: &HonestClients) -> Result<(), String> {
        while !seen.stop.load(Ordering::Acquire) {
            let connection_lock = seen.connection_lock.read().unwrap();
            let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
            let stream = TcpStream::connect(address).map_err(failed("connect"))?;
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            let mut stream = BufReader::new(stream);
            for number in 1..=requests {
                stream.get_mut().write_all(b"?\n").map_err(failed("ask"))?;
                let mut line = String::new();
                stream.read_line(&mut line).map_err(failed("answer"))?;
                if !line.ends_with(&format!(" {number}\n")) {
                    return Err(format!("request {number} of {requests} was answered with {line:?}"));
                }
                seen.answers.fetch_add(1, Ordering::Relaxed);
            }
            drop(connection_lock);
            thread::sleep(Duration::from_micros(500));
        }
        Ok(())
    }

    /// Opens connections and resets them, before they are accepted or in the middle of a line, until it is stopped. Returns their
    /// number.
    fn rude(address: &str, stop: &AtomicBool) -> u64 {
        let mut resets = 0;
        while !stop.load(Ordering::Acquire) {
            for words in [&b""[..], b"half a line", b"?\nand half a line"] {
                // Errors are expected: a killed worker may have had the connection.
                let Ok(mut stream) = TcpStream::connect(address) else { continue };
                let _ = stream.write_all(words);
                option::set_reset_on_close(stream.as_fd()).unwrap();
                resets += 1;
            }
            thread::sleep(Duration::from_millis(2));
        }
        resets
    }

    /// Sends SYNs, each from another address and port that does not exist.
    struct Flood {
        sources: Vec<Raw>,
        sent: u32,
    }

    impl Flood {
        fn open(to: SocketAddrV4) -> Flood {
            let sources = (2..10).map(|last| Raw::open(Ipv4Addr::new(127, 0, 0, last), to)).collect();
            Flood { sources, sent: 0 }
        }

        fn volley(&mut self) {
            for _ in 0..VOLLEY {
                let (number, sources) = (self.sent as usize, self.sources.len());
                self.sources[number % sources].send(1024 + (number / sources % 60_000) as u16, SYN);
                self.sent += 1;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Waits until no worker has found a leak for longer than one check takes.
    fn settled(prefork: &mut Prefork) -> u64 {
        const STEADY: Duration = Duration::from_secs(6);
        let end = Instant::now() + DEADLINE;
        let mut leaks = prefork.counts("leaks");
        let mut since = Instant::now();
        while since.elapsed() < STEADY {
            assert!(Instant::now() < end, "leaks are found on and on: {leaks:?}");
            thread::sleep(Duration::from_millis(100));
            let now = prefork.counts("leaks");
            if now != leaks {
                (leaks, since) = (now, Instant::now());
            }
        }
        leaks.iter().sum()
    }

    /// Runs floods, resets and kills beside honest clients. Returns the resets, and the SYNs sent after the last kill.
    fn storm(prefork: &mut Prefork, flood: &mut Flood, connection_lock: &RwLock<()>) -> (u64, u32) {
        let address = prefork.address.clone();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stopping = StopOnDrop(&stop);
            let rude = scope.spawn(|| rude(&address, &stop));
            for kill in 0..kills() {
                (0..VOLLEYS).for_each(|_| flood.volley());
                let _no_request_runs = connection_lock.write().unwrap();
                let said = prefork.order(&format!("kill {}", kill as usize % WORKERS));
                assert!(said.ends_with("signal: 9 (SIGKILL)"), "{said}");
            }
            let before = flood.sent;
            (0..VOLLEYS).for_each(|_| flood.volley());
            drop(stopping);
            (rude.join().unwrap(), flood.sent - before)
        })
    }

    /// Returns whether each worker got at least a third of the mean.
    fn none_starves(requests: &[u64]) -> bool {
        let mean = requests.iter().sum::<u64>() / WORKERS as u64;
        requests.iter().filter(|&&requests| requests >= mean / 3).count() == WORKERS
    }

    #[test]
    fn least_busy_workers_survive_floods_resets_and_kills() {
        let Some(example) = example(TEST) else { return };
        in_namespace(move || {
            if !is_available(AcceptPolicy::ReuseportLeastBusy, TEST) {
                return;
            }
            set_sysctl("net.core.somaxconn", "4096");
            // Honest clients close first and get the TIME_WAIT sockets.
            set_sysctl("net.ipv4.ip_local_port_range", "10000 65000");
            let mut prefork = Prefork::start(&example, "reuseport-least-busy", WORKERS);
            let address = prefork.address.clone();
            let mut flood = Flood::open(address.parse().unwrap());
            let seen = HonestClients::default();
            let (resets, last, leaked, quiet) = thread::scope(|scope| {
                let stopping = StopOnDrop(&seen.stop);
                let (address, seen) = (&address, &seen);
                let clients =
                    [1, 1, 1, 20].map(|requests| scope.spawn(move || honest(address, requests, seen)));
                let (resets, last) = storm(&mut prefork, &mut flood, &seen.connection_lock);
                let leaked = settled(&mut prefork);

                let end = Instant::now() + DEADLINE * kills();
                // A worker that waits for a CPU for long may find a leak later: then another period is counted.
                let quiet = loop {
                    let before = prefork.counts("stats");
                    let enough = seen.answers.load(Ordering::Relaxed) + QUIET * u64::from(kills());
                    while seen.answers.load(Ordering::Relaxed) < enough
                        && !clients.iter().any(|it| it.is_finished())
                    {
                        assert!(Instant::now() < end, "requests are answered no more");
                        thread::sleep(Duration::from_millis(10));
                    }
                    let now = prefork.counts("stats");
                    let quiet: Vec<u64> = now.iter().zip(&before).map(|(now, then)| now - then).collect();
                    if none_starves(&quiet) || Instant::now() >= end {
                        break quiet;
                    }
                };
                drop(stopping);
                let failed: Vec<_> = clients.into_iter().filter_map(|it| it.join().unwrap().err()).collect();
                assert_eq!(failed, Vec::<String>::new(), "of honest clients");
                (resets, last, leaked, quiet)
            });
            eprintln!(
                "{} SYNs without a client, {resets} resets, {} workers killed; honest requests: {} answered, 0 failed; when it was \
             quiet, by seat: {quiet:?}; leaked and found: {leaked}",
                flood.sent,
                kills(),
                seen.answers.load(Ordering::Relaxed),
            );
            // Under load newer connections replace leaked ones in the counters, and the counters of a killed worker are reset.
            assert!(leaked >= u64::from(last) / 2, "{leaked} found of {last} at least");
            assert!(none_starves(&quiet), "one worker starves: {quiet:?}");
            assert_eq!(quiet.iter().filter(|&&requests| requests > 0).count(), WORKERS, "one seat is free");
            prefork.stop();
        });
    }
}
