//! `fourtuple fix accept` on servers that are used if they are installed: Node.js 22.12 or later, and Envoy.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::program::fixing::{self, attached};
use crate::program::situation::{envoy, has};
use crate::program::{Room, children, fourtuple, run};
use fourtuple_syscalls::{child, schedule};
use fourtuple_testing::{in_namespace, skip};

const WORKERS: usize = 4;
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
    fn node(test: &str, room: &Room, policy: &str, address: SocketAddr, reuse: &str) -> Option<Server> {
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
        let script = room.file("server.js", NODE);
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
fn ask(address: SocketAddr, words: &str) -> Option<String> {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(SILENCE)).unwrap();
    connection.write_all(words.as_bytes()).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).ok().filter(|length| *length > 0).map(|_| answer)
}

#[test]
fn a_blocked_worker_of_node_gets_no_connection() {
    for policy in ["none", "rr"] {
        in_namespace(move || {
            let test = "fix_accept_peers::a_blocked_worker_of_node_gets_no_connection";
            let address: SocketAddr = "127.0.0.1:4300".parse().unwrap();
            let room = Room::new();
            let Some(server) = Server::node(test, &room, policy, address, "reuse") else { return };
            let flags = format!("fix accept --pid {} --select least-busy --json", server.0.id());
            let Some(fix) = attached(test, &flags) else { return };
            let mut blocker = TcpStream::connect(address).unwrap();
            blocker.write_all(b"block").unwrap();
            let answered = (0..100).take_while(|_| ask(address, "hello").is_some()).count();
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
    in_namespace(|| {
        let test = "fix_accept_peers::node_without_a_group_is_refused_with_its_setting";
        let address: SocketAddr = "127.0.0.1:4301".parse().unwrap();
        let room = Room::new();
        let Some(_server) = Server::node(test, &room, "none", address, "share") else { return };
        let ended = run(&mut fourtuple(&format!("fix accept --listen {address} --select random")));
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        let refused = ended.line();
        assert!(refused.contains("`reusePort: true`") || refused.contains("bpf("), "{refused}");
    });
}

/// The listeners of Envoy are groups by default.
#[test]
fn the_workers_of_envoy_get_the_connections_of_the_rule() {
    in_namespace(|| {
        let test = "fix_accept_peers::the_workers_of_envoy_get_the_connections_of_the_rule";
        let address: SocketAddr = "127.0.0.1:4302".parse().unwrap();
        let room = Room::new();
        if !has(test, &["envoy"]) {
            return;
        }
        let server = envoy(&room, address.port(), WORKERS);
        let flags = format!("fix accept --pid {} --select cpu --json", server.pid());
        let Some(fix) = attached(test, &flags) else { return };
        schedule::pin_to(schedule::allowed_cpus().unwrap()[0]).unwrap();
        let held: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
        let request = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let answer = ask(address, request).unwrap_or_default();
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
