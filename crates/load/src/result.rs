use std::time::Duration;

use fourtuple_measure::Histogram;
use fourtuple_measure::words::counted;
use fourtuple_record::{
    Held, Latency, LoadPorts, LoadResults, LoadSettings, LoadStatus, Quantile, Quantiles, Remark, Second,
    format_time,
};
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::socket::Transport;

use crate::preflight::{self, Closer, Need, NoPort, Offered, Preflight, RunMeasurements, hindsight};
use crate::run::Outcome;
use crate::settings::{Close, Load};
use crate::target::Scheme;
use crate::workload::Workload;

impl Load {
    /// Returns the need of the run.
    pub fn need(&self) -> Need {
        let sends_nothing = matches!(self.workload, Workload::Connect);
        Need {
            transport: match (self.target.scheme(), self.transport()) {
                (Scheme::Unix, _) => preflight::Transport::Unix,
                (_, Transport::Tcp) => preflight::Transport::Tcp,
                (_, Transport::Udp) => preflight::Transport::Udp,
            },
            closer: match self.close {
                Close::Client => Closer::Client,
                Close::Reset => Closer::Reset,
                Close::Server => Closer::Server,
            },
            rate_per_s: self.arrival.rate_per_s(),
            connections: u64::from(self.connections),
            pause: self.pause,
            // Held connections only: no other connection is opened.
            operations: if self.connections == 0 { Some(0) } else { self.operations },
            length: self.length,
            requests_per_connection: if sends_nothing { 1 } else { self.close_every },
            hold: u64::from(self.hold),
            threads: self.threads as u64,
            engine_needs_descriptors: self.engine == crate::EngineChoice::Epoll,
            may_keep_alive: matches!(self.workload, Workload::Http(_)),
        }
    }

    /// Returns the settings for the record. `sources` is the text as typed.
    pub fn settings(&self, endpoints: &[Endpoint], sources: Option<&str>, anyway: bool) -> LoadSettings {
        let sends_nothing = self.workload.sends_nothing();
        let (request_bytes, response_bytes) = self.workload.sizes();
        let method = match &self.workload {
            Workload::Http(request) => request.method.clone(),
            _ => String::new(),
        };
        LoadSettings {
            target: self.target.to_string(),
            address: endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            resolve: self.resolve.as_ref().map(ToString::to_string),
            all_addresses: self.all_addresses,
            workload: if self.hold > 0 && sends_nothing { Workload::HOLD } else { self.workload.name() }
                .to_owned(),
            arrival: self.arrival.name().to_owned(),
            rate_per_s: self.arrival.rate_per_s(),
            connections: u64::from(self.connections),
            pause_ns: nanoseconds(self.pause),
            close_every: self.close_every,
            hold: u64::from(self.hold),
            operations: self.operations,
            for_ns: self.length.map(nanoseconds),
            timeout_ns: nanoseconds(self.timeout),
            threshold_ns: self.threshold.map(nanoseconds),
            engine: self.engine.name().to_owned(),
            threads: self.threads as u64,
            pinned: self.pinned,
            strategy: self.strategy.to_string(),
            sources: sources.map(str::to_owned),
            close: self.close.name().to_owned(),
            request_bytes: request_bytes as u64,
            response_bytes: response_bytes as u64,
            method,
            separate_ack: self.separate_ack,
            anyway,
            seed: self.seed,
        }
    }
}

impl Outcome {
    /// Returns the results and the remarks of the hindsight. `time_wait`: the number of TIME_WAIT sockets to the destination now.
    pub fn results(
        self,
        load: &Load,
        need: &Need,
        preflight: &Preflight,
        time_wait: Option<u64>,
    ) -> (LoadResults, Vec<Remark>) {
        let tally = &self.tally;
        let details = tally.details.iter().map(|(name, text)| (name.to_string(), text.clone())).collect();
        let statuses: Vec<LoadStatus> = tally.statuses.values().cloned().collect();
        let errors = tally.errors.iter().map(|(name, count)| (name.to_string(), *count)).collect();
        let no_port = tally.stall.first.map(|first| NoPort {
            first: Duration::from_nanos(first),
            last: Duration::from_nanos(tally.stall.last),
            total: Duration::from_nanos(tally.stall.length),
        });
        let mut seconds = self.seconds;
        let budget = preflight.budget;
        if let Some(budget) = budget {
            count_ports(&mut seconds, budget.saturating_sub(preflight.taken), preflight.kept);
        }
        // No other connection is opened while the held connections are opened.
        let span = self.elapsed.saturating_sub(Duration::from_nanos(tally.ramp.unwrap_or(0)));
        let mut need = *need;
        need.threads = self.threads as u64;
        let seen = RunMeasurements {
            preflight,
            need: &need,
            predicted_stall: self.predicted_stall,
            no_port,
            tuples_used: tally.connections,
            time_wait,
            errors: &errors,
            details: &details,
            statuses: &statuses,
            operations: tally.operations,
            seconds: &seconds,
            in_flight: &self.in_flight,
            refusals: &self.refusals,
            offered: load.arrival.rate_per_s().map(|_| Offered {
                intended: tally.offered,
                done: tally.operations,
                span,
                behind: Duration::from_nanos(tally.behind),
            }),
            elapsed: self.elapsed,
            client_cpu: Duration::from_nanos(tally.cpu_ns),
            all_busy: Duration::from_nanos(tally.all_busy),
        };
        let mut judged = hindsight(&seen);
        if tally.retried > 0 {
            judged.advice.push(format!(
                "The server closed kept connections: {} sent again on new ones.",
                requests(tally.retried)
            ));
        }
        let mut remarks = judged.remarks;
        if self.refused {
            let text = format!(
                "nothing listens there: all {} of the first {} were refused, and the run ended",
                counted(tally.errors.values().sum(), "attempt"),
                format_time(self.elapsed)
            );
            remarks.insert(0, Remark::new("all-refused", text));
        }
        if self.interrupted {
            remarks.insert(
                0,
                Remark::new("interrupted", "ended from outside: what was measured until then is shown"),
            );
        }
        let rate = tally.operations as f64 / span.as_secs_f64().max(1e-9);
        let per = |whole: f64, parts: u64| if parts == 0 { 0.0 } else { whole / parts as f64 };
        let results = LoadResults {
            operations: tally.operations,
            connections: tally.connections,
            retried: tally.retried,
            elapsed_ns: nanoseconds(self.elapsed),
            rate_per_s: rate,
            offered_per_s: load.arrival.rate_per_s().unwrap_or(rate),
            client_cpu_ns_per_operation: per(tally.cpu_ns as f64, tally.operations) as u64,
            syscalls_per_connection: per(tally.syscalls as f64, tally.connections),
            engine: self.engine.to_owned(),
            engine_reason: self.engine_reason,
            close: load.close.name().to_owned(),
            strategy: self.strategy,
            latency_ns: Latency {
                search: quantiles(&tally.search),
                handshake: quantiles(&tally.handshake),
                first_byte: quantiles(&tally.first_byte),
                total: quantiles(&tally.total),
            },
            late_ns: quantiles(&tally.late),
            slow_count: tally.slow_count,
            distribution: points(&tally.total),
            ports: budget.map(|budget| LoadPorts {
                budget,
                taken_before: preflight.taken,
                needed: preflight.needed,
                used: tally.connections,
                kept_ns: nanoseconds(preflight.kept),
                predicted_stall_ns: self.predicted_stall.map(nanoseconds),
                stalled_ns: tally.stall.first,
                stall_length_ns: tally.stall.length,
            }),
            hold: (load.hold > 0).then_some(Held {
                opened: tally.held,
                lost: tally.held_lost,
                ramp_ns: tally.ramp.unwrap_or(0),
            }),
            advice: judged.advice,
            hosts: Vec::new(),
            addresses: self.addresses,
            slow: self.tally.slow,
            errors,
            error_details: details,
            statuses,
            seconds,
        };
        (results, remarks)
    }
}

/// Sets the number of free 4-tuples at the end of each second: all but the ones used by connections opened within the time that a
/// tuple is kept.
fn count_ports(seconds: &mut [Second], free: u64, kept: Duration) {
    let kept = kept.as_secs() as usize;
    let mut taken = 0;
    for index in 0..seconds.len() {
        if kept > 0 {
            taken += seconds[index].connections;
            if let Some(back) = index.checked_sub(kept) {
                taken -= seconds[back].connections;
            }
        }
        seconds[index].ports_left = Some(free.saturating_sub(taken));
    }
}

fn requests(count: u64) -> String {
    format!("{} {}", counted(count, "request"), if count == 1 { "was" } else { "were" })
}

fn quantiles(histogram: &Histogram) -> Quantiles {
    let short = histogram.summary();
    Quantiles {
        samples: short.count,
        mean: short.mean,
        p50: short.p50,
        p99: short.p99,
        p999: short.p999,
        max: short.max,
    }
}

fn points(histogram: &Histogram) -> Vec<Quantile> {
    histogram.distribution().into_iter().map(|(share, ns)| Quantile { share, ns }).collect()
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos().min(u128::from(u64::MAX)) as u64
}
