//! The latest snapshot as metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use fourtuple_observe::doctor::{Budget, Diagnosis};
use fourtuple_observe::trace::SurveyTimes;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::snapshot::{Connections, Snapshot, Tuple};
use fourtuple_report::exposition::{
    Collector, DescriptorEncoder, Durations, Kind, Sample, write_durations, write_family,
};

use crate::watch::time_to_exhaustion;

/// The latest snapshot; empty before the first reading.
#[derive(Debug)]
pub(super) struct Metrics {
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
    pub(super) fn new(tuples: usize) -> Metrics {
        Metrics { tuples, latest: Mutex::default(), unexplained: Mutex::default() }
    }

    pub(super) fn update(&self, snapshot: &Snapshot, diagnosis: &Diagnosis, times: SurveyTimes) {
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
