use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::connect_search::{Event, Totals, Tuple, UDP_TIER, Wanted};
use fourtuple_bpf::flame::Sampled;
use fourtuple_bpf::tracing::COARSE_BITS;
use fourtuple_bpf::{ConnectSearch, Tier};
use fourtuple_measure::LogLinear;
use fourtuple_record::{
    ByParity, Remark, TraceConnectResults, TraceFlame, TraceHeat, TraceSample, TraceStep, TraceTuple,
};

use crate::TraceError;
use crate::cgroup;
use crate::fill::{self, Fill, Question};
use crate::flame::{Folded, Sampling};
use crate::heat::Heat;
use crate::reservoir::Reservoir;
use crate::tier::{self, Attached};
use crate::times::{spread, times};

/// How often the ring is emptied. It holds 30,000 samples; a thousand come in a second at most.
const LOOK: Duration = Duration::from_millis(50);
/// How often the one who waits hears something.
const TELL: Duration = Duration::from_millis(200);
/// Samples a second, and as many searches of `OUTLIER` or longer.
const SAMPLES_PER_S: u32 = 500;
const OUTLIER: Duration = Duration::from_millis(1);
/// Samples in a record: a page of them is half a megabyte.
const SAMPLES: usize = 10_000;
/// Pairs of process and destination whose ports are counted: each is a walk through all sockets of a namespace.
const FILLS: usize = 8;

/// Whose connect().
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP: there is no handshake, and the tier is always `cgroup+tp_btf`.
    Udp,
}

impl Protocol {
    /// As records have it.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }
}

/// What connect() does: the search for a source port apart from the handshake, of programs that know nothing of it.
#[derive(Clone, Debug, Default)]
pub struct Connect {
    /// Protocol.
    pub protocol: Protocol,
    /// Process, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that connects (comm), 15 bytes at most.
    pub name: Option<String>,
    /// Destination.
    pub address: Option<std::net::IpAddr>,
    /// Port of the destination.
    pub port: Option<u16>,
    /// Id of a cgroup (version 2): the inode of its directory.
    pub cgroup: Option<u64>,
    /// For how long; absent: until told to stop.
    pub time: Option<Duration>,
    /// Of the choice of samples.
    pub seed: u64,
    /// Instrument; absent: the first of [`Tier::ALL`] that this kernel can do. UDP has but one, whatever this says.
    pub tier: Option<Tier>,
    /// Whether to sample what the traced programs do with the processors, for a flame graph: all that `process`, `name`
    /// and `cgroup` let pass; without one of these, processes that connected.
    pub flame: bool,
}

/// How it goes.
#[derive(Clone, Debug, Default)]
pub struct News {
    /// Since the beginning.
    pub elapsed: Duration,
    /// Searches that found a port, so far.
    pub searches: u64,
    /// These per second, of the time since the last news.
    pub searches_per_s: f64,
    /// Median and 99th percentile of all searches so far, in nanoseconds.
    pub p50_ns: u64,
    /// See `p50_ns`.
    pub p99_ns: u64,
    /// Connects that failed so far.
    pub failed: u64,
    /// What was lost so far.
    pub lost: u64,
    /// Searches so far by their length: the shortest time of a step, in nanoseconds, and how many. Four steps to a factor
    /// of ten, in ascending order; those without searches are left out.
    pub steps: Vec<(u64, u64)>,
}

/// What was seen, and what limits it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For the record.
    pub results: TraceConnectResults,
    /// Why it is not to be believed wholly.
    pub validity: Vec<Remark>,
    /// For a flame graph: frames joined by `;`, the thread's name first, and samples. Empty if none was asked for.
    pub folded: Vec<(String, u64)>,
}

impl Connect {
    /// Traces until the time is up or `stop` is set. `attached` is called once, as soon as connects are counted; `news`
    /// every 200 ms.
    ///
    /// # Errors
    ///
    /// [`TraceError::Bpf`], [`TraceError::Tier`], [`TraceError::NoTier`] and, of UDP, [`TraceError::NoCgroup`] where the
    /// programs cannot be attached; with
    /// `flame` also [`TraceError::Flame`], [`TraceError::Symbols`] and [`TraceError::HiddenSymbols`].
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(),
        mut news: impl FnMut(&News),
    ) -> Result<Outcome, TraceError> {
        let wanted = self.wanted();
        let (mut search, tier, reason) = self.attach(&wanted)?;
        let sampling = self.flame.then(|| Sampling::begin(&self.sampled())).transpose()?;
        let begun = Instant::now();
        attached();
        let mut samples = Reservoir::new(SAMPLES, self.seed);
        let (mut last, mut heat) = (News::default(), Heat::new());
        loop {
            let elapsed = begun.elapsed();
            let left = self.time.map_or(LOOK, |time| time.saturating_sub(elapsed));
            search.drain(|event| samples.offer(event));
            search.keep_up()?;
            if left.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            if heat.is_due(elapsed) {
                heat.look(elapsed, &both(&search.totals()?));
            }
            if elapsed >= last.elapsed + TELL {
                last = look(&search.totals()?, elapsed, &last);
                last.steps = heat.steps();
                news(&last);
            }
            // Always at the same places of the clock, where columns of the heat map end.
            let past = begun.elapsed().as_nanos() % LOOK.as_nanos();
            thread::sleep(left.min(LOOK - Duration::from_nanos(past as u64)));
        }
        let elapsed = begun.elapsed();
        search.detach();
        search.drain(|event| samples.offer(event));
        let totals = search.totals()?;
        let tuples = search.tuples()?;
        let (flame, folded) = self.sampled_of(sampling, &tuples)?;
        heat.look(elapsed, &both(&totals));
        let results = TraceConnectResults {
            tier: tier.to_owned(),
            tier_reason: reason,
            heat: heat.into_record(),
            flame,
            ..results(self.protocol, &totals, tuples, samples.into_kept(), elapsed)
        };
        let early = self.time.is_some_and(|time| elapsed < time);
        let mut validity = validity(&totals, early.then_some(elapsed));
        validity.extend(flame.and_then(thin));
        Ok(Outcome { results, validity, folded })
    }

    /// With the name of the tier, and why it is not the first.
    fn attach(&self, wanted: &Wanted) -> Result<(ConnectSearch, &'static str, Option<String>), TraceError> {
        match self.protocol {
            Protocol::Tcp => {
                let Attached { programs, tier, reason } =
                    tier::attach(self.tier, |tier| ConnectSearch::attach(wanted, tier))?;
                Ok((programs, tier.name(), reason))
            }
            Protocol::Udp => {
                let root = cgroup::root().map_err(TraceError::NoCgroup)?;
                Ok((ConnectSearch::attach_udp(wanted, root.as_fd())?, UDP_TIER, None))
            }
        }
    }

    fn sampled(&self) -> Sampled {
        Sampled { process: self.process, name: self.name.clone(), cgroup: self.cgroup }
    }

    fn sampled_of(
        &self,
        sampling: Option<Sampling>,
        tuples: &[Tuple],
    ) -> Result<(Option<TraceFlame>, Folded), TraceError> {
        let Some(sampling) = sampling else { return Ok((None, Vec::new())) };
        let everybody = self.sampled() == Sampled::default();
        let dialing: Option<HashSet<u32>> =
            everybody.then(|| tuples.iter().map(|tuple| tuple.key.process).collect());
        let (flame, folded) = sampling.end(dialing.as_ref())?;
        Ok((Some(flame), folded))
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            process: self.process,
            name: self.name.clone(),
            address: self.address,
            port: self.port,
            cgroup: self.cgroup,
            samples_per_s: SAMPLES_PER_S,
            outlier_ns: OUTLIER.as_nanos() as u64,
        }
    }
}

fn both(totals: &Totals) -> LogLinear {
    let mut both = times(&totals.even);
    both.merge(&times(&totals.odd));
    both
}

fn lost(totals: &Totals) -> u64 {
    totals.lost_events + totals.lost_starts + totals.lost_tuples + totals.without_end + totals.lost_answers
}

fn look(totals: &Totals, elapsed: Duration, last: &News) -> News {
    let all = both(totals);
    let searches = all.count();
    let since = (elapsed - last.elapsed).as_secs_f64();
    News {
        elapsed,
        searches,
        searches_per_s: searches.saturating_sub(last.searches) as f64 / since,
        p50_ns: all.quantile(0.5),
        p99_ns: all.quantile(0.99),
        failed: totals.failures().map(|(_, number)| number).sum(),
        lost: lost(totals),
        steps: Vec::new(),
    }
}

fn results(
    protocol: Protocol,
    totals: &Totals,
    tuples: Vec<Tuple>,
    mut events: Vec<Event>,
    elapsed: Duration,
) -> TraceConnectResults {
    let mut order: Vec<usize> = (0..tuples.len()).filter(|&place| tuples[place].key.port != 0).collect();
    // The name decides among equals, so that the order is the same each time.
    order.sort_by_cached_key(|&place| {
        let tuple = &tuples[place];
        let weight = tuple.searches().iter().sum::<u64>() + tuple.failed + tuple.given_port;
        (std::cmp::Reverse(weight), tuple.key.process, tuple.key.address(), tuple.key.port)
    });
    let mut place_of = vec![None; tuples.len()];
    order.iter().zip(0_u32..).for_each(|(&place, sorted)| place_of[place] = Some(sorted));
    events.sort_by_key(|event| event.at_ns);
    let samples = events.iter().map(|event| TraceSample {
        at_ns: event.at_ns,
        search_ns: event.search_ns,
        source_port: (event.source_port != 0).then_some(event.source_port),
        tuple: place_of.get(event.tuple as usize).copied().flatten(),
    });
    let (even, odd, all) = (times(&totals.even), times(&totals.odd), both(totals));
    let searches = all.count();
    // A port of UDP is taken for all destinations alike: to count those towards one would say little.
    let fills = if protocol == Protocol::Tcp { FILLS } else { 0 };
    let questions: Vec<Question> = order.iter().take(fills).map(|&place| question(&tuples[place])).collect();
    let mut fills = fill::of(&questions);
    fills.resize(order.len(), None);
    TraceConnectResults {
        tier: String::new(),
        tier_reason: None,
        elapsed_ns: elapsed.as_nanos() as u64,
        searches,
        searches_per_s: searches as f64 / elapsed.as_secs_f64().max(1e-9),
        failed: totals.failures().collect(),
        given_port: totals.given_port,
        established: totals.established,
        untimed: totals.untimed,
        lost: lost(totals),
        switched: totals.switched,
        search_ns: ByParity { all: spread(&all), even: spread(&even), odd: spread(&odd) },
        failed_search_ns: spread(&times(&totals.failed)),
        handshake_ns: spread(&times(&totals.handshake)),
        histogram: histogram(&even, &odd),
        heat: TraceHeat::default(),
        flame: None,
        samples: samples.collect(),
        tuples: order.iter().zip(fills).map(|(&place, fill)| tuple_result(&tuples[place], fill)).collect(),
    }
}

/// Both parities side by side; steps without searches are left out.
fn histogram(even: &LogLinear, odd: &LogLinear) -> Vec<TraceStep> {
    let mut steps: Vec<TraceStep> = even
        .steps()
        .map(|(from_ns, even)| TraceStep { from_ns, even, odd: 0 })
        .chain(odd.steps().map(|(from_ns, odd)| TraceStep { from_ns, even: 0, odd }))
        .collect();
    steps.sort_by_key(|step| step.from_ns);
    steps.dedup_by(|next, step| {
        let same = next.from_ns == step.from_ns;
        if same {
            (step.even, step.odd) = (step.even + next.even, step.odd + next.odd);
        }
        same
    });
    steps
}

fn question(tuple: &Tuple) -> Question {
    Question {
        namespace: tuple.namespace,
        process: tuple.key.process,
        destination: SocketAddr::new(tuple.key.address(), tuple.key.port),
    }
}

fn tuple_result(tuple: &Tuple, fill: Option<Fill>) -> TraceTuple {
    let by_parity = |odd: usize| {
        let counts = tuple.buckets[odd].iter().map(|&number| u64::from(number)).collect();
        // The longest is not kept for each; the end of the last bucket is long enough.
        LogLinear::new(COARSE_BITS, counts, tuple.search_ns[odd], u64::MAX)
    };
    let (even, odd) = (by_parity(0), by_parity(1));
    let mut all = even.clone();
    all.merge(&odd);
    let median = |times: &LogLinear| (times.count() > 0).then(|| times.quantile(0.5));
    let ([evens, odds], key) = (tuple.searches(), &tuple.key);
    let searches = evens + odds;
    TraceTuple {
        process: key.process,
        name: tuple.name(),
        destination: SocketAddr::new(key.address(), key.port).to_string(),
        searches,
        even: evens,
        odd: odds,
        mean_ns: (tuple.search_ns[0] + tuple.search_ns[1]) / searches.max(1),
        p99_ns: all.quantile(0.99),
        even_p50_ns: median(&even),
        odd_p50_ns: median(&odd),
        failed: tuple.failed,
        no_port: tuple.no_port,
        given_port: tuple.given_port,
        established: tuple.established,
        retries: tuple.retries,
        syn_retries: tuple.syn_retries,
        closed_first: tuple.closed_first,
        closed_by_peer: tuple.closed_by_peer,
        in_use: fill.map(|fill| fill.in_use),
        range: fill.map(|fill| fill.range),
        fill: fill.map(|fill| f64::from(fill.in_use) / f64::from(fill.range.max(1))),
    }
}

/// A graph of which more than a twentieth is missing. A few stacks without room are no reason to doubt it.
fn thin(flame: TraceFlame) -> Option<Remark> {
    let message = format!(
        "{} samples of the flame graph were lost, and {} were counted: there was no room for their stacks",
        flame.lost, flame.samples
    );
    (flame.lost > flame.samples / 20).then(|| Remark::new("events-lost", message))
}

fn validity(totals: &Totals, stopped: Option<Duration>) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if let Some(elapsed) = stopped {
        let message =
            format!("stopped after {:.1} s; what was seen until then is below", elapsed.as_secs_f64());
        remarks.push(Remark::new("interrupted", message));
    }
    let losses = [
        (totals.lost_starts, "connects were not traced: too many at the same time"),
        (
            totals.without_end,
            "connections whose search's end was not seen: they are missing among the searches",
        ),
        (totals.lost_tuples, "events belong to processes and destinations that had no room in the table"),
        (totals.lost_answers, "connects whose end, established or failed, went by unseen"),
        (totals.lost_events, "samples were lost: the ring was full; the counts are whole"),
    ];
    for (number, what) in losses {
        if number > 0 {
            remarks.push(Remark::new("events-lost", format!("{number} {what}")));
        }
    }
    remarks
}
