//! Faults of ports and of TIME_WAIT that one client makes, with nginx as the server.

use std::thread;
use std::time::{Duration, Instant};

use crate::program::fixing::Cgroup;
use crate::program::situation::{
    Daemon, Fix, PROXY, SERVER, actions, behind, diagnose, diagnose_for, diagnose_until, diagnose_with,
    do_now, experiment, failed_requests, finds, first, has, is_found, nginx, paste, paste_first, set_range,
    traced, until_found, wait_for,
};
use crate::program::{TempDir, in_own_namespace, text, until};
use crate::row;
use fourtuple_syscalls::{device, resource};
use fourtuple_testing::process::Python;
use fourtuple_testing::{in_namespace, in_namespace_of, keep_time_wait, set_sysctl, test_of};
use serde_json::Value;

/// A server with four ports, and a client.
pub(crate) struct Scene {
    pub(crate) temp: TempDir,
    pub(crate) client: Python,
    _server: Daemon,
}

const CLIENT: &str = "\
import threading
def attempt(call):
  try: call()
  except OSError: return 1
  return 0
def churn(number, port=4000, first=True):
  def one():
    s = socket.create_connection(('10.0.0.2', port))
    if not first: s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); s.recv(4096); s.recv(4096)
    s.close()
  return sum(attempt(one) for _ in range(number))
def dial(number, port=4000, source=None):
  return sum(attempt(lambda: held.append(socket.create_connection(('10.0.0.2', port), source_address=source))) for _ in range(number))
def waiting(low=20000, states=('06',)):
  rows = [line.split() for line in list(open('/proc/thread-self/net/tcp'))[1:]]
  return sum(row[3] in states and int(row[1].split(':')[1], 16) >= low for row in rows)
def closing(): return waiting(states=('04', '05'))";

impl Scene {
    /// Starts the server and a client in the namespace of a test, with 400 ports; `None` after a skip.
    fn start(test: &str) -> Option<Scene> {
        Scene::with_range(test, 20_000, 20_399)
    }

    /// The same with another range of ports.
    fn with_range(test: &str, low: u16, high: u16) -> Option<Scene> {
        if !has(test, &["nginx", "python3"]) {
            return None;
        }
        resource::raise_descriptor_limit().expect("a limit");
        set_range(low, high);
        keep_time_wait();
        let temp = TempDir::new();
        let listens: String =
            (SERVER..SERVER + 4).map(|port| format!("listen 10.0.0.2:{port} backlog=4096;")).collect();
        let server = nginx(&temp, "server", 0, None, &format!("server {{ {listens} return 200 ok; }}"));
        wait_for("10.0.0.2", SERVER + 3);
        Some(Scene { temp, client: client(), _server: server })
    }

    /// Runs `doctor` while a thread of the client repeats a call.
    fn diagnose_during(&mut self, call: &str, pause_s: f64, time: &str, thresholds: &str) -> Value {
        self.begin(call, pause_s);
        let record = diagnose_for(&self.temp, time, thresholds);
        self.client.run("going = False; thread.join()");
        record
    }

    /// The same until a rule has a finding with all parts.
    fn diagnose_until(&mut self, call: &str, pause_s: f64, id: &str, parts: &[&str]) -> Value {
        self.begin(call, pause_s);
        let record = until_found(id, parts, || diagnose(&self.temp));
        self.client.run("going = False; thread.join()");
        record
    }

    /// Starts a thread of the client that repeats a call.
    fn begin(&mut self, call: &str, pause_s: f64) {
        self.client.run(&format!(
            "going = True\ndef repeat():\n  while going: {call}; time.sleep({pause_s})\n\
             thread = threading.Thread(target=repeat); thread.start()"
        ));
    }

    /// Makes a number of connections that the client closes first, and waits until they are in TIME_WAIT.
    fn churn(&mut self, number: u64) {
        assert_eq!(self.client.number(&format!("print(churn({number}))")), 0);
        until("all are in TIME_WAIT", || self.client.number("print(waiting())") >= number);
    }
}

fn client() -> Python {
    let mut client = Python::start();
    client.run(CLIENT);
    client
}

/// Runs a closure of a test in a network namespace of its own, with the server and a client, unless it is skipped.
fn scene<F: FnOnce(&mut Scene) + Send + 'static>(run: F) {
    let test = test_of(&run);
    in_namespace_of(test.clone(), move || {
        if let Some(mut scene) = Scene::start(&test) {
            run(&mut scene);
        }
    });
}

/// Returns how many connections fail with net.ipv4.tcp_tw_reuse = 1. connect() takes a port a second after its peer's last packet, which a
/// busy host delays: a few tries.
pub(crate) fn after_reuse(mut failed: impl FnMut() -> u64) -> u64 {
    let mut tries = (0..10).map(|_| {
        thread::sleep(Duration::from_millis(1_100));
        failed()
    });
    tries.find(|failed| *failed == 0).unwrap_or(u64::MAX)
}

#[test]
fn reuse_gives_the_ports_of_time_wait_back() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        scene.churn(300);
        let record = diagnose(&scene.temp);
        let finding = first(&record, "T03", &[]);
        let before = scene.client.number("print(churn(400))");
        let command = paste_first(finding);
        let after = after_reuse(|| scene.client.number("print(churn(400))"));
        row(
            finding,
            "net.ipv4.tcp_tw_reuse = 0, the client closes first",
            "python3",
            &format!("{before} of 400 connections fail"),
            &command,
            &format!("{after} fail"),
        );
        assert!(before > 200 && after == 0, "{before} {after}");
    });
}

#[test]
fn reuse_needs_timestamps() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_tw_reuse", "1");
        set_sysctl("net.ipv4.tcp_timestamps", "0");
        scene.churn(300);
        let record = diagnose(&scene.temp);
        let finding = first(&record, "T04", &[]);
        let before = scene.client.number("churn(400)\ntime.sleep(1.1)\nprint(churn(400))");
        let command = paste_first(finding);
        scene.client.run("churn(400, 4001)");
        let after = after_reuse(|| scene.client.number("print(churn(300, 4001))"));
        row(
            finding,
            "net.ipv4.tcp_tw_reuse = 1 with net.ipv4.tcp_timestamps = 0",
            "python3",
            &format!("{before} of 400 connections fail"),
            &command,
            &format!("{after} fail to another destination"),
        );
        assert!(before > 200 && after == 0, "{before} {after}");
    });
}

#[test]
fn fin_timeout_does_not_shorten_time_wait() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_fin_timeout", "1");
        // What a busy server closes later than a second never enters TIME_WAIT.
        let mut waiting = 0;
        until("350 sockets are in TIME_WAIT", || {
            scene.client.run(&format!("churn({})", 350 - waiting));
            until("the server has closed all", || scene.client.number("print(closing())") == 0);
            waiting = scene.client.number("print(waiting())");
            waiting >= 350
        });
        thread::sleep(Duration::from_millis(1_500));
        let record = diagnose(&scene.temp);
        let finding = &behind(&record, "T05", "T03");
        let before = scene.client.number("print(waiting())");
        let command = paste_first(finding);
        let after = scene.client.number("print(waiting())");
        row(
            finding,
            "net.ipv4.tcp_fin_timeout = 1 against TIME_WAIT",
            "python3",
            &format!("{before} sockets in TIME_WAIT after 1.5 s"),
            &command,
            &format!("{after}: the sysctl has no part in it"),
        );
        assert!(before >= 350 && after >= 350, "{before} {after}");
    });
}

#[test]
fn the_side_that_closes_first_is_named() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        scene.churn(300);
        // On a busy host the closes may be older than 10 s before doctor reads them.
        let finding = &loop {
            let finding = behind(&diagnose(&scene.temp), "T06", "T03");
            if text(&finding, "verdict").contains("in the last 10 s") {
                break finding;
            }
            scene.churn(5);
        };
        let before = scene.client.number("print(waiting())");
        let cure = actions(finding, "proper").remove(0);
        // The server closes first now.
        let after = scene.client.number("churn(100, 4001, False)\nprint(waiting())").saturating_sub(before);
        row(
            finding,
            "the client closes first",
            "python3",
            &format!("{before} sockets in TIME_WAIT of the client"),
            &cure,
            &format!("{after} of 100 more if the server closes first"),
        );
        assert!(before >= 300 && after == 0, "{before} {after}");
    });
}

#[test]
fn a_low_limit_of_time_wait_is_named() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_max_tw_buckets", "400");
        scene.churn(370);
        let record = diagnose(&scene.temp);
        let finding = &behind(&record, "T01", "P01");
        let command = paste_first(finding);
        row(
            finding,
            "net.ipv4.tcp_max_tw_buckets = 400",
            "python3",
            "370 sockets in TIME_WAIT, room for 30 more",
            &command,
            "room for all",
        );
        assert!(!finds(&diagnose(&scene.temp), "T01"));
    });
}

#[test]
fn a_time_wait_that_is_cut_short_is_named() {
    scene(|scene| {
        set_sysctl("net.ipv4.tcp_max_tw_buckets", "100");
        keep_time_wait();
        let skipped = |client: &mut Python, number: u64| {
            let begun = fourtuple_testing::accept_queue::tcp_counter("TCPTimeWaitOverflow");
            client.run(&format!("churn({number})"));
            // The kernel counts when the server closes its side.
            until("the server has closed all", || client.number("print(closing())") == 0);
            fourtuple_testing::accept_queue::tcp_counter("TCPTimeWaitOverflow") - begun
        };
        let before = skipped(&mut scene.client, 200);
        let record = diagnose(&scene.temp);
        let finding = &behind(&record, "T02", "T01");
        let command = paste_first(finding);
        let after = skipped(&mut scene.client, 100);
        row(
            finding,
            "net.ipv4.tcp_max_tw_buckets = 100",
            "python3",
            &format!("{before} of 200 connections skip TIME_WAIT"),
            &command,
            &format!("{after} of 100"),
        );
        assert!(before > 20 && after == 0, "{before} {after}");
    });
}

#[test]
fn reserved_ports_are_named() {
    scene(|scene| {
        set_sysctl("net.ipv4.ip_local_reserved_ports", "20000-20299");
        scene.client.run("dial(60)");
        let record = diagnose(&scene.temp);
        let finding = first(&record, "P04", &[]);
        let before = scene.client.number("print(dial(100))");
        let command = paste_first(finding);
        let after = scene.client.number("print(dial(100))");
        row(
            finding,
            "three quarters of the range in net.ipv4.ip_local_reserved_ports",
            "python3",
            &format!("{before} of 100 connections fail"),
            &command,
            &format!("{after} fail"),
        );
        assert!(before > 50 && after == 0, "{before} {after}");
    });
}

#[test]
fn a_process_that_holds_ports_by_bind_is_named() {
    scene(|scene| {
        let mut holder = client();
        holder.run("for _ in range(300):\n  s = socket.socket(); s.bind(('10.0.0.1', 0)); held.append(s)");
        scene.client.run("dial(20)");
        let record = diagnose(&scene.temp);
        let finding = first(&record, "P06", &[]);
        let before = scene.client.number("print(dial(200))");
        let cure = actions(finding, "proper").remove(0);
        drop(holder);
        let after = scene.client.number("print(dial(100))");
        row(
            finding,
            "a process binds 300 of 400 ports and connects none",
            "python3",
            &format!("{before} of 200 connections of another process fail"),
            &cure,
            &format!("{after} of 100 fail after its end"),
        );
        assert!(before > 50 && after == 0, "{before} {after}");
    });
}

#[test]
fn processes_that_share_ports_are_named() {
    scene(|scene| {
        let mut other = client();
        scene.client.run("dial(180)");
        other.run("dial(180)");
        let record = diagnose(&scene.temp);
        let finding = &behind(&record, "P12", "P01");
        let before = other.number("print(dial(100))");
        let cure = actions(finding, "proper").remove(0);
        let after = other.number("print(dial(100, source=('10.0.0.3', 0)))");
        row(
            finding,
            "two processes with 180 connections each from one source address",
            "python3",
            &format!("{before} of 100 connections fail"),
            &cure,
            &format!("{after} fail from another address"),
        );
        assert!(before > 50 && after == 0, "{before} {after}");
    });
}

#[test]
fn a_small_range_is_named() {
    scene(|scene| {
        scene.client.run("dial(250)");
        let record = diagnose_with(&scene.temp, "");
        let finding = first(&record, "P03", &[]);
        let before = scene.client.number("print(dial(300))");
        let command = paste_first(finding);
        let after = scene.client.number("print(dial(300))");
        row(
            finding,
            "net.ipv4.ip_local_port_range = 20000 20399",
            "python3",
            &format!("{before} of 300 connections fail"),
            &command,
            &format!("{after} fail"),
        );
        assert!(before > 100 && after == 0, "{before} {after}");
    });
}

#[test]
fn connects_without_a_port_are_named() {
    in_own_namespace(|test| {
        let Some(mut scene) = Scene::start(test) else { return };
        let mut holder = client();
        holder.run("dial(400)");
        let record = scene.diagnose_until("dial(1)", 0.01, "P07", &["calls of connect() failed"]);
        if !traced(test, &record, "P07") {
            return;
        }
        let finding = &behind(&record, "P07", "P01");
        let before = scene.client.number("print(dial(100))");
        let command = sysctl(finding);
        paste(&command);
        let after = scene.client.number("print(dial(100))");
        row(
            finding,
            "another process has all ports to the destination",
            "python3",
            &format!("{before} of 100 connections fail"),
            &command,
            &format!("{after} fail"),
        );
        assert!(before == 100 && after == 0, "{before} {after}");
    });
}

/// A client that shares its ports with others by IP_LOCAL_PORT_RANGE.
#[test]
fn a_range_of_the_program_is_named() {
    in_own_namespace(|test| {
        let Some(mut scene) = Scene::start(test) else { return };
        scene.client.run(
            "import struct\ndef permit(low, high):\n  global ports; ports = struct.pack('I', high << 16 | low)\n\
             def dial(number):\n  def one():\n    s = socket.socket(); s.setsockopt(0, 51, ports); s.connect(('10.0.0.2', 4000)); held.append(s)\n  \
             return sum(attempt(one) for _ in range(number))\n\
             permit(20100, 20149); dial(50)",
        );
        let record = scene.diagnose_until("dial(1)", 0.01, "P07", &["calls of connect() failed"]);
        if !traced(test, &record, "P07") {
            return;
        }
        let finding = first(&record, "P07", &[]);
        let fact = finding["evidence"][0].as_str().unwrap();
        assert!(fact.contains("the ports 20100-20149 only (IP_LOCAL_PORT_RANGE)"), "{finding:#}");
        let before = scene.client.number("print(dial(100))");
        scene.client.run("permit(20100, 20299)");
        let after = scene.client.number("print(dial(100))");
        row(
            finding,
            "IP_LOCAL_PORT_RANGE of 50 ports, all in use",
            "python3",
            &format!("{before} of 100 connections fail"),
            "IP_LOCAL_PORT_RANGE of 200 ports",
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (100, 0));
    });
}

/// As a resolver or a QUIC client that opens a socket for each question.
#[test]
fn a_host_without_udp_ports_is_named() {
    in_own_namespace(|test| {
        let Some(mut scene) = Scene::start(test) else { return };
        scene.client.run(
            "def ask():\n  s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('10.0.0.2', 53)); held.append(s)\n\
             def questions(number): return sum(attempt(ask) for _ in range(number))\n\
             questions(400)",
        );
        let record = scene.diagnose_until("questions(1)", 0.01, "X01", &["failed with EAGAIN"]);
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "X01", &[]);
        let fact = finding["evidence"][0].as_str().unwrap();
        assert!(fact.contains("UDP sockets hold 400 ports of the range"), "{finding:#}");
        let before = scene.client.number("print(questions(100))");
        scene.client.run("for s in held: s.close()");
        let after = scene.client.number("print(questions(100))");
        row(
            finding,
            "a UDP socket for each question, none of them closed",
            "python3",
            &format!("{before} of 100 questions fail"),
            "close() of sockets that have their answer",
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (100, 0));
    });
}

/// Returns the first `sysctl` of "do now".
#[track_caller]
fn sysctl(finding: &Value) -> String {
    let actions = actions(finding, "now");
    actions
        .iter()
        .find(|action| action.contains("sysctl -w "))
        .unwrap_or_else(|| panic!("{actions:#?}"))
        .clone()
}

#[test]
fn the_last_port_is_forecast() {
    in_namespace(|| {
        // At 10 connections a second the ports last longer than `doctor` takes on a busy machine.
        let test = "settings::the_last_port_is_forecast";
        let Some(mut scene) = Scene::with_range(test, 20_000, 21_999) else { return };
        scene.client.run("dial(1050)");
        let record = scene.diagnose_until("dial(1)", 0.1, "P10", &[]);
        let finding = &behind(&record, "P10", "P02");
        let before = scene.client.number("print(dial(1500))");
        let command = sysctl(finding);
        paste(&command);
        let after = scene.client.number("print(dial(1500))");
        row(
            finding,
            "a program that opens connections and closes none",
            "python3",
            &format!("{before} of 1500 more connections fail"),
            &command,
            &format!("{after} fail"),
        );
        assert!(before > 50 && after == 0, "{before} {after}");
    });
}

#[test]
fn a_source_address_that_is_gone_is_named() {
    in_own_namespace(|test| {
        let Some(mut scene) = Scene::start(test).filter(|_| has(test, &["ip"])) else { return };
        let gone = [10, 9, 0, 1].into();
        device::add_address("lo", gone, 32).expect("an address");
        scene.client.run("dial(20, source=('10.9.0.1', 0))");
        device::remove_address("lo", gone, 32).expect("the address");
        // The kernel sends each request again at a time of its own, and the server closes after its answer.
        let ask = "got = set()\ndef answered():\n  for s in held:\n    s.settimeout(0.05)\n    try:\n      s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')\n      \
                   if s.recv(4096): got.add(s)\n    except OSError: pass\n  return len(got)";
        scene.client.run(ask);
        let record = diagnose(&scene.temp);
        let finding = first(&record, "P11", &[]);
        let before = 20 - scene.client.number("print(answered())");
        let cure = actions(finding, "now")
            .into_iter()
            .find(|action| action.contains("ip addr add"))
            .expect("an address");
        let cure = cure.split('`').nth(1).expect("a command");
        assert_eq!(cure, "ip addr add 10.9.0.1/32 dev lo");
        paste(cure);
        let mut after = 20;
        until("the retransmitted requests are answered", || {
            after = 20 - scene.client.number("print(answered())");
            after == 0
        });
        row(
            finding,
            "the source address of 20 connections is removed from its device",
            "python3",
            &format!("{before} of 20 connections get no answer"),
            cure,
            &format!("{after} get none"),
        );
        assert_eq!((before, after), (20, 0));
    });
}

#[test]
fn crowded_ports_are_named() {
    in_namespace(|| {
        let Some(mut scene) = Scene::with_range("settings::crowded_ports_are_named", 20_000, 20_001) else {
            return;
        };
        set_sysctl("net.core.somaxconn", "4096");
        scene.client.run(
            "resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))\n\
             sinks = []\n\
             l = socket.socket(); l.bind(('0.0.0.0', 4010)); l.listen(4096)\n\
             for n in range(1010):\n  \
               for _ in range(2): held.append(socket.create_connection((f'127.1.{n // 250}.{n % 250 + 1}', 4010)))",
        );
        let record = diagnose_with(&scene.temp, "");
        let finding = &behind(&record, "L02", "P01");
        let command = paste_first(finding);
        let after = diagnose_with(&scene.temp, "");
        row(
            finding,
            "2,020 connections to 1,010 destinations from 2 ports",
            "python3",
            "1,010 sockets for each port",
            &command,
            "less than 1 for each port of the range",
        );
        assert!(!finds(&after, "L02"));
    });
}

/// Among the TIME_WAIT sockets of all even ports of the default range a search takes more than a millisecond.
#[test]
fn a_slow_search_is_named_by_its_time() {
    in_own_namespace(|test| {
        let Some(cgroup) = Cgroup::new(test, "slow") else { return };
        let Some(mut scene) = Scene::with_range(test, 32_768, 60_999) else { return };
        std::fs::write(cgroup.0.join("cgroup.procs"), scene.client.pid().to_string()).expect("a cgroup");
        // Another process, which the fix does not concern.
        let mut filler = client();
        // Each in a window of one port (option 51), so that no search delays them.
        filler.run(
            "def connect(port):\n  \
               s = socket.socket(); s.setsockopt(0, 51, (port << 16 | port).to_bytes(4, 'little'))\n  \
               attempt(lambda: s.connect(('10.0.0.2', 4000))); s.close()\n\
             def fill(ports):\n  \
               try:\n    \
                 for port in ports: connect(port)\n  \
               except OSError: churn(len(ports))\n  \
               churn(200)\n\
             even, odd = range(32768, 60999, 2), range(32769, 60999, 4)",
        );
        // A port that is taken again is in TIME_WAIT for 60 s from then on: what follows does not depend on the time before.
        let mut fill = |ports: &str| {
            set_sysctl("net.ipv4.tcp_tw_reuse", "1");
            filler.run(&format!("fill({ports})"));
            set_sysctl("net.ipv4.tcp_tw_reuse", "0");
        };
        fill("even");
        let cost =
            "began = time.thread_time_ns(); churn(100); print((time.thread_time_ns() - began) // 100000)";
        let before = scene.client.number(cost);
        // Of fewer than 100 searches, which a slow host makes in half a second, the verdict has the mean.
        let mut record = Value::Null;
        for time in ["4s", "8s", "12s", "24s"] {
            fill("even");
            record = scene.diagnose_during("churn(1)", 0.0, time, "");
            let parts = [("P02", ""), ("P09", "99th percentile"), ("L03", "")];
            if parts.iter().all(|(id, part)| is_found(&record, id, &[*part])) {
                break;
            }
        }
        if !traced(test, &record, "P09") {
            return;
        }
        let slow = &behind(&record, "P09", "P02");
        let busy = &behind(&record, "L03", "P02");
        let command = do_now(slow);
        // The fix acts past a quarter of the ports by its first 16 samples. Of half of the ports it may find too few.
        let begun = Instant::now();
        fill("[*even, *odd]");
        let Some(fix) = Fix::paste(test, &command) else { return };
        let after = scene.client.number(cost);
        // On a machine that is busy enough the first sockets have left TIME_WAIT, and draws would shorten nothing.
        if begun.elapsed() < Duration::from_secs(60) {
            crate::ports::require_drawn(fix, 100);
        }
        for (finding, fault) in [
            (slow, "a search of 14,116 even ports in TIME_WAIT"),
            (busy, "the same, without a pause between connections"),
        ] {
            row(
                finding,
                fault,
                "python3",
                &format!("{before} us of CPU time per connection"),
                &command,
                &format!("{after} us"),
            );
        }
    });
}

/// A program that waits between its attempts has few failures in an interval.
#[test]
fn a_server_that_is_down_is_named_to_a_program_that_tries_it_each_second() {
    let test = "settings::a_server_that_is_down_is_named_to_a_program_that_tries_it_each_second";
    experiment(&["haproxy", "nginx", "curl"], |temp| {
        let config = temp.file(
            "haproxy.cfg",
            &format!(
                "defaults\n    mode http\n    timeout client 60s\n    timeout connect 2s\n    timeout server 60s\nlisten front\n    \
                 bind 127.0.0.1:{PROXY}\n    server one 127.0.0.1:{SERVER} check inter 1s\n"
            ),
        );
        let haproxy = Daemon::start(None, &["haproxy", "-db", "-f", &config]);
        wait_for("127.0.0.1", PROXY);
        let url = format!("http://127.0.0.1:{PROXY}/");
        let what =
            format!("connect() of haproxy[{}] to 127.0.0.1:{SERVER} failed with ECONNREFUSED", haproxy.pid());
        let record = until_found("X01", &[&what], || diagnose_for(temp, "4s", ""));
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "X01", &[&what]);
        let evidence = finding["evidence"].to_string();
        assert!(
            evidence.contains("the cause here: no socket listens at the address on this host"),
            "{evidence}"
        );
        let before = failed_requests(&url, 20);
        let _server =
            nginx(temp, "web", 0, None, &format!("server {{ listen 127.0.0.1:{SERVER}; return 200 ok; }}"));
        until("haproxy has seen the server", || failed_requests(&url, 1) == 0);
        let after = failed_requests(&url, 20);
        row(
            finding,
            "a server that is down, and that is checked each second",
            "haproxy",
            &format!("{before} of 20 requests fail"),
            "the server is started",
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (20, 0));
    });
}

/// bind() to an address that the host does not have: each request fails, and no counter of the kernel grows.
#[test]
fn a_source_that_is_not_on_the_host_is_named() {
    let test = "settings::a_source_that_is_not_on_the_host_is_named";
    experiment(&["haproxy", "nginx", "curl"], |_| {
        let Some(scene) = Scene::start(test) else { return };
        let config = scene.temp.file(
            "haproxy.cfg",
            &format!(
                "global\n    nbthread 1\ndefaults\n    mode http\n    timeout client 60s\n    timeout connect 60s\n    timeout server 60s\n    \
                 retries 0\nlisten front\n    bind 127.0.0.1:{PROXY}\n    source 10.8.0.99\n    server one 10.0.0.2:{SERVER}\n"
            ),
        );
        let haproxy = Daemon::start(None, &["haproxy", "-db", "-f", &config]);
        wait_for("127.0.0.1", PROXY);
        let url = format!("http://127.0.0.1:{PROXY}/");
        let name = format!("haproxy[{}]", haproxy.pid());
        let verdict = [&*name, "10.8.0.99", "calls of bind()"];
        let record = diagnose_until(&scene.temp, "P11", &verdict, || _ = failed_requests(&url, 20));
        if !traced(test, &record, "X01") {
            return;
        }
        let finding = first(&record, "P11", &verdict);
        let before = failed_requests(&url, 100);
        device::add_address("lo", [10, 8, 0, 99].into(), 32).expect("an address");
        let after = failed_requests(&url, 100);
        row(
            finding,
            "`source 10.8.0.99`, an address that the host does not have",
            "haproxy",
            &format!("{before} of 100 requests fail"),
            "ip addr add 10.8.0.99/32 dev lo",
            &format!("{after} fail"),
        );
        assert_eq!((before, after), (100, 0));
    });
}
