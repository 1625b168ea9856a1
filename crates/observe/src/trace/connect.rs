use std::collections::HashSet;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use crate::host::cgroup;
use fourtuple_bpf::connect_search::{ConnectFilter, Event, Totals, Tuple, UDP_TIER};
use fourtuple_bpf::filter::TaskFilter;
use fourtuple_bpf::{ConnectSearch, Tier};
use fourtuple_record::measure::LogLinear;
use fourtuple_record::{Remark, TraceConnectResults, TraceFlame, TraceTuple};

use crate::trace::blind_spots;
use crate::trace::blind_spots::{Judgement, Losses, MISSED};
use crate::trace::connect_results::{all_searches, by_parity, results, rows, tuple_result};
use crate::trace::ended::is_alive;
use crate::trace::error::TraceError;
use crate::trace::failed::{FailedSession, account, correct};
use crate::trace::flame::Sampling;
use crate::trace::heat::Heat;
use crate::trace::instrument::{Folded, Instrument, Outcome, Session};
use crate::trace::tier::{self, Attached};
use crate::trace::times::Reservoir;
use crate::trace::times::merged;

/// Samples per second, and as many searches of `OUTLIER` or longer. The ring holds 30,000, and each poll drains it.
const SAMPLES_PER_S: u32 = 500;
const OUTLIER: Duration = Duration::from_millis(1);
/// Maximum number of samples in a record: a page with them has half a megabyte.
const SAMPLES: usize = 10_000;

/// The protocol whose connect() is traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP. It has no handshake, and its only tier is `cgroup+tp_btf`.
    Udp,
}

impl Protocol {
    /// Returns the name that records use: `tcp` or `udp`.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }
}

/// A trace of connect(): the search for a source port, and the handshake apart from it.
#[derive(Clone, Debug, Default)]
pub struct Connect {
    pub protocol: Protocol,
    /// Process, as numbered in the PID namespace of this process.
    pub process: Option<u32>,
    /// Name of the process or thread that connects (comm), at most 15 bytes.
    pub name: Option<String>,
    pub address: Option<IpAddr>,
    pub port: Option<u16>,
    /// Id of a cgroup (version 2): the inode of its directory.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the socket.
    pub network: Option<u32>,
    /// How long to trace; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
    /// Seed of the random choice of samples.
    pub seed: u64,
    /// Tier of instrument; `None` means the first of [`Tier::ALL`] that attaches. UDP ignores it, having one tier only.
    pub tier: Option<Tier>,
    /// Whether to sample the stacks of traced programs for a flame graph. Sampled are programs that match `process`, `name`
    /// and `cgroup`, in the network namespace; with none of the three, programs that connected during the trace.
    pub flame: bool,
}

/// Figures of a running trace of connect().
#[derive(Clone, Debug, Default)]
pub struct ConnectProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Searches that found a port, since the start.
    pub searches: u64,
    /// Searches per second since the previous progress.
    pub searches_per_s: f64,
    /// Median duration of all searches since the start, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of all searches since the start, in nanoseconds.
    pub p99_ns: u64,
    /// Failed connects since the start.
    pub failed: u64,
    /// Events that were not counted because a table was full, and events that no program saw (`recursion_misses`).
    pub lost: u64,
    /// Histogram of all searches since the start: lower bound of a step in nanoseconds, and number of searches. Four steps
    /// to a factor of ten, in ascending order, without empty steps.
    pub steps: Vec<(u64, u64)>,
}

/// A running trace of connect().
#[derive(Debug)]
pub struct ConnectSession {
    search: ConnectSearch,
    protocol: Protocol,
    tier: &'static str,
    /// Why the tier is not the first of [`Tier::ALL`].
    tier_reason: Option<String>,
    sampling: Option<Sampling>,
    tasks: TaskFilter,
    samples: Reservoir<Event>,
    heat: Heat,
    /// Time and number of searches at the previous progress.
    last: (Duration, u64),
    /// The counts at the end of the previous window.
    earlier: Vec<Tuple>,
    /// Failed calls, or why they are not counted.
    failed: Result<FailedSession, String>,
    address: Option<IpAddr>,
    port: Option<u16>,
}

impl Instrument for Connect {
    type Session = ConnectSession;

    fn attach(&self) -> Result<ConnectSession, TraceError> {
        // Before the search, so that each attempt of the search has its failure here.
        let failed = FailedSession::attach(&self.tasks());
        self.attach_beside(failed.map_err(|error| error.to_string()))
    }

    fn duration(&self) -> Option<Duration> {
        self.time
    }
}

impl Connect {
    fn tasks(&self) -> TaskFilter {
        let Connect { process, name, cgroup, network, .. } = self.clone();
        TaskFilter { process, name, cgroup, network }
    }

    /// Attaches the trace beside a count of failed calls; `Err`: why there is none.
    pub(crate) fn attach_beside(
        &self,
        failed: Result<FailedSession, String>,
    ) -> Result<ConnectSession, TraceError> {
        let (search, tier, tier_reason) = self.attach_search()?;
        let tasks = self.tasks();
        let sampling = self.flame.then(|| Sampling::begin(&tasks)).transpose()?;
        Ok(ConnectSession {
            search,
            protocol: self.protocol,
            tier,
            tier_reason,
            sampling,
            tasks,
            samples: Reservoir::new(SAMPLES, self.seed),
            heat: Heat::new(),
            last: (Duration::ZERO, 0),
            earlier: Vec::new(),
            failed,
            address: self.address,
            port: self.port,
        })
    }

    /// Attaches the programs. Returns also the name of the tier, and why it is not the first tier.
    fn attach_search(&self) -> Result<(ConnectSearch, &'static str, Option<String>), TraceError> {
        let filter = ConnectFilter {
            process: self.process,
            name: self.name.clone(),
            address: self.address,
            port: self.port,
            cgroup: self.cgroup,
            network: self.network,
            samples_per_s: SAMPLES_PER_S,
            outlier_ns: OUTLIER.as_nanos() as u64,
        };
        match self.protocol {
            Protocol::Tcp => {
                let Attached { programs, tier, reason } =
                    tier::attach(self.tier, |tier| ConnectSearch::attach(&filter, tier))?;
                Ok((programs, tier.name(), reason))
            }
            Protocol::Udp => {
                // Programs attached to the root see every connect() of the host.
                let root =
                    cgroup::mount_point(Path::new("/")).and_then(File::open).map_err(TraceError::NoCgroup)?;
                Ok((ConnectSearch::attach_udp(&filter, root.as_fd())?, UDP_TIER, None))
            }
        }
    }
}

impl ConnectSession {
    /// Returns the times of all searches that found a port.
    pub(crate) fn times(&self) -> Result<LogLinear, TraceError> {
        Ok(all_searches(&self.search.totals()?))
    }

    /// Returns the calls of a network namespace since the previous window: by process and destination, without the ports in use, and the
    /// times of all searches together, which the percentiles of single pairs do not give. `None`: there was no search.
    pub(crate) fn window(
        &mut self,
        namespace: u32,
    ) -> Result<(Vec<TraceTuple>, Option<LogLinear>), TraceError> {
        let tuples = self.search.tuples()?;
        // The kernel adds tuples and removes none.
        let earlier = self.earlier.iter().map(Some).chain(std::iter::repeat(None));
        let since = |(now, before): (&Tuple, Option<&Tuple>)| before.map_or(*now, |before| now.since(before));
        let since = tuples.iter().zip(earlier).map(since).filter(|tuple| tuple.key.port != 0);
        // Tuples of earlier windows stay in the table.
        let has_calls =
            |tuple: &Tuple| tuple.searches().iter().sum::<u64>() + tuple.given_port + tuple.failed > 0;
        let is_here = |tuple: &Tuple| tuple.namespace == namespace && has_calls(tuple);
        let since: Vec<Tuple> = since.filter(is_here).collect();
        let (rows, _) = rows(&since, is_alive);
        let window = rows.iter().map(|row| tuple_result(row, None)).collect();
        let searches = since.iter().flat_map(|tuple| <[LogLinear; 2]>::from(by_parity(tuple)));
        let searches = merged(searches.filter(|times| times.count() > 0));
        self.earlier = tuples;
        Ok((window, searches))
    }

    /// Returns whether calls were not counted, because the table of processes and destinations is full.
    pub(crate) fn is_full(&self) -> Result<bool, TraceError> {
        Ok(self.search.totals()?.lost_tuples > 0)
    }
}

impl Session for ConnectSession {
    type Progress = ConnectProgress;
    type Results = TraceConnectResults;
    const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

    fn poll(&mut self, elapsed: Duration) -> Result<(), TraceError> {
        self.search.drain(|event| self.samples.offer(event));
        self.search.keep_up()?;
        if self.heat.is_due(elapsed) {
            self.heat.update(elapsed, &all_searches(&self.search.totals()?));
        }
        Ok(())
    }

    fn progress(&mut self, elapsed: Duration) -> Result<ConnectProgress, TraceError> {
        let totals = self.search.totals()?;
        let all = all_searches(&totals);
        let searches = all.count();
        let (last_elapsed, last_searches) = std::mem::replace(&mut self.last, (elapsed, searches));
        let since = (elapsed - last_elapsed).as_secs_f64();
        Ok(ConnectProgress {
            elapsed,
            searches,
            searches_per_s: searches.saturating_sub(last_searches) as f64 / since,
            p50_ns: all.quantile(0.5),
            p99_ns: all.quantile(0.99),
            failed: totals.failures().map(|(_, number)| number).sum(),
            lost: losses(&totals, self.search.missed()?).sum(),
            steps: self.heat.steps(),
        })
    }

    fn finish(mut self, elapsed: Duration) -> Result<Outcome<TraceConnectResults>, TraceError> {
        self.search.detach();
        self.search.drain(|event| self.samples.offer(event));
        let totals = self.search.totals()?;
        let losses = losses(&totals, self.search.missed()?);
        let tuples = self.search.tuples()?;
        let failed = self
            .failed
            .and_then(|mut failed| failed.end(self.address, self.port).map_err(|error| error.to_string()));
        let (flame, folded) = match self.sampling {
            Some(sampling) => {
                let connecting = || tuples.iter().map(|tuple| tuple.key.process).collect::<HashSet<u32>>();
                // Without a setting that restricts the samples, the processes that connected.
                let all = TaskFilter { network: self.tasks.network, ..TaskFilter::default() };
                let only = (self.tasks == all).then(connecting);
                let (flame, folded) = sampling.end(only.as_ref())?;
                (Some(flame), folded)
            }
            None => (None, Folded::new()),
        };
        self.heat.update(elapsed, &all_searches(&totals));
        let (mut results, fill_error) =
            results(self.protocol, &totals, tuples, self.samples.into_kept(), elapsed);
        if let (Ok(counted), Protocol::Tcp) = (&failed, self.protocol) {
            correct(&mut results.failed, &counted.failed);
        }
        let of_32_bits = blind_spots::processes_of_32_bits(&self.tasks);
        let unseen = blind_spots::remark_of_32_bits(&of_32_bits);
        let Judgement { mut validity, notes } =
            losses.judge(all_searches(&totals).count() + totals.established);
        let results = TraceConnectResults {
            lost: losses.sum(),
            calls: failed.map(|counted| account(counted.failed.iter(), counted.lost, of_32_bits)).into(),
            notes,
            tier: self.tier.to_owned(),
            tier_reason: self.tier_reason,
            heat: self.heat.into_record(),
            flame,
            ..results
        };
        validity.extend(flame.and_then(incomplete_flame));
        validity.extend(unseen);
        validity.extend(fill_error.map(|error| {
            Remark::new("fill-unseen", format!("the number of ports in use is unknown: {error}"))
        }));
        Ok(Outcome { results, validity, folded })
    }
}

/// Returns a remark if more than 1 in 20 samples of the flame graph were lost.
fn incomplete_flame(flame: TraceFlame) -> Option<Remark> {
    let message = format!(
        "samples of the flame graph: {} lost, {} counted; the table of stacks was full",
        flame.lost, flame.samples
    );
    (flame.lost > flame.samples / 20).then(|| Remark::new("events-lost", message))
}

/// Lists the losses; `missed` is the number of events that no program saw (`recursion_misses`).
fn losses(totals: &Totals, missed: u64) -> Losses {
    Losses::new([
        (totals.lost_starts, "connects were not traced: the table of connects in progress was full"),
        (
            totals.without_end,
            "connections are missing among the searches: no program saw the end of their search",
        ),
        (totals.lost_tuples, "events were not counted: the table of processes and destinations was full"),
        (
            totals.lost_answers,
            "connects have no outcome: no program saw whether they were established or failed",
        ),
        (totals.unmarked, "closes may be missing: the kernel had no memory to remember who had connected"),
        (totals.lost_events, "samples were lost because the ring buffer was full; the counts are complete"),
        (missed, MISSED),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::instrument::tests::attached;

    #[test]
    fn missed_events_are_part_of_lost() {
        let test = "connect::tests::missed_events_are_part_of_lost";
        let Some(session) = attached(test, Connect::default().attach()) else { return };
        let totals = session.search.totals().unwrap();
        assert_eq!(losses(&totals, 3).sum(), losses(&totals, 0).sum() + 3);
    }
}
