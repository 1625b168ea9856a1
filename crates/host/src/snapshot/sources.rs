//! Ports in use of each source address, over all destinations.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use fourtuple_record::snapshot::{Owner, Source};

use super::LISTED;
use super::processes::Sockets;

#[derive(Debug, Default)]
struct Sums {
    ports: HashSet<u16>,
    destinations: u64,
    owners: BTreeMap<u32, u32>,
}

/// Sums of tuples by source address.
#[derive(Debug, Default)]
pub(super) struct Sources(HashMap<IpAddr, Sums>);

impl Sources {
    /// Adds a tuple: its ports, and its sockets by process.
    pub(super) fn add(&mut self, source: IpAddr, ports: &HashSet<u16>, owners: &BTreeMap<u32, u32>) {
        let sums = self.0.entry(source).or_default();
        sums.ports.extend(ports);
        sums.destinations += 1;
        for (pid, number) in owners {
            *sums.owners.entry(*pid).or_default() += number;
        }
    }

    /// Returns the sources with the most ports in use. `low` is the first port of the range.
    pub(super) fn listed(self, low: u16, sockets: &Sockets) -> Vec<Source> {
        let mut sources: Vec<(IpAddr, Sums)> = self.0.into_iter().collect();
        sources.sort_by_key(|(address, sums)| (Reverse(sums.ports.len()), *address));
        sources.truncate(LISTED);
        let source = |(address, sums): (IpAddr, Sums)| {
            let mut owners: Vec<Owner> =
                sums.owners.iter().map(|(pid, number)| sockets.owner(*pid, *number)).collect();
            owners.sort_by_key(|owner| Reverse(owner.sockets));
            owners.truncate(LISTED);
            Source {
                address,
                in_use: sums.ports.len() as u32,
                low_parity: sums.ports.iter().filter(|port| **port & 1 == low & 1).count() as u32,
                destinations: sums.destinations,
                owners,
            }
        };
        sources.into_iter().map(source).collect()
    }
}
