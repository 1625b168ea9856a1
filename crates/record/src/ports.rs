use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{CommandLine, Record};

/// The record of `fourtuple lab ports`.
pub type PortsRecord = Record<PortsSettings, PortsResults>;

/// The settings of `lab ports`, defaults included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortsSettings {
    /// First port of net.ipv4.ip_local_port_range in the experiment's namespace.
    pub low: u16,
    /// Last port of the range, inclusive.
    pub high: u16,
    /// Names of the strategies, in the order given.
    pub strategies: Vec<String>,
    /// Whether each random window gets one attempt without a fallback, as in Cloudflare, "connect() - why are you so
    /// slow?".
    pub windows: bool,
    /// Share of the tuples to fill, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub fill: f64,
    /// `tcp` or `udp`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tcp", "udp"])))]
    pub protocol: String,
    /// IP version: 4 or 6.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = [4, 6])))]
    pub family: u8,
    /// Number of source addresses.
    pub sources: u32,
    /// Number of runs of every strategy; runs are interleaved.
    pub repeats: u32,
    /// Seed of fourtuple's own random choices.
    pub seed: u64,
}

impl Default for PortsSettings {
    /// Returns the defaults of the command, without strategies: they depend on the kernel.
    fn default() -> PortsSettings {
        PortsSettings {
            // Small enough for the kernel's own search to fill it within seconds.
            low: 32_768,
            high: 49_151,
            strategies: Vec::new(),
            windows: false,
            fill: 1.0,
            protocol: "tcp".to_owned(),
            family: 4,
            sources: 1,
            repeats: 1,
            seed: 0,
        }
    }
}

impl PortsSettings {
    /// Returns the command that runs the experiment again.
    pub fn command_line(&self) -> String {
        let PortsSettings { low, high, strategies, windows, fill, protocol, family, sources, repeats, seed } =
            self;
        CommandLine::new("lab ports")
            .words(format_args!("--range {low}-{high} --strategy {}", strategies.join(",")))
            .flag("--windows", *windows)
            .words(format_args!("--fill {fill} --protocol {protocol} --family {family}"))
            .words(format_args!("--sources {sources} --repeats {repeats} --seed {seed}"))
            .finish()
    }

    /// Returns the number of 4-tuples towards the one destination.
    pub fn tuples(&self) -> u64 {
        (u64::from(self.high) + 1).saturating_sub(self.low.into()) * u64::from(self.sources)
    }

    /// Returns the number of dials of one fill.
    pub fn dials(&self) -> u64 {
        ((self.tuples() as f64 * self.fill).round() as u64).max(1)
    }
}

/// The results of `lab ports`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortsResults {
    /// Number of tuples: ports of the range x sources.
    pub tuples: u64,
    /// One entry per strategy and repeat, in the order of the runs.
    pub strategies: Vec<StrategyResult>,
    /// Advice: the kernel's behaviour and the settings to use, one sentence per entry.
    pub advice: Vec<String>,
}

/// The results of one run, in which one strategy fills the range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Strategy"))]
pub struct StrategyResult {
    /// Strategy: `kernel-default`, `select-test-repeat`, `random-window:500`, `full-range`, `auto`.
    pub strategy: String,
    /// Strategy that `auto` chose on this kernel; absent for other strategies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// Number of the run, from 1.
    pub repeat: u32,
    /// Dials started.
    pub dials: u64,
    /// Connections open at the end.
    pub connections: u64,
    /// connect() and bind() calls after the first call of each dial.
    pub retries: u64,
    /// Dials that failed, by name of the errno of the last call.
    pub errors: BTreeMap<String, u64>,
    /// Wall time of all dials, without the interleaved floor dials.
    pub elapsed_ns: u64,
    /// Connections per second of `elapsed_ns`.
    pub rate_per_s: f64,
    /// CPU time of the dialing thread per dial, including time in the kernel.
    pub cpu_ns_per_dial: u64,
    /// Time in connect() per successful dial; for strategies that bind a port, in bind() and connect().
    pub connect_ns: ByParity,
    /// Mean time in connect() for each sixteenth of the fill.
    pub by_fill: Vec<FillPoint>,
    /// Floor: mean time of the same calls to a destination with an empty table, dialed in between.
    pub floor_ns: u64,
    /// One dot per dial for the scatter plot; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scatter: Option<Scatter>,
}

impl StrategyResult {
    /// Returns the number of dials that failed.
    pub fn failed(&self) -> u64 {
        self.errors.values().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

/// One distribution over all ports, one over even and one over odd ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ByParity {
    /// All ports; absent: nothing was measured.
    pub all: Option<Distribution>,
    /// Even ports.
    pub even: Option<Distribution>,
    /// Odd ports.
    pub odd: Option<Distribution>,
}

/// A distribution of durations, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Distribution {
    /// Number of samples.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
}

/// One step of the fill: the connections made while the fill rose from the previous step's `fill` to this one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FillPoint {
    /// Share of the tuples in use at the end of this step, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub fill: f64,
    /// Connections made in this step.
    pub connections: u64,
    /// Mean time in connect() of this step; 0 without connections.
    pub mean_ns: u64,
    /// Mean time of the floor dials in this step; 0 without floor dials.
    pub floor_ns: u64,
}

/// A dial of a scatter plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dot {
    /// Time in connect(), in nanoseconds, rounded down to a multiple of 2 and capped at 2.1 s.
    pub ns: u32,
    /// Whether the source port was odd. Meaningless for a failed dial.
    pub odd: bool,
    /// Whether the dial failed; its time is then the time of the failing calls.
    pub failed: bool,
}

/// The dials of a run in order, four bytes each.
///
/// In JSON it is one base64 string (RFC 4648, padded) of little-endian 32-bit words: bits 1 to 30 are the time in
/// units of 2 ns, bit 0 is the parity of the port, bit 31 is set when the dial failed. A list of numbers would take
/// three times the space, and a page holds 56,512 dials per strategy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scatter {
    words: Vec<u32>,
}

const ODD: u32 = 1;
const FAILED: u32 = 1 << 31;

impl Scatter {
    /// Returns an empty list with capacity for `dials` dials.
    pub fn with_capacity(dials: usize) -> Self {
        Scatter { words: Vec::with_capacity(dials) }
    }

    /// Appends a dial.
    pub fn push(&mut self, ns: u64, odd: bool, failed: bool) {
        let time = u32::try_from(ns).unwrap_or(u32::MAX).min(FAILED - 2) & !ODD;
        self.words.push(time | if odd { ODD } else { 0 } | if failed { FAILED } else { 0 });
    }

    /// Returns all dials in order.
    pub fn dots(&self) -> impl ExactSizeIterator<Item = Dot> + '_ {
        self.words.iter().map(|&word| Dot {
            ns: word & !FAILED & !ODD,
            odd: word & ODD != 0,
            failed: word & FAILED != 0,
        })
    }

    /// Returns the JSON form, which the script of the page decodes.
    pub fn to_base64(&self) -> String {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        STANDARD.encode(&bytes)
    }
}

impl Serialize for Scatter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_base64())
    }
}

impl<'de> Deserialize<'de> for Scatter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(&text).map_err(serde::de::Error::custom)?;
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(serde::de::Error::custom("scatter is not a whole number of 32-bit words"));
        }
        Ok(Scatter { words: words.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect() })
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Scatter {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Scatter".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "contentEncoding": "base64",
            "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)?$",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_json_to_two_nanoseconds() {
        let mut scatter = Scatter::default();
        scatter.push(15_001, true, false);
        scatter.push(4_682_000, false, true);
        scatter.push(u64::MAX, true, false);
        let json = serde_json::to_string(&scatter).unwrap();
        let back: Scatter = serde_json::from_str(&json).unwrap();
        let dots: Vec<Dot> = back.dots().collect();
        assert_eq!(dots[0], Dot { ns: 15_000, odd: true, failed: false });
        assert_eq!(dots[1], Dot { ns: 4_682_000, odd: false, failed: true });
        assert_eq!(dots[2], Dot { ns: 0x7fff_fffe, odd: true, failed: false });
    }

    #[test]
    fn invalid_scatter_data_is_refused() {
        for text in ["\"***\"", "\"AAA=\"", "7"] {
            assert!(serde_json::from_str::<Scatter>(text).is_err(), "{text}");
        }
    }
}
