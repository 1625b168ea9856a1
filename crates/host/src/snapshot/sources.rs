//! Ports in use of each source address, over all destinations.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::SocketAddr;

use fourtuple_record::snapshot::{Owner, Source};

use crate::snapshot::fast::Fast;
use crate::snapshot::port_set::Ports;
use crate::snapshot::processes::Sockets;
use crate::snapshot::sums::{Key, Table};

/// Maximum number of source addresses whose ports are counted. Only transparent proxies have more, the addresses of their clients.
const COUNTED: usize = 256;

#[derive(Debug, Default)]
struct OfSource {
    ports: Ports,
    destinations: u64,
    owners: HashMap<u32, u32, Fast>,
}

/// Ports by source address.
#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<Key, OfSource, Fast>);

impl Sources {
    /// Adds a connection on a port of the range.
    pub(super) fn add(&mut self, local: SocketAddr) {
        let key = Key::of_source(local.ip());
        if self.0.len() < COUNTED {
            self.0.entry(key).or_default().ports.insert(local.port());
        } else if let Some(source) = self.0.get_mut(&key) {
            source.ports.insert(local.port());
        }
    }

    /// Returns the sources with the most ports in use, with the destinations and the largest process of each of their tuples. `low`
    /// is the first port of the range.
    pub(super) fn listed(mut self, low: u16, tuples: &Table, sockets: &Sockets) -> Vec<Source> {
        for (key, sums) in &tuples.sums {
            let Some(source) = self.0.get_mut(&Key::of_source(key.source())) else { continue };
            let (pid, number) = sums.owner();
            source.destinations += 1;
            if pid != 0 {
                *source.owners.entry(pid).or_default() += number;
            }
        }
        let source = |(key, of_source): (Key, OfSource)| {
            let mut owners: Vec<Owner> =
                of_source.owners.iter().filter_map(|(pid, number)| sockets.owner(*pid, *number)).collect();
            owners.sort_by_key(|owner| (Reverse(owner.sockets), owner.pid));
            owners.truncate(crate::snapshot::reading::LISTED);
            let (in_use, low_parity) = of_source.ports.count(low);
            Source { address: key.source(), in_use, low_parity, destinations: of_source.destinations, owners }
        };
        let mut sources: Vec<Source> = self.0.into_iter().map(source).collect();
        sources.sort_by_key(|source| (Reverse(source.in_use), source.address));
        sources.truncate(crate::snapshot::reading::LISTED);
        sources
    }
}
