use serde::{Deserialize, Serialize};

/// The ports that connect() may choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "DoctorEphemeralPorts"))]
pub struct EphemeralPorts {
    /// First port of net.ipv4.ip_local_port_range.
    pub low: u16,
    /// Last port of net.ipv4.ip_local_port_range.
    pub high: u16,
    /// First and last ports of net.ipv4.ip_local_reserved_ports.
    pub reserved: Vec<(u16, u16)>,
}

impl EphemeralPorts {
    /// Parses net.ipv4.ip_local_port_range and net.ipv4.ip_local_reserved_ports. `None` if the text is not a range; a missing list
    /// reserves nothing.
    pub fn parse(range: &str, reserved: &str) -> Option<EphemeralPorts> {
        let mut bounds = range.split_whitespace().map(|bound| bound.parse().ok());
        let (low, high) = (bounds.next()??, bounds.next()??);
        let reserved = reserved.trim().split(',').filter_map(span).collect();
        (low <= high && low > 0).then_some(EphemeralPorts { low, high, reserved })
    }

    /// Returns whether connect() may choose this port.
    pub fn contains(&self, port: u16) -> bool {
        (self.low..=self.high).contains(&port)
            && !self.reserved.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Returns the number of ports that connect() may choose.
    pub fn usable(&self) -> u32 {
        let reserved = merged(self.reserved.clone()).into_iter().map(|(first, last)| {
            let (first, last) = (first.max(self.low), last.min(self.high));
            (u32::from(last) + 1).saturating_sub(first.into())
        });
        self.range() - reserved.sum::<u32>()
    }

    /// Returns the number of ports of the range, reserved ports included.
    pub fn range(&self) -> u32 {
        u32::from(self.high.saturating_sub(self.low)) + 1
    }
}

/// Parses `8080` or `9000-9100`.
fn span(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
}

/// Returns blocks of ports (first and last) in ascending order without overlap; adjacent blocks become one.
pub fn merged(mut blocks: Vec<(u16, u16)>) -> Vec<(u16, u16)> {
    blocks.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in blocks {
        match merged.last_mut() {
            Some(previous) if u32::from(first) <= u32::from(previous.1) + 1 => {
                previous.1 = previous.1.max(last)
            }
            _ => merged.push((first, last)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_are_not_usable() {
        let ports = EphemeralPorts::parse("20000\t20099\n", "8080,20010-20019,20050\n").unwrap();
        assert_eq!(ports.reserved, [(8_080, 8_080), (20_010, 20_019), (20_050, 20_050)]);
        assert_eq!((ports.range(), ports.usable()), (100, 89));
        assert!(ports.contains(20_009) && !ports.contains(20_010) && !ports.contains(8_080));
        let ports = EphemeralPorts::parse("32768\t60999\n", "8080,40000-40009,60999\n").unwrap();
        assert_eq!(ports.usable(), 28_232 - 11);
        assert!(ports.contains(32_768) && !ports.contains(40_003) && !ports.contains(60_999));
        assert!(EphemeralPorts::parse("1024 65535", "\n").unwrap().contains(65_535));
        for range in ["", "1024", "2 1", "0 9"] {
            assert!(EphemeralPorts::parse(range, "").is_none(), "{range:?}");
        }
    }

    #[test]
    fn reserved_blocks_may_overlap_and_exceed_the_range() {
        let list = "19990-20004,20003-20010,20005,20090-20200,1-5,65535";
        let ports = EphemeralPorts::parse("20000 20099", list).unwrap();
        let counted = (20_000..=20_099).filter(|port| ports.contains(*port)).count();
        assert_eq!((ports.usable(), counted), (79, 79));
        assert_eq!(
            merged(vec![(7, 9), (1, 3), (4, 4), (65_535, 65_535)]),
            [(1, 4), (7, 9), (65_535, 65_535)]
        );
    }
}
