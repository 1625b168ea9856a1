//! `fourtuple fix ports` and programs that know nothing of fourtuple, at 90% use of a port range to one destination.
//!
//! `unmodified_clients_find_free_ports` checks with a small range that no connect fails. `rates_bare_and_fixed` measures:
//!
//! ```text
//! cargo test --release --test commands fix_clients -- --ignored --nocapture
//! ```
//!
//! `FOURTUPLE_CLIENTS=curl,go` selects clients. `FOURTUPLE_PREFIX='fourtuple run --'` starts the clients of the fixed runs with these
//! words in front of their command, instead of `fourtuple fix ports`. `FOURTUPLE_SECONDS` is the time of a run, 3 by default.

use std::env;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::program::fixing::Cgroup;
use crate::program::fixing::{attached, record_of};
use crate::program::{DEADLINE, TempDir, in_own_namespace};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{child, resource};
use fourtuple_testing::process::until_expected;
use fourtuple_testing::{set_sysctl, skip};
use serde_json::Value;

const LOW: u16 = 20_000;
/// The destination of which 90% of the ports are in use, and a destination of the same server without connections.
const FULL: u16 = 4_000;
const EMPTY: u16 = 4_010;
/// The port of a proxy under test.
const PROXY: u16 = 4_020;

/// The instruction of classic BPF that returns its operand (BPF_RET | BPF_K).
const RETURN: u16 = 0x06;

const PYTHON: &str = r#"
import socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
began, connects, failed = time.monotonic(), 0, 0
while time.monotonic() - began < seconds:
    with socket.socket() as s:
        try:
            s.connect((host, port))
            s.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while s.recv(4096):
                pass
            connects += 1
        except OSError:
            failed += 1
print(connects, failed, time.monotonic() - began)
"#;

const NODE: &str = r#"
const net = require("net");
const [host, port, seconds] = [process.argv[2], +process.argv[3], +process.argv[4]];
const began = process.hrtime.bigint();
const elapsed = () => Number(process.hrtime.bigint() - began) / 1e9;
let connects = 0, failed = 0;
function next() {
  if (elapsed() >= seconds) return console.log(connects, failed, elapsed());
  let ok = true;
  const s = net.connect(port, host, () => s.write("GET / HTTP/1.0\r\n\r\n"));
  s.on("data", () => {});
  s.on("error", () => { ok = false; });
  s.on("close", () => { ok ? connects++ : failed++; next(); });
}
next();
"#;

const JAVA: &str = r#"
import java.io.IOException;
import java.net.Socket;

public class Client {
    public static void main(String[] arguments) {
        double seconds = Double.parseDouble(arguments[2]);
        long began = System.nanoTime(), connects = 0, failed = 0;
        byte[] request = "GET / HTTP/1.0\r\n\r\n".getBytes(), buffer = new byte[4096];
        while ((System.nanoTime() - began) / 1e9 < seconds) {
            try (Socket socket = new Socket(arguments[0], Integer.parseInt(arguments[1]))) {
                socket.getOutputStream().write(request);
                while (socket.getInputStream().read(buffer) >= 0) {}
                connects++;
            } catch (IOException error) {
                failed++;
            }
        }
        System.out.println(connects + " " + failed + " " + (System.nanoTime() - began) / 1e9);
    }
}
"#;

const GO: &str = r#"package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

func main() {
	seconds, _ := strconv.ParseFloat(os.Args[3], 64)
	began, connects, failed := time.Now(), 0, 0
	for time.Since(began).Seconds() < seconds {
		connection, err := net.Dial("tcp", os.Args[1]+":"+os.Args[2])
		if err == nil {
			fmt.Fprint(connection, "GET / HTTP/1.0\r\n\r\n")
			_, err = io.Copy(io.Discard, connection)
			connection.Close()
		}
		if err == nil {
			connects++
		} else {
			failed++
		}
	}
	fmt.Println(connects, failed, time.Since(began).Seconds())
}
"#;

/// The connects of a run.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    connects: u64,
    failed: u64,
    seconds: f64,
}

impl Outcome {
    fn rate(&self) -> f64 {
        self.connects as f64 / self.seconds
    }
}

/// A kind of program that connects.
struct Kind {
    name: &'static str,
    /// A command that succeeds where the program is installed.
    installed: &'static [&'static str],
    run: fn(&Site, u16) -> Outcome,
}

const KINDS: [Kind; 9] = [
    Kind { name: "curl", installed: &["curl", "--version"], run: curl },
    Kind { name: "wrk", installed: &["sh", "-c", "command -v wrk"], run: |site, port| wrk(site, port, true) },
    Kind { name: "nginx", installed: &["sh", "-c", "command -v wrk && nginx -v"], run: nginx },
    Kind { name: "haproxy", installed: &["sh", "-c", "command -v wrk && haproxy -v"], run: haproxy },
    Kind {
        name: "python3",
        installed: &["python3", "-c", ""],
        run: |site, port| own(site, port, &["python3", "-c", PYTHON]),
    },
    Kind {
        name: "node",
        installed: &["node", "--version"],
        run: |site, port| own(site, port, &["node", &site.path("client.js")]),
    },
    Kind {
        name: "java",
        installed: &["javac", "-version"],
        run: |site, port| own(site, port, &["java", "-cp", &site.path(""), "Client"]),
    },
    Kind {
        name: "go",
        installed: &["sh", "-c", "PATH=$PATH:/usr/local/go/bin go version"],
        run: |site, port| own(site, port, &[&site.path("go-client")]),
    },
    Kind { name: "io_uring", installed: &["true"], run: io_uring },
];

/// A server, connections to it that use 90% of a port range, and a cgroup for clients.
struct Site {
    cgroup: Cgroup,
    temp: TempDir,
    seconds: f64,
    /// Words in front of the command of a client.
    prefix: Vec<String>,
    _server: Daemon,
    _sink: OwnedFd,
    _held: Vec<OwnedFd>,
}

/// A server program, ended with SIGTERM on drop: `fourtuple run` passes the signal on, and would leave the program behind on SIGKILL.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = child::terminate(self.0.id());
        let _ = self.0.wait();
    }
}

impl Site {
    /// Fills 90% of a range as connect() does: all ports of one parity first. `None` after a skip.
    fn new(test: &str, ports: u16, seconds: f64) -> Option<Site> {
        if !runs(&["nginx", "-v"]) {
            skip(test, "programs", "nginx, the server, does not run");
            return None;
        }
        let cgroup = Cgroup::new(test, "clients")?;
        resource::raise_descriptor_limit().unwrap();
        set_sysctl("net.core.somaxconn", "65535");
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + ports - 1));
        let sink = sink();
        let Some(held) = hold(ports) else {
            skip(test, "ip_local_port_range", "this kernel does not have the option");
            return None;
        };
        let temp = TempDir::new();
        let server = server(&temp);
        // From now on the second socket of the group, nginx's, gets the connections.
        let _ = option::attach_group_selector(sink.as_fd(), &[(RETURN, 0, 0, 1)]).unwrap();
        Some(Site { cgroup, temp, seconds, prefix: Vec::new(), _server: server, _sink: sink, _held: held })
    }

    fn path(&self, name: &str) -> String {
        self.temp.join(name)
    }

    /// Returns a command whose process enters the cgroup before it starts the client.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""]).arg(&self.cgroup.0);
        command.args(&self.prefix).args(words).stdin(Stdio::null());
        command
    }

    fn start(&self, words: &[&str]) -> Daemon {
        let mut command = self.command(words);
        Daemon(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts"))
    }

    /// Runs a client to its end and returns its output.
    fn output(&self, words: &[&str]) -> String {
        let output = self.command(words).output().expect("the program starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.is_empty(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

/// Opens the first socket of a group of listeners. Nothing is accepted: the queue holds the connections without descriptors.
fn sink() -> OwnedFd {
    let address = SocketAddr::from(([127, 0, 0, 1], FULL));
    let sink = socket::open(Transport::Tcp, address, false).unwrap();
    let _ = option::set_reuse_port(sink.as_fd()).unwrap();
    socket::bind(sink.as_fd(), address).unwrap();
    socket::listen(sink.as_fd(), 65_535).unwrap();
    sink
}

/// Connects from 90% of the ports: all of the parity of the first port, then ports of the second parity.
fn hold(ports: u16) -> Option<Vec<OwnedFd>> {
    let address = SocketAddr::from(([127, 0, 0, 1], FULL));
    let order = (0..ports).step_by(2).chain((1..ports).step_by(2));
    let mut held = Vec::new();
    for offset in order.take(usize::from(ports) / 10 * 9) {
        let client = socket::open(Transport::Tcp, address, false).unwrap();
        // A window of one port: connect() chooses it as it would choose it without a window.
        if option::set_local_port_range(client.as_fd(), LOW + offset, LOW + offset).unwrap() == Answer::Absent
        {
            return None;
        }
        socket::connect(client.as_fd(), address).unwrap();
        held.push(client);
    }
    Some(held)
}

/// Starts nginx, which closes a connection after a response, so that the port of the client is free at once.
fn server(temp: &TempDir) -> Daemon {
    let listen = format!(
        "server {{ listen 127.0.0.1:{FULL} reuseport backlog=4096; listen 127.0.0.1:{EMPTY} backlog=4096; \
         keepalive_timeout 0; return 200 ok; }}"
    );
    let running = start_nginx(temp, "server", &listen, &|words| {
        Command::new(words[0]).args(&words[1..]).spawn().unwrap()
    });
    wait_for(EMPTY);
    running
}

fn start_nginx(temp: &TempDir, name: &str, servers: &str, spawn: &dyn Fn(&[&str]) -> Child) -> Daemon {
    fs::create_dir_all(temp.join(name)).unwrap();
    let directory = temp.join(name);
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {directory};\n"))
        .concat();
    let config = temp.file(
        &format!("{name}/nginx.conf"),
        &format!(
            "daemon off;\nmaster_process off;\npid {directory}/pid;\nerror_log {directory}/error.log;\n\
             events {{ worker_connections 8192; }}\nhttp {{\naccess_log off;\n{temporary}{servers}\n}}\n"
        ),
    );
    Daemon(spawn(&["nginx", "-c", &config]))
}

fn wait_for(port: u16) {
    let begun = Instant::now();
    while let Err(error) = TcpStream::connect(("127.0.0.1", port)) {
        assert!(begun.elapsed() < DEADLINE, "port {port}: {error}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn runs(words: &[&str]) -> bool {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Builds the client programs that need it.
fn build(site: &Site, kind: &Kind) {
    match kind.name {
        "node" => drop(site.temp.file("client.js", NODE)),
        "java" => {
            let source = site.temp.file("Client.java", JAVA);
            assert!(runs(&["javac", "-d", &site.path(""), &source]));
        }
        "go" => {
            let source = site.temp.file("client.go", GO);
            let build = "PATH=$PATH:/usr/local/go/bin CGO_ENABLED=0 GOFLAGS= go build -o \"$0\" \"$1\"";
            assert!(runs(&["sh", "-c", build, &site.path("go-client"), &source]));
        }
        _ => {}
    }
}

/// Runs a client that prints its connects, its failures and its time.
fn own(site: &Site, port: u16, words: &[&str]) -> Outcome {
    let (port, seconds) = (port.to_string(), site.seconds.to_string());
    let words: Vec<&str> = words.iter().copied().chain(["127.0.0.1", &port, &seconds]).collect();
    let text = site.output(&words);
    let numbers: Vec<f64> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();
    Outcome { connects: numbers[0] as u64, failed: numbers[1] as u64, seconds: numbers[2] }
}

/// Runs curl, which opens a connection for each URL, until the time has passed.
fn curl(site: &Site, port: u16) -> Outcome {
    const URLS: usize = 200;
    let url = format!("http://127.0.0.1:{port}/[1-{URLS}]");
    let (began, mut lines, mut failed) = (Instant::now(), 0, 0);
    while began.elapsed().as_secs_f64() < site.seconds {
        let text =
            site.output(&["curl", "-s", "-o", "/dev/null", "-w", "%{http_code} %{num_connects}\n", &url]);
        let fine = text.lines().filter(|line| *line == "200 1").count();
        lines += fine as u64;
        failed += (URLS - fine) as u64;
    }
    Outcome { connects: lines, failed, seconds: began.elapsed().as_secs_f64() }
}

/// Runs wrk, in the cgroup or outside.
fn wrk(site: &Site, port: u16, inside: bool) -> Outcome {
    let (time, url) = (format!("{}s", site.seconds.ceil()), format!("http://127.0.0.1:{port}/"));
    // A response after 2 s, the default, is a failure, and a server of a busy machine may wait that long for a processor.
    let words = ["wrk", "-t1", "-c4", "--timeout", "20s", "-d", &time, &url];
    let text = if inside {
        site.output(&words)
    } else {
        let output = Command::new(words[0]).args(&words[1..]).output().expect("wrk starts");
        String::from_utf8(output.stdout).unwrap()
    };
    let number =
        |word: &str| word.trim_end_matches([',', 's']).parse::<f64>().unwrap_or_else(|_| panic!("{text}"));
    let total: Vec<&str> =
        text.lines().find(|line| line.contains(" requests in ")).unwrap().split_whitespace().collect();
    // `Socket errors: connect 0, read 5, write 0, timeout 0`. Read errors are connections that the server has closed.
    let after = |word: &str| {
        let mut words = text.split_whitespace().skip_while(|found| *found != word).skip(1);
        words.next().map_or(0.0, number)
    };
    let failed = after("connect") + after("timeout") + after("responses:");
    Outcome { connects: number(total[0]) as u64, failed: failed as u64, seconds: number(total[3]) }
}

/// Runs a proxy in the cgroup, which opens a connection to the server for each request; wrk keeps its connections to the proxy.
fn nginx(site: &Site, port: u16) -> Outcome {
    let servers = format!(
        "server {{ listen 127.0.0.1:{PROXY}; location / {{ proxy_pass http://127.0.0.1:{port}; }} }}"
    );
    let _running = start_nginx(&site.temp, "proxy", &servers, &|words| {
        site.command(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    wait_for(PROXY);
    wrk(site, PROXY, false)
}

fn haproxy(site: &Site, port: u16) -> Outcome {
    let config = site.temp.file(
        "haproxy.cfg",
        &format!(
            "global\n    nbthread 1\n    maxconn 1000\ndefaults\n    mode http\n    timeout client 60s\n    timeout connect 60s\n    timeout server 60s\n\
             listen front\n    bind 127.0.0.1:{PROXY}\n    server one 127.0.0.1:{port}\n"
        ),
    );
    let _running = site.start(&["haproxy", "-db", "-f", &config]);
    wait_for(PROXY);
    wrk(site, PROXY, false)
}

fn io_uring(site: &Site, port: u16) -> Outcome {
    let (target, time) =
        (format!("http://127.0.0.1:{port}/"), format!("{}ms", (site.seconds * 1000.0) as u64));
    let flags = "--engine uring --strategy kernel-default --close-every 1 --close server --connections 4 --anyway --json --quiet";
    // An operation that is under way when the time is over fails after 2 s, so that a short run has a number instead.
    let end = if site.seconds < 1.0 { ["--operations", "1000"] } else { ["--for", time.as_str()] };
    let mut words = vec![env!("CARGO_BIN_EXE_fourtuple"), "load", &target];
    words.extend(end);
    words.extend(flags.split(' '));
    let record: Value = serde_json::from_str(&site.output(&words)).unwrap();
    let results = &record["results"];
    let failed: u64 =
        results["errors"].as_object().map_or(0, |errors| errors.values().filter_map(Value::as_u64).sum());
    let number = |name: &str| results[name].as_u64().unwrap_or_else(|| panic!("no {name} in {results}"));
    Outcome { connects: number("operations"), failed, seconds: number("elapsed_ns") as f64 / 1e9 }
}

/// Returns the clients that run here; the others are skipped, and a variable can leave clients out.
fn clients(test: &str) -> Vec<&'static Kind> {
    let chosen = env::var("FOURTUPLE_CLIENTS").ok();
    let is_chosen =
        |kind: &&Kind| chosen.as_ref().is_none_or(|names| names.split(',').any(|name| name == kind.name));
    let is_there = |kind: &&'static Kind| {
        let there = runs(kind.installed);
        if !there {
            // Large runtimes, which nothing else of the tests needs, are not required.
            let need = if matches!(kind.name, "node" | "java") { kind.name } else { "programs" };
            skip(test, need, &format!("{} is not installed", kind.name));
        }
        there
    };
    KINDS.iter().filter(is_chosen).filter(is_there).collect()
}

#[test]
fn unmodified_clients_find_free_ports() {
    in_own_namespace(|test| {
        // nginx sometimes closes a connection before the server does, and its port is in TIME_WAIT then: a small range would be exhausted.
        let Some(site) = Site::new(test, 10_000, 0.3) else { return };
        for kind in clients(test) {
            build(&site, kind);
            let once = || {
                let child = attached(test, &site.cgroup.flags("--json"))?;
                let outcome = (kind.run)(&site, FULL);
                Some((outcome, record_of(child)["results"].clone()))
            };
            // On a busy host a client may stand still for its whole time, and hardly connect.
            let has_run = |(outcome, results): &(Outcome, Value)| outcome.failed > 0 || results["drawn"] != 0;
            let Some((outcome, results)) = until_expected(5, once, |run| run.as_ref().is_none_or(has_run))
            else {
                return;
            };
            assert_eq!(outcome.failed, 0, "{}: {outcome:?}", kind.name);
            let drawn = results["drawn"].as_u64().unwrap();
            // Claims of other processes of curl block the few free ports of this range for a while, and the kernel searches then.
            assert!(drawn > 0, "{}: {outcome:?} {results}", kind.name);
        }
    });
}

#[test]
#[ignore = "a measurement of about 5 minutes on an idle machine"]
fn rates_bare_and_fixed() {
    in_own_namespace(|test| {
        let seconds = env::var("FOURTUPLE_SECONDS").map_or(3.0, |text| text.parse().unwrap());
        let Some(mut site) = Site::new(test, 20_000, seconds) else { return };
        let prefix: Vec<String> =
            env::var("FOURTUPLE_PREFIX").unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        println!("load average before: {}", fs::read_to_string("/proc/loadavg").unwrap().trim());
        println!(
            "| client | bare, connects/s | fixed, connects/s | factor | no other connections | failed bare, fixed |"
        );
        println!("|---|---|---|---|---|---|");
        for kind in clients(test) {
            build(&site, kind);
            let mut rates: [Vec<f64>; 3] = Default::default();
            let mut failed = [0; 3];
            let mut drawn = Vec::new();
            // The last number is the limit of the server or of the client.
            for turn in [2, 0, 1, 1, 0, 2] {
                let child = if turn == 1 && prefix.is_empty() {
                    let Some(child) = attached(test, &site.cgroup.flags("--json")) else { return };
                    Some(child)
                } else {
                    None
                };
                site.prefix = if turn == 1 { prefix.clone() } else { Vec::new() };
                let outcome = (kind.run)(&site, if turn == 2 { EMPTY } else { FULL });
                drawn.extend(child.map(|child| {
                    let results = record_of(child)["results"].clone();
                    ["drawn", "fallbacks", "left"].map(|name| results[name].to_string()).join(" ")
                }));
                rates[turn].push(outcome.rate());
                failed[turn] += outcome.failed;
            }
            let list =
                |rates: &[f64]| rates.iter().map(|rate| format!("{rate:.0}")).collect::<Vec<_>>().join(", ");
            let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
            println!(
                "| {} | {} | {} | {:.1} | {} | {}, {} |",
                kind.name,
                list(&rates[0]),
                list(&rates[1]),
                mean(&rates[1]) / mean(&rates[0]),
                list(&rates[2]),
                failed[0],
                failed[1]
            );
            eprintln!("{}: drawn, fallbacks, left: {}", kind.name, drawn.join("; "));
        }
        println!("load average after: {}", fs::read_to_string("/proc/loadavg").unwrap().trim());
    });
}
