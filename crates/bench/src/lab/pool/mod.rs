//! A pool of workers behind one listener, and its clients; shared by `lab accept` and `lab keepalive`.
//!
//! The setup is a small version of "Keepalives considered harmful" (Cloudflare). Each worker serves one request at a time;
//! the clients are the upstream connections of a TLS terminator, each with one request in progress. Both speak HTTP/1.1, so
//! that the clients can also load nginx or haproxy: a request names the service time, and an answer may name the worker and
//! its timestamps.

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod sums;
pub(crate) mod wire;
pub(crate) mod workers;

use std::time::Duration;

use fastrand::Rng;
use fourtuple::listen::{AcceptPolicy, Family, ListenError, Recycle};
use fourtuple::ports::PortRange;
use fourtuple_record::{AcceptResults, AcceptSettings, Remark, SkippedCell, Timeline, errno};

use crate::lab::pool::address::ListenAddress;
use crate::lab::pool::client::{ClientLoad, Measured};
use crate::lab::pool::sums::{Label, Sums};
use crate::lab::pool::workers::{BACKLOG, Pool};
use crate::lab::{LabError, Namespace, Watch};

/// The service times of a load: most requests are short, some are long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    /// Service time of short requests.
    pub(crate) short: Duration,
    /// Service time of long requests.
    pub(crate) long: Duration,
    /// Share of long requests, 0 to 1.
    pub(crate) long_share: f64,
}

impl Mix {
    /// Returns a mix in which all requests take this long.
    pub(crate) fn all(time: Duration) -> Mix {
        Mix { short: time, long: time, long_share: 0.0 }
    }

    /// Draws a service time. Takes exactly one number from the generator.
    fn draw(&self, random: &mut Rng) -> Duration {
        if random.f64() < self.long_share { self.long } else { self.short }
    }
}

/// How a worker spends the service time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spend {
    /// The worker sleeps, like a worker that waits for a disk. Workers need no processor meanwhile, so few processors are
    /// enough.
    Sleep,
    /// The worker computes. Only a machine with a processor for each worker shows the effect of the policy.
    Spin,
}

impl Spend {
    /// Returns the name that records use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Spend::Sleep => "sleep",
            Spend::Spin => "spin",
        }
    }

    fn named(name: &str) -> Option<Spend> {
        [Spend::Sleep, Spend::Spin].into_iter().find(|spend| spend.name() == name)
    }
}

/// The pause of a client between a response and its next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Exponential with this mean, so that requests of many clients arrive independently of each other.
    Exponential(Duration),
    /// Constant, as in the published probe.
    Fixed(Duration),
}

impl Pause {
    /// Draws a pause. Takes exactly one number from the generator.
    fn draw(self, random: &mut Rng) -> Duration {
        let share = random.f64();
        match self {
            Pause::Exponential(mean) => mean.mul_f64(-(1.0 - share).ln()),
            Pause::Fixed(time) => time,
        }
    }
}

/// Returns the Rust expression for a policy name.
pub(crate) fn in_rust(policy: &str) -> String {
    match policy.split_once(':') {
        Some((_, every)) => format!("AcceptPolicy::Rotate {{ every: {every} }}"),
        None if policy == "rotate" => "AcceptPolicy::ROTATE".to_owned(),
        None => {
            let words = policy.split('-').map(|word| {
                let (first, rest) = word.split_at(word.len().min(1));
                first.to_uppercase() + rest
            });
            format!("AcceptPolicy::{}", words.collect::<String>())
        }
    }
}

/// A cell and its runs so far.
pub(crate) struct Cell<S> {
    /// The cell to run.
    pub(crate) spec: S,
    label: Label,
    sums: Sums,
    /// The request with the longest misplaced wait, and this wait in nanoseconds.
    timeline: Option<(u64, Timeline)>,
}

impl<S> Cell<S> {
    pub(crate) fn new(label: Label, spec: S) -> Cell<S> {
        Cell { spec, sums: Sums::new(label.clone()), label, timeline: None }
    }

    fn title(&self) -> String {
        let closing = match self.label.close_every {
            0 => "never".to_owned(),
            every => every.to_string(),
        };
        format!("{} {} {} {closing}", self.label.policy, self.label.family, self.label.load)
    }

    fn add(&mut self, measured: &Measured) {
        let served = self.sums.add(measured);
        // Only on kept connections does a request wait for one particular worker.
        if self.label.close_every == 0 {
            let workers = measured.seats.len().max(self.label.workers);
            let found = sums::longest(&self.label, workers, measured.begun_ns, &served);
            if found.as_ref().map(|(misplaced, _)| misplaced) > self.timeline.as_ref().map(|(most, _)| most) {
                self.timeline = found;
            }
        }
    }
}

fn interrupted<S>(cell: &Cell<S>) -> Remark {
    Remark::new(
        "interrupted",
        format!("interrupted at {}: it is cut short, and what should follow is missing", cell.title()),
    )
}

/// Share of failed requests above which a remark is made.
const FEW: f64 = 0.001;

/// Returns the reasons to doubt a cell.
fn doubts<S>(cell: &Cell<S>) -> Vec<Remark> {
    let found = cell.sums.cell();
    if found.repeats == 0 {
        return Vec::new();
    }
    let title = cell.title();
    let mut remarks = Vec::new();
    let failed = found.errors.values().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let listed: Vec<String> = found.errors.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let listed = listed.join(", ");
    if found.errors.contains_key(errno::EADDRNOTAVAIL) {
        remarks.push(Remark::new("ports-exhausted", format!("{title}: clients ran out of ports ({listed})")));
    } else if found.operations == 0 {
        let why = if listed.is_empty() { "none was sent".to_owned() } else { listed };
        remarks.push(Remark::new("no-answers", format!("{title}: no request was answered ({why})")));
    } else if failed as f64 > FEW * found.operations as f64 {
        let all = found.operations + failed;
        remarks
            .push(Remark::new("failures", format!("{title}: {failed} of {all} requests failed ({listed})")));
    }
    if cell.sums.too_soon as f64 > FEW * found.operations.max(1) as f64 {
        remarks.push(Remark::new(
            "work-not-done",
            format!(
                "{title}: {} of {} answers came sooner than the requested work takes: the server does not do \
                 what ?work= says, so that its waits are too short",
                cell.sums.too_soon, found.operations
            ),
        ));
    }
    remarks
}

/// Returns the cells that were run, as a record keeps them, with the timeline of the cell with the longest tail (p99.9).
pub(crate) fn results<S>(cells: Vec<Cell<S>>, skipped: Vec<SkippedCell>) -> AcceptResults {
    let run = |cell: &&Cell<S>| cell.sums.repeats() > 0;
    let found = cells.iter().filter(run).map(|cell| cell.sums.cell()).collect();
    let worst = cells
        .into_iter()
        .filter(|cell| cell.timeline.is_some())
        .max_by_key(|cell| cell.sums.cell().wait_ns.p999);
    AcceptResults {
        cells: found,
        skipped,
        timeline: worst.and_then(|cell| cell.timeline).map(|(_, timeline)| timeline),
        break_even: None,
        advice: Vec::new(),
    }
}

/// Returns a combination that cannot be run, as a record keeps it.
pub(crate) fn skipped(pair: Pair, close_every: u64, why: impl Into<String>) -> SkippedCell {
    SkippedCell {
        policy: pair.policy.to_string(),
        family: pair.family.to_string(),
        close_every,
        why: why.into(),
    }
}

/// What the user named: a named policy that cannot run is an error, and one of the defaults is skipped.
#[derive(Clone, Copy, Debug, Default)]
pub struct Named {
    pub policies: bool,
    pub families: bool,
}

/// Returns the usual settings of `lab accept`, without policies, families and loads.
pub fn usual() -> AcceptSettings {
    AcceptSettings {
        workers: 8,
        clients: 6,
        connections: 48,
        families: Vec::new(),
        policies: Vec::new(),
        close_every: vec![1],
        load: Vec::new(),
        service: Spend::Sleep.name().to_owned(),
        short_ns: 50_000,
        long_ns: 50_000,
        long_share: 0.0,
        pause_ns: 0,
        slow_ns: 5_000_000,
        for_ns: 300_000_000,
        repeats: 3,
        backlog: BACKLOG,
        seed: 1,
        server: None,
    }
}

/// A policy over a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) policy: AcceptPolicy,
    pub(crate) family: Family,
}

/// The pairs that this host can run.
#[derive(Debug)]
pub(crate) struct Runnable {
    pub(crate) pairs: Vec<Pair>,
    /// The pairs that cannot run, each with the reason.
    pub(crate) skipped: Vec<(Pair, String)>,
}

/// Returns the ephemeral range of clients in the namespace; the server's port is below the range.
fn client_ports() -> PortRange {
    PortRange::new(10_000, u16::MAX).expect("not backwards")
}

/// Settings that were checked, with the values that their texts name.
pub(crate) struct Checked<'a> {
    pub(crate) settings: &'a AcceptSettings,
    pub(crate) named: Named,
    /// The policies, in this order; none with an external server.
    pub(crate) policies: Vec<AcceptPolicy>,
    families: Vec<Family>,
    pub(crate) spend: Spend,
    pub(crate) mix: Mix,
}

impl Checked<'_> {
    /// Checks the settings of both labs, without system calls.
    pub(crate) fn new(settings: &AcceptSettings, named: Named) -> Result<Checked<'_>, LabError> {
        let external = settings.server.is_some();
        LabError::unless_within("workers", settings.workers, u32::from(!external)..=64)?;
        LabError::unless_within("clients", settings.clients, 1..=1024)?;
        LabError::unless_within("repeats", settings.repeats, 1..=100)?;
        let length = Duration::from_nanos(settings.for_ns);
        if length < Duration::from_millis(10) {
            return Err(LabError::setting("for", format!("{length:?}"), "at least 10ms are needed"));
        }
        if !(0.0..=1.0).contains(&settings.long_share) {
            let accepted = "accepted is a share from 0 to 1";
            return Err(LabError::setting("long-share", settings.long_share, accepted));
        }
        LabError::if_empty("close-every", &settings.close_every)?;
        let spend = Spend::named(&settings.service)
            .ok_or_else(|| LabError::setting("service", &settings.service, "accepted are sleep and spin"))?;
        let (policies, families) = if external {
            (Vec::new(), Vec::new())
        } else {
            (
                LabError::named("policy", &settings.policies, |name| name.parse().ok())?,
                LabError::named("family", &settings.families, |name| name.parse().ok())?,
            )
        };
        let mix = Mix {
            short: Duration::from_nanos(settings.short_ns),
            long: Duration::from_nanos(settings.long_ns),
            long_share: settings.long_share,
        };
        Ok(Checked { settings, named, policies, families, spend, mix })
    }

    pub(crate) fn workers(&self) -> usize {
        self.settings.workers as usize
    }

    /// Starts the workers behind a listener, in a namespace of its own.
    pub(crate) fn with_workers<R: Send>(
        &self,
        Pair { policy, family }: Pair,
        recycle: Recycle,
        work: impl FnOnce(Pool) -> Result<R, LabError> + Send,
    ) -> Result<R, LabError> {
        Namespace::run(|namespace| {
            namespace.set_range(client_ports())?;
            // Its path, of a unix socket, stays until the end of the work.
            let listen = ListenAddress::new(family)?;
            work(Pool::start(&listen.endpoint, policy, self.workers(), self.spend, recycle)?)
        })
    }

    pub(crate) fn client_load(&self, close_every: u64, probe: Option<Duration>, seed: u64) -> ClientLoad {
        ClientLoad {
            clients: self.settings.clients,
            close_every,
            mix: self.mix,
            pause: Duration::from_nanos(self.settings.pause_ns),
            probe,
            length: Duration::from_nanos(self.settings.for_ns),
            seed,
        }
    }

    /// Runs every cell as often as the settings say; odd repeats in the reverse order (A B C C B A), so that a machine that warms up or gets
    /// a noisy neighbour favours no cell. `run` receives the number of the repeat, from 0.
    pub(crate) fn run_cells<S>(
        &self,
        cells: &mut [Cell<S>],
        watch: &Watch<'_>,
        run: impl Fn(&S, u32) -> Result<Measured, LabError>,
    ) -> Result<Vec<Remark>, LabError> {
        let mut remarks = Vec::new();
        'repeats: for repeat in 0..self.settings.repeats {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            if repeat % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let any = cells.iter().any(|cell| cell.sums.operations() > 0);
                let cell = &mut cells[index];
                if watch.stopped() {
                    remarks.push(interrupted(cell));
                    break 'repeats;
                }
                watch.progress.begin(&cell.title(), self.settings.for_ns / 1_000_000);
                match run(&cell.spec, repeat) {
                    Ok(measured) => {
                        if measured.all().next().is_some() || !measured.cut {
                            cell.add(&measured);
                        }
                        if measured.cut {
                            remarks.push(interrupted(cell));
                            break 'repeats;
                        }
                    }
                    // The results of earlier runs are kept.
                    Err(error) if any => {
                        remarks.push(Remark::new("failed", format!("{} failed: {error}", cell.title())));
                        break 'repeats;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        if remarks.iter().any(|remark| remark.id == "interrupted")
            && cells.iter().all(|cell| cell.sums.repeats() == 0)
        {
            return Err(LabError::Interrupted);
        }
        remarks.extend(cells.iter().flat_map(doubts));
        Ok(remarks)
    }

    /// Probes every pair, each in a namespace of its own, by opening a listener group.
    ///
    /// Skips a pair that no kernel supports, unless both policy and family were named. Skips a pair that this kernel lacks
    /// or does not permit, unless the policy was named. Otherwise such a pair is an error, and so is an empty selection.
    pub(crate) fn runnable(&self) -> Result<Runnable, LabError> {
        let mut left = Runnable { pairs: Vec::new(), skipped: Vec::new() };
        let mut first = None;
        for &family in &self.families {
            for &policy in &self.policies {
                let pair = Pair { policy, family };
                match self.with_workers(pair, Recycle::Never, Pool::end) {
                    Ok(_) => left.pairs.push(pair),
                    Err(LabError::Listen(error)) if self.forgives(&error) => {
                        left.skipped.push((pair, error.to_string()));
                        first.get_or_insert(error);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        match first {
            Some(error) if left.pairs.is_empty() => Err(error.into()),
            _ => Ok(left),
        }
    }

    fn forgives(&self, error: &ListenError) -> bool {
        match error {
            ListenError::Impossible { .. } => !(self.named.policies && self.named.families),
            ListenError::NotPermitted { .. } | ListenError::Absent { .. } => !self.named.policies,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_share_of_long_requests_is_as_requested() {
        let mix = Mix { short: MS, long: 9 * MS, long_share: 0.05 };
        let mut random = Rng::with_seed(4);
        let long = (0..20_000).filter(|_| mix.draw(&mut random) == 9 * MS).count();
        assert!((900..1_100).contains(&long), "{long} of 20,000");
        let none = Mix::all(MS);
        assert!((0..1_000).all(|_| none.draw(&mut random) == MS));
    }

    #[test]
    fn pauses_have_their_mean_and_a_seed_gives_them_again() {
        let draw = |seed| -> Vec<Duration> {
            let mut random = Rng::with_seed(seed);
            (0..20_000).map(|_| Pause::Exponential(MS).draw(&mut random)).collect()
        };
        let pauses = draw(1);
        let mean = pauses.iter().sum::<Duration>() / 20_000;
        assert!((mean.as_secs_f64() - 1e-3).abs() < 5e-5, "{mean:?}");
        assert_eq!(pauses, draw(1));
        assert_ne!(pauses, draw(2));
        assert_eq!(Pause::Fixed(MS).draw(&mut Rng::with_seed(9)), MS);
        assert_eq!(Pause::Exponential(Duration::ZERO).draw(&mut Rng::with_seed(9)), Duration::ZERO);
    }

    #[test]
    fn policy_names_match_the_enum_variants() {
        for policy in AcceptPolicy::ALL {
            let said = in_rust(&policy.to_string());
            let is_rotate = policy == AcceptPolicy::ROTATE && said == "AcceptPolicy::ROTATE";
            assert!(is_rotate || said == format!("AcceptPolicy::{policy:?}"), "{said} for {policy:?}");
        }
        assert_eq!(in_rust("rotate:16"), "AcceptPolicy::Rotate { every: 16 }");
    }
}
