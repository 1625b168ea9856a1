//! `fourtuple guard`: begins and ends fixes by evidence, follows the life of programs and of itself, and leaves nothing.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::Objects;
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{child, procfs};
use fourtuple_testing::{set_sysctl, skip};
use serde_json::Value;

use crate::program::fixing::Cgroup;
use crate::program::fixing::Client;
use crate::program::situation::{SERVER, has, nginx, set_range, wait_for};
use crate::program::{
    DEADLINE, Ended, Limited, TempDir, children, fourtuple, in_own_namespace, is_root, list, number, queues,
    require_valid, run, stat, text, until,
};

const LOW: u16 = 20_000;
const PORTS: u16 = 400;

/// A running guard, killed on drop. Its socket and its policy are in the directory of the test.
struct Guard {
    child: Child,
    events: Receiver<Value>,
    temp: TempDir,
}

impl Guard {
    /// Starts a guard and waits until it watches; `None` after a skip.
    fn start(test: &str, policy: Option<&str>, flags: &str) -> Option<Guard> {
        let temp = TempDir::new();
        let mut line = format!("guard --every 200ms --no-trace --socket {} {flags}", temp.join("guard.sock"));
        if let Some(policy) = policy {
            line += &format!(" --config {}", temp.file("guard.toml", policy));
        }
        Guard::of(test, &mut fourtuple(&line), temp)
    }

    fn of(test: &str, command: &mut Command, temp: TempDir) -> Option<Guard> {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let (sender, events) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let event: Value =
                    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        let mut guard = Guard { child, events, temp };
        match guard.events.recv_timeout(DEADLINE) {
            Ok(event) => assert!(["start", "takeover"].contains(&text(&event, "event")), "{event}"),
            Err(RecvTimeoutError::Timeout) => panic!("no start within {DEADLINE:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                let ended = guard.ended();
                assert_eq!(ended.code, 4, "{ended:?}");
                skip(test, "bpf", ended.line());
                return None;
            }
        }
        Some(guard)
    }

    /// Returns the number of cgroup programs of its fixes: two of each.
    fn links(&self) -> usize {
        links(self.child.id()).len()
    }

    /// Waits for an event of this kind.
    #[track_caller]
    fn event(&self, kind: &str) -> Value {
        let mut others = Vec::new();
        loop {
            match self.events.recv_timeout(DEADLINE) {
                Ok(event) if event["event"] == kind => return event,
                Ok(event) => others.push(event),
                Err(error) => panic!("no {kind}, {error}: {others:#?}"),
            }
        }
    }

    /// Returns the events about fixes that have come, without waiting.
    fn kinds(&self) -> Vec<String> {
        let kinds = self.events.try_iter().map(|event| text(&event, "event").to_owned());
        kinds.filter(|kind| kind != "notify").collect()
    }

    fn ask(&self, words: &str) -> Ended {
        run(&mut fourtuple(&format!("guard {words} --socket {}", self.temp.join("guard.sock"))))
    }

    fn status(&self) -> Value {
        let record = self.ask("status --json").json();
        require_valid(&record);
        record["results"].clone()
    }

    /// Waits until two readings have been made since now.
    fn read_twice(&self) {
        thread::sleep(Duration::from_secs(1));
        self.status();
    }

    /// Runs `act` while the guard is stopped: it reads nothing of what happens meanwhile.
    fn while_stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        let id = self.child.id();
        child::stop(id).unwrap();
        until("the guard is stopped", || stat(id).is_some_and(|(state, _)| state == 'T'));
        let done = act();
        assert!(Command::new("kill").args(["-CONT", &id.to_string()]).status().unwrap().success());
        done
    }

    /// Ends the guard with SIGTERM.
    fn end(mut self) -> Ended {
        child::terminate(self.child.id()).unwrap();
        self.ended()
    }

    fn ended(&mut self) -> Ended {
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut self.child.stderr.take().unwrap(), &mut stderr).unwrap();
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        Ended { code, stdout: String::new(), stderr }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // After a failure its successor may still run.
        let directory = format!("{}/", self.temp.path().display());
        let line = |id: u32| fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        for id in procfs::processes("/").filter(|id| line(*id).contains(&directory)) {
            let _ = child::kill(id);
        }
    }
}

/// Returns a policy for the programs of a cgroup.
fn policy(cgroup: &Cgroup, more: &str) -> String {
    format!("[fix-ports]\ncgroups = [\"{}\"]\n{more}\n", name(cgroup))
}

/// Returns the path of a cgroup below the mount.
fn name(cgroup: &Cgroup) -> String {
    let root = fourtuple_testing::cgroup_root().unwrap();
    format!("/{}", cgroup.0.strip_prefix(root).unwrap().display())
}

/// A listener, a cgroup and a client in it, in a namespace with few ports.
fn scene(test: &str, cgroup: &str) -> Option<(OwnedFd, SocketAddr, Cgroup, Client)> {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
    // The listener closes nothing.
    set_sysctl("net.ipv4.tcp_fin_timeout", "1");
    let (listener, address) = fourtuple_testing::listener("127.0.0.1", 4096);
    let cgroup = Cgroup::new(test, cgroup)?;
    let client = Client::start(test, &cgroup)?;
    Some((listener, address, cgroup, client))
}

/// Returns the links of cgroup programs that a process holds. Its readings have links of other kinds.
fn links(process: u32) -> BTreeSet<u32> {
    let entries = fs::read_dir(format!("/proc/{process}/fdinfo")).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let of_cgroup = texts.filter(|text| text.contains("link_type:\tcgroup"));
    let number =
        |text: String| text.lines().find_map(|line| line.strip_prefix("link_id:")?.trim().parse().ok());
    of_cgroup.filter_map(number).collect()
}

#[test]
fn a_fix_begins_at_its_share_helps_and_ends() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-share") else { return };
        let policy = format!("quiet = \"2s\"\n{}", policy(&cgroup, ""));
        let Some(guard) = Guard::start(test, Some(&policy), "") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 150).0, 0);
        guard.read_twice();
        assert_eq!(guard.kinds(), [""; 0], "37% of the ports");
        // Of half of the ports the first 16 samples of the fix may find too few. A client that stands still between two of these connects would
        // make the rest with the fix.
        assert_eq!(guard.while_stopped(|| client.connect("127.0.0.1", address.port(), 150)).0, 0);
        let attach = guard.event("attach");
        assert_eq!((text(&attach, "action"), text(&attach, "target")), ("fix-ports", name(&cgroup).as_str()));
        // The guard may have been stopped within a reading.
        let says = |ports: u32| text(&attach, "message").contains(&format!("uses {ports} of 400 ports"));
        assert!((200..=300).any(says), "{attach}");
        until("the programs are attached", || guard.links() == 2);
        let (failed, ports) = client.connect("127.0.0.1", address.port(), 40);
        assert_eq!((failed, ports.len()), (0, 40));
        let effect = guard.event("effect");
        // Of those that the reading has seen.
        assert!(text(&effect, "message").starts_with("it helps: "), "{effect}");
        let mut status = guard.status();
        until("all are counted", || {
            status = guard.status();
            number(&list(&status, "/fixes")[0], "drawn") == 40
        });
        assert_eq!(text(&list(&status, "/fixes")[0], "effect"), "helps", "{status}");
        assert_eq!((text(&status, "state"), number(&status["totals"], "attached")), ("active", 1));
        // Without its connections the program has no need.
        drop(client);
        let release = guard.event("release");
        assert!(text(&release, "message").starts_with("no need for 2 s; 40 of 40 connects"), "{release}");
        assert_eq!(list(&guard.status(), "/fixes").len(), 0);
        until("nothing is attached", || guard.links() == 0);
        assert_eq!(guard.end().code, 0);
    });
}

#[test]
fn without_a_free_port_nothing_begins() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-full") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), PORTS).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        let refusal = guard.event("refusal");
        assert_eq!(text(&refusal, "target"), name(&cgroup));
        assert!(text(&refusal, "message").contains("400 of 400 ports: a draw would find none"), "{refusal}");
        guard.read_twice();
        assert_eq!(guard.kinds(), [""; 0], "said once");
        drop(client);
    });
}

#[test]
fn the_largest_need_comes_first() {
    in_own_namespace(|test| {
        let Some((_listener, address, few, mut client)) = scene(test, "guard-1-few") else { return };
        let Some(many) = Cgroup::new(test, "guard-2-many") else { return };
        let Some(mut other) = Client::start(test, &many) else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 20).0, 0);
        assert_eq!(other.connect("127.0.0.1", address.port(), 230).0, 0);
        let policy = format!("[fix-ports]\ncgroups = [\"{}\", \"{}\"]\nmax = 1\n", name(&few), name(&many));
        let Some(guard) = Guard::start(test, Some(&policy), "") else { return };
        let refusal = guard.event("refusal");
        assert_eq!(text(&refusal, "target"), name(&few));
        assert!(text(&refusal, "message").ends_with("`max` allows 1"), "{refusal}");
        assert_eq!(text(&guard.event("attach"), "target"), name(&many));
        drop((client, other));
    });
}

/// The kernel's search passes over ports that are bound, for all destinations: a fix for one program takes them from others.
#[test]
fn programs_from_which_a_fix_takes_ports_are_fixed_too() {
    in_own_namespace(|test| {
        let Some((_listener, address, first, mut client)) = scene(test, "guard-crowd-1") else { return };
        let Some(second) = Cgroup::new(test, "guard-crowd-2") else { return };
        let Some(mut other) = Client::start(test, &second) else { return };
        let (_listener, elsewhere) = fourtuple_testing::listener("127.0.0.2", 4096);
        let policy = format!(
            "quiet = \"2s\"\n[fix-ports]\ncgroups = [\"{}\", \"{}\"]\npast = \"10%\"\n",
            name(&first),
            name(&second)
        );
        let Some(guard) = Guard::start(test, Some(&policy), "") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 44).0, 0);
        assert_eq!(text(&guard.event("attach"), "target"), name(&first));
        until("the programs are attached", || guard.links() == 2);
        assert_eq!(client.connect("127.0.0.1", address.port(), 320).0, 0);
        // 6% of the ports, of which the kernel's search finds a quarter at most.
        assert_eq!(other.connect("127.0.0.2", elsewhere.port(), 24).0, 0);
        let attach = guard.event("attach");
        assert_eq!(text(&attach, "target"), name(&second));
        // A reading may fall between two of the connects.
        let says = |ports: u32| {
            let words = format!("uses {ports} of 400 ports, and fixes may have bound 75% of the range");
            text(&attach, "message").ends_with(&words)
        };
        assert!((20..=24).any(says), "{attach}");
        until("the programs are attached", || guard.links() == 4);
        assert_eq!(other.connect("127.0.0.2", elsewhere.port(), 300).0, 0);
        drop((client, other));
    });
}

#[test]
fn a_fix_without_effect_is_let_go() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-effect") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        // A program that binds its sockets gets no port from connect().
        let binding = format!(
            "import os, socket\nopen({:?}, 'w').write(str(os.getpid()))\nfor port in range(30_000, 30_020):\n s = \
             socket.socket()\n s.bind(('127.0.0.1', port))\n s.connect(('127.0.0.1', {}))\n",
            cgroup.0.join("cgroup.procs"),
            address.port()
        );
        assert!(Command::new("python3").args(["-c", &binding]).status().unwrap().success());
        let release = guard.event("release");
        assert!(text(&release, "message").starts_with("the program binds its sockets itself"), "{release}");
        guard.read_twice();
        assert_eq!(guard.kinds(), [""; 0], "it rests");
        drop(client);
    });
}

#[test]
fn without_a_policy_nothing_is_changed() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-observes") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, None, "") else { return };
        let would = loop {
            let event = guard.event("would");
            if event["target"] == name(&cgroup) {
                break event;
            }
        };
        assert!(text(&would, "message").contains("250 of 400 ports: fix ports would begin"), "{would}");
        let status = guard.status();
        assert_eq!((text(&status, "state"), list(&status, "/fixes").len()), ("observing", 0));
        assert!(guard.links() == 0);
        drop(client);
    });
}

#[test]
fn programs_of_the_root_cgroup_are_left_alone() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, client)) = scene(test, "guard-root") else { return };
        drop(client);
        let mut command = Command::new("python3");
        command.args(["-c", crate::program::fixing::CLIENT]);
        let Some(mut client) = Client::of(command) else { return };
        let root = fourtuple_testing::cgroup_root().unwrap();
        fs::write(root.join("cgroup.procs"), client.child.id().to_string()).unwrap();
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        let refusal = guard.event("refusal");
        assert_eq!(text(&refusal, "target"), "/");
        assert!(text(&refusal, "message").contains("is in the root cgroup"), "{refusal}");
        assert_eq!(list(&guard.status(), "/fixes").len(), 0);
        drop(client);
    });
}

#[test]
fn a_cgroup_that_is_made_again_is_fixed_again() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-again") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        drop(client);
        cgroup.remove();
        let release = guard.event("release");
        assert!(text(&release, "message").starts_with("the cgroup was removed"), "{release}");
        fs::create_dir(&cgroup.0).unwrap();
        let mut client = Client::start(test, &cgroup).unwrap();
        let mut connected = 0;
        until("the ports are free again", || {
            connected += client.connect("127.0.0.1", address.port(), 50).1.len();
            connected > 200
        });
        guard.event("attach");
        drop(client);
    });
}

#[test]
fn a_killed_guard_leaves_nothing() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-killed") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(mut guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        let held = Objects::of_process(guard.child.id()).unwrap();
        child::kill(guard.child.id()).unwrap();
        guard.child.wait().unwrap();
        until("the kernel frees what the guard held", || held.remaining().unwrap().is_empty());
        assert_eq!(client.connect("127.0.0.1", address.port(), 20).0, 0);
        // The path of the socket remains, and hinders no new guard.
        let line = format!("guard --no-trace --socket {}", guard.temp.join("guard.sock"));
        let temp = std::mem::replace(&mut guard.temp, TempDir::new());
        assert_eq!(Guard::of(test, &mut fourtuple(&line), temp).unwrap().end().code, 0);
        drop(client);
    });
}

#[test]
fn a_new_guard_takes_over_without_a_gap() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-takeover") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(mut first) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        first.event("attach");
        until("the programs are attached", || first.links() == 2);
        let held = Objects { links: links(first.child.id()), ..Objects::default() };
        let line = format!(
            "guard --every 200ms --no-trace --takeover --config {} --socket {}",
            first.temp.join("guard.toml"),
            first.temp.join("guard.sock")
        );
        // The first one detaches only after the second one has attached: at any time one of them is.
        let mut child = fourtuple(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("the second guard has attached", || {
            // Looked at before the second one, which has attached if the first one has not.
            let first = held.remaining().unwrap().links.len() == 2;
            let second = links(child.id()).len() == 2;
            assert!(first || second, "a gap");
            second
        });
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut events = stdout.lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        assert_eq!(events.next().unwrap()["event"], "attach");
        let takeover = events.next().unwrap();
        assert!(text(&takeover, "message").starts_with("took over from process"), "{takeover}");
        first.event("takeover");
        assert_eq!(first.ended().code, 0);
        let status = first.status();
        assert_eq!(list(&status, "/fixes").len(), 1, "{status}");
        assert_eq!(number(&status["totals"], "attached"), 2);
        assert_eq!(client.connect("127.0.0.1", address.port(), 20).0, 0);
        child::terminate(child.id()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        drop(client);
    });
}

#[test]
fn a_guard_goes_on_when_its_successor_dies() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-widow") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        let mut successor = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut stream = std::os::unix::net::UnixStream::connect(guard.temp.join("guard.sock")).unwrap();
        writeln!(stream, "{{\"do\":\"takeover\",\"pid\":{}}}", successor.id()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        assert!(answer.contains(&name(&cgroup)), "{answer}");
        assert!(text(&guard.event("takeover"), "message").ends_with("takes over"));
        // A process that nobody has waited for yet has ended too.
        child::kill(successor.id()).unwrap();
        let stays = guard.event("takeover");
        assert_eq!(text(&stays, "message"), "this guard goes on: its successor has ended");
        successor.wait().unwrap();
        until("guard answers", || guard.ask("status").code == 0);
        assert_eq!(list(&guard.status(), "/fixes").len(), 1);
        drop(client);
    });
}

/// SIGHUP: a successor with the policy as it is now. The service manager hears of it, and its watchdog is answered.
#[test]
fn a_guard_that_is_reloaded_has_a_successor() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-reload") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let temp = TempDir::new();
        let config = temp.file("guard.toml", &policy(&cgroup, ""));
        // By default ten messages that nobody reads leave no place for another, and the guard sends six a second.
        set_sysctl("net.unix.max_dgram_qlen", "1000");
        let manager = UnixDatagram::bind(temp.join("notify")).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        // Reads all the time, as a service manager does.
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length) = manager.recv(&mut buffer) {
                if sender.send(String::from_utf8_lossy(&buffer[..length]).into_owned()).is_err() {
                    break;
                }
            }
        });
        let heard = |wanted: &str| {
            let end = Instant::now() + DEADLINE;
            loop {
                let left = end.saturating_duration_since(Instant::now());
                let message = messages.recv_timeout(left);
                let message = message.unwrap_or_else(|error| panic!("no {wanted}: {error}"));
                if message.starts_with(wanted) {
                    return message;
                }
            }
        };
        let line =
            format!("guard --every 200ms --no-trace --config {config} --socket {}", temp.join("guard.sock"));
        let mut command = fourtuple(&line);
        command.env("NOTIFY_SOCKET", temp.join("notify")).env("WATCHDOG_USEC", "2000000");
        let Some(mut guard) = Guard::of(test, &mut command, temp) else { return };
        heard("READY=1");
        heard("WATCHDOG=1");
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        // A policy with a mistake: the guard goes on.
        fs::write(&config, "[fix-ports]\nunit = []").unwrap();
        child::hang_up(guard.child.id()).unwrap();
        heard("RELOADING=1");
        assert!(
            text(&guard.event("takeover"), "message").contains("this guard goes on: its successor ended")
        );
        heard("READY=1");
        assert_eq!(list(&guard.status(), "/fixes").len(), 1);
        fs::write(&config, policy(&cgroup, "max = 7")).unwrap();
        child::hang_up(guard.child.id()).unwrap();
        let main = heard("MAINPID=");
        heard("READY=1");
        heard("WATCHDOG=1");
        let successor: u32 = main.trim_start_matches("MAINPID=").parse().unwrap();
        assert_eq!(guard.child.wait().unwrap().code(), Some(0));
        let status = guard.status();
        assert_eq!(list(&status, "/fixes").len(), 1, "{status}");
        child::terminate(successor).unwrap();
        until("the successor has ended", || stat(successor).is_none_or(|(state, _)| state == 'Z'));
        drop(client);
    });
}

#[test]
fn a_person_pauses_and_resumes() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-pause") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        let socket = guard.temp.join("guard.sock");
        let second = run(&mut fourtuple(&format!("guard --socket {socket}")));
        assert_eq!(second.code, 4);
        assert!(second.line().starts_with(&format!("another guard runs at {socket}")), "{second:?}");
        assert_eq!(guard.ask("pause --for 1h").code, 0);
        assert!(text(&guard.event("release"), "message").contains("a person has paused guard"));
        let status = guard.status();
        assert_eq!((text(&status, "state"), list(&status, "/fixes").len()), ("paused", 0));
        assert!(number(&status, "paused_for_ns") > 3_000_000_000_000);
        let table = guard.ask("status").stdout;
        assert!(table.contains("paused"), "{table}");
        guard.event("pause");
        guard.read_twice();
        assert_eq!(guard.kinds(), [""; 0]);
        assert_eq!(guard.ask("resume").code, 0);
        guard.event("resume");
        guard.event("attach");
        drop(client);
    });
}

#[test]
fn doctor_knows_the_fixes_of_a_guard() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-doctor") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 390).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "") else { return };
        guard.event("attach");
        let doctor = || run(&mut fourtuple("doctor --no-trace --for 200ms --json")).json();
        let mut with = Value::Null;
        // doctor waits for a guard that is busy for a short time only.
        until("doctor knows the fix", || {
            with = doctor();
            !with["results"]["snapshot"]["connections"]["seen"]["tuples"][0]["fix"].is_null()
        });
        let tuple = &list(&with, "/results/snapshot/connections/seen/tuples")[0];
        assert_eq!((&tuple["fix"]["pid"], &tuple["fix"]["guard"]), (&guard.child.id().into(), &true.into()));
        let name = format!("guard[{}]", guard.child.id());
        assert!(with["results"]["findings"].to_string().contains(&name), "{:#}", with["results"]["findings"]);
        assert_eq!(guard.end().code, 0);
        assert!(!doctor()["results"]["findings"].to_string().contains(&name));
        drop(client);
    });
}

#[test]
fn one_process_repairs_and_exports() {
    in_own_namespace(|test| {
        let Some((_listener, address, cgroup, mut client)) = scene(test, "guard-export") else { return };
        assert_eq!(client.connect("127.0.0.1", address.port(), 250).0, 0);
        let Some(guard) = Guard::start(test, Some(&policy(&cgroup, "")), "--listen 127.0.0.1:9416") else {
            return;
        };
        guard.event("attach");
        let metrics = || {
            let mut stream = TcpStream::connect("127.0.0.1:9416").unwrap();
            stream
                .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                .unwrap();
            let mut text = String::new();
            std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
            text
        };
        let active = "fourtuple_guard_active{action=\"fix-ports\"} 1";
        until("the metrics show the fix", || metrics().contains(active));
        let metrics = metrics();
        for name in [
            "fourtuple_guard_actions_total{action=\"fix-ports\",event=\"attach\"} 1",
            "fourtuple_ports_used{",
        ] {
            assert!(metrics.contains(name), "{name}: {metrics}");
        }
        drop(client);
    });
}

/// nginx as a proxy whose upstream accepts nothing: each request holds a port until its time limit.
#[test]
fn errors_of_a_proxy_do_not_start() {
    in_own_namespace(|test| {
        if !has(test, &["nginx"]) {
            return;
        }
        set_range(LOW, LOW + 199);
        set_sysctl("net.core.somaxconn", "4096");
        let address = SocketAddr::from(([10, 0, 0, 1], SERVER));
        let silent = socket::open(Transport::Tcp, address, false).unwrap();
        socket::bind(silent.as_fd(), address).unwrap();
        socket::listen(silent.as_fd(), 4096).unwrap();
        let Some(cgroup) = Cgroup::new(test, "guard-proxy") else { return };
        let path = name(&cgroup);
        let temp = TempDir::new();
        // By default nginx closes a connection without an answer after a minute, which a busy host may need for the fix.
        let wait = "proxy_read_timeout 10m;";
        let proxy = format!("server {{ listen 4020; location / {{ {wait} proxy_pass http://{address}; }} }}");
        let server = nginx(&temp, "proxy", 1, Some(cgroup), &proxy);
        wait_for("127.0.0.1", 4_020);
        let policy =
            format!("quiet = \"2s\"\n[fix-ports]\ncgroups = [\"{path}\"]\nsource = \"10.0.0.0/29\"\n");
        let Some(guard) = Guard::start(test, Some(&policy), "") else { return };
        let ask = |number: usize| -> Vec<TcpStream> {
            let request = |index: usize| {
                // The clients need ports too, of other tuples.
                let mut stream = TcpStream::connect((format!("127.0.0.{}", 1 + index % 20), 4_020)).unwrap();
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
                stream
            };
            (0..number).map(request).collect()
        };
        let errors = || fs::read_to_string(temp.join("proxy/error.log")).unwrap_or_default();
        let mut held = ask(120);
        guard.event("attach");
        until("the programs are attached", || guard.links() == 2);
        held.extend(ask(180));
        let upstream = || queues(SERVER).iter().sum::<u64>();
        until("300 requests wait", || upstream() == 300);
        assert!(!errors().contains("Cannot assign requested address"), "{}", errors());
        // The same requests without a guard, at the same proxy.
        assert_eq!(guard.end().code, 0);
        let more = ask(200);
        until("nginx finds no port", || errors().contains("Cannot assign requested address"));
        drop((held, more, server, silent));
    });
}

#[test]
fn a_stuck_worker_gets_no_new_connections() {
    in_own_namespace(|test| {
        let Some((temp, server, stuck, policy)) = stuck(test, "guard-stuck") else { return };
        let Some(guard) = Guard::start(test, Some(&policy), "") else { return };
        let mut streams = fill(&guard);
        let attach = guard.event("attach");
        assert_eq!((text(&attach, "action"), text(&attach, "target")), ("fix-accept", "127.0.0.1:4020"));
        until("fix accept runs", || {
            let status = guard.status();
            let fix = list(&status, "/fixes").first().cloned().unwrap_or_default();
            fix["pid"].as_u64().is_some_and(|pid| {
                fs::read_to_string(format!("/proc/{pid}/status"))
                    .is_ok_and(|text| text.contains("Threads:\t2"))
            })
        });
        let effect = guard.event("effect");
        assert!(text(&effect, "message").contains("grows no more"), "{effect}");
        let waiting = || queues(4_020).into_iter().max().unwrap();
        // On a busy host heartbeats of the selector come late, and the hash chooses meanwhile: 60 connections pass the worker by chance once in
        // 30 million times. The guard would let go of a fix with which the queue has grown.
        guard.while_stopped(|| {
            until("the worker gets no connection", || {
                let before = waiting();
                streams.extend(connect(60));
                until("the other workers accept", do_others_accept);
                waiting() == before
            });
            assert!(Command::new("kill").args(["-CONT", &stuck.to_string()]).status().unwrap().success());
            until("the worker accepts", || waiting() == 0);
        });
        let release = guard.event("release");
        assert!(text(&release, "message").starts_with("no need for 2 s; fix accept chose for"), "{release}");
        assert_eq!(guard.end().code, 0);
        drop((streams, server, temp));
    });
}

#[test]
fn a_killed_guard_leaves_the_choice_to_the_hash() {
    in_own_namespace(|test| {
        let Some((temp, server, stuck, policy)) = self::stuck(test, "guard-hash") else { return };
        let Some(mut guard) = Guard::start(test, Some(&policy), "") else { return };
        let streams = fill(&guard);
        guard.event("attach");
        let mut fix = 0;
        until("fix accept runs", || {
            let status = guard.status();
            fix = list(&status, "/fixes").first().map_or(0, |fix| number(fix, "pid") as u32);
            children(fix).len() == 1
                && Objects::of_process(fix).is_ok_and(|objects| !objects.programs.is_empty())
        });
        let held = Objects::of_process(fix).unwrap();
        child::kill(guard.child.id()).unwrap();
        guard.child.wait().unwrap();
        until("fix accept ends", || stat(fix).is_none_or(|(state, _)| state == 'Z'));
        until("the kernel frees what it held", || held.remaining().unwrap().is_empty());
        let before = queues(4_020).into_iter().max().unwrap();
        let more = connect(100);
        until("the hash gives the worker connections again", || {
            queues(4_020).into_iter().max().unwrap() > before
        });
        assert!(Command::new("kill").args(["-CONT", &stuck.to_string()]).status().unwrap().success());
        drop((streams, more, server, temp));
    });
}

/// Starts nginx with 4 workers that have listeners of their own, and stops one of them.
fn stuck(test: &str, cgroup: &str) -> Option<(TempDir, crate::program::situation::Daemon, u32, String)> {
    if !has(test, &["nginx"]) {
        return None;
    }
    let cgroup = Cgroup::new(test, cgroup)?;
    let policy = format!("quiet = \"2s\"\n[fix-accept]\ncgroups = [\"{}\"]\n", name(&cgroup));
    let temp = TempDir::new();
    let server =
        nginx(&temp, "web", 4, Some(cgroup), "server { listen 127.0.0.1:4020 reuseport; return 200 ok; }");
    until("4 workers", || children(server.pid()).len() == 4);
    let stuck = children(server.pid())[1];
    assert!(Command::new("kill").args(["-STOP", &stuck.to_string()]).status().unwrap().success());
    until("the process is stopped", || stat(stuck).is_some_and(|(state, _)| state == 'T'));
    Some((temp, server, stuck, policy))
}

fn connect(number: usize) -> Vec<TcpStream> {
    (0..number).map(|_| TcpStream::connect("127.0.0.1:4020").unwrap()).collect()
}

/// Returns whether connections wait for one worker only.
fn do_others_accept() -> bool {
    queues(4_020).iter().filter(|queue| **queue > 0).count() == 1
}

/// Opens connections, a quarter of which wait for the stopped worker. Before the others have accepted theirs, the guard would see another fault,
/// or a part of the queue.
fn fill(guard: &Guard) -> Vec<TcpStream> {
    guard.while_stopped(|| {
        let streams = connect(200);
        until("the other workers accept", do_others_accept);
        streams
    })
}

#[test]
fn what_the_host_cannot_do_is_one_line() {
    let temp = TempDir::new();
    let socket = temp.join("guard.sock");
    let config = temp.file("guard.toml", "[fix-ports]\nunits = [\"a\"]\n");
    let refused = |line: &str| {
        let mut command = fourtuple(&format!("{line} --socket {socket}"));
        child::refuse(&mut command, Facility::Bpf);
        let ended = run(&mut command);
        (ended.code, ended.line().to_owned())
    };
    let (code, line) = refused(&format!("guard --config {config}"));
    assert_eq!(code, 4, "{line}");
    // Loading for a cgroup needs CAP_NET_ADMIN beside CAP_BPF.
    if is_root() {
        let flags = format!("guard --config {config} --socket {socket}");
        let ended = run(&mut Limited::new().command(&["+bpf".to_owned(), "+perfmon".to_owned()], &flags));
        assert!(ended.code == 4 && ended.line().starts_with("guard: cannot fix ports: "), "{ended:?}");
    }
    let (code, line) = refused("guard status");
    assert_eq!((code, line), (4, format!("no guard runs at {socket}")));
    let wrong = temp.file("wrong.toml", "[fix-ports]\nunits = [\"a\"]\npast = \"200%\"\n");
    let (code, line) = refused(&format!("guard --config {wrong}"));
    assert_eq!(code, 2, "{line}");
    assert!(line.starts_with(&format!("invalid value '{wrong}' for '--config': fix-ports.past: ")), "{line}");
    let (code, line) = refused("guard --config /nonexistent");
    assert_eq!(code, 2, "{line}");
}
