//! `fourtuple fix accept`: servers that run while it is attached, refusals, reloads, and what stays behind.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::program::fixing::{self, attached};
use crate::program::{Limited, fourtuple, in_own_namespace, is_root, queues, refused, run, stat, until};
use fourtuple_bpf::FixAccept;
use fourtuple_bpf::fix_accept::{FoundProgram, Learner};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::{child, netns, resource, schedule, sock_diag};
use fourtuple_testing::process::{Python, until_expected};
use fourtuple_testing::stream::arrives;
use fourtuple_testing::{StopOnDrop, has_mptcp, in_namespace};
use serde_json::{Value, json};

/// Time without an answer after which a worker counts as blocked.
const SILENCE: Duration = Duration::from_secs(30);

/// A server that knows nothing of fourtuple: processes that block in accept() or recvfrom(), each with a socket of its own. A worker
/// answers with its number, on `block` never again, and on `fork` by a child to which it leaves its socket. The parent reads lines: `start`, `close N`. It prints the process id of each
/// worker.
const SERVER: &str = r#"
import os, signal, socket, sys, time
kind, address, port, group = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "group"
family = socket.AF_INET6 if ":" in address else socket.AF_INET
workers = []
os.setpgrp()

def work(number):
    os.close(0)
    s = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM, 262 if kind == "mptcp" else 0)
    if group:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind((address, port))
    if kind != "udp":
        s.listen(128)
    print(os.getpid(), flush=True)
    while True:
        if kind == "udp":
            data, peer = s.recvfrom(2048)
            s.sendto(str(number).encode(), peer)
            continue
        try:
            c, _ = s.accept()
            data = c.recv(16)
            if data == b"block":
                time.sleep(10000)
            if data == b"fork" and os.fork():
                os._exit(0)
            c.sendall(str(number).encode())
            c.close()
        except OSError:
            pass

for line in sys.stdin:
    words = line.split()
    if words[0] == "start":
        number = len(workers)
        worker = os.fork()
        if worker == 0:
            work(number)
        workers.append(worker)
    else:
        worker = workers[int(words[1])]
        workers[int(words[1])] = 0
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        print(worker, flush=True)
# The sockets of a worker are closed when it has ended.
for worker in filter(None, workers):
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
os.killpg(0, signal.SIGKILL)
"#;

/// A running server.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
}

impl Server {
    /// Starts a server in the namespace of this thread; `None` after a skip.
    fn start(test: &str, kind: &str, address: &str, workers: usize, group: &str) -> Option<Server> {
        let address: SocketAddr = address.parse().unwrap();
        let mut command = Command::new("python3");
        command.args(["-c", SERVER, kind, &address.ip().to_string(), &address.port().to_string(), group]);
        let Ok(mut child) = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
            fourtuple_testing::skip(test, "python3", "python3 does not start");
            return None;
        };
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut server = Server { child, input, output, address };
        for _ in 0..workers {
            if server.tell("start") == 0 {
                fourtuple_testing::skip(test, "python3", "python3 does not run the server");
                return None;
            }
        }
        Some(server)
    }

    /// Gives an order and returns the process id of the worker.
    fn tell(&mut self, order: &str) -> u32 {
        // A python3 that cannot start closes the pipe.
        let _ = writeln!(self.input.as_mut().unwrap(), "{order}");
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().parse().unwrap_or(0)
    }

    /// Asks over a new connection; `None` if no worker answers.
    fn ask(&self, words: &str) -> Option<usize> {
        let mut connection = TcpStream::connect(self.address).unwrap();
        connection.set_read_timeout(Some(SILENCE)).unwrap();
        connection.write_all(words.as_bytes()).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).ok()?;
        answer.parse().ok()
    }

    /// Returns the workers that answered this many connections, or datagrams with this first byte.
    fn workers(&self, kind: &str, questions: usize) -> Vec<usize> {
        let ask = |_| match kind {
            "tcp" => self.ask("hello"),
            _ => {
                let client = UdpSocket::bind("127.0.0.1:0").unwrap();
                let mut answer = [0; 16];
                let send = || _ = client.send_to(b"\x07rest", self.address).unwrap();
                let (length, _) = arrives(send, &client, &mut answer);
                std::str::from_utf8(&answer[..length]).ok()?.parse().ok()
            }
        };
        let mut found: Vec<usize> = (0..questions).map(|number| ask(number).expect("an answer")).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    fn flags(&self, more: &str) -> String {
        format!("fix accept --listen {} {more}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The parent kills its workers when its input ends.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Ends a fix with SIGTERM and returns its results.
fn record_of(fix: Child) -> Value {
    fixing::record_of(fix)["results"].clone()
}

/// Returns the guard process of a fix: its only child.
fn guard_of(fix: &Child) -> u32 {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", fix.id())).unwrap();
    children.trim().parse().unwrap_or_else(|_| panic!("one child: {children:?}"))
}

/// Requires that the group has no selector left, and that no socket is in a map any more.
#[track_caller]
fn require_no_selector(flags: &str) {
    let again = || run(&mut fourtuple(&format!("{flags} --for 1ms")));
    // The kernel frees the maps of a fix that was killed in the background, on a busy host later than the next fix waits for that.
    let ended = until_expected(30, again, |ended| !ended.stderr.contains("is in a map of sockets"));
    assert_eq!(ended.code, 0, "the second fix is refused: {ended:?}");
}

/// Waits until a fix has ended, and its guard process.
fn until_ended(mut fix: Child, guard: u32) {
    fix.wait().unwrap();
    until_gone(guard);
}

/// Waits until a guard process has ended. A fix that has ended by itself waits for its guard for 5 s only.
fn until_gone(guard: u32) {
    until("the guard has ended", || stat(guard).is_none_or(|(state, _)| state == 'Z'));
}

#[test]
fn a_blocked_worker_gets_no_connection() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4100", 4, "group") else { return };
        let flags = server.flags("--select least-busy --json");
        let Some(fix) = attached(test, &flags) else { return };
        let mut blocker = fourtuple_testing::connect(server.address);
        blocker.write_all(b"block").unwrap();
        until("the worker has accepted", || queues(server.address.port()).iter().all(|queue| *queue == 0));
        let answers: Vec<_> = (0..200).map(|_| server.ask("hello")).take_while(Option::is_some).collect();
        let results = record_of(fix);
        // A heartbeat that came late leaves connections to the hash.
        if results["lapsed"] == 0 {
            assert_eq!(answers.len(), 200, "{results}");
            let rows = results["listeners"].as_array().unwrap();
            let blocked = rows.iter().find(|row| row["open"] == 1).unwrap_or_else(|| panic!("{results}"));
            assert_eq!((&blocked["choices"], &blocked["queue"]), (&1.into(), &0.into()));
            let chosen: u64 = rows.iter().map(|row| row["choices"].as_u64().unwrap()).sum();
            assert_eq!((chosen, &results["connections"]), (201, &201.into()), "{results}");
            assert!(rows.iter().all(|row| row["command"] == "python3" || row["command"] == "python"));
        }
    });
}

#[test]
fn a_flow_stays_and_the_end_restores_the_hash() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4101", 8, "group") else { return };
        for _ in 0..2 {
            let Some(fix) = attached(test, &server.flags("--select flow:0:1 --json")) else { return };
            let during = server.workers("udp", 40);
            let results = record_of(fix);
            assert!(during.len() == 1 || results["lapsed"] != 0, "{during:?} {results}");
            assert!(results["choices"].as_u64().unwrap() + results["lapsed"].as_u64().unwrap() >= 40);
            assert!(server.workers("udp", 100).len() > 3, "the hash chooses again");
        }
    });
}

#[test]
fn after_sigkill_the_guard_detaches_the_selector() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4102", 8, "group") else { return };
        let flags = server.flags("--select flow:0:1 --json");
        let Some(fix) = attached(test, &flags) else { return };
        let guard = guard_of(&fix);
        child::kill(fix.id()).unwrap();
        until_ended(fix, guard);
        assert!(server.workers("udp", 100).len() > 3, "the hash chooses again");
        require_no_selector(&flags);
    });
}

#[test]
fn a_stopped_guard_does_not_delay_the_end() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4154", 8, "group") else { return };
        let Some(fix) = attached(test, &server.flags("--select flow:0:1 --json")) else { return };
        let guard = guard_of(&fix);
        child::stop(guard).unwrap();
        until("the guard is stopped", || stat(guard).is_some_and(|(state, _)| state == 'T'));
        record_of(fix);
        until_gone(guard);
    });
}

#[test]
fn without_guard_and_owner_the_heartbeat_ends() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4103", 8, "group") else { return };
        let flags = server.flags("--select flow:0:1 --json");
        let Some(mut fix) = attached(test, &flags) else { return };
        child::kill(guard_of(&fix)).unwrap();
        child::kill(fix.id()).unwrap();
        fix.wait().unwrap();
        until("the hash chooses again", || server.workers("udp", 60).len() > 3);
        // The inert selector is still attached.
        let ended = run(&mut fourtuple(&flags));
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.line().contains("already has a selector (BPF program"), "{ended:?}");
        assert!(ended.line().contains("fix_accept"), "{ended:?}");
    });
}

#[test]
fn a_closed_listener_is_closed_and_a_new_one_joins() {
    in_own_namespace(|test| {
        let Some(mut server) = Server::start(test, "tcp", "127.0.0.1:4104", 3, "group") else { return };
        let Some(fix) = attached(test, &server.flags("--select least-busy --json")) else { return };
        let listeners = || {
            let mut count = 0;
            sock_diag::each_member(|member| count += usize::from(member.local == server.address)).unwrap();
            count
        };
        assert_eq!(listeners(), 3);
        server.tell("close 1");
        // The process has ended, and no descriptor of fourtuple keeps its listener.
        let mut count = 0;
        sock_diag::each_member(|member| count += usize::from(member.local == server.address)).unwrap();
        assert_eq!(count, 2);
        assert_eq!(server.workers("tcp", 40), [0, 2]);
        server.tell("start");
        until("the new worker gets connections", || server.workers("tcp", 10).contains(&3));
        server.tell("close 0");
        server.tell("close 2");
        assert_eq!(server.workers("tcp", 40), [3]);
        let results = record_of(fix);
        assert_eq!(results["closed"], 3, "{results}");
        // A heartbeat that came late leaves connections to the hash, also those of a listener that has not joined.
        if results["lapsed"] == 0 {
            assert_eq!(results["joined"], 1, "{results}");
            assert_eq!(results["listeners"].as_array().unwrap().len(), 4);
        }
    });
}

#[test]
fn sockets_left_to_other_processes_are_detached() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4114", 2, "group") else { return };
        let flags = server.flags("--select random --json");
        let Some(fix) = attached(test, &flags) else { return };
        let before = server.child.id();
        for _ in 0..12 {
            assert!(server.ask("fork").is_some());
        }
        let results = record_of(fix);
        assert_eq!(results["closed"], 0, "{results}");
        let processes =
            results["listeners"].as_array().unwrap().iter().map(|row| row["process"].as_u64().unwrap());
        assert!(
            processes.into_iter().all(|process| process != 0 && process != u64::from(before)),
            "{results}"
        );
        require_no_selector(&flags);
    });
}

#[test]
fn a_restarted_server_gets_the_selector_again() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4105", 8, "group") else { return };
        let Some(fix) = attached(test, &server.flags("--select flow:0:1 --json")) else { return };
        drop(server);
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4105", 8, "group") else { return };
        until("one worker gets the flow", || server.workers("udp", 30).len() == 1);
        let results = record_of(fix);
        assert_eq!((&results["groups"], &results["closed"]), (&1.into(), &8.into()), "{results}");
    });
}

#[test]
fn a_process_in_another_namespace_is_found() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let test = "fix_accept::a_process_in_another_namespace_is_found";
    in_namespace(move || {
        let Some(server) = Server::start(test, "tcp", "[::1]:4106", 3, "group") else { return };
        let inside = netns::current().unwrap();
        let pid = server.child.id();
        // fourtuple runs in a namespace without the server.
        let fix = thread::spawn(move || {
            netns::enter_new().unwrap();
            attached(test, &format!("fix accept --pid {pid} --select random --json"))
        });
        let Some(fix) = fix.join().unwrap() else { return };
        drop(inside);
        assert_eq!(server.workers("tcp", 100), [0, 1, 2]);
        let results = record_of(fix);
        assert_eq!(results["listeners"][0]["address"], "[::1]:4106");
        assert_eq!(results["connections"], 100, "{results}");
        sender.send(()).unwrap();
    });
    let _ = receiver.try_recv();
}

/// Opens groups of UDP sockets, and finds out whether each socket of a group gets a flow of its own.
const GROUPS: &str = r#"
import ctypes, struct
groups = {}
def more(port, number=1, kind=socket.SOCK_DGRAM, reuse=1):
    for _ in range(number):
        s = socket.socket(socket.AF_INET, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
        s.bind(("127.0.0.1", port))
        if kind == socket.SOCK_STREAM:
            s.listen(8)
        groups.setdefault(port, []).append(s)
def select_first(port):
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    value = struct.pack("HL", 1, ctypes.addressof(program))
    groups[port][0].setsockopt(socket.SOL_SOCKET, 51, value)
def sockets_of(port, flow):
    found = set()
    for _ in range(20):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(bytes([flow]), ("127.0.0.1", port))
            for s in select.select(groups[port], [], [], 30)[0]:
                s.recv(9)
                found.add(groups[port].index(s))
    return found
def has_selector(port):
    found = [sockets_of(port, flow) for flow in range(len(groups[port]))]
    print(int(all(len(of) == 1 for of in found) and set.union(*found) == set(range(len(found)))))
"#;

/// Returns a server that can open such groups; `None` after a skip.
fn groups(test: &str) -> Option<Python> {
    Python::is_installed(test).then(|| {
        let mut server = Python::start();
        server.run(GROUPS);
        server
    })
}

#[test]
fn a_refused_group_keeps_no_other_from_its_selector() {
    in_own_namespace(|test| {
        let Some(mut server) = groups(test) else { return };
        // Without a payload in the SYN, and without a group.
        server.run("more(4117, 2, socket.SOCK_STREAM); more(4118, 1, reuse=0); more(4116, 2)");
        let Some(fix) =
            attached(test, &format!("fix accept --pid {} --select flow:0:1 --json", server.pid()))
        else {
            return;
        };
        let until_chosen = |server: &mut Python, port: u16| {
            until("each socket has a flow", || server.number(&format!("has_selector({port})")) == 1);
        };
        // All of this is new in one listing of the sockets.
        server.run(&format!("os.kill({}, signal.SIGSTOP)", fix.id()));
        until("the fix is stopped", || stat(fix.id()).is_some_and(|(state, _)| state == 'T'));
        server.run("for port in range(4120, 4128):\n  more(port, 2); select_first(port)");
        let number = server.number("more(4130, 2); print(groups[4130][1].fileno())");
        let taken = Pidfd::of_process(server.pid()).unwrap().duplicate(number as i32).unwrap();
        let mut other = FixAccept::attach().unwrap();
        let found = other.learner().learn(taken.as_fd()).unwrap();
        other.enter(0, taken.as_fd(), &found, true).unwrap();
        drop(taken);
        server.run(&format!("more(4131, 2); more(4116); os.kill({}, signal.SIGCONT)", fix.id()));
        until_chosen(&mut server, 4116);
        until_chosen(&mut server, 4131);
        // A listing after the refusals.
        server.run("more(4131)");
        until_chosen(&mut server, 4131);
        // The group of the socket in another map has no selector, and gets one when all its sockets can be chosen.
        other.leave(0);
        server.run("more(4130)");
        until_chosen(&mut server, 4130);
        let record = fixing::record_with(fix, 3);
        let results = &record["results"];
        assert_eq!((&results["groups"], &results["joined"]), (&3.into(), &7.into()), "{record}");
        assert_eq!(record["validity"][0]["id"], "not-followed", "{record}");
    });
}

#[test]
fn listeners_that_replace_all_others_keep_the_selector() {
    in_own_namespace(|test| {
        let Some(mut server) = groups(test) else { return };
        server.run("more(4132, 2)");
        let flags = format!("fix accept --pid {} --select flow:0:1 --json", server.pid());
        let Some(fix) = attached(test, &flags) else { return };
        // Between two listings, as in a reload of HAProxy.
        server.run(&format!("os.kill({}, signal.SIGSTOP)", fix.id()));
        until("the fix is stopped", || stat(fix.id()).is_some_and(|(state, _)| state == 'T'));
        server.run("old = groups.pop(4132); more(4132, 2); [s.close() for s in old]");
        server.run(&format!("os.kill({}, signal.SIGCONT)", fix.id()));
        until("each socket has a flow", || server.number("has_selector(4132)") == 1);
        let results = record_of(fix);
        let counts = ["groups", "joined", "closed"].map(|name| &results[name]);
        assert_eq!(counts, [&Value::from(1), &2.into(), &2.into()], "{results}");
        require_no_selector(&flags);
    });
}

#[test]
fn a_process_that_ends_ends_the_fix() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4107", 2, "group") else { return };
        let flags = format!("fix accept --pid {} --select least-busy --json", server.child.id());
        let Some(mut fix) = attached(test, &flags) else { return };
        drop(server);
        let mut text = String::new();
        fix.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(fix.wait().unwrap().code(), Some(3), "{text}");
        let record: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(record["validity"][0]["id"], "target-ended");
    });
}

#[test]
fn attaching_and_detaching_under_load_fails_no_request() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4108", 4, "group") else { return };
        let flags = server.flags("--select least-busy --json");
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let stopping = StopOnDrop(&stop);
            let load = scope.spawn(|| {
                let mut asked = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    assert!(server.ask("hello").is_some(), "request {asked}");
                    asked += 1;
                }
                asked
            });
            for _ in 0..10 {
                let Some(fix) = attached(test, &flags) else { break };
                record_of(fix);
            }
            drop(stopping);
            assert!(load.join().unwrap() > 0);
        });
    });
}

#[test]
fn a_dry_run_counts_and_changes_nothing() {
    in_own_namespace(|test| {
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4109", 4, "group") else { return };
        let Some(dry) = attached(test, &server.flags("--select cpu --json --dry-run")) else { return };
        // A fix may run at the same time.
        let Some(fix) = attached(test, &server.flags("--select cpu --json")) else { return };
        let cpu = schedule::allowed_cpus().unwrap()[0];
        schedule::pin_to(cpu).unwrap();
        let during = server.workers("tcp", 60);
        let results = record_of(fix);
        assert!(during.len() == 1 || results["lapsed"] != 0, "{during:?} {results}");
        let results = record_of(dry);
        assert_eq!((&results["choices"], &results["connections"]), (&0.into(), &60.into()), "{results}");
        assert!(server.workers("tcp", 60).len() > 1, "the hash chooses again");
    });
}

#[test]
fn servers_that_cannot_be_fixed_are_refused_in_one_line() {
    in_own_namespace(|test| {
        let Some(alone) = Server::start(test, "tcp", "127.0.0.1:4110", 1, "alone") else { return };
        let Some(single) = Server::start(test, "tcp", "127.0.0.1:4111", 1, "group") else { return };
        let Some(server) = Server::start(test, "tcp", "127.0.0.1:4112", 2, "group") else { return };
        let Some(fix) = attached(test, &server.flags("--select random --json")) else { return };
        for (flags, code, words) in [
            (alone.flags("--select random"), 4, "is in no SO_REUSEPORT group; a server creates one with"),
            (single.flags("--select random"), 4, "is the only socket of its SO_REUSEPORT group"),
            (server.flags("--select random"), 4, "already has a selector (BPF program"),
            (server.flags("--select flow:0:1"), 2, "a SYN has no payload"),
            (server.flags("--select random --control ttl=255"), 2, "'--control'"),
            (
                "fix accept --listen 127.0.0.1:4113 --select cpu".to_owned(),
                4,
                "nothing listens at 127.0.0.1:4113",
            ),
        ] {
            let ended = run(&mut fourtuple(&flags));
            assert_eq!((ended.code, ended.stdout.as_str()), (code, ""), "{flags}: {ended:?}");
            assert!(ended.line().contains(words), "{flags}: {ended:?}");
        }
        record_of(fix);
    });
}

/// The maps of the kernel take no sockets of MPTCP, with which programs in Go listen since 1.24.
#[test]
fn listeners_of_mptcp_are_refused_with_their_setting() {
    in_own_namespace(|test| {
        if !has_mptcp(test) {
            return;
        }
        let Some(server) = Server::start(test, "mptcp", "127.0.0.1:4114", 2, "group") else { return };
        for target in ["--listen 127.0.0.1:4114".to_owned(), format!("--pid {}", server.child.id())] {
            let ended = run(&mut fourtuple(&format!("fix accept {target} --select least-busy")));
            ended.require_line(
                4,
                &["127.0.0.1:4114 (TCP, python", "is a listener of MPTCP", "GODEBUG=multipathtcp=0"],
            );
        }
    });
}

/// Maximum size of a group that a selector compares.
const GROUP: usize = 1_024;

#[test]
fn a_group_of_1024_listeners_is_fixed_and_a_larger_one_refused() {
    in_own_namespace(|test| {
        if !Python::is_installed(test) || resource::raise_descriptor_limit().unwrap() < 4_096 {
            return fourtuple_testing::skip(test, "python3", "too few descriptors");
        }
        let address: SocketAddr = "127.0.0.1:4115".parse().unwrap();
        let mut server = Python::start();
        server.run(&format!(
            "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n\
             def more(number):\n  for _ in range(number):\n    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n    \
             s.bind(('127.0.0.1', {})); s.listen(8); held.append(s)\nmore({GROUP})",
            address.port()
        ));
        let flags = format!("fix accept --listen {address} --select least-busy --json");
        let Some(fix) = attached(test, &flags) else { return };
        // Nothing is accepted, so that each listener gets one connection.
        let _held: Vec<TcpStream> = (0..GROUP).map(|_| TcpStream::connect(address).unwrap()).collect();
        let results = record_of(fix);
        let rows = results["listeners"].as_array().unwrap();
        assert_eq!(rows.len() as u64 + results["listeners_left_out"].as_u64().unwrap(), GROUP as u64);
        if results["lapsed"] == 0 {
            assert_eq!((&results["choices"], &results["strays"]), (&GROUP.into(), &0.into()));
            assert!(rows.iter().all(|row| row["choices"] == 1 && row["queue"] == 1), "{results}");
        }
        server.run("more(1)");
        let ended = run(&mut fourtuple(&flags));
        ended.require_line(4, &["compares at most 1024 of the 1025 listeners of the group of"]);
    });
}

/// The kernel moves a group to another place in memory when it gets its 129th socket, its 257th and so on (`reuseport_grow`).
#[test]
fn a_group_that_grows_keeps_its_selector_through_reloads() {
    in_own_namespace(|test| {
        const LISTENERS: usize = 1_000;
        if !Python::is_installed(test) || resource::raise_descriptor_limit().unwrap() < 8_192 {
            return fourtuple_testing::skip(test, "python3", "too few descriptors");
        }
        let address: SocketAddr = "127.0.0.1:4116".parse().unwrap();
        let mut server = Python::start();
        server.run(&format!(
            "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n\
             def one():\n  s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n  \
             s.bind(('127.0.0.1', {})); s.listen(8); s.setblocking(False); return s\n\
             def reload():\n  for i in range(len(held)):\n    old = held[i]; held[i] = one(); old.close()\n\
             def drain():\n  for s in held:\n    try:\n      while True: s.accept()[0].close()\n    except BlockingIOError: pass\n\
             held.extend(one() for _ in range(100))",
            address.port()
        ));
        let flags = format!("fix accept --listen {address} --select least-busy --json");
        let Some(fix) = attached(test, &flags) else { return };
        server.run(&format!("held.extend(one() for _ in range({} - 100))", LISTENERS));
        for round in 0..=3 {
            if round > 0 {
                server.run("reload()");
            }
            // Only the selector gives each listener one connection.
            until("the selector knows all listeners", || {
                let held: Vec<TcpStream> =
                    (0..LISTENERS).map(|_| TcpStream::connect(address).unwrap()).collect();
                let queues = queues(address.port());
                drop(held);
                server.run("drain()");
                queues.len() == LISTENERS && queues.iter().all(|queue| *queue == 1)
            });
        }
        let record = fixing::record_of(fix);
        let results = &record["results"];
        assert_eq!((&results["groups"], &record["validity"]), (&1.into(), &json!([])), "{record}");
        // The record has rows of some, and counts the others.
        let all = results["closed"].as_u64().unwrap() + LISTENERS as u64;
        let rows = results["listeners"].as_array().unwrap().len() as u64;
        assert_eq!(rows + results["listeners_left_out"].as_u64().unwrap(), all, "{record}");
        assert_eq!(program_of(&mut server, "held[0]"), None);
    });
}

/// Returns the program of the group of a socket.
fn program_of(server: &mut Python, socket: &str) -> Option<FoundProgram> {
    let number = server.number(&format!("print({socket}.fileno())"));
    let socket = Pidfd::of_process(server.pid()).unwrap().duplicate(number as i32).unwrap();
    Learner::load().unwrap().learn(socket.as_fd()).unwrap().program
}

#[test]
fn listeners_of_the_last_moment_lose_the_selector_at_the_end() {
    in_own_namespace(|test| {
        let Some(mut server) = groups(test) else { return };
        // The end by a signal, and the end that the guard sees.
        for (port, signal) in [(4134, "SIGTERM"), (4135, "SIGKILL")] {
            server.run(&format!("more({port}, 2)"));
            let flags = format!("fix accept --pid {} --select flow:0:1 --json", server.pid());
            let Some(fix) = attached(test, &flags) else { return };
            let guard = guard_of(&fix);
            server.run(&format!("os.kill({}, signal.SIGSTOP)", fix.id()));
            until("the fix is stopped", || stat(fix.id()).is_some_and(|(state, _)| state == 'T'));
            server.run(&format!(
                "old = groups.pop({port}); more({port}, 200); [s.close() for s in old]\n\
                 os.kill({0}, signal.{signal}); os.kill({0}, signal.SIGCONT)",
                fix.id()
            ));
            until_ended(fix, guard);
            assert_eq!(program_of(&mut server, &format!("groups[{port}][0]")), None, "{signal}");
        }
    });
}

#[test]
fn a_selector_that_the_server_attached_meanwhile_stays() {
    in_own_namespace(|test| {
        let Some(mut server) = groups(test) else { return };
        for (port, signal) in [(4136, "SIGTERM"), (4137, "SIGKILL")] {
            server.run(&format!("more({port}, 4)"));
            let flags = format!("fix accept --listen 127.0.0.1:{port} --select random --json");
            let Some(fix) = attached(test, &flags) else { return };
            let guard = guard_of(&fix);
            server.run(&format!("select_first({port}); os.kill({}, signal.{signal})", fix.id()));
            until_ended(fix, guard);
            // A classic program has no id.
            let program = program_of(&mut server, &format!("groups[{port}][0]"));
            assert_eq!(program.map(|program| program.id), Some(0), "{signal}");
        }
    });
}

/// A resolver binds a port for each query, and later another program may have a group there.
#[test]
fn an_address_that_the_process_has_left_is_not_followed() {
    in_own_namespace(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let (mut server, mut other) = (Python::start(), Python::start());
        server.run(GROUPS);
        other.run(GROUPS);
        server.run("more(4150, 2)");
        let flags = format!("fix accept --pid {} --select flow:0:1 --json", server.pid());
        let Some(fix) = attached(test, &flags) else { return };
        // A new group that has its selector shows that the addresses were looked for.
        let look = |server: &mut Python, port: u16| {
            server.run(&format!("more({port}, 2)"));
            until("each socket has a flow", || server.number(&format!("has_selector({port})")) == 1);
        };
        server.run("more(4160, reuse=0)");
        look(&mut server, 4151);
        server.run("groups.pop(4160)[0].close()");
        look(&mut server, 4152);
        other.run("more(4160, 2)");
        look(&mut server, 4153);
        assert_eq!(program_of(&mut other, "groups[4160][0]"), None);
        assert_eq!(record_of(fix)["groups"], 4);
    });
}

#[test]
fn without_descriptors_at_the_end_the_guard_detaches_the_selector() {
    in_own_namespace(|test| {
        if Command::new("prlimit").arg("--version").output().is_err() {
            return fourtuple_testing::skip(test, "programs", "prlimit is not in PATH");
        }
        let Some(server) = Server::start(test, "udp", "127.0.0.1:4139", 8, "group") else { return };
        let flags = server.flags("--select flow:0:1 --json");
        let Some(fix) = attached(test, &flags) else { return };
        let guard = guard_of(&fix);
        let mut limit = Command::new("prlimit");
        limit.args(["--pid", &fix.id().to_string(), "--nofile=0:"]);
        assert!(limit.status().unwrap().success());
        child::terminate(fix.id()).unwrap();
        until_ended(fix, guard);
        require_no_selector(&flags);
    });
}

#[test]
fn bad_values_are_refused_in_one_line() {
    for (flags, words) in [
        ("--select random", "--listen"),
        ("", "--listen"),
        ("--listen 127.0.0.1 --select random", "--listen"),
        ("--listen 127.0.0.1:80 --pid 1 --select random", "--pid"),
        ("--pid 2147483647 --select random", "there is no such process"),
        ("--pid 1 --select hash", "expected least-busy, cpu, random, flow:OFFSET:WIDTH"),
        ("--pid 1 --select flow:0:3", "expected least-busy"),
        ("--pid 1 --select random --control nothing", "ttl=HOPS"),
        ("--pid 1 --select random --for soon", "--for"),
    ] {
        refused(&mut fourtuple(&format!("fix accept {flags}")), &[words]);
    }
}

#[test]
fn without_permission_the_error_is_one_line() {
    let mut command = fourtuple("fix accept --listen 127.0.0.1:80 --select random");
    child::refuse(&mut command, Facility::Bpf);
    let ended = run(&mut command);
    ended.require_line(4, &["cannot fix accept"]);
    assert!(!is_root() || ended.line().contains("so its seccomp filter refuses bpf(2)"), "{ended:?}");
}

#[test]
fn a_missing_capability_is_named_in_one_line() {
    let test = "fix_accept::a_missing_capability_is_named_in_one_line";
    if !is_root() || Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_err() {
        return fourtuple_testing::skip(test, "root", "root drops capabilities with setpriv");
    }
    let limited = Limited::new();
    for (given, lacking) in [
        ("+net_admin", "lacks CAP_BPF and CAP_PERFMON (to trace, and to fix); "),
        ("+bpf,+perfmon", "lacks CAP_NET_ADMIN (for everything but traces); "),
    ] {
        let ended = run(
            &mut limited.command(&[given.to_owned()], "fix accept --listen 127.0.0.1:80 --select random")
        );
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
        // With all capabilities for its programs the command finds no listener.
        let words = if given == "+net_admin" { lacking } else { "nothing listens" };
        let line = ended.line();
        assert!(line.contains(words) || line.contains(lacking), "{given}: {line}");
    }
    let flags = format!("fix accept --pid {} --select random", std::process::id());
    let ended = run(&mut limited.command(&["+bpf".to_owned()], &flags));
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(ended.line().contains("EACCES") && ended.line().contains("CAP_SYS_PTRACE"), "{ended:?}");
}
