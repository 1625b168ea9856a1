use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use fourtuple_observe::doctor::{Budget, Diagnosis};
use fourtuple_observe::trace::SurveyTimes;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::snapshot::{Connections, Snapshot, Tuple};
use fourtuple_record::{DoctorResults, DoctorSettings, Saved};
use fourtuple_report::exposition::{
    Collector, DescriptorEncoder, Durations, Endpoint, Kind, Limits, Page, Publisher, Registry, Sample,
    write_durations, write_family,
};
use fourtuple_report::html;
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::units::{self, nanoseconds};
use crate::watch::{
    Namespace, Past, SHARE, TargetFlags, Thresholds, Watch, diagnose_in, host, read_thresholds,
    time_to_exhaustion,
};
use crate::{output, stop};

/// Serve what `doctor` sees for Prometheus, and as a live page
///
/// GET /metrics returns OpenMetrics text, GET / a page that updates itself. Read-only; process names and addresses are visible to every
/// client that can connect, so the endpoint listens on loopback unless told otherwise. Ends with Ctrl-C or SIGTERM.
#[derive(Debug, Args)]
pub(crate) struct ExportFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Time between two readings
    ///
    /// At least 100ms.
    #[arg(long, value_name = "TIME", value_parser = units::interval, default_value = "5s", allow_hyphen_values = true)]
    every: Duration,
    /// Thresholds of rules, a TOML file
    ///
    /// With lines such as P01 = 80.
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Load no BPF program; the histograms are missing
    #[arg(long)]
    no_trace: bool,
    /// Print nothing but errors
    #[arg(long)]
    quiet: bool,
    /// Address to listen on
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address, default_value = "127.0.0.1:9416")]
    listen: SocketAddr,
    /// Destinations with own metrics
    ///
    /// All further destinations are summed up as "other".
    #[arg(long, value_name = "N", value_parser = units::up_to::<100>, default_value = "20", allow_hyphen_values = true)]
    destinations: u32,
}

impl ExportFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let thresholds = read_thresholds(self.thresholds.as_deref())?;
        let namespace = self.target.open()?;
        let stop = stop::flag()?;
        let settings = self.target.settings(nanoseconds(self.every));
        let mut exporter = Exporter::start(self.listen, self.destinations, thresholds, settings, Vec::new())?;
        namespace.within(|| {
            let mut watch = Watch::begin(&namespace, !self.no_trace, SHARE);
            let SurveyTimes { search, wait } = watch.times();
            for reason in [search.err(), wait.err()].into_iter().flatten().filter(|_| !self.no_trace) {
                output::say(&format!("without a histogram: {reason}"));
            }
            exporter.show(&namespace, watch.read(), watch.times());
            if !self.quiet {
                output::say(&exporter.announcement());
            }
            let mut next = Instant::now() + self.every;
            while !stop.load(Ordering::Relaxed) {
                watch.poll();
                let now = Instant::now();
                if now >= next {
                    // After a stop of the machine the missed readings are not made up for.
                    next = now.max(next) + self.every;
                    exporter.show(&namespace, watch.read(), watch.times());
                }
                let pause = next.saturating_duration_since(Instant::now()).min(watch.poll_interval());
                thread::sleep(pause);
            }
            Ok(Exit::Fine)
        })
    }
}

/// Returns the page of the latest reading.
fn render(latest: &Mutex<Option<Saved>>) -> String {
    let record = latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
    // The endpoint listens before the first reading.
    record.map_or_else(|| "<meta http-equiv=refresh content=1>".to_owned(), |record| html::live_page(&record))
}

/// The endpoint with the metrics and the page, and what they show.
pub(crate) struct Exporter {
    endpoint: Endpoint,
    thresholds: Thresholds,
    settings: DoctorSettings,
    past: Past,
    latest: Arc<Mutex<Option<Saved>>>,
    publisher: Publisher,
    metrics: Arc<Metrics>,
}

impl Exporter {
    /// Listens at the address. `destinations`: the number of destinations with metrics of their own; `more`: metrics beside those of the host.
    pub(crate) fn start(
        listen: SocketAddr,
        destinations: u32,
        thresholds: Thresholds,
        settings: DoctorSettings,
        more: Vec<Box<dyn Collector>>,
    ) -> anyhow::Result<Exporter> {
        let metrics = Arc::new(Metrics::new(destinations as usize));
        let mut registry = Registry::with_prefix("fourtuple");
        registry.register_collector(Box::new(Arc::clone(&metrics)));
        more.into_iter().for_each(|collector| registry.register_collector(collector));
        let latest = Arc::new(Mutex::new(None));
        let shown = Arc::clone(&latest);
        let (page, publisher) = Page::new(move || render(&shown));
        let endpoint = Endpoint::start_with_page(listen, Limits::default(), registry, page)
            .with_context(|| format!("--listen {listen}"))?;
        Ok(Exporter { endpoint, thresholds, settings, past: Past::new(), latest, publisher, metrics })
    }

    /// Returns a line that says where the metrics and the page are.
    pub(crate) fn announcement(&self) -> String {
        let address = self.endpoint.address();
        format!("metrics at http://{address}/metrics, live page at http://{address}/")
    }

    /// Updates the metrics, and the page if a browser reads it.
    pub(crate) fn show(&mut self, namespace: &Namespace, snapshot: Snapshot, times: SurveyTimes) {
        self.past.add(&snapshot);
        let diagnosis = diagnose_in(namespace, &snapshot, &self.thresholds.limits, &|_| None);
        self.metrics.update(&snapshot, &diagnosis, times);
        let record = self.record(snapshot, diagnosis);
        if self.publisher.has_readers() {
            // A JSON string has no line ends, which would end an event.
            let update = serde_json::to_string(&html::article(&record));
            self.publisher.send(update.unwrap_or_default());
        }
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        self.publisher.renew();
    }

    fn record(&self, snapshot: Snapshot, diagnosis: Diagnosis) -> Saved {
        let Diagnosis { findings, checked, unchecked, unexplained: _, symptoms: _, explained: _ } = diagnosis;
        let settings = DoctorSettings { thresholds: self.thresholds.set.clone(), ..self.settings.clone() };
        let host = host(&snapshot);
        let history = Some(self.past.history());
        let results = DoctorResults { findings, checked, unchecked, snapshot, history };
        Saved::Doctor(output::record(
            "doctor",
            OffsetDateTime::now_utc(),
            host,
            settings,
            Vec::new(),
            results,
        ))
    }
}

/// The latest snapshot; empty before the first reading.
#[derive(Debug)]
struct Metrics {
    /// The number of tuples with labels of their own.
    tuples: usize,
    latest: Mutex<Option<Latest>>,
    unexplained: Mutex<Unexplained>,
}

/// Events without an explanation since the start, by symptom and process.
type Unexplained = BTreeMap<(String, String), u64>;

/// The number of symptoms with labels of their own.
const SYMPTOMS: usize = 100;

#[derive(Clone, Debug)]
struct Latest {
    tuples: Vec<TupleMetrics>,
    states: BTreeMap<String, u64>,
    /// Address, connections in the accept queue, limit of the queue.
    listeners: Vec<(String, u64, u64)>,
    /// Number of findings by rule and severity.
    findings: BTreeMap<(String, String), u64>,
    /// Rules that could not be checked.
    unchecked: Vec<String>,
    times: SurveyTimes,
}

/// The metrics of a tuple, or of all tuples without labels of their own.
#[derive(Clone, Debug, Default)]
struct TupleMetrics {
    source: String,
    destination: String,
    states: BTreeMap<String, u64>,
    /// Ports that connect() can take now; `None`: not known, or several tuples.
    free: Option<u32>,
    seconds_to_exhaustion: Option<f64>,
}

impl Metrics {
    fn new(tuples: usize) -> Metrics {
        Metrics { tuples, latest: Mutex::default(), unexplained: Mutex::default() }
    }

    fn update(&self, snapshot: &Snapshot, diagnosis: &Diagnosis, times: SurveyTimes) {
        add_unexplained(&mut self.unexplained.lock().unwrap_or_else(PoisonError::into_inner), diagnosis);
        let connections = snapshot.connections.seen().ok();
        let mut by_rule = BTreeMap::new();
        for finding in &diagnosis.findings {
            let severity = format!("{:?}", finding.severity).to_lowercase();
            *by_rule.entry((finding.id.clone(), severity)).or_default() += 1;
        }
        let listeners = snapshot.listeners.seen().ok().into_iter().flatten();
        let mut queues: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        // The members of a SO_REUSEPORT group have the same address.
        for listener in listeners {
            let queue = queues.entry(listener.address.to_string()).or_default();
            queue.0 += u64::from(listener.waiting);
            queue.1 += u64::from(listener.backlog);
        }
        let latest = Latest {
            tuples: connections
                .map(|connections| listed(snapshot, connections, self.tuples))
                .unwrap_or_default(),
            states: connections.map(|connections| connections.states.clone()).unwrap_or_default(),
            listeners: queues
                .into_iter()
                .map(|(address, (waiting, limit))| (address, waiting, limit))
                .collect(),
            findings: by_rule,
            unchecked: diagnosis.unchecked.iter().map(|rule| rule.id.clone()).collect(),
            times,
        };
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(latest);
    }
}

/// Adds the events of a reading. Symptoms beyond [`SYMPTOMS`] are summed up as `other`.
fn add_unexplained(sums: &mut Unexplained, diagnosis: &Diagnosis) {
    for symptom in &diagnosis.unexplained {
        let mut key = (symptom.symptom.clone(), symptom.process.clone());
        if sums.len() >= SYMPTOMS && !sums.contains_key(&key) {
            key = ("other".to_owned(), String::new());
        }
        *sums.entry(key).or_default() += symptom.events;
    }
}

/// Returns the first tuples, and the sum of all further tuples.
fn listed(snapshot: &Snapshot, connections: &Connections, most: usize) -> Vec<TupleMetrics> {
    let one = |tuple: &Tuple| {
        let budget = Budget::of(snapshot, tuple).ok();
        TupleMetrics {
            source: tuple.source.to_string(),
            destination: tuple.destination.to_string(),
            states: tuple.states.clone(),
            free: budget.map(|budget| budget.free()),
            seconds_to_exhaustion: budget.and_then(|budget| time_to_exhaustion(tuple, &budget)),
        }
    };
    let tuples = &connections.tuples;
    let (first, others) = tuples.split_at(most.min(tuples.len()));
    let mut listed: Vec<TupleMetrics> = first.iter().map(one).collect();
    if others.len() as u64 + connections.tuples_left_out > 0 {
        let mut sum = TupleMetrics {
            source: "other".to_owned(),
            destination: "other".to_owned(),
            states: connections.tuples_left_out_states.clone(),
            ..TupleMetrics::default()
        };
        for tuple in others {
            for (state, number) in &tuple.states {
                *sum.states.entry(state.clone()).or_default() += number;
            }
        }
        listed.push(sum);
    }
    listed
}

impl TupleMetrics {
    fn labels(&self) -> [(&'static str, String); 2] {
        [("destination", self.destination.clone()), ("source", self.source.clone())]
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(latest) = latest else { return Ok(()) };
        latest.write_tuples(&mut encoder)?;
        latest.write_host(&mut encoder)?;
        let unexplained = self.unexplained.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let unexplained = unexplained.into_iter().map(|((symptom, process), events)| {
            Sample::new([("process", process), ("symptom", symptom)], events)
        });
        let help = "Failed calls, drops and other symptoms that no finding explains, since the start of the exporter";
        write_family(&mut encoder, Kind::Counter, "unexplained_events", help, unexplained)?;
        let SurveyTimes { search, wait } = &latest.times;
        if let Ok(search) = search {
            let help = "Time in which connect() found a source port, in all network namespaces";
            write_durations(&mut encoder, "connect_search_seconds", help, &durations(search))?;
        }
        if let Ok(wait) = wait {
            let help = "Time from the end of the handshake to accept(), in all network namespaces";
            write_durations(&mut encoder, "accept_wait_seconds", help, &durations(wait))?;
        }
        Ok(())
    }
}

fn durations(times: &LogLinear) -> Durations {
    Durations { steps: times.steps().collect(), count: times.count(), sum_ns: times.sum_ns() }
}

impl Latest {
    fn write_tuples(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let used = self.tuples.iter().flat_map(|tuple| {
            tuple.states.iter().map(|(state, number)| {
                Sample::new(tuple.labels().into_iter().chain([("state", state.clone())]), *number)
            })
        });
        let help = "Sockets that use a source port, by source, destination and TCP state";
        write_family(encoder, Kind::Gauge, "ports_used", help, used)?;
        let available =
            self.tuples.iter().filter_map(|tuple| Some(Sample::new(tuple.labels(), u64::from(tuple.free?))));
        let help = "Ports that connect() can take for a source and a destination";
        write_family(encoder, Kind::Gauge, "ports_available", help, available)?;
        let forecast = self
            .tuples
            .iter()
            .filter_map(|tuple| Some(Sample::new(tuple.labels(), tuple.seconds_to_exhaustion?)));
        let help = "Time until no port is free at the present growth; absent without growth";
        write_family(encoder, Kind::Gauge, "time_to_exhaustion_seconds", help, forecast)
    }

    fn write_host(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let states =
            self.states.iter().map(|(state, number)| Sample::new([("state", state.clone())], *number));
        write_family(encoder, Kind::Gauge, "sockets", "TCP sockets except listeners, by state", states)?;
        let of_listener = |get: fn(&(String, u64, u64)) -> u64| {
            self.listeners
                .iter()
                .map(move |listener| Sample::new([("listener", listener.0.clone())], get(listener)))
        };
        let help = "Connections in the accept queue, by address of the listener";
        write_family(encoder, Kind::Gauge, "accept_queue_length", help, of_listener(|listener| listener.1))?;
        let help = "Limit of the accept queue, by address of the listener";
        write_family(encoder, Kind::Gauge, "accept_queue_limit", help, of_listener(|listener| listener.2))?;
        let findings = self.findings.iter().map(|((id, severity), number)| {
            Sample::new([("id", id.clone()), ("severity", severity.clone())], *number)
        });
        write_family(encoder, Kind::Gauge, "findings", "Findings of `fourtuple doctor`, by rule", findings)?;
        let unchecked = self.unchecked.iter().map(|id| Sample::new([("id", id.clone())], 1_u64));
        let help = "Rules that could not be checked, so that they have no findings";
        write_family(encoder, Kind::Gauge, "unchecked_rules", help, unchecked)
    }
}
