//! The connections of each worker of a service.

use fourtuple_record::Severity;
use fourtuple_record::measure::balance::jain;
use fourtuple_record::snapshot::{Listener, Owner, Service, Snapshot, UnixListener};

use crate::doctor::accepting::{groups, process_of};

/// Connections for each worker, on average, below which shares say nothing.
const PER_WORKER: u64 = 10;
/// Connections of all workers below which shares say nothing.
const TOTAL: u64 = 40;
/// Workers that a snapshot lists for each service.
const LISTED: usize = 100;
/// Share of one processor from which on a worker is busy.
const BUSY: f64 = 0.7;

/// A worker and its connections.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) pid: u32,
    pub(crate) name: String,
    pub(crate) connections: u64,
    /// Share of one processor during the interval.
    pub(crate) cpu: Option<f64>,
}

/// Workers of a listener, or of the listeners of a port, with unequal numbers of connections.
pub(crate) struct Skew {
    /// Where they accept: `port 4020`, or the path of a unix listener.
    pub(crate) place: String,
    /// `None`: a unix listener.
    pub(crate) port: Option<u16>,
    /// In the order of their start.
    pub(crate) workers: Vec<Worker>,
    pub(crate) total: u64,
    pub(crate) jain: f64,
    /// `Warning` if the worker with the most connections is busy, `Notice` otherwise.
    pub(crate) severity: Severity,
    /// Whether all workers hold the same listener, and their shares rise or fall in the order of their start.
    pub(crate) is_ladder: bool,
}

/// Returns the services whose workers have unequal shares: Jain's index is below `limit` and the busiest worker is busy, or the index is
/// far below.
///
/// # Errors
///
/// The connections or the listeners were not read, or no process is visible.
pub(crate) fn skews(snapshot: &Snapshot, limit: f64) -> Result<Vec<Skew>, String> {
    let listeners = snapshot.listeners.seen()?;
    let services = &snapshot.connections.seen()?.services;
    let is_large = |service: &Service| service.states.values().sum::<u64>() >= TOTAL;
    if services.iter().any(is_large) && listeners.iter().all(|listener| listener.owners.is_empty()) {
        return Err(
            "the processes of the listeners are not visible; run as root in the PID namespace of the host"
                .to_owned(),
        );
    }
    let tcp = services.iter().filter_map(|service| of_port(snapshot, listeners, service, limit));
    // A kernel without unix_diag has the services of TCP.
    let unix = snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default();
    let unix = unix.iter().filter_map(|listener| of_unix(snapshot, listener, limit));
    Ok(tcp.chain(unix).collect())
}

fn of_port(snapshot: &Snapshot, listeners: &[Listener], service: &Service, limit: f64) -> Option<Skew> {
    let own: Vec<&Listener> =
        listeners.iter().filter(|listener| listener.address.port() == service.port).collect();
    let owners: Vec<&[Owner]> = own.iter().map(|listener| listener.owners.as_slice()).collect();
    // Listeners of two families, as of `listen 80; listen [::]:80`, are not a group: each is shared.
    let is_shared = groups(own.iter().copied()).is_empty() && owners.iter().all(|owners| owners.len() > 1);
    let skew = skew(snapshot, &owners, &service.workers, limit)?;
    Some(Skew {
        place: format!("port {}", service.port),
        port: Some(service.port),
        is_ladder: is_shared && skew.is_ladder,
        ..skew
    })
}

/// Unix sockets have no SO_REUSEPORT: the workers of a listener share it.
fn of_unix(snapshot: &Snapshot, listener: &UnixListener, limit: f64) -> Option<Skew> {
    let skew = skew(snapshot, &[&listener.owners], &listener.workers, limit)?;
    Some(Skew { place: listener.path.clone(), ..skew })
}

/// Compares the shares of the processes that hold the listeners. `accepted`: the processes that hold accepted connections.
fn skew(snapshot: &Snapshot, owners: &[&[Owner]], accepted: &[Owner], limit: f64) -> Option<Skew> {
    let workers = workers(snapshot, owners, accepted);
    let total: u64 = workers.iter().map(|worker| worker.connections).sum();
    let number = workers.len() as u64;
    // The snapshot lists a bounded number of workers; the others would have no connections here.
    let is_cut = accepted.len() >= LISTED && workers.len() > accepted.len();
    if is_cut || number < 2 || total < TOTAL.max(number * PER_WORKER) {
        return None;
    }
    let counts: Vec<u64> = workers.iter().map(|worker| worker.connections).collect();
    let jain = jain(&counts).filter(|jain| *jain < limit)?;
    let first = workers.iter().max_by_key(|worker| worker.connections)?;
    let severity = if first.cpu.is_some_and(|cpu| cpu >= BUSY) {
        Severity::Warning
    } else if number > 2 && jain < limit * 0.7 {
        Severity::Notice
    } else {
        return None;
    };
    let slack = total / 20;
    let falls = counts.windows(2).all(|pair| pair[0] + slack >= pair[1]);
    let rises = counts.windows(2).all(|pair| pair[0] <= pair[1] + slack);
    Some(Skew { place: String::new(), port: None, workers, total, jain, severity, is_ladder: falls || rises })
}

/// Returns the processes that hold listeners, without a parent that accepts nothing.
fn workers(snapshot: &Snapshot, owners: &[&[Owner]], accepted: &[Owner]) -> Vec<Worker> {
    let mut workers: Vec<Worker> = Vec::new();
    for owner in owners.iter().copied().flatten() {
        if workers.iter().any(|worker| worker.pid == owner.pid) {
            continue;
        }
        let held = accepted.iter().find(|worker| worker.pid == owner.pid);
        let cpu = process_of(snapshot, owner.pid).and_then(|process| process.cpu_ns);
        workers.push(Worker {
            pid: owner.pid,
            name: owner.name.clone(),
            connections: held.map_or(0, |held| held.sockets.into()),
            cpu: cpu.map(|cpu| cpu as f64 / snapshot.interval_ns.max(1) as f64),
        });
    }
    let parents: Vec<u32> = workers
        .iter()
        .filter_map(|worker| process_of(snapshot, worker.pid))
        .map(|process| process.parent)
        .collect();
    workers.retain(|worker| worker.connections > 0 || !parents.contains(&worker.pid));
    // A child that executed another program may still hold the listener, but does not accept.
    let busiest = workers.iter().max_by_key(|worker| worker.connections).map(|worker| worker.name.clone());
    workers.retain(|worker| Some(&worker.name) == busiest.as_ref());
    by_start(snapshot, &mut workers);
    workers
}

/// Half of the process IDs that a kernel has at least (PID_MAX_DEFAULT).
const HALF_OF_PIDS: u32 = 16_384;

/// Sorts workers by their start. The clock of /proc/PID/stat has steps of 10 ms; within a step their process IDs decide, which begin again at
/// a low number.
fn by_start(snapshot: &Snapshot, workers: &mut [Worker]) {
    let started = |worker: &Worker| process_of(snapshot, worker.pid).map_or(0, |process| process.started_ns);
    // One that is not known leaves the process IDs.
    let is_known = workers.iter().all(|worker| started(worker) > 0);
    let time = |worker: &Worker| if is_known { started(worker) } else { 0 };
    workers.sort_by_key(|worker| (time(worker), worker.pid));
    for same in workers.chunk_by_mut(|one, next| time(one) == time(next)) {
        let newest = same.last().map_or(0, |worker| worker.pid);
        let oldest = same.partition_point(|worker| worker.pid + HALF_OF_PIDS < newest);
        same.rotate_left(oldest);
    }
}

/// Returns the connections of each worker: `48, 0, 0, 0`.
pub(crate) fn shares(workers: &[Worker]) -> String {
    const SHOWN: usize = 16;
    let shown = workers.iter().take(SHOWN).map(|worker| worker.connections.to_string());
    let rest = if workers.len() > SHOWN { ", ..." } else { "" };
    shown.collect::<Vec<_>>().join(", ") + rest
}

/// Returns the CPU time of the workers with the most and the fewest connections.
pub(crate) fn load(workers: &[Worker]) -> Option<String> {
    let first = workers.iter().max_by_key(|worker| worker.connections)?;
    let last = workers.iter().min_by_key(|worker| worker.connections)?;
    Some(format!(
        "{}[{}] used {:.0}% of a processor, {}[{}] {:.0}%",
        first.name,
        first.pid,
        first.cpu? * 100.0,
        last.name,
        last.pid,
        last.cpu? * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Part, Process};

    use super::*;

    #[test]
    fn workers_are_in_the_order_of_their_start() {
        let sorted = |started: &[(u32, u64)]| {
            let process = |&(pid, started_ns): &(u32, u64)| Process { pid, started_ns, ..Process::default() };
            let processes = started.iter().filter(|(_, started)| *started > 0).map(process);
            let snapshot = Snapshot { processes: Part::Seen(processes.collect()), ..Snapshot::default() };
            let worker =
                |&(pid, _): &(u32, u64)| Worker { pid, name: String::new(), connections: 0, cpu: None };
            let mut workers: Vec<Worker> = started.iter().map(worker).collect();
            by_start(&snapshot, &mut workers);
            workers.iter().map(|worker| worker.pid).collect::<Vec<_>>()
        };
        assert_eq!(sorted(&[(7, 20), (32_767, 10), (302, 20)]), [32_767, 7, 302]);
        // The process IDs began again within a step of the clock.
        assert_eq!(sorted(&[(301, 10), (302, 10), (32_766, 10), (32_767, 10)]), [32_766, 32_767, 301, 302]);
        assert_eq!(sorted(&[(9, 10), (5, 10), (7, 10)]), [5, 7, 9]);
        assert_eq!(sorted(&[(9, 0), (5, 30), (7, 10)]), [5, 7, 9], "the start of one is not known");
    }
}
