//! `fourtuple fix accept --select rotate`: workers that share a listener with EPOLLEXCLUSIVE. And `fix accept` on servers that are used if
//! they are installed: Node.js 22.12 or later, and Envoy.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_record::measure::balance::jain;
use fourtuple_syscalls::epoll::Registration;
use fourtuple_syscalls::{child, procfs, schedule};
use fourtuple_testing::process::Python;
use fourtuple_testing::skip;
use serde_json::Value;

use crate::program::fixing::{self, attached, record_of};
use crate::program::situation::{Daemon, envoy, has, nginx, wait_for};
use crate::program::{TempDir, children, fourtuple, in_own_namespace, list, number, run, stat, until};

const WORKERS: usize = 4;

/// Starts nginx with a listener for TCP and a unix listener, and returns it with the path of that one.
fn start_nginx(temp: &TempDir, port: u16) -> (Daemon, String) {
    let path = temp.join("socket");
    let server = format!(
        "server {{ listen 127.0.0.1:{port}; listen unix:{path}; location / {{ return 200 \"$pid\"; }} }}"
    );
    let nginx_daemon = nginx(temp, "nginx", WORKERS as u32, None, &server);
    wait_for("127.0.0.1", port);
    until("all workers wait", || workers(&nginx_daemon).len() == WORKERS);
    (nginx_daemon, path)
}

/// Returns the children of a server that wait for a listener with EPOLLEXCLUSIVE.
fn workers(server: &Daemon) -> Vec<u32> {
    let exclusive = |worker: &u32| registrations(*worker).iter().any(Registration::is_exclusive);
    children(server.pid()).into_iter().filter(exclusive).collect()
}

/// Returns all registrations with epoll of a process.
fn registrations(process: u32) -> Vec<Registration> {
    let all = procfs::descriptors("/", process).into_iter().flatten();
    let epolls = all.filter(|(_, name)| name.as_os_str() == "anon_inode:[eventpoll]");
    epolls
        .flat_map(|(epoll, _)| {
            let text = fs::read_to_string(format!("/proc/{process}/fdinfo/{epoll}")).unwrap_or_default();
            Registration::listed(&text).map(|(registration, _)| registration).collect::<Vec<_>>()
        })
        .collect()
}

trait Connection: Read + Write {}
impl<T: Read + Write> Connection for T {}

fn connect(place: &str) -> Box<dyn Connection> {
    match place.strip_prefix("unix:") {
        Some(path) => Box::new(UnixStream::connect(path).unwrap()),
        None => Box::new(TcpStream::connect(place).unwrap()),
    }
}

/// Sends a request of HTTP over a connection, and returns the process in the response.
fn ask(connection: &mut dyn Connection) -> u32 {
    connection.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut response = vec![0; 1024];
    let length = connection.read(&mut response).unwrap();
    let response = String::from_utf8_lossy(&response[..length]).into_owned();
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    response.rsplit("\r\n").next().unwrap().parse().unwrap()
}

/// Returns what nginx has logged, without the alert of a worker that ran between the two calls of a move (docs/fix-accept.md).
fn errors_of(temp: &TempDir) -> Vec<String> {
    let log = fs::read_to_string(temp.join("nginx/error.log")).unwrap();
    let is_of_move = |line: &&str| {
        line.contains(" epoll_ctl(2, ") && line.ends_with(" failed (2: No such file or directory)")
    };
    log.lines().filter(|line| !is_of_move(line)).map(str::to_owned).collect()
}

/// Makes connections that are kept, each when all workers sleep, and returns Jain's index of the connections of the workers.
fn jain_of(place: &str, workers: &[u32]) -> f64 {
    let is_idle = |worker: &u32| stat(*worker).is_some_and(|(state, _)| state == 'S');
    let mut counts: BTreeMap<u32, u64> = workers.iter().map(|worker| (*worker, 0)).collect();
    let mut kept = Vec::new();
    for _ in 0..48 {
        until("all workers sleep", || workers.iter().all(is_idle));
        let mut connection = connect(place);
        *counts.get_mut(&ask(connection.as_mut())).unwrap() += 1;
        kept.push(connection);
    }
    jain(&counts.into_values().collect::<Vec<_>>()).unwrap()
}

#[test]
fn kept_connections_of_nginx_become_even() {
    in_own_namespace(|test| {
        if !has(test, &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let (server, path) = start_nginx(&temp, 4300);
        let workers = workers(&server);
        for place in ["127.0.0.1:4300".to_owned(), format!("unix:{path}")] {
            assert!(jain_of(&place, &workers) < 0.9, "{place}: the first workers have most connections");
            let flags = format!("fix accept --listen {place} --select rotate --json");
            let Some(fix) = attached(test, &flags) else { return };
            // On a busy host connections may come faster than their workers are moved, and be even by chance.
            for _ in 0..3 {
                until("all workers have equal shares", || jain_of(&place, &workers) > 0.9);
            }
            // `doctor` knows the fix, and does not propose it again.
            let diagnosis = run(&mut fourtuple("doctor --no-trace --for 100ms --json")).json();
            let kind = if place.starts_with("unix:") { "unix_listeners" } else { "listeners" };
            let known = list(&diagnosis, &format!("/results/snapshot/{kind}/seen")).iter();
            let known: Vec<&Value> = known.map(|listener| &listener["fix"]).collect();
            assert!(known.contains(&&fix.id().into()), "{known:?}");
            let record = record_of(fix);
            let (results, rows) = (&record["results"], list(&record, "/results/listeners"));
            assert_eq!((rows.len(), &record["validity"]), (WORKERS, &serde_json::json!([])), "{record}");
            for row in rows {
                assert!(number(row, "moves") > 0 && row["open"].is_null(), "{record}");
                assert!(number(row, "moves") <= number(row, "connections"), "{record}");
            }
            assert_eq!(number(results, "connections") % 48, 0, "{record}");
        }
        assert_eq!(errors_of(&temp), Vec::<String>::new());
    });
}

#[test]
fn workers_of_a_process_tree_are_counted() {
    in_own_namespace(|test| {
        if !has(test, &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let (server, path) = start_nginx(&temp, 4301);
        let flags = format!("fix accept --pid {} --select rotate --dry-run --json", server.pid());
        let Some(fix) = attached(test, &flags) else { return };
        for _ in 0..10 {
            ask(connect("127.0.0.1:4301").as_mut());
            ask(connect(&format!("unix:{path}")).as_mut());
        }
        let record = record_of(fix);
        assert_eq!((&record["results"]["connections"], &record["results"]["moves"]), (&20.into(), &0.into()));
        let of = |transport: &str| -> u64 {
            let rows = list(&record, "/results/listeners").iter();
            rows.filter(|row| row["transport"] == transport).map(|row| number(row, "connections")).sum()
        };
        assert_eq!((of("tcp"), of("unix")), (10, 10), "{record}");
    });
}

/// Kills fourtuple, or the process that moves, after a number of requests that differs in each round.
#[test]
fn after_sigkill_every_worker_accepts() {
    in_own_namespace(|test| {
        if !has(test, &["nginx"]) {
            return;
        }
        let temp = TempDir::new();
        let (server, _) = start_nginx(&temp, 4302);
        let before = workers(&server);
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let (stop, served) = (Arc::clone(&stop), Arc::clone(&served));
                thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        ask(connect("127.0.0.1:4302").as_mut());
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let flags = "fix accept --listen 127.0.0.1:4302 --select rotate --json";
        for round in 0..20 {
            let Some(mut fix) = attached(test, flags) else { break };
            let mover = children(fix.id())[0];
            let begun = served.load(Ordering::Relaxed);
            let has_served = |more: u64| served.load(Ordering::Relaxed) >= begun + more;
            until("requests are served", || has_served(10 + 17 * round));
            if round % 4 == 0 {
                child::kill(mover).unwrap();
                until("another process moves workers", || {
                    children(fix.id()).first().is_some_and(|next| *next != mover)
                });
                let record = record_of(fix);
                assert_eq!(record["validity"], serde_json::json!([]), "{record}");
            } else {
                child::kill(fix.id()).unwrap();
                fix.wait().unwrap();
                until("the mover has ended", || stat(mover).is_none_or(|(state, _)| state == 'Z'));
            }
            until("every worker is registered", || workers(&server) == before);
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().expect("no request fails"));
        assert_eq!(errors_of(&temp), Vec::<String>::new());
    });
}

/// Workers that wait with EPOLLEXCLUSIVE and answer with their number. On `leave` one removes its registration, and on `plain` it adds it
/// without EPOLLEXCLUSIVE.
const SERVER: &str = "\
def work(number):
  e = select.epoll(); e.register(s.fileno(), events)
  os.write(ready[1], b'x')
  while True:
    e.poll()
    try: c = s.accept()[0]
    except BlockingIOError: continue
    held.append(c); word = c.recv(8)
    if word != b'hello': e.unregister(s.fileno())
    if word == b'plain': e.register(s.fileno(), select.EPOLLIN)
    c.sendall(str(number).encode())
s = socket.socket(); s.bind(('127.0.0.1', port)); s.listen(100); s.setblocking(False)
ready = os.pipe(); pids = []
for number in range(4):
  pids.append(os.fork())
  if pids[-1] == 0: os.close(0); work(number)
  os.read(ready[0], 1)
";

const EXCLUSIVE: &str = "events = select.EPOLLIN | select.EPOLLEXCLUSIVE";

fn say(address: SocketAddr, word: &str) -> usize {
    let mut connection = fourtuple_testing::connect(address);
    connection.write_all(word.as_bytes()).unwrap();
    let mut answer = [0; 1];
    connection.read_exact(&mut answer).unwrap();
    usize::from(answer[0] - b'0')
}

#[test]
fn registrations_that_a_worker_removes_or_changes_stay_so() {
    in_own_namespace(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let address: SocketAddr = "127.0.0.1:4303".parse().unwrap();
        let mut server = Python::start();
        server.run(&format!("port = 4303; {EXCLUSIVE}\n{SERVER}"));
        let pids: Vec<u32> =
            (0..WORKERS).map(|at| server.number(&format!("print(pids[{at}])")) as u32).collect();
        let is_idle = |pid: &u32| stat(*pid).is_none_or(|(state, _)| state == 'S' || state == 'Z');
        let hello = || {
            until("all workers sleep", || pids.iter().all(is_idle));
            say(address, "hello")
        };
        assert!((0..20).all(|_| hello() == 0), "the first worker has all connections");
        let Some(fix) = attached(test, &format!("fix accept --listen {address} --select rotate --json"))
        else {
            return;
        };
        let until_turns = |numbers: &[usize]| {
            until("workers take turns", || {
                let mut found: Vec<usize> = (0..2 * WORKERS).map(|_| hello()).collect();
                found.sort_unstable();
                found.dedup();
                found == numbers
            });
        };
        until_turns(&[0, 1, 2, 3]);
        let left = say(address, "leave");
        let rest: Vec<usize> = (0..WORKERS).filter(|number| *number != left).collect();
        until_turns(&rest);
        server.run(&format!("os.kill(pids[{0}], signal.SIGKILL); os.waitpid(pids[{0}], 0)", rest[0]));
        until_turns(&rest[1..]);
        let plain = say(address, "plain");
        for _ in 0..40 {
            hello();
        }
        let registered = |number: usize| registrations(pids[number]);
        assert_eq!(registered(left), [], "it stays removed");
        assert!(matches!(&registered(plain)[..], [only] if !only.is_exclusive()), "it stays plain");
        let last = rest[1..].iter().copied().find(|number| *number != plain).unwrap();
        // The last of its moves may be under way.
        until("it is registered", || matches!(&registered(last)[..], [only] if only.is_exclusive()));
        let record = record_of(fix);
        assert_eq!(record["results"]["closed"], 1, "{record}");
    });
}

#[test]
fn servers_without_a_fixed_order_are_refused() {
    in_own_namespace(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let mut server = Python::start();
        server.run(&format!("port = 4304; events = select.EPOLLIN\n{SERVER}"));
        server.run(&format!("{EXCLUSIVE}\nt = socket.socket(); t.bind(('127.0.0.1', 4305)); t.listen(1)"));
        server.run("e = select.epoll(); e.register(t.fileno(), events)");
        for (flags, code, words) in [
            ("--listen 127.0.0.1:4304", 4, "no process waits for 127.0.0.1:4304 (python3, process "),
            ("--listen 127.0.0.1:4305", 4, "only one process waits for 127.0.0.1:4305 (python3, process "),
            ("--listen 127.0.0.1:4306", 4, "nothing listens at 127.0.0.1:4306"),
            ("--listen unix:/no/socket", 4, "no unix socket that was bound to /no/socket"),
            ("--listen unix:", 2, "expected a path after unix:"),
            ("--listen unix:/no/socket --select least-busy", 2, "needs --select rotate, not least-busy"),
            ("--listen 127.0.0.1:4304 --control ttl=255", 2, "--control is for UDP groups"),
        ] {
            let select = if flags.contains("--select") { "" } else { "--select rotate" };
            let ended = run(&mut fourtuple(&format!("fix accept {flags} {select}")));
            assert_eq!((ended.code, ended.stdout.as_str()), (code, ""), "{flags}: {ended:?}");
            if ended.line().contains("bpf(") {
                return fourtuple_testing::skip(test, "bpf", ended.line());
            }
            assert!(ended.line().contains(words), "{flags}: {ended:?}");
        }
    });
}

/// Time without an answer after which a worker counts as blocked.
const SILENCE: Duration = Duration::from_secs(30);

/// Workers of the module cluster that answer with their number, and on `block` never again.
const NODE: &str = r#"
const cluster = require('cluster'), net = require('net');
const [policy, port, workers, reuse] = process.argv.slice(2);
cluster.schedulingPolicy = policy == 'none' ? cluster.SCHED_NONE : cluster.SCHED_RR;
if (cluster.isPrimary) {
  for (let worker = 0; worker < workers; worker++) cluster.fork({ WORKER: worker });
  // The event 'listening' of the primary does not occur with reusePort.
  cluster.on('message', () => console.log('listening'));
  process.stdin.on('end', () => { for (const id in cluster.workers) cluster.workers[id].process.kill('SIGKILL'); process.exit(); }).resume();
} else {
  const answer = connection => connection.on('error', () => {}).on('data', words => {
    if (words == 'block') Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0);
    connection.end(process.env.WORKER);
  });
  net.createServer(answer).listen({ host: '127.0.0.1', port: +port, reusePort: reuse == 'reuse' }, () => process.send('listening'));
}
"#;

/// A running server, killed on drop with its workers.
struct Server(Child);

impl Server {
    /// Starts Node.js and waits until all workers listen; `None` after a skip.
    fn node(test: &str, temp: &TempDir, policy: &str, address: SocketAddr, reuse: &str) -> Option<Server> {
        let is_new = |program: &&str| {
            let version = Command::new(program).arg("--version").output();
            let text = version
                .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
                .unwrap_or_default();
            let mut numbers =
                text.trim().trim_start_matches('v').split('.').map(|word| word.parse().unwrap_or(0));
            (numbers.next().unwrap_or(0_u32), numbers.next().unwrap_or(0_u32)) >= (22, 12)
        };
        let Some(program) = ["node", "node-22"].into_iter().find(is_new) else {
            skip(test, "node-22", "neither node nor node-22 in PATH is Node.js 22.12 or later");
            return None;
        };
        let script = temp.file("server.js", NODE);
        let mut node = Command::new(program);
        node.args([&script, policy, &address.port().to_string(), &WORKERS.to_string(), reuse]);
        let mut child = node.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.take(WORKERS).flatten().count(), WORKERS);
        Some(Server(child))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The primary first: it may start a worker again.
        let workers = children(self.0.id());
        for process in [self.0.id()].into_iter().chain(workers) {
            let _ = child::kill(process);
        }
        let _ = self.0.wait();
    }
}

/// Sends words over a new connection and returns the answer; `None` if there is none.
fn answer(address: SocketAddr, words: &str) -> Option<String> {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(SILENCE)).unwrap();
    connection.write_all(words.as_bytes()).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).ok().filter(|length| *length > 0).map(|_| answer)
}

#[test]
fn a_blocked_worker_of_node_gets_no_connection() {
    for policy in ["none", "rr"] {
        in_own_namespace(move |test| {
            let address: SocketAddr = "127.0.0.1:4300".parse().unwrap();
            let temp = TempDir::new();
            let Some(server) = Server::node(test, &temp, policy, address, "reuse") else { return };
            let flags = format!("fix accept --pid {} --select least-busy --json", server.0.id());
            let Some(fix) = attached(test, &flags) else { return };
            let mut blocker = TcpStream::connect(address).unwrap();
            blocker.write_all(b"block").unwrap();
            let answered = (0..100).take_while(|_| answer(address, "hello").is_some()).count();
            let results = fixing::record_of(fix)["results"].clone();
            // A heartbeat that came late leaves connections to the hash.
            if results["lapsed"] == 0 {
                assert_eq!(answered, 100, "{results}");
                let rows = results["listeners"].as_array().unwrap();
                assert_eq!(rows.len(), WORKERS, "{results}");
                let blocked = rows.iter().find(|row| row["open"] == 1).unwrap_or_else(|| panic!("{results}"));
                assert_eq!((&blocked["choices"], &results["connections"]), (&1.into(), &101.into()));
            }
        });
    }
}

#[test]
fn node_without_a_group_is_refused_with_its_setting() {
    in_own_namespace(|test| {
        let address: SocketAddr = "127.0.0.1:4301".parse().unwrap();
        let temp = TempDir::new();
        let Some(_server) = Server::node(test, &temp, "none", address, "share") else { return };
        let ended = run(&mut fourtuple(&format!("fix accept --listen {address} --select random")));
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        let refused = ended.line();
        assert!(refused.contains("`reusePort: true`") || refused.contains("bpf("), "{refused}");
    });
}

/// The listeners of Envoy are groups by default.
#[test]
fn the_workers_of_envoy_get_the_connections_of_the_rule() {
    in_own_namespace(|test| {
        let address: SocketAddr = "127.0.0.1:4302".parse().unwrap();
        let temp = TempDir::new();
        if !has(test, &["envoy"]) {
            return;
        }
        let server = envoy(&temp, address.port(), WORKERS);
        let flags = format!("fix accept --pid {} --select cpu --json", server.pid());
        let Some(fix) = attached(test, &flags) else { return };
        schedule::pin_to(schedule::allowed_cpus().unwrap()[0]).unwrap();
        let held: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
        let request = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let answer = answer(address, request).unwrap_or_default();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let results = fixing::record_of(fix)["results"].clone();
        if results["lapsed"] == 0 {
            let rows = results["listeners"].as_array().unwrap();
            assert_eq!(rows.len(), WORKERS, "{results}");
            assert!(rows.iter().any(|row| row["choices"] == 41), "one worker has all: {results}");
            assert!(rows.iter().all(|row| row["connections"] == row["choices"]), "{results}");
        }
        drop(held);
    });
}
