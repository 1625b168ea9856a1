//! `lab time-wait`: measures when a client that closes its connections runs out of ports, for how long, and which remedy
//! helps.
//!
//! Published: "Benchmarkers, Beware the Ephemeral Port Limit" (Daniel Mendel): 16,300 transactions took 12.03 s, 16,384 took
//! 21.73 s, because the range had 16,383 ports.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, SourcePool};
use fourtuple::ports::PortRange;
use fourtuple_record::measure::words::{counted, grouped};
use fourtuple_record::{
    Remark, TimeWaitPoint, TimeWaitResults, TimeWaitRun, TimeWaitSettings, errno, format_duration,
};
use fourtuple_syscalls::socket;

use crate::lab::namespace::{Family, Namespace};
use crate::lab::ports::FIRST_PORT;
use crate::lab::{LabError, Watch, start_thread};

/// The time that Linux keeps a socket in TIME_WAIT (TCP_TIMEWAIT_LEN in include/net/tcp.h): a constant, which
/// tcp_fin_timeout does not change.
pub const TIME_WAIT: Duration = Duration::from_secs(60);

/// Settings that were checked, with the values that their texts name.
struct Checked {
    range: PortRange,
    remedies: Vec<Remedy>,
    /// Maximum time to wait in a stall.
    patience: Duration,
}

/// Checks the settings, without system calls.
pub fn check(settings: &TimeWaitSettings) -> Result<(), LabError> {
    Checked::new(settings).map(drop)
}

/// Runs the remedies in order. A run that stalls keeps waiting while the next remedies run.
pub fn run(
    settings: &TimeWaitSettings,
    watch: &Watch<'_>,
) -> Result<(TimeWaitResults, Vec<Remark>), LabError> {
    Checked::new(settings)?.run(watch)
}

impl Checked {
    fn new(settings: &TimeWaitSettings) -> Result<Checked, LabError> {
        let TimeWaitSettings { low, high, ref remedies, patience_ns } = *settings;
        let range = match PortRange::new(low, high) {
            Ok(range) if low >= FIRST_PORT && (64..=32_768).contains(&range.len()) => range,
            _ => {
                return Err(LabError::setting(
                    "range",
                    format!("{low}-{high}"),
                    "accepted are ranges of 64 to 32768 ports from port 1024 on, so that a wider range is left to try",
                ));
            }
        };
        let remedies: Vec<Remedy> = LabError::named("remedy", remedies, |name| name.parse().ok())?;
        Ok(Checked { range, remedies, patience: Duration::from_nanos(patience_ns) })
    }

    fn ports(&self) -> u64 {
        u64::from(self.range.len())
    }

    /// Returns the range of a run: with a wider range, all ports that need no privilege to bind.
    fn range(&self, remedy: Remedy) -> PortRange {
        if remedy.widens_range {
            PortRange::new(FIRST_PORT, u16::MAX).expect("not backwards")
        } else {
            self.range
        }
    }

    /// Returns the number of transactions: a few more than the ports, so that the run goes on after the stall.
    fn transactions(&self, remedy: Remedy) -> u64 {
        if remedy.exceeds_ports { self.ports() + self.ports() / 16 } else { self.ports() - 1 }
    }

    /// Returns the number of 4-tuples available before a port must leave TIME_WAIT.
    fn tuples(&self, remedy: Remedy) -> u64 {
        u64::from(self.range(remedy).len()) * u64::from(remedy.sources)
    }

    /// Returns the number of the first transaction that will find no free port, if any.
    fn predicted_stall_at(&self, remedy: Remedy) -> Option<u64> {
        let first = self.tuples(remedy) * remedy.per_connection + 1;
        (!remedy.server_closes_first && first <= self.transactions(remedy)).then_some(first)
    }

    fn run(&self, watch: &Watch<'_>) -> Result<(TimeWaitResults, Vec<Remark>), LabError> {
        // Only one run works at a time, so that runs do not compete for the CPU; a run that waits for ports releases the lock.
        let turn = Mutex::new(());
        let (first_sender, first) = std::sync::mpsc::channel();
        let ended: Vec<Result<TimeWaitRun, LabError>> = thread::scope(|scope| {
            let mut handles = Vec::new();
            for remedy in self.remedies.iter().take_while(|_| !watch.stopped()) {
                watch.progress.begin(remedy.name(), self.transactions(*remedy));
                let begun = first_sender.clone();
                let turn = &turn;
                let started = start_thread(scope, move || {
                    let run =
                        Namespace::run(|namespace| run_remedy(self, *remedy, namespace, watch, turn, &begun));
                    // Sent after a failure too: the next run waits for this message.
                    let _ = begun.send(());
                    run
                });
                // The next run begins when this run has ended or waits for ports.
                if started.is_ok() {
                    let _ = first.recv();
                }
                handles.push(started);
            }
            handles
                .into_iter()
                .map(|started| started?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let mut remarks = Vec::new();
        let mut runs = Vec::new();
        let mut failed = None;
        for (remedy, run) in self.remedies.iter().zip(ended) {
            match run {
                Ok(run) if run.completed > 0 => runs.push(run),
                Ok(_) => {}
                Err(error) => {
                    remarks.push(Remark::new("failed", format!("{} failed: {error}", remedy.name())));
                    failed.get_or_insert(error);
                }
            }
        }
        // Completed runs are kept; without any completed run the first error is returned.
        if let (Some(error), true) = (failed, runs.is_empty()) {
            return Err(error);
        }
        if watch.stopped() {
            remarks.push(Remark::new("interrupted", "interrupted: runs are cut short or missing"));
        }
        let mut results = TimeWaitResults {
            ports: self.ports(),
            time_wait_ns: TIME_WAIT.as_nanos() as u64,
            ceiling_per_s: self.ports() as f64 / TIME_WAIT.as_secs_f64(),
            runs,
            advice: Vec::new(),
        };
        results.advice = advice(&results);
        Ok((results, remarks))
    }
}

/// Returns advice from the runs: the findings, and the settings that help here.
pub fn advice(results: &TimeWaitResults) -> Vec<String> {
    let find = |name: &str| results.runs.iter().find(|run| run.remedy == name);
    let mut lines = vec![format!(
        "A source address that closes first has {} to one destination, and each stays in TIME_WAIT for 60.0s: it cannot \
         sustain more than {} per second.",
        counted(results.ports, "port"),
        counted(results.ceiling_per_s as u64, "connection")
    )];
    if let Some(run) = find("none-over")
        && let Some(at) = run.stalled_at
    {
        let before = at.saturating_sub(1);
        lines.push(format!(
            "Transaction {} found no port (EADDRNOTAVAIL) {}. {} before it took {}.",
            grouped(at),
            if run.cut {
                format!(
                    "and would have waited for one for {}; the run ended earlier",
                    format_duration(run.predicted_stall_ns)
                )
            } else {
                format!(
                    "and waited for one for {} (predicted: {})",
                    format_duration(run.stall_ns),
                    format_duration(run.predicted_stall_ns)
                )
            },
            counted(before, "transaction"),
            format_duration((before as f64 / run.rate_per_s.max(1e-9) * 1e9) as u64),
        ));
    }
    let helped = results.runs.iter().filter(|run| helps(run));
    let helped: Vec<&str> = helped.filter_map(|run| TimeWaitRun::meaning(&run.remedy)).collect();
    if !helped.is_empty() {
        lines.push(format!(
            "The same transactions did not stall with each of these changes: {}.",
            helped.join("; ")
        ));
    }
    if let Some(run) = find("tcp-tw-reuse")
        && run.stall_ns > 0
        && !run.cut
    {
        lines.push(format!(
            "tcp_tw_reuse=1 shortened the stall to {}: connect() may reuse a port after one second in TIME_WAIT (before Linux 6.14, \
             after up to one second).",
            format_duration(run.stall_ns)
        ));
    }
    lines
}

fn helps(run: &TimeWaitRun) -> bool {
    !run.remedy.starts_with("none") && run.stalled_at.is_none() && run.completed == run.transactions
}

// The table of remedies.
//
// Names, parsing, the help of `lab time-wait`, and predictions derive from a remedy's row; the record has its text.

/// A change to the base case: a client that opens and closes connections from one source as fast as it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// The name on the command line and in records. Names of unchanged cases begin with `none`.
    name: &'static str,
    /// Whether there are more transactions than ports, so that the run goes on after the stall.
    exceeds_ports: bool,
    sources: u32,
    per_connection: u64,
    /// net.ipv4.ip_local_port_range = 1024 65535.
    widens_range: bool,
    /// net.ipv4.tcp_tw_reuse = 1, which needs TCP timestamps on both sides.
    reuses_time_wait: bool,
    /// The server closes first (active close), so the TIME_WAIT socket is the server's.
    server_closes_first: bool,
}

/// No change; every other row starts from its values.
const NONE_OVER: Remedy = Remedy {
    name: "none-over",
    exceeds_ports: true,
    sources: 1,
    per_connection: 1,
    widens_range: false,
    reuses_time_wait: false,
    server_closes_first: false,
};

impl Remedy {
    /// All remedies, the unchanged cases first.
    pub const ALL: [Remedy; 7] = [
        Remedy { name: "none-under", exceeds_ports: false, ..NONE_OVER },
        NONE_OVER,
        Remedy { name: "more-sources", sources: 4, ..NONE_OVER },
        Remedy { name: "wider-range", widens_range: true, ..NONE_OVER },
        Remedy { name: "tcp-tw-reuse", reuses_time_wait: true, ..NONE_OVER },
        Remedy { name: "server-closes-first", server_closes_first: true, ..NONE_OVER },
        Remedy { name: "keep-alive", per_connection: 100, ..NONE_OVER },
    ];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the names of all remedies, separated by commas.
    pub fn names() -> String {
        Remedy::ALL.map(Remedy::name).join(", ")
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}

impl FromStr for Remedy {
    type Err = String;

    fn from_str(text: &str) -> Result<Remedy, String> {
        let found = Remedy::ALL.into_iter().find(|remedy| remedy.name == text);
        found.ok_or_else(|| format!("{text:?} is not a remedy: expected {}", Remedy::names()))
    }
}

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
fn run_remedy(
    settings: &Checked,
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
    // On a busy host a FIN is sent again, and the RST that its answer meets would end the TIME_WAIT socket.
    namespace.set("net.ipv4.tcp_rfc1337", "1")?;
    let server = namespace.listen(Family::V4, SERVER)?;
    let mut builder = Dialer::builder(SocketAddr::new(Family::V4.loopback(), SERVER)).without_census();
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
    // When the transaction of the predicted stall began.
    let mut due = None;
    log.sample();
    while log.completed < transactions {
        let waiting = Instant::now();
        if predicted_stall_at == Some(log.completed + 1) {
            due = Some(waiting);
        }
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
            *errors.entry(errno::EADDRNOTAVAIL.to_owned()).or_default() += refused;
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
    let again = if remedy.reuses_time_wait { reuse_delay() } else { TIME_WAIT };
    let (predicted_stall_at, predicted_stall) = match predicted_stall(due, first_closed, again) {
        Some(stall) => (predicted_stall_at, stall),
        // A transaction that was not begun has only its number.
        None => (predicted_stall_at.filter(|_| due.is_none()), Duration::ZERO),
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

/// Returns how long the transaction that began at `due`, when no port was left, waits for the first port that was closed; `None` if that port
/// was back already, because the transactions before took longer than `again`.
fn predicted_stall(due: Option<Instant>, first_closed: Option<Instant>, again: Duration) -> Option<Duration> {
    let passed = due?.duration_since(first_closed?);
    again.checked_sub(passed).filter(|left| !left.is_zero())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remedy_has_a_meaning() {
        for remedy in Remedy::ALL {
            assert!(TimeWaitRun::meaning(remedy.name()).is_some(), "{remedy}");
        }
    }

    #[test]
    fn a_port_that_is_back_in_time_predicts_no_stall() {
        let began = Instant::now();
        let after = |seconds| Some(began + Duration::from_secs(seconds));
        let again = Duration::from_secs(60);
        assert_eq!(predicted_stall(after(59), Some(began), again), Some(Duration::from_secs(1)));
        for seconds in [60, 61] {
            assert_eq!(predicted_stall(after(seconds), Some(began), again), None, "{seconds} s");
        }
        assert_eq!(predicted_stall(None, Some(began), again), None, "a run that ended before");
    }
}
