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
mod family;
mod live;
mod respond;

pub use endpoint::{Endpoint, EndpointError, Limits};
pub use family::{Durations, Kind, Number, Sample, text, write_durations, write_family};
pub use live::{Page, Publisher};
pub use prometheus_client::collector::Collector;
pub use prometheus_client::encoding::DescriptorEncoder;
pub use prometheus_client::registry::Registry;
