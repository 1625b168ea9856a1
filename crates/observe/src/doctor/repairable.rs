//! Faults that a fix from outside mends, as values: the conditions of P01, B01 and B03.

use std::net::SocketAddr;

use fourtuple_record::snapshot::{Listener, Snapshot, Tuple};

use crate::doctor::accepting::{groups, is_left_behind, lags, stopped};
use crate::doctor::balance::{Skew, skews};
use crate::doctor::budget::Budget;

/// A source and a destination that use a share of the ports.
#[derive(Clone, Copy, Debug)]
pub struct Shortage<'a> {
    pub tuple: &'a Tuple,
    pub budget: Budget,
}

/// Returns the sources and destinations for which connect() cannot take this share of the ports, 0 to 1.
///
/// # Errors
///
/// The ports or the connections were not read.
pub fn shortages(snapshot: &Snapshot, share: f64) -> Result<Vec<Shortage<'_>>, String> {
    let mut found = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if budget.is_past(share * 100.0) {
            found.push(Shortage { tuple, budget });
        }
    }
    Ok(found)
}

/// A SO_REUSEPORT group whose connections go where they should not.
#[derive(Clone, Debug)]
pub struct Imbalance<'a> {
    pub address: SocketAddr,
    /// A member of the group: the one that is stuck, or the first one.
    pub member: &'a Listener,
    pub kind: ImbalanceKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ImbalanceKind {
    /// The member does not accept.
    Stuck,
    /// One worker has most of the connections: Jain's index.
    Skewed(f64),
}

/// Returns the groups with a member that is stuck with `queue` connections or more, and those whose connections are on few workers, with
/// a Jain's index below `jain` and a busy worker.
///
/// # Errors
///
/// The listeners or the connections were not read, or no process is visible.
pub fn imbalances(snapshot: &Snapshot, queue: f64, jain: f64) -> Result<Vec<Imbalance<'_>>, String> {
    let listeners = snapshot.listeners.seen()?;
    let mut found: Vec<Imbalance<'_>> = stuck(snapshot, listeners, queue)
        .into_iter()
        .map(|(member, _)| Imbalance { address: member.address, member, kind: ImbalanceKind::Stuck })
        .collect();
    let skews: Vec<Skew> = skews(snapshot, jain)?;
    for group in groups(listeners) {
        let address = group[0].address;
        let skew = skews.iter().find(|skew| !skew.is_ladder && skew.port == Some(address.port()));
        if let Some(skew) = skew.filter(|_| found.iter().all(|known| known.address != address)) {
            found.push(Imbalance { address, member: group[0], kind: ImbalanceKind::Skewed(skew.jain) });
        }
    }
    Ok(found)
}

/// Returns the members of SO_REUSEPORT groups that do not accept, each with its group: B03. B04 has the listeners of an old generation.
pub(crate) fn stuck<'a>(
    snapshot: &Snapshot,
    listeners: &'a [Listener],
    limit: f64,
) -> Vec<(&'a Listener, Vec<&'a Listener>)> {
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").is_ok_and(|value| value != 0);
    let mut found = Vec::new();
    for group in groups(listeners) {
        for member in &group {
            let is_stuck = f64::from(member.waiting) >= limit || stopped(snapshot, &member.owners).is_some();
            let is_old = !migrates && is_left_behind(snapshot, member, &group);
            if is_stuck && lags(member, &group) && !is_old {
                found.push((*member, group.clone()));
            }
        }
    }
    found
}
