use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::BpfError;
use fourtuple_bpf::lock_waits::{LockWaits, Totals, Wanted};
use fourtuple_record::{Remark, TraceLocksResults};

use crate::TraceError;
use crate::blind_spots::Sight;
use crate::lock_sums::Sums;
use crate::stacks::Stacks;
use crate::symbols::Symbols;

/// How often is looked whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// How often the one who waits hears something: all locks are read for that.
const TELL: Duration = Duration::from_millis(500);

/// Which locks of TCP are waited for, by programs that know nothing of it.
#[derive(Clone, Debug, Default)]
pub struct Locks {
    /// Process, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that waits (comm), 15 bytes at most.
    pub name: Option<String>,
    /// Id of a cgroup (version 2): the inode of its directory.
    pub cgroup: Option<u64>,
    /// For how long; absent: until told to stop.
    pub time: Option<Duration>,
}

/// How it goes.
#[derive(Clone, Debug, Default)]
pub struct LockNews {
    /// Since the beginning.
    pub elapsed: Duration,
    /// Waits on the path of TCP, so far.
    pub waits: u64,
    /// How long they took together, in nanoseconds.
    pub wait_ns: u64,
    /// Connections so far.
    pub connections: u64,
    /// The class with the longest time of waiting.
    pub worst: Option<&'static str>,
    /// What was lost so far.
    pub lost: u64,
}

/// What was seen, and what limits it.
#[derive(Clone, Debug)]
pub struct LocksOutcome {
    /// For the record.
    pub results: TraceLocksResults,
    /// Why it is not to be believed wholly.
    pub validity: Vec<Remark>,
    /// Nanoseconds of waiting by stack, for flame graphs: functions from the outermost to the one that waits, the class of
    /// the lock in brackets at the end, joined by `;`. Sorted.
    pub folded: Vec<(String, u64)>,
}

impl Locks {
    /// Traces until the time is up or `stop` is set. `attached` is called once, as soon as waits are counted; `news` every
    /// 500 ms.
    ///
    /// # Errors
    ///
    /// [`TraceError::Locks`] where the programs cannot be attached.
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(),
        mut news: impl FnMut(&LockNews),
    ) -> Result<LocksOutcome, TraceError> {
        // Without the table there are no paths, which is said; a host without /proc has no more of it than that.
        let mut stacks = Stacks::new(Symbols::read().unwrap_or_default());
        let lock_sock = stacks.symbols().range("__lock_sock");
        let wanted =
            Wanted { process: self.process, name: self.name.clone(), cgroup: self.cgroup, lock_sock };
        let filtered = self.process.is_some() || self.name.is_some() || self.cgroup.is_some();
        let mut waits = LockWaits::attach(&wanted).map_err(TraceError::Locks)?;
        let begun = Instant::now();
        attached();
        let mut told = Duration::ZERO;
        loop {
            let elapsed = begun.elapsed();
            let left = self.time.map_or(LOOK, |time| time.saturating_sub(elapsed));
            if left.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            if elapsed >= told + TELL {
                told = elapsed;
                news(&look(&waits, &mut stacks, filtered, elapsed).map_err(TraceError::Locks)?);
            }
            thread::sleep(left.min(LOOK));
        }
        let elapsed = begun.elapsed();
        waits.detach();
        let totals = waits.totals().map_err(TraceError::Locks)?;
        let sums = Sums::read(&waits, &mut stacks, &totals.tables).map_err(TraceError::Locks)?;
        let sight = Sight {
            spun: sums.spun,
            paravirtual: stacks.paravirtual(),
            symbols: !stacks.symbols().is_empty(),
            sleeps: lock_sock.is_some(),
            filtered,
            tables: totals.tables.bhash != 0,
            bucket_each: totals.tables.bhash_size > u32::from(u16::MAX),
            ..Sight::of_host()
        };
        let early = self.time.is_some_and(|time| elapsed < time);
        Ok(LocksOutcome {
            folded: sums.folded(),
            validity: validity(&totals, early.then_some(elapsed)),
            results: results(&totals, &sums, sight, filtered, elapsed),
        })
    }
}

fn look(
    waits: &LockWaits,
    stacks: &mut Stacks,
    filtered: bool,
    elapsed: Duration,
) -> Result<LockNews, BpfError> {
    let totals = waits.totals()?;
    let sums = Sums::read(waits, stacks, &totals.tables)?;
    Ok(LockNews {
        elapsed,
        waits: sums.waits(),
        wait_ns: sums.wait_ns(),
        connections: connections(&totals, filtered),
        worst: sums.worst().map(|class| class.name()),
        lost: lost(&totals),
    })
}

fn lost(totals: &Totals) -> u64 {
    totals.lost_waits + totals.lost_stacks + totals.lost_nested
}

/// One over loopback is opened here and accepted here; it counts once. Of some tasks only, it is those that they opened, or
/// those that they closed and had not opened.
fn connections(totals: &Totals, filtered: bool) -> u64 {
    match filtered {
        true => totals.opened.max(totals.closed.saturating_sub(totals.opened)),
        false => totals.opened.max(totals.accepted),
    }
}

fn results(
    totals: &Totals,
    sums: &Sums,
    sight: Sight,
    filtered: bool,
    elapsed: Duration,
) -> TraceLocksResults {
    let connections = connections(totals, filtered);
    let each = |sum: u64| (connections > 0).then(|| sum as f64 / connections as f64);
    let processors_ns = elapsed.as_nanos() as f64 * processors() as f64;
    TraceLocksResults {
        tier: LockWaits::TIER.to_owned(),
        elapsed_ns: elapsed.as_nanos() as u64,
        connections,
        waits: sums.waits(),
        wait_ns: sums.wait_ns(),
        waits_per_connection: each(sums.waits()),
        wait_ns_per_connection: each(sums.wait_ns()),
        cpu_share: (sums.spin_ns() as f64 / processors_ns.max(1.0)).min(1.0),
        lost: lost(totals),
        elsewhere_waits: sums.elsewhere.waits,
        elsewhere_wait_ns: sums.elsewhere.wait_ns,
        classes: sums.classes(),
        paths: sums.paths(),
        ports: sums.ports(),
        blind_spots: sight.blind_spots(),
    }
}

/// Processors that are online.
fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let is_one = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    text.lines().filter(is_one).count().max(1)
}

fn validity(totals: &Totals, stopped: Option<Duration>) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if let Some(elapsed) = stopped {
        let message =
            format!("stopped after {:.1} s; what was seen until then is below", elapsed.as_secs_f64());
        remarks.push(Remark::new("interrupted", message));
    }
    let losses = [
        (totals.lost_waits, "waits were not counted: too many locks and paths"),
        (totals.lost_stacks, "waits were counted without their path: too many paths"),
        (totals.lost_nested, "waits were not counted: their end was not seen"),
    ];
    for (number, what) in losses {
        if number > 0 {
            remarks.push(Remark::new("events-lost", format!("{number} {what}")));
        }
    }
    remarks
}
