use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, SourcePool};
use fourtuple_record::{TimeWaitPoint, TimeWaitRun};
use fourtuple_syscalls::socket;

use crate::namespace::{Family, Namespace};
use crate::time_wait::{Remedy, TIME_WAIT, TimeWait};
use crate::{LabError, Watch};

/// Interval at which a transaction without a port tries again.
const RETRY: Duration = Duration::from_millis(10);

/// Interval at which the TIME_WAIT count is read.
const SAMPLE: Duration = Duration::from_millis(100);

/// Length of a stall after which the next run may begin.
const GIVES_WAY: Duration = Duration::from_secs(3);

/// Port of the server, below every accepted range.
const SERVER: u16 = 80;

/// Runs transactions: connect, one byte each way, close. The server is on the same thread, so every transaction ends before
/// the next begins. Holds `turn` while it works and releases the lock in a long stall; sends to `idle` when the next run
/// may begin.
pub(super) fn run(
    settings: &TimeWait,
    remedy: Remedy,
    namespace: &Namespace,
    watch: &Watch<'_>,
    turn: &Mutex<()>,
    idle: &Sender<()>,
) -> Result<TimeWaitRun, LabError> {
    let mut work = Some(turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    namespace.set_range(settings.range(remedy))?;
    // The default, 2, reuses TIME_WAIT sockets on loopback only, and would hide the stall that other destinations show.
    let reuse = if remedy.reuses_time_wait { "1" } else { "0" };
    namespace.set("net.ipv4.tcp_tw_reuse", reuse)?;
    let server = namespace.listen(Family::V4, SERVER)?;
    let mut builder = Dialer::to(SocketAddr::new(Family::V4.loopback(), SERVER)).without_census();
    if remedy.sources > 1 {
        let sources = namespace.sources(Family::V4, remedy.sources)?;
        builder = builder.sources(SourcePool::several(sources).expect("addresses of one family, and few"));
    }
    let dialer = builder.build()?;
    let transactions = settings.transactions(remedy);
    let predicted_stall_at = settings.predicted_stall_at(remedy);
    let begun = Instant::now();
    let mut log = Log { begun, completed: 0, points: Vec::new(), next: begun };
    let mut connection: Option<(TcpStream, TcpStream)> = None;
    let mut errors = BTreeMap::new();
    let (mut stall, mut stalled_at, mut first_closed, mut cut) = (None, None, None, false);
    log.sample();
    while log.completed < transactions {
        let waiting = Instant::now();
        let mut refused = 0_u64;
        while connection.is_none() {
            if watch.stopped() {
                // The part of the stall that has passed stays in the result.
                cut = refused > 0;
                break;
            }
            match dialer.dial() {
                Ok((stream, _)) => {
                    let accepted = socket::accept(server.as_fd()).map_err(LabError::call("accept"))?;
                    connection = Some((stream, accepted.into()));
                }
                Err(DialError::PortsExhausted { .. }) => {
                    refused += 1;
                    stalled_at.get_or_insert(log.completed + 1);
                    if waiting.elapsed() >= settings.patience {
                        cut = true;
                        break;
                    }
                    if waiting.elapsed() >= GIVES_WAY && work.take().is_some() {
                        let _ = idle.send(());
                    }
                    thread::sleep(RETRY);
                    log.sample_if_due();
                }
                Err(error) => return Err(error.into()),
            }
        }
        if refused > 0 {
            *errors.entry("EADDRNOTAVAIL".to_owned()).or_default() += refused;
            // The first stall is the predicted one; later stalls wait for ports that leave TIME_WAIT one by one.
            stall.get_or_insert((waiting, waiting.elapsed()));
        }
        let Some((stream, accepted)) = connection.take() else { break };
        exchange(&stream, &accepted).map_err(LabError::call("a transaction on loopback"))?;
        log.completed += 1;
        if log.completed.is_multiple_of(remedy.per_connection) || log.completed == transactions {
            if remedy.server_closes_first {
                drop(accepted);
                dialer.release(stream.local_addr().map_err(LabError::call("getsockname"))?);
                drop(stream);
            } else {
                drop(stream);
                drop(accepted);
            }
            first_closed.get_or_insert_with(Instant::now);
        } else {
            connection = Some((stream, accepted));
        }
        if log.completed.is_multiple_of(64) {
            watch.progress.at(log.completed);
            log.sample_if_due();
        }
    }
    let elapsed = begun.elapsed();
    log.sample();
    drop(work);
    let stall_length = stall.map_or(Duration::ZERO, |(_, length)| length);
    // The first port to leave TIME_WAIT is the port that was closed first.
    let predicted_stall = match (predicted_stall_at, stall, first_closed) {
        (Some(_), Some((from, _)), Some(closed)) => {
            let again = if remedy.reuses_time_wait { reuse_delay() } else { TIME_WAIT };
            again.saturating_sub(from.duration_since(closed))
        }
        _ => Duration::ZERO,
    };
    Ok(TimeWaitRun {
        remedy: remedy.name().to_owned(),
        transactions,
        completed: log.completed,
        elapsed_ns: nanoseconds(elapsed),
        rate_per_s: log.completed as f64 / (elapsed.saturating_sub(stall_length)).as_secs_f64().max(1e-9),
        predicted_stall_at,
        stalled_at,
        predicted_stall_ns: nanoseconds(predicted_stall),
        stall_ns: nanoseconds(stall_length),
        cut,
        errors,
        time_wait: log.points,
    })
}

/// Sends one byte in each direction.
fn exchange(mut client: &TcpStream, mut server: &TcpStream) -> io::Result<()> {
    client.write_all(b"?")?;
    server.read_exact(&mut [0])?;
    server.write_all(b"!")?;
    client.read_exact(&mut [0])
}

/// Returns the age at which tcp_tw_reuse may reuse a TIME_WAIT socket (`tcp_twsk_unique`): tcp_tw_reuse_delay since Linux
/// 6.14; before 6.14 the next full second of the clock, so one second at most.
fn reuse_delay() -> Duration {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_tw_reuse_delay")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .map_or(Duration::from_secs(1), Duration::from_millis)
}

struct Log {
    begun: Instant,
    completed: u64,
    points: Vec<TimeWaitPoint>,
    next: Instant,
}

impl Log {
    fn sample_if_due(&mut self) {
        if Instant::now() >= self.next {
            self.sample();
        }
    }

    fn sample(&mut self) {
        self.next = Instant::now() + SAMPLE;
        self.points.push(TimeWaitPoint {
            at_ns: nanoseconds(self.begun.elapsed()),
            count: time_wait_count().unwrap_or(0),
            completed: self.completed,
        });
    }
}

/// Returns `tw` from the TCP line of sockstat: the number of TIME_WAIT sockets in this thread's namespace.
fn time_wait_count() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/sockstat").ok()?;
    let mut words = text.lines().find(|line| line.starts_with("TCP:"))?.split_whitespace();
    words.find(|word| *word == "tw")?;
    words.next()?.parse().ok()
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}
