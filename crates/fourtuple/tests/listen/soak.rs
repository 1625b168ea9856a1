//! Least busy workers under everything that goes wrong at once: a SYN flood, clients that reset, workers that are killed.
//! What is decided is decided by counts; times say only how long it goes on.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;
use fourtuple_testing::segment::{Raw, SYN};
use fourtuple_testing::{in_namespace, set_sysctl};

use crate::policies::can_choose;
use crate::processes::{Prefork, example};

const TEST: &str = "least_busy_workers_survive_floods_resets_and_kills";
const WORKERS: usize = 4;
/// SYNs between two kills, in volleys with a pause behind each.
const VOLLEYS: u32 = 25;
const VOLLEY: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);
/// Requests when it is quiet, for every worker that was killed before.
const QUIET: u64 = 5000;
/// Nothing is decided by it but that the test has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// How many times a worker is killed: two a second of the length that FOURTUPLE_SOAK asks for, in half of which it is quiet.
fn kills() -> u32 {
    env::var("FOURTUPLE_SOAK").map_or(3, |seconds| seconds.parse().expect("FOURTUPLE_SOAK is in seconds"))
}

/// What honest clients have in common.
#[derive(Default)]
struct Honest {
    stop: AtomicBool,
    answers: AtomicU64,
    /// Held by who is in the middle of a connection; the test takes it for itself to kill a worker, for what that one is
    /// answering at this moment is lost, whatever the policy.
    at_it: RwLock<()>,
}

/// Tells others to stop, also where the test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Opens connections of so many requests each, until it is told to stop; the first request that failed, if one did.
fn honest(address: &str, requests: u64, seen: &Honest) -> Result<(), String> {
    while !seen.stop.load(Ordering::Acquire) {
        let at_it = seen.at_it.read().unwrap();
        let told = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
        let stream = TcpStream::connect(address).map_err(told("connect"))?;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut stream = BufReader::new(stream);
        for number in 1..=requests {
            stream.get_mut().write_all(b"?\n").map_err(told("ask"))?;
            let mut line = String::new();
            stream.read_line(&mut line).map_err(told("answer"))?;
            if !line.ends_with(&format!(" {number}\n")) {
                return Err(format!("request {number} of {requests} was answered with {line:?}"));
            }
            seen.answers.fetch_add(1, Ordering::Relaxed);
        }
        drop(at_it);
        thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Opens connections and breaks them off with a RST, before they are accepted (if it is fast) or in the middle of a line,
/// until it is told to stop; how many.
fn rude(address: &str, stop: &AtomicBool) -> u64 {
    let mut resets = 0;
    while !stop.load(Ordering::Acquire) {
        for words in [&b""[..], b"half a line", b"?\nand half a line"] {
            // What becomes of it before is nobody's business: a worker may be killed that has it.
            let Ok(mut stream) = TcpStream::connect(address) else { continue };
            let _ = stream.write_all(words);
            option::set_reset_on_close(stream.as_fd()).unwrap();
            resets += 1;
        }
        thread::sleep(Duration::from_millis(2));
    }
    resets
}

/// SYNs from ports and addresses of nobody, each another one.
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

/// Waits until no worker has found a leak for longer than it takes to find one.
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

/// All that goes wrong, beside honest clients: how many connections were reset, and SYNs sent after the last kill.
fn storm(prefork: &mut Prefork, flood: &mut Flood, at_it: &RwLock<()>) -> (u64, u32) {
    let address = prefork.address.clone();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stopping = Stopping(&stop);
        let rude = scope.spawn(|| rude(&address, &stop));
        for kill in 0..kills() {
            (0..VOLLEYS).for_each(|_| flood.volley());
            let _nobody_is_at_it = at_it.write().unwrap();
            let said = prefork.order(&format!("kill {}", kill as usize % WORKERS));
            assert!(said.ends_with("Killed(9)"), "{said}");
        }
        let before = flood.sent;
        (0..VOLLEYS).for_each(|_| flood.volley());
        drop(stopping);
        (rude.join().unwrap(), flood.sent - before)
    })
}

#[test]
fn least_busy_workers_survive_floods_resets_and_kills() {
    let Some(example) = example(TEST) else { return };
    in_namespace(move || {
        if !can_choose(TEST) {
            return;
        }
        set_sysctl("net.core.somaxconn", "4096");
        // The honest close first: TIME_WAIT is theirs.
        set_sysctl("net.ipv4.ip_local_port_range", "10000 65000");
        let mut prefork = Prefork::start(&example, "reuseport-least-busy", WORKERS);
        let address = prefork.address.clone();
        let mut flood = Flood::open(address.parse().unwrap());
        let seen = Honest::default();
        let (resets, last, leaked, mut quiet) = thread::scope(|scope| {
            let stopping = Stopping(&seen.stop);
            let (address, seen) = (&address, &seen);
            let clients = [1, 1, 1, 20].map(|requests| scope.spawn(move || honest(address, requests, seen)));
            let (resets, last) = storm(&mut prefork, &mut flood, &seen.at_it);
            let leaked = settled(&mut prefork);

            let before = prefork.counts("stats");
            let enough = seen.answers.load(Ordering::Relaxed) + QUIET * u64::from(kills());
            let end = Instant::now() + DEADLINE * kills();
            while seen.answers.load(Ordering::Relaxed) < enough && !clients.iter().any(|it| it.is_finished())
            {
                assert!(Instant::now() < end, "requests are answered no more");
                thread::sleep(Duration::from_millis(10));
            }
            let quiet: Vec<u64> =
                prefork.counts("stats").iter().zip(&before).map(|(now, then)| now - then).collect();
            drop(stopping);
            let failed: Vec<_> = clients.into_iter().filter_map(|it| it.join().unwrap().err()).collect();
            assert_eq!(failed, Vec::<String>::new(), "of honest clients");
            (resets, last, leaked, quiet)
        });
        eprintln!(
            "{} SYNs of nobody, {resets} resets, {} workers killed; honest requests: {} answered, 0 failed; when it was \
             quiet, by seat: {quiet:?}; leaked and found: {leaked}",
            flood.sent,
            kills(),
            seen.answers.load(Ordering::Relaxed),
        );
        // Under load newer connections stand in for those that leaked, and what a killed worker had goes with its seat.
        assert!(leaked >= u64::from(last) / 2, "{leaked} found of {last} at least");
        quiet.sort();
        let (least, most) = quiet.split_at(quiet.len() - WORKERS);
        assert_eq!(least.iter().sum::<u64>(), 0, "one seat is free");
        let mean = most.iter().sum::<u64>() / WORKERS as u64;
        assert!(most.iter().all(|&requests| requests >= mean / 3), "one worker starves: {most:?}");
        prefork.stop();
    });
}
