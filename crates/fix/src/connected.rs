//! The destinations of the connections that exist.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;

use fourtuple_bpf::fix_ports::NamespacePorts;

const DESTINATIONS: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Connected(HashMap<IpAddr, u64>);

impl Connected {
    /// Counts a connection if its local port is in the range: then this host may have opened it.
    pub(crate) fn add(&mut self, local_port: u16, destination: IpAddr, ports: &NamespacePorts) {
        if (ports.low..=ports.high).contains(&local_port) && !destination.is_unspecified() {
            *self.0.entry(destination).or_default() += 1;
        }
    }

    /// Returns the destinations, the most frequent first.
    pub(crate) fn destinations(self) -> Vec<IpAddr> {
        let mut found: Vec<(IpAddr, u64)> = self.0.into_iter().collect();
        found.sort_by_key(|(address, count)| (Reverse(*count), *address));
        found.into_iter().map(|(address, _)| address).take(DESTINATIONS).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_from_the_range_have_destinations() {
        let ports = NamespacePorts {
            low: 20_000,
            high: 20_099,
            reserved: Vec::new(),
            time_wait_reuse: 0,
            has_sources: false,
        };
        let mut connected = Connected::default();
        for (local_port, destination) in [
            (20_000, "127.0.0.2"),
            (20_001, "127.0.0.3"),
            (20_002, "127.0.0.3"),
            (4_000, "127.0.0.4"),
            (20_003, "::1"),
            (20_099, "0.0.0.0"),
            (20_100, "127.0.0.5"),
        ] {
            connected.add(local_port, destination.parse().unwrap(), &ports);
        }
        let found: Vec<String> = connected.destinations().iter().map(IpAddr::to_string).collect();
        assert_eq!(found, ["127.0.0.3", "127.0.0.2", "::1"]);
    }
}
