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
use fourtuple_testing::segment::{Raw, SYN};
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
            let clients = [1, 1, 1, 20].map(|requests| scope.spawn(move || honest(address, requests, seen)));
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
