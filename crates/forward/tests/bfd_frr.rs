//! Interoperation with FRR's bfdd, in a separate network namespace at the other end of a veth.

#[path = "forwarder/flood/mod.rs"]
mod flood;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use flood::Flood;
use fourtuple::spread::Selector;
use fourtuple_forward::bfd::{Diagnostic, Link, LinkSettings, LinkState, State, Timers};
use fourtuple_forward::{Forward, Peer, PlaneCounts};
use fourtuple_syscalls::netns;
use fourtuple_testing::{in_namespace, skip};
use serde_json::Value;

const BFDD: &str = "/usr/lib/frr/bfdd";
const VTYSH: &str = "/usr/bin/vtysh";
/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(90);
/// The detection multiplier of both sides: 30 s with 300 ms, longer than a thread waits on a busy machine.
const DETECT_MULT: u8 = 100;

fn timers(tx_ms: u64, rx_ms: u64) -> Timers {
    let ms = Duration::from_millis;
    Timers::new(ms(tx_ms), ms(rx_ms), DETECT_MULT).unwrap()
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[track_caller]
fn wait_until(what: &str, now: impl Fn() -> String, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about: {}", now());
        thread::sleep(Duration::from_millis(50));
    }
}

/// A bfdd process, its namespace, and the directory of its sockets.
struct Frr {
    shell: Child,
    /// The shell's standard input. The shell waits for a line or for the end of input, and then kills bfdd, also if this
    /// process dies.
    words: Option<ChildStdin>,
    directory: PathBuf,
    peer: IpAddr,
}

impl Frr {
    /// Starts bfdd in a namespace behind a veth with the addresses `here` and `there`.
    fn start(name: &str, here: IpAddr, there: IpAddr, interval_ms: u64, detect_mult: u8) -> Frr {
        let directory = std::env::temp_dir().join(format!("fourtuple-{name}-{}", std::process::id()));
        // A previous process with the same process ID may have left this directory.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        // bfdd drops root before it creates its sockets.
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        let path = |file: &str| directory.join(file).to_str().unwrap().to_owned();
        let config = format!(
            "bfd\n peer {here}\n  detect-multiplier {detect_mult}\n  receive-interval {interval_ms}\n  \
             transmit-interval {interval_ms}\n !\n!\n"
        );
        fs::write(path("bfdd.conf"), config).unwrap();
        // bfdd leaves a directory in /var/tmp, so the namespace gets its own.
        let script = format!(
            "mount -t tmpfs tmpfs /var/tmp; echo ready; read go
            {BFDD} -u frr -g frr -P 0 --vty_socket {} -f {} -i {} --bfdctl {} --log stdout < /dev/null > {} 2>&1 &
            read end; kill -9 $!; wait",
            directory.display(),
            path("bfdd.conf"),
            path("bfdd.pid"),
            path("bfdd.sock"),
            path("log"),
        );
        let mut shell = Command::new("unshare")
            .args(["--net", "--mount", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut ready = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let mut words = shell.stdin.take().unwrap();
        assert_eq!(ready, "ready\n");
        let id = shell.id().to_string();
        let here_ip = |words: &str| run(Command::new("ip").args(words.split(' ')));
        let there_ip =
            |words: &str| run(Command::new("nsenter").args(["-t", &id, "-n", "ip"]).args(words.split(' ')));
        // Without nodad an IPv6 address is usable only after a second (duplicate address detection).
        let suffix = |address: IpAddr| if address.is_ipv4() { "/24" } else { "/64 nodad" };
        here_ip(&format!("link add here type veth peer name there netns {id}"));
        here_ip(&format!("addr add dev here {here}{}", suffix(here)));
        there_ip(&format!("addr add dev there {there}{}", suffix(there)));
        here_ip("link set here up");
        there_ip("link set lo up");
        there_ip("link set there up");
        words.write_all(b"go\n").unwrap();
        let frr = Frr { shell, words: Some(words), directory, peer: here };
        frr.wait("bfdd", |_| true);
        frr
    }

    fn vtysh(&self, commands: &[&str]) -> Option<String> {
        let mut vtysh = Command::new(VTYSH);
        vtysh.arg("--vty_socket").arg(&self.directory);
        for command in commands {
            vtysh.args(["-c", command]);
        }
        let output = vtysh.output().expect("vtysh");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns bfdd's view of its session, or null while bfdd does not answer.
    fn peer(&self) -> Value {
        let text = self.vtysh(&["show bfd peers json"]).unwrap_or_default();
        serde_json::from_str::<Value>(&text).map_or(Value::Null, |peers| peers[0].clone())
    }

    #[track_caller]
    fn wait(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        let now = || {
            let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            format!("{:#} {log}", self.peer())
        };
        wait_until(&format!("{what} of bfdd"), now, || {
            let peer = self.peer();
            peer.is_object() && condition(&peer)
        });
    }

    #[track_caller]
    fn wait_for(&self, status: &str) {
        self.wait(status, |peer| peer["status"] == status);
    }

    /// Changes the configuration of the session in bfdd.
    #[track_caller]
    fn configure(&self, words: &[&str]) {
        let peer = format!("peer {}", self.peer);
        let commands = [&["configure terminal", "bfd", &peer], words].concat();
        assert!(self.vtysh(&commands).is_some(), "{words:?}");
    }

    /// Returns how many times the session went down.
    fn downs(&self) -> u64 {
        let text = self.vtysh(&["show bfd peers counters json"]).expect("counters");
        let peers: Value = serde_json::from_str(&text).unwrap();
        peers[0]["session-down"].as_u64().expect("a count")
    }

    /// Runs a closure in bfdd's namespace. A socket that the closure opens stays in that namespace.
    fn beside<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.shell.id())).unwrap();
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                netns::enter(namespace.as_fd()).unwrap();
                what()
            });
            there.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
        })
    }

    /// Kills bfdd with SIGKILL, so that it sends nothing more.
    fn kill(&mut self) {
        self.words = None;
        self.shell.wait().unwrap();
    }
}

impl Drop for Frr {
    fn drop(&mut self) {
        self.words = None;
        let _ = self.shell.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[track_caller]
fn wait_for(state: &LinkState, expected: State) {
    wait_until(&expected.to_string(), || format!("{:?}", state.report()), || state.state() == expected);
}

#[track_caller]
fn wait_report(
    state: &LinkState,
    what: &str,
    condition: impl Fn(&fourtuple_forward::bfd::LinkReport) -> bool,
) {
    wait_until(what, || format!("{:?}", state.report()), || condition(&state.report()));
}

/// Returns whether the host can run bfdd, and counts a skipped test otherwise.
fn is_there(test: &str) -> bool {
    // A user namespace has no other user that bfdd could switch to.
    let is_root = fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| map.contains("4294967295"));
    if !Path::new(BFDD).exists() || !Path::new(VTYSH).exists() {
        skip(test, "frr", "FRR's bfdd is not installed (Debian: frr)");
        return false;
    }
    if !is_root {
        skip(test, "frr", "bfdd takes root of the initial user namespace");
        return false;
    }
    true
}

/// Tests the life of a session, from Up to the death of the peer.
fn interoperate(name: &str, here: &str, there: &str) {
    let (here, there): (IpAddr, IpAddr) = (here.parse().unwrap(), there.parse().unwrap());
    let mut frr = Frr::start(name, here, there, 300, DETECT_MULT);
    let settings = LinkSettings { timers: timers(300, 300), ..LinkSettings::new(here, there) };
    let link = Link::start(&settings).unwrap();
    let state = link.state();
    let ms = Duration::from_millis;

    // The session comes up with timers that both sides confirm.
    wait_for(&state, State::Up);
    frr.wait_for("up");
    frr.wait("our timers", |peer| {
        peer["remote-transmit-interval"] == 300
            && peer["remote-receive-interval"] == 300
            && peer["remote-detect-multiplier"] == DETECT_MULT
    });
    wait_report(&state, "its timers", |report| {
        report.transmit_interval == ms(300) && report.detection_time == ms(300) * u32::from(DETECT_MULT)
    });
    let report = state.report();
    assert_eq!(frr.peer()["id"], report.remote_discriminator.unwrap());
    assert_eq!(frr.peer()["remote-id"], report.local_discriminator);

    // Timers change while the session is Up: first ours, then bfdd's.
    let before = (state.transitions(), frr.downs());
    link.set_timers(timers(500, 700));
    frr.wait("our new timers", |peer| {
        peer["remote-transmit-interval"] == 500 && peer["remote-receive-interval"] == 700
    });
    wait_report(&state, "our interval", |report| report.transmit_interval == ms(500));
    frr.configure(&["receive-interval 600", "transmit-interval 800"]);
    wait_report(&state, "its new timers", |report| {
        report.transmit_interval == ms(600) && report.detection_time == ms(800) * u32::from(DETECT_MULT)
    });
    link.set_timers(timers(300, 300));
    frr.wait("our first timers", |peer| {
        peer["remote-transmit-interval"] == 300 && peer["remote-receive-interval"] == 300
    });
    frr.configure(&["receive-interval 300", "transmit-interval 300"]);
    wait_report(&state, "its first timers", |report| {
        report.transmit_interval == ms(300) && report.detection_time == ms(300) * u32::from(DETECT_MULT)
    });
    assert_eq!((state.transitions(), frr.downs()), before, "it stayed up");

    // The administrator of bfdd holds the session down, then ours does.
    frr.configure(&["shutdown"]);
    wait_for(&state, State::Down);
    let report = state.report();
    assert_eq!(report.diagnostic, Diagnostic::NeighborSignaledDown);
    assert_eq!(report.remote_state, State::AdminDown);
    frr.configure(&["no shutdown"]);
    wait_for(&state, State::Up);
    frr.wait_for("up");
    link.set_admin_down(true);
    frr.wait_for("down");
    frr.wait("our diagnostic", |peer| peer["remote-diagnostic"] == "administratively down");
    assert_eq!(state.state(), State::AdminDown);
    link.set_admin_down(false);
    wait_for(&state, State::Up);
    frr.wait_for("up");

    // Our session ends in order and starts again.
    let report = link.drain();
    assert_eq!(
        report.discards.total(),
        report.discards.of(fourtuple_forward::bfd::Discard::AdminDown),
        "{report:?}"
    );
    frr.wait("our end", |peer| {
        peer["status"] == "down" && peer["diagnostic"] == "neighbor signaled session down"
    });
    let link = Link::start(&settings).unwrap();
    let state = link.state();
    wait_for(&state, State::Up);
    frr.wait_for("up");

    // bfdd dies. Shorter intervals before, so that its death is detected within 6 s.
    link.set_timers(timers(60, 60));
    frr.configure(&["receive-interval 60", "transmit-interval 60"]);
    wait_report(&state, "its short timers", |report| {
        report.detection_time == ms(60) * u32::from(DETECT_MULT)
    });
    frr.kill();
    wait_for(&state, State::Down);
    assert_eq!(state.report().diagnostic, Diagnostic::DetectionTimeExpired);
    assert_eq!(state.report().remote_discriminator, None);
}

#[test]
fn a_session_with_bfdd_over_ipv4() {
    in_namespace(|| {
        if is_there("a_session_with_bfdd_over_ipv4") {
            interoperate("bfd4", "10.11.12.1", "10.11.12.2");
        }
    });
}

#[test]
fn a_session_with_bfdd_over_ipv6() {
    in_namespace(|| {
        if is_there("a_session_with_bfdd_over_ipv6") {
            interoperate("bfd6", "fd00:11::1", "fd00:11::2");
        }
    });
}

/// The forwarder's port gets more data than its planes can read, from the host of bfdd. `FOURTUPLE_OVERLOAD_SECONDS=60` runs
/// the full test with timers of 50 ms x 3, for an otherwise idle machine; without it the timers are long enough for any busy
/// machine.
#[test]
fn a_session_with_bfdd_stays_up_under_overload() {
    in_namespace(|| {
        if !is_there("a_session_with_bfdd_stays_up_under_overload") {
            return;
        }
        let seconds = std::env::var("FOURTUPLE_OVERLOAD_SECONDS").ok();
        let seconds = seconds.map(|seconds| seconds.parse().expect("FOURTUPLE_OVERLOAD_SECONDS is a number"));
        let ((interval, detect_mult), seconds) = match seconds {
            Some(seconds) => ((50, 3), seconds),
            None => ((300, DETECT_MULT), 2),
        };
        let (here, there): (IpAddr, IpAddr) = ("10.11.13.1".parse().unwrap(), "10.11.13.2".parse().unwrap());
        let frr = Frr::start("overload", here, there, interval, detect_mult);
        let each = Duration::from_millis(interval);
        let timers = Timers::new(each, each, detect_mult).unwrap();
        let listen = SocketAddr::new(here, 4000);
        let link = fourtuple_forward::Link {
            bfd: Some(Peer { timers, local: Some(here), ..Peer::new(there) }),
            spread: Selector::Random,
            ..fourtuple_forward::Link::new(listen, SocketAddr::new(there, 5000))
        };
        let work = Duration::from_micros(20);
        let running = Forward { work, ..Forward::new(link, 2) }.start().unwrap();
        let report = || running.bfd().remove(0).report;
        wait_until("up", || format!("{:?}", report()), || report().state == State::Up);
        frr.wait_for("up");
        let (_sink, data) =
            frr.beside(|| (UdpSocket::bind((there, 5000)).unwrap(), UdpSocket::bind((there, 4000)).unwrap()));
        let before = (report(), frr.downs());
        let flood = Flood::start(data.into(), listen);
        thread::sleep(Duration::from_secs(seconds));
        wait_until(
            "control beside it",
            || format!("{:?}", report()),
            || {
                let report = report();
                report.received > before.0.received && report.transmitted > before.0.transmitted
            },
        );
        let (after, downs) = (report(), frr.downs());
        let offered = flood.end();
        // Planes read the kernel's drop counter once a second, and forward the packets in their queues.
        thread::sleep(Duration::from_millis(1500));
        let counts = running.counts(0);
        println!(
            "{seconds} s, {interval} ms x {detect_mult}: down {} times here ({:?}), {} there; {} sent, {} received; {offered} data, {} \
             forwarded, {} dropped",
            after.downs - before.0.downs,
            after.last_failure,
            downs - before.1,
            after.transmitted - before.0.transmitted,
            after.received - before.0.received,
            counts.iter().map(|plane| plane.sent).sum::<u64>(),
            counts.iter().map(PlaneCounts::dropped_in_all).sum::<u64>(),
        );
        assert_eq!((after.downs, downs), (before.0.downs, before.1));
    });
}
