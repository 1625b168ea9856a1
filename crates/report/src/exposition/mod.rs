//! Metrics for Prometheus: OpenMetrics text, and the HTTP endpoint that serves it.
//!
//! An [`Endpoint`] has one thread. It serves many clients at once and limits their cost: the number of connections, the time of
//! each, and the size of a request. Metrics come from a [`Registry`]; a program that keeps its counters elsewhere registers a
//! [`Collector`], which writes them with [`write_family`] at each scrape.
//!
//! ```
//! use fourtuple_report::exposition::{Endpoint, Kind, Limits, Registry, Sample, write_family};
//!
//! #[derive(Debug)]
//! struct Sockets;
//!
//! impl fourtuple_report::exposition::Collector for Sockets {
//!     fn encode(&self, mut encoder: fourtuple_report::exposition::DescriptorEncoder<'_>) -> std::fmt::Result {
//!         let samples = [Sample::new([("state", "listen")], 3)];
//!         write_family(&mut encoder, Kind::Gauge, "sockets", "Sockets by state", samples)
//!     }
//! }
//!
//! let mut registry = Registry::with_prefix("host");
//! registry.register_collector(Box::new(Sockets));
//! let endpoint = Endpoint::start("127.0.0.1:0".parse()?, Limits::default(), registry)?;
//! println!("metrics at http://{}/metrics", endpoint.address());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod endpoint;
mod respond;

use std::fmt;

use prometheus_client::encoding::NoLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;

pub use endpoint::{Endpoint, EndpointError, Limits};
pub use prometheus_client::collector::Collector;
pub use prometheus_client::encoding::DescriptorEncoder;
pub use prometheus_client::registry::Registry;
pub use respond::{Page, Publisher};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that never decreases while the process runs; its samples get the suffix `_total`.
    Counter,
    /// A number that can rise and fall.
    Gauge,
}

/// The value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An integer, written without a decimal point.
    Integer(u64),
    /// A floating-point number, written with a decimal point.
    Float(f64),
}

impl From<u64> for Number {
    fn from(value: u64) -> Number {
        Number::Integer(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Number {
        Number::Float(value)
    }
}

/// A value and its labels.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    labels: Vec<(String, String)>,
    value: Number,
}

impl Sample {
    /// Returns a sample with labels, each a pair of name and value.
    pub fn new<N: Into<String>, V: Into<String>>(
        labels: impl IntoIterator<Item = (N, V)>,
        value: impl Into<Number>,
    ) -> Sample {
        let labels = labels.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Sample { labels, value: value.into() }
    }
}

/// Writes a metric with its description and all its samples. `name` excludes the registry's prefix and, for a counter, the
/// suffix `_total`.
///
/// # Errors
///
/// The errors of the encoder; the text encoder has none.
pub fn write_family(
    encoder: &mut DescriptorEncoder<'_>,
    kind: Kind,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = Sample>,
) -> fmt::Result {
    let metric_type = match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
    };
    let mut metric = encoder.encode_descriptor(name, help, None, metric_type)?;
    for Sample { labels, value } in samples {
        let mut sample = metric.encode_family(&labels)?;
        match (kind, value) {
            (Kind::Counter, Number::Integer(value)) => {
                sample.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
            }
            (Kind::Counter, Number::Float(value)) => {
                sample.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
            }
            (Kind::Gauge, Number::Integer(value)) => sample.encode_gauge(&value)?,
            (Kind::Gauge, Number::Float(value)) => sample.encode_gauge(&value)?,
        }
    }
    Ok(())
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// Lower bound of a step in nanoseconds and number of durations, ascending. A step belongs to the bucket that contains its
    /// lower bound.
    pub steps: Vec<(u64, u64)>,
    /// Number of durations.
    pub count: u64,
    /// Sum of the durations in nanoseconds.
    pub sum_ns: u64,
}

/// Upper bounds of the buckets of a histogram of durations, in seconds: 1, 2 and 5 of each decade from 10 us to 1 s.
const BUCKETS: [f64; 16] =
    [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0];

/// Writes a histogram of durations in seconds, without labels.
///
/// # Errors
///
/// The errors of the encoder; the text encoder has none.
pub fn write_durations(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    durations: &Durations,
) -> fmt::Result {
    let mut buckets: Vec<(f64, u64)> = BUCKETS.iter().map(|bound| (*bound, 0)).collect();
    // The encoder writes this bound as +Inf.
    buckets.push((f64::INFINITY, 0));
    for (from_ns, number) in &durations.steps {
        let from = *from_ns as f64 / 1e9;
        let bucket = buckets.iter_mut().find(|(bound, _)| from < *bound);
        bucket.into_iter().for_each(|(_, sum)| *sum += number);
    }
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    metric.encode_histogram::<NoLabelSet>(durations.sum_ns as f64 / 1e9, durations.count, &buckets, None)
}

/// Returns the metrics of a registry as OpenMetrics text, as a scrape returns them.
///
/// # Errors
///
/// The errors of the collectors of the registry.
pub fn text(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    encode(&mut text, registry)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use prometheus_client::collector::Collector;

    use super::*;

    #[derive(Debug)]
    struct Planes;

    impl Collector for Planes {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let plane = |number: u64, value: Number| Sample::new([("plane", number.to_string())], value);
            let packets = [plane(0, 3.into()), plane(1, 4.into())];
            write_family(&mut encoder, Kind::Counter, "packets", "Packets received", packets)?;
            let seconds = [plane(0, 0.5.into())];
            write_family(&mut encoder, Kind::Counter, "cpu_seconds", "Processor time", seconds)?;
            let quoted = [Sample::new([("peer", "a\"b\\c\n")], 1)];
            write_family(&mut encoder, Kind::Gauge, "up", "Whether it is up", quoted)?;
            write_family(&mut encoder, Kind::Gauge, "clients", "Clients", [])
        }
    }

    #[derive(Debug)]
    struct Searches;

    impl Collector for Searches {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let steps = vec![(8_000, 3), (10_000, 2), (2_000_000_000, 1)];
            let durations = Durations { steps, count: 6, sum_ns: 3_500_000_000 };
            write_durations(&mut encoder, "search_seconds", "Searches", &durations)
        }
    }

    #[test]
    fn buckets_of_a_histogram_are_cumulative() {
        let mut registry = Registry::with_prefix("x");
        registry.register_collector(Box::new(Searches));
        let text = text(&registry).unwrap();
        for line in [
            "x_search_seconds_sum 3.5\n",
            "x_search_seconds_count 6\n",
            "_bucket{le=\"0.00001\"} 3\n",
            "_bucket{le=\"0.00002\"} 5\n",
            "_bucket{le=\"1.0\"} 5\n",
            "_bucket{le=\"+Inf\"} 6\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }

    #[test]
    fn samples_are_written_as_openmetrics() {
        let mut registry = Registry::with_prefix("x");
        registry.register_collector(Box::new(Planes));
        assert_eq!(
            text(&registry).unwrap(),
            "# HELP x_packets Packets received\n# TYPE x_packets counter\nx_packets_total{plane=\"0\"} 3\n\
             x_packets_total{plane=\"1\"} 4\n# HELP x_cpu_seconds Processor time\n# TYPE x_cpu_seconds counter\n\
             x_cpu_seconds_total{plane=\"0\"} 0.5\n# HELP x_up Whether it is up\n# TYPE x_up gauge\n\
             x_up{peer=\"a\\\"b\\\\c\\n\"} 1\n# HELP x_clients Clients\n# TYPE x_clients gauge\n# EOF\n"
        );
    }
}
