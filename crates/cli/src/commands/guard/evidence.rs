//! What the readings say about the programs of a policy.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fourtuple_fix::guard::{Scope, directory_of, own_cgroup, user_who_chose};
use fourtuple_observe::doctor::{ImbalanceKind, Shortage, imbalances, shortages};
use fourtuple_record::GuardAction;
use fourtuple_record::measure::words::grouped as count;
use fourtuple_record::snapshot::{Owner, Tuple};

use super::policy::{AcceptPolicy, PortsPolicy};
use super::watcher::Reading;

/// Time for which the programs that connected to a destination are remembered: TIME_WAIT sockets have no process.
const MEMORY: Duration = Duration::from_secs(600);
/// Maximum number of destinations that are remembered.
const MAX_REMEMBERED: usize = 10_000;
/// Share of the ports that is in use, by a destination and by the draws for other programs together, from which a program needs a fix too: the
/// kernel's search passes over ports that others have bound.
const CROWDED: f64 = 0.75;
/// Share of the ports that draws of guard may bind (SPARED of fix_ports.bpf.c).
const DRAWN: f64 = 0.75;
/// Share of the ports that a program has in use at a destination from which such a crowd concerns it.
const CONCERNED: f64 = 0.05;
/// Jain's index of the connections of the workers below which a group is out of balance, as the threshold of B01.
const JAIN: f64 = 0.7;

/// The programs of a cgroup, and the destinations of a filter of the policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PortsKey {
    /// Such as `/system.slice/nginx.service`.
    pub(super) cgroup: String,
    /// Index of the destination in the policy; `None`: all destinations.
    pub(super) destination: Option<usize>,
}

/// A SO_REUSEPORT group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AcceptKey {
    pub(super) namespace: u32,
    pub(super) address: SocketAddr,
}

#[derive(Clone, Debug, Default)]
pub(super) struct PortsNeed {
    /// Inode of the network namespace.
    pub(super) namespace: u32,
    /// Whether a fix should begin.
    pub(super) begins: bool,
    /// The fact in one line.
    pub(super) reason: String,
    /// Sockets that the programs of the cgroup hold at such destinations: of more needs than `max`, the largest come first.
    pub(super) sockets: u64,
}

#[derive(Clone, Debug)]
pub(super) struct AcceptNeed {
    /// A process that holds the listeners, for another namespace.
    pub(super) process: Option<u32>,
    /// Connections in the queue of the member that is stuck.
    pub(super) stuck: Option<u32>,
    pub(super) reason: String,
}

/// A fault that guard leaves alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Refusal {
    pub(super) action: GuardAction,
    pub(super) target: String,
    pub(super) why: String,
}

/// What a reading of all namespaces says.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    pub(super) ports: BTreeMap<PortsKey, PortsNeed>,
    pub(super) accept: BTreeMap<AcceptKey, AcceptNeed>,
    pub(super) refusals: BTreeSet<Refusal>,
}

impl Evidence {
    /// Returns whether a refusal is about a cgroup that has a fix.
    pub(super) fn is_fixed(&self, refusal: &Refusal, is_fixed: impl Fn(&PortsKey) -> bool) -> bool {
        self.ports.keys().any(|key| key.cgroup == refusal.target && is_fixed(key))
    }
}

/// The cgroups of processes; `None`: the process has ended.
type Cgroups = BTreeMap<u32, Option<String>>;

/// The programs that connected to a destination, each with the time of the last reading that saw it.
type Callers = BTreeMap<String, Duration>;

/// Reads evidence, and remembers who connected where.
#[derive(Debug, Default)]
pub(super) struct Judge {
    callers: BTreeMap<(u32, SocketAddr), Callers>,
    /// The fixes of this guard, each with the time of the last reading at which it ran: its draws stay bound as long as their connections.
    fixed: BTreeMap<(u32, PortsKey), Duration>,
    /// The cgroups of processes since the last new pass over the sockets. Repeated passes have the same processes.
    cgroups: Cgroups,
}

impl Judge {
    /// Notes the fixes that run, with the inodes of their network namespaces.
    pub(super) fn note_fixes(&mut self, now: Duration, fixes: impl IntoIterator<Item = (u32, PortsKey)>) {
        self.fixed.extend(fixes.into_iter().map(|fix| (fix, now)));
        self.fixed.retain(|_, seen| now.saturating_sub(*seen) < MEMORY);
    }

    /// `mount`: where the cgroups are.
    pub(super) fn evidence(
        &mut self,
        now: Duration,
        readings: &[Reading],
        ports: Option<&PortsPolicy>,
        accept: Option<&AcceptPolicy>,
        mount: &Path,
    ) -> Evidence {
        let mut evidence = Evidence::default();
        for reading in readings {
            if let Some(policy) = ports {
                self.ports(now, reading, policy, mount, &mut evidence);
            }
            if let Some(policy) = accept {
                groups(reading, policy, mount, &mut evidence);
            }
        }
        self.callers.retain(|_, callers| {
            callers.retain(|_, seen| now.saturating_sub(*seen) < MEMORY);
            !callers.is_empty()
        });
        evidence
    }

    fn ports(
        &mut self,
        now: Duration,
        reading: &Reading,
        policy: &PortsPolicy,
        mount: &Path,
        evidence: &mut Evidence,
    ) {
        // A part of the snapshot that was not read proves nothing.
        let tuples = shortages(&reading.snapshot, 0.0).unwrap_or_default();
        let tuples: Vec<Shortage<'_>> =
            tuples.into_iter().filter(|shortage| policy.includes(shortage.tuple.destination)).collect();
        let is_fresh = reading.snapshot.connections.seen().is_ok_and(|connections| connections.age_ns == 0);
        if is_fresh {
            self.cgroups.clear();
        }
        // A fix with more source addresses spreads the connections of a destination over them.
        let mut by_destination: BTreeMap<SocketAddr, u32> = BTreeMap::new();
        for shortage in &tuples {
            *by_destination.entry(shortage.tuple.destination).or_default() += shortage.budget.taken();
        }
        let own_share = |shortage: &Shortage<'_>| {
            f64::from(shortage.budget.taken()) / f64::from(shortage.budget.total.max(1))
        };
        // The tuples whose ports a fix draws, with the share that they leave free.
        let mut drawn: Vec<(usize, f64)> = Vec::new();
        let held: Vec<BTreeMap<String, u64>> =
            tuples.iter().map(|shortage| sockets(&shortage.tuple.owners, &mut self.cgroups)).collect();
        for (number, (shortage, held)) in tuples.iter().zip(&held).enumerate() {
            let destination = policy.index_of(shortage.tuple.destination);
            let mut keys = held
                .keys()
                .filter_map(|cgroup| policy.scope.find(cgroup))
                .map(|target| PortsKey { cgroup: target.to_owned(), destination });
            // A guard that was killed may have left draws of which this one does not know.
            let has_predecessor = now < MEMORY;
            if keys.any(|key| has_predecessor || self.fixed.contains_key(&(reading.namespace, key))) {
                drawn.push((number, (1.0 - own_share(shortage)).max(0.0)));
            }
        }
        // Draws are at random, so that the shares that they leave multiply.
        let bound_by_others = |than: usize| -> f64 {
            let others = drawn.iter().filter(|(number, _)| *number != than);
            (1.0 - others.map(|(_, left)| left).product::<f64>()).min(DRAWN)
        };
        for (number, (shortage, held)) in tuples.iter().zip(&held).enumerate() {
            let (tuple, budget) = (shortage.tuple, &shortage.budget);
            let share = |taken: u32| f64::from(taken) / f64::from(budget.total.max(1));
            let own = own_share(shortage);
            let bound = bound_by_others(number);
            let is_crowded = own >= CONCERNED && own + bound >= policy.past.max(CROWDED);
            let is_past = own >= policy.past || is_crowded;
            if !is_past && share(by_destination[&tuple.destination]) < policy.past / 2.0 {
                continue;
            }
            let mut fact = format!(
                "{tuple} uses {} of {} ports",
                count(budget.taken().into()),
                count(budget.total.into())
            );
            if is_crowded && bound > 0.0 {
                fact += &format!(", and fixes may have bound {:.0}% of the range", bound * 100.0);
            }
            let helps = budget.draws_pay() || policy.source.is_some();
            for cgroup in self.cgroups(now, (reading.namespace, is_fresh), tuple, held, mount) {
                let refuse = |target: &str, why: String| Refusal {
                    action: GuardAction::FixPorts,
                    target: target.to_owned(),
                    why,
                };
                let target = match included(&policy.scope, &cgroup, mount) {
                    Ok(Some(target)) => target,
                    Ok(None) => continue,
                    Err(why) if is_past => {
                        evidence.refusals.insert(refuse(&cgroup, format!("{fact}; {why}")));
                        continue;
                    }
                    Err(_) => continue,
                };
                if is_past && !helps {
                    let why =
                        "a draw would find none; `source` in the policy gives connects more source addresses";
                    evidence.refusals.insert(refuse(target, format!("{fact}: {why}")));
                }
                let key =
                    PortsKey { cgroup: target.to_owned(), destination: policy.index_of(tuple.destination) };
                let need = evidence.ports.entry(key).or_default();
                if need.reason.is_empty() || is_past && helps && !need.begins {
                    need.reason.clone_from(&fact);
                    need.namespace = reading.namespace;
                }
                need.begins |= is_past && helps;
                need.sockets += held.get(&cgroup).copied().unwrap_or(0);
            }
        }
    }

    /// Returns the cgroups of the programs that connect to the destination of a tuple.
    fn cgroups(
        &mut self,
        now: Duration,
        (namespace, is_fresh): (u32, bool),
        tuple: &Tuple,
        held: &BTreeMap<String, u64>,
        mount: &Path,
    ) -> Vec<String> {
        let key = (namespace, tuple.destination);
        if self.callers.len() >= MAX_REMEMBERED && !self.callers.contains_key(&key) {
            return held.keys().cloned().collect();
        }
        let callers = self.callers.entry(key).or_default();
        // A pass that is repeated has the processes of which the cgroups were read.
        if is_fresh || callers.is_empty() {
            callers.extend(held.keys().map(|cgroup| (cgroup.clone(), now)));
        }
        callers.retain(|cgroup, _| directory_of(mount, cgroup).exists());
        callers.keys().cloned().collect()
    }
}

fn groups(reading: &Reading, policy: &AcceptPolicy, mount: &Path, evidence: &mut Evidence) {
    for imbalance in imbalances(&reading.snapshot, policy.queue.into(), JAIN).unwrap_or_default() {
        let address = imbalance.address;
        if !policy.includes(address) {
            continue;
        }
        let member = imbalance.member;
        let fact = match imbalance.kind {
            ImbalanceKind::Stuck => format!(
                "a worker of {address} does not accept: {} in its queue",
                count(member.waiting.into())
            ),
            ImbalanceKind::Skewed(jain) => {
                format!("the connections at {address} are on few of its workers (Jain's index {jain:.2})")
            }
        };
        let mut is_included = false;
        for cgroup in cgroups(&member.owners) {
            let included = included(&policy.scope, &cgroup, mount);
            let included = included.and_then(|target| match target {
                Some(_) if member.mptcp => Err("no selector can choose a listener of MPTCP".to_owned()),
                target => Ok(target),
            });
            match included {
                Ok(target) => is_included |= target.is_some(),
                Err(why) => {
                    let why = format!("{fact}; {why}");
                    evidence.refusals.insert(Refusal { action: GuardAction::FixAccept, target: cgroup, why });
                }
            }
        }
        if is_included {
            let key = AcceptKey { namespace: reading.namespace, address };
            // `--pid` means the process and its descendants: the master of the workers has the lowest number.
            let process = member.owners.iter().map(|owner| owner.pid).min();
            let stuck = (imbalance.kind == ImbalanceKind::Stuck).then_some(member.waiting);
            let process = process.filter(|_| !reading.is_own);
            evidence.accept.insert(key, AcceptNeed { process, stuck, reason: fact });
        }
    }
}

fn cgroups(owners: &[Owner]) -> BTreeSet<String> {
    sockets(owners, &mut Cgroups::new()).into_keys().collect()
}

/// Returns the number of sockets by cgroup. `known`: the cgroups that need not be read.
fn sockets(owners: &[Owner], known: &mut Cgroups) -> BTreeMap<String, u64> {
    let mut sockets = BTreeMap::new();
    for owner in owners.iter().filter(|owner| owner.pid != 0) {
        let cgroup = known.entry(owner.pid).or_insert_with(|| own_cgroup(owner.pid));
        if let Some(cgroup) = cgroup.clone() {
            *sockets.entry(cgroup).or_default() += u64::from(owner.sockets);
        }
    }
    sockets
}

/// Returns the cgroup of a policy that has the programs of `cgroup`. An error: they are included, and left alone.
fn included<'a>(scope: &Scope, cgroup: &'a str, mount: &Path) -> Result<Option<&'a str>, String> {
    if cgroup == "/" {
        return Err("its program is in the root cgroup, as are other programs of the host".to_owned());
    }
    let Some(target) = scope.find(cgroup) else { return Ok(None) };
    match user_who_chose(mount, target) {
        None => Ok(Some(target)),
        Some(user) => Err(format!("user {user} may have chosen the name of its cgroup")),
    }
}
