use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
