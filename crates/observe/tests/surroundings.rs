//! Traces of connect() by cgroup, in another network namespace, with a peer that drops SYNs, and over IPv6.

mod traced;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use fourtuple_observe::trace::{Connect, Outcome};
use fourtuple_record::TraceConnectResults;
use fourtuple_syscalls::socket::{self, Progress, Transport};
use fourtuple_syscalls::{netns, option};
use fourtuple_testing::accept_queue::{listen_overflows, tcp_counter};
use fourtuple_testing::process::{start, undisturbed};
use fourtuple_testing::{cgroup_root, listener, set_sysctl, skip};
use traced::{elsewhere, named, own_network, to, traced, tuple, until_none_missed};

/// Time after which a test fails.
const DEADLINE: Duration = Duration::from_secs(60);

fn dial(destination: SocketAddr) -> OwnedFd {
    let socket = socket::open(Transport::Tcp, destination, false).unwrap();
    socket::connect(socket.as_fd(), destination).unwrap();
    socket
}

/// A new cgroup. Dropping it moves this process back to its previous cgroup.
struct Cgroup {
    before: PathBuf,
    own: PathBuf,
}

impl Cgroup {
    fn make() -> Result<Cgroup, String> {
        let root = cgroup_root().map_err(|error| format!("no cgroup2 file system: {error}"))?;
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
        let path = groups.lines().find_map(|line| line.strip_prefix("0::/")).ok_or("no cgroup2")?;
        let before = root.join(path);
        let own = before.join(format!("fourtuple-test-{}", process::id()));
        // A killed process with the same ID may have left it.
        fs::create_dir_all(&own).map_err(|error| format!("{}: {error}", own.display()))?;
        Ok(Cgroup { before, own })
    }

    fn enter(&self, directory: &Path) -> io::Result<()> {
        fs::write(directory.join("cgroup.procs"), process::id().to_string())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.enter(&self.before);
        let _ = fs::remove_dir(&self.own);
    }
}

#[test]
fn only_connects_in_the_cgroup_are_counted() {
    named(|test| {
        let cgroup = match Cgroup::make() {
            Err(reason) => return skip(test, "cgroup", &reason),
            Ok(cgroup) => cgroup,
        };
        let (_listener, destination) = listener("127.0.4.1", 64);
        let id = fs::metadata(&cgroup.own).unwrap().ino();
        let connect = Connect { cgroup: Some(id), ..to(destination) };
        let program = || {
            let mut sockets: Vec<OwnedFd> = (0..2).map(|_| dial(destination)).collect();
            if let Err(error) = cgroup.enter(&cgroup.own) {
                return Err(format!("{}: {error}", cgroup.own.display()));
            }
            sockets.extend((0..3).map(|_| dial(destination)));
            cgroup.enter(&cgroup.before).unwrap();
            sockets.extend((0..4).map(|_| dial(destination)));
            Ok(())
        };
        let Some((moved, outcome)) = until_none_missed(|| traced(test, &connect, program)) else { return };
        if let Err(reason) = moved {
            return skip(test, "cgroup", &reason);
        }
        let tuple = tuple(&outcome.results, destination);
        assert_eq!((outcome.results.searches, tuple.searches, tuple.established), (3, 3, 3), "{tuple:?}");
    });
}

#[test]
fn a_retransmitted_syn_is_counted() {
    named(|test| {
        // The queue has space for one connection.
        let (listener, destination) = listener("127.0.4.2", 0);
        let program = || {
            let first = dial(destination);
            // poll() may report the connection before the kernel counts it (inet_csk_reqsk_queue_add).
            while option::accept_queue(listener.as_fd()).unwrap() == 0 {
                thread::yield_now();
            }
            // Before connect(): a second after it, the client has retransmitted its SYN.
            let (before, retries) = (listen_overflows(), tcp_counter("TCPSynRetrans"));
            let second = socket::open(Transport::Tcp, destination, true).unwrap();
            socket::connect(second.as_fd(), destination).unwrap();
            // Accept only after the kernel has dropped the SYN, so that the client retransmits it.
            let begun = Instant::now();
            while listen_overflows() == before {
                assert!(begun.elapsed() < DEADLINE, "the listener dropped no SYN");
                thread::sleep(Duration::from_millis(1));
            }
            let accepted = socket::accept(listener.as_fd()).unwrap();
            let progress = socket::wait_connected(second.as_fd(), Some(DEADLINE)).unwrap();
            assert_eq!(progress, Progress::Connected);
            // The queue is empty for another run.
            let queued = socket::accept(listener.as_fd()).unwrap();
            drop((first, second, accepted, queued));
            tcp_counter("TCPSynRetrans") - retries
        };
        let run = || traced(test, &to(destination), program);
        let Some((retries, outcome)) = until_none_missed(run) else { return };
        assert!(retries >= 1, "the client sent its SYN once");
        let tuple = tuple(&outcome.results, destination);
        assert_eq!((tuple.searches, tuple.established, tuple.failed), (2, 2, 0), "{tuple:?}");
        assert_eq!(tuple.syn_retries, retries, "{tuple:?}");
    });
}

/// Environment variable of the child process that dials in a new network namespace.
const DIALS: &str = "FOURTUPLE_TEST_DIALS";

/// Writes its destination to stderr, dials at the first line of stdin, and exits at the second.
fn dial_on_request() {
    set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
    let (_listener, destination) = listener("127.0.4.3", 64);
    let mut lines = io::stdin().lines();
    eprintln!("to {destination}");
    lines.next();
    let _sockets: Vec<OwnedFd> = (0..10).map(|_| dial(destination)).collect();
    eprintln!("dialed");
    lines.next();
}

#[test]
fn ports_in_use_are_counted_in_the_traced_namespace() {
    if env::var_os(DIALS).is_some() {
        return dial_on_request();
    }
    let test = "ports_in_use_are_counted_in_the_traced_namespace";
    let Some(((), outcome)) = until_none_missed(|| traced_child(test)) else { return };
    let [tuple] = &outcome.results.tuples[..] else { panic!("{:?}", outcome.results) };
    assert_eq!((tuple.searches, tuple.in_use, tuple.range), (10, Some(10), Some(100)), "{tuple:?}");
    assert_eq!(tuple.fill, Some(0.1));
}

/// Traces a child process that dials in a new network namespace.
fn traced_child(test: &str) -> Option<((), Outcome<TraceConnectResults>)> {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DIALS, "1");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    netns::start_in_new(&mut command);
    let mut child = match start(&mut command) {
        Err(error) => {
            skip(test, "netns", &error.to_string());
            return None;
        }
        Ok(child) => child,
    };
    // When this test fails, stdin closes and the child exits.
    let mut stdin = child.stdin.take().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line =
        stderr.by_ref().find(|line| line.starts_with("to ")).expect("the child reports its destination");
    let destination: SocketAddr = line[3..].parse().unwrap();
    let connect = Connect { process: Some(child.id()), network: None, ..to(destination) };
    let found = traced(test, &connect, || {
        writeln!(stdin, "now").unwrap();
        assert!(stderr.any(|line| line == "dialed"));
    });
    drop(stdin);
    assert!(child.wait().unwrap().success());
    found
}

/// A process may have threads in several network namespaces, and connect to the same address in each.
#[test]
fn connects_in_another_namespace_are_not_counted() {
    named(|test| {
        let (_listener, destination) = listener("127.0.4.4", 64);
        // No socket listens at the next port, in both namespaces.
        let closed = SocketAddr::new(destination.ip(), destination.port() ^ 1);
        let refused = || {
            let socket = socket::open(Transport::Tcp, closed, false).unwrap();
            socket::connect(socket.as_fd(), closed).unwrap_err();
        };
        let dials = |number: u32| {
            let sockets: Vec<OwnedFd> = (0..number).map(|_| dial(destination)).collect();
            // A child of another test has copies of the sockets until its exec.
            undisturbed(|| drop(sockets));
            (0..number).for_each(|_| refused());
        };
        let program = || {
            dials(2);
            elsewhere(|| {
                let socket = socket::open(Transport::Tcp, destination, false).unwrap();
                socket::bind(socket.as_fd(), destination).unwrap();
                socket::listen(socket.as_fd(), 64).unwrap();
                dials(5);
            });
            dials(1);
        };
        let of_process = Connect { port: None, ..to(destination) };
        for (network, number) in [(Some(own_network()), 3), (None, 8), (Some(1), 0)] {
            let connect = Connect { network, ..of_process.clone() };
            let Some(((), outcome)) = until_none_missed(|| traced(test, &connect, program)) else { return };
            let results = &outcome.results;
            assert_eq!((results.searches, results.established), (2 * number, number), "{results:?}");
            let refused = results.failed.get("ECONNREFUSED").copied().unwrap_or_default();
            assert_eq!(refused, number, "{results:?}");
            let failed: u64 = results.calls.seen().unwrap().calls.iter().map(|call| call.failed).sum();
            assert_eq!(failed, number, "{results:?}");
            let closed: u64 = results.tuples.iter().map(|tuple| tuple.closed_first).sum();
            assert_eq!(closed, number, "{results:?}");
        }
    });
}

#[test]
fn ipv6_without_a_destination_filter_counts_all() {
    named(|test| {
        // No other test of this process dials this port.
        let destination = SocketAddr::from((Ipv6Addr::LOCALHOST, 4_777));
        let listener = socket::open(Transport::Tcp, destination, false).unwrap();
        socket::bind(listener.as_fd(), destination).unwrap();
        socket::listen(listener.as_fd(), 256).unwrap();
        let connect = Connect { address: None, ..to(destination) };
        let program = || {
            let mut sockets: Vec<OwnedFd> = (0..40).map(|_| dial(destination)).collect();
            // Meanwhile the trace attaches to net_dev_queue. On a slow machine more connections stay untimed.
            thread::sleep(Duration::from_millis(300));
            sockets.extend((0..40).map(|_| dial(destination)));
        };
        let run = || traced(test, &connect, program);
        let Some(((), outcome)) = until_none_missed(run) else { return };
        let results = &outcome.results;
        assert_eq!(outcome.validity, [], "{results:?}");
        assert!(results.untimed >= 1, "the first connection was timed: {results:?}");
        assert_eq!((results.untimed + results.searches, results.established), (80, 80), "{results:?}");
        assert_eq!(tuple(results, destination).established, 80);
    });
}
