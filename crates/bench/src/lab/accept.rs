//! `lab accept`: measures which worker accepts a connection under each accept policy.
//!
//! Published: "Why does one NGINX worker take all the load?" and "Keepalives considered harmful" (both Cloudflare). The lab
//! repeats their test with rising load and their table of open sockets on this kernel.

use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, Recycle};
use fourtuple_record::{AcceptCell, AcceptResults, AcceptSettings, Remark};
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::schedule;

use crate::lab::pool::address::ServerAddress;
use crate::lab::pool::client::{Client, Measured};
use crate::lab::pool::sums::Label;
use crate::lab::pool::workers::Pool;
use crate::lab::pool::{self, Cell, Checked, Named, Pair, in_rust};
use crate::lab::{LabError, Watch};

/// The arrival process of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Sequential connections, each opened while all workers wait, so that only the kernel chooses the worker.
    Light,
    /// Connections from many clients that do not pause: the kernel skips busy workers.
    Heavy,
}

impl Load {
    /// The two loads, light first.
    pub const ALL: [Load; 2] = [Load::Light, Load::Heavy];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Load::Light => "light",
            Load::Heavy => "heavy",
        }
    }

    pub fn named(name: &str) -> Option<Load> {
        Load::ALL.into_iter().find(|load| load.name() == name)
    }
}

struct Spec {
    pair: Pair,
    load: Load,
}

/// Checks the settings, without system calls.
pub fn check(settings: &AcceptSettings) -> Result<(), LabError> {
    checked(settings, Named::default()).map(drop)
}

fn checked(settings: &AcceptSettings, named: Named) -> Result<(Checked<'_>, Vec<Load>), LabError> {
    LabError::unless_within("connections", settings.connections, 1..=10_000)?;
    let loads = LabError::named("load", &settings.load, Load::named)?;
    Ok((Checked::new(settings, named)?, loads))
}

/// Runs every cell, each in a namespace of its own; odd repeats run in the reverse order.
///
/// # Errors
///
/// Returns an error if a named policy cannot run here, if a setting is out of range, or if a run fails before the first
/// result.
pub fn run(
    settings: &AcceptSettings,
    named: Named,
    watch: &Watch<'_>,
) -> Result<(AcceptResults, Vec<Remark>), LabError> {
    let (checked, loads) = checked(settings, named)?;
    let runnable = checked.runnable()?;
    let skipped = runnable.skipped.into_iter().map(|(pair, why)| pool::skipped(pair, 1, why)).collect();
    let mut cells = Vec::new();
    for load in loads {
        for &pair in &runnable.pairs {
            cells.push(Cell::new(label(&checked, pair, load), Spec { pair, load }));
        }
    }
    let remarks = checked.run_cells(&mut cells, watch, |Spec { pair, load }, _| {
        checked.with_workers(*pair, Recycle::Never, |pool| match load {
            Load::Light => light(settings, pair.policy, pool, watch),
            Load::Heavy => checked.client_load(1, None, settings.seed).run(pool, watch),
        })
    })?;
    let mut results = pool::results(cells, skipped);
    results.advice = advice(&results);
    Ok((results, remarks))
}

fn label(checked: &Checked<'_>, pair: Pair, load: Load) -> Label {
    Label {
        policy: pair.policy.to_string(),
        server: None,
        family: pair.family,
        close_every: 1,
        load: load.name(),
        workers: checked.workers(),
        clients: if load == Load::Light { 1 } else { checked.settings.clients },
        balance_of_accepts: true,
        slow_ns: checked.settings.slow_ns,
    }
}

/// Pause between an answer and the next connection, long enough for the worker to wait again on an idle machine.
const REST: Duration = Duration::from_millis(1);

/// Maximum pause on a busy machine.
const MAX_REST: Duration = Duration::from_secs(1);

/// Opens the connections, each with one request, and keeps them open until all are open and counted, for the table of open
/// sockets. Only a blocking worker's connection is closed at once, since that worker would serve it until the end.
fn light(
    settings: &AcceptSettings,
    policy: AcceptPolicy,
    pool: Pool,
    watch: &Watch<'_>,
) -> Result<Measured, LabError> {
    let _ = schedule::sleep_precisely();
    let place = ServerAddress::at(pool.endpoint().clone());
    let close_every = u64::from(policy == AcceptPolicy::Blocking);
    let mut client = Client::new(&place, close_every, 0);
    let mut held = Vec::new();
    let mut measured = Measured { begun_ns: monotonic_ns(), ..Measured::default() };
    let (work, length_ms) = (Duration::from_nanos(settings.short_ns), settings.for_ns / 1_000_000);
    for connection in 0..settings.connections {
        if watch.stopped() {
            measured.cut = true;
            break;
        }
        client.request(work, monotonic_ns());
        held.extend(client.take_connection());
        let answered = Instant::now();
        thread::sleep(REST);
        while !pool.is_waiting() && answered.elapsed() < MAX_REST {
            thread::sleep(REST);
        }
        if connection % 16 == 0 {
            watch.progress.at(connection * length_ms / settings.connections);
        }
    }
    measured.load = std::mem::take(&mut client.results.answered);
    measured.add_errors(std::mem::take(&mut client.results.errors));
    measured.seats = pool.settled(measured.load.len() as u64, held.len() as u64);
    drop(held);
    pool.settled(0, 0);
    measured.cpu = pool.end()?;
    Ok(measured)
}

/// Jain's index below which the first workers have most of the work.
const LADDER: f64 = 0.75;

/// Jain's index above which differences between workers do not matter.
const EVEN: f64 = 0.97;

/// Returns advice: what the results show about this kernel, and what to set.
pub fn advice(results: &AcceptResults) -> Vec<String> {
    let light: Vec<&AcceptCell> =
        results.cells.iter().filter(|cell| cell.load == "light" && cell.jain.is_some()).collect();
    let jain = |cell: &AcceptCell| cell.jain.unwrap_or_default();
    let mut lines = Vec::new();
    let exclusive: Vec<&AcceptCell> =
        light.iter().filter(|cell| cell.policy == "exclusive").copied().collect();
    let steep: Vec<&AcceptCell> = exclusive.iter().filter(|cell| jain(cell) < LADDER).copied().collect();
    if let Some(cell) = steep.first() {
        lines.push(format!(
            "This kernel distributes connections as a ladder: of the workers that wait with epoll and EPOLLEXCLUSIVE it wakes the \
             same one first, and the next one only while the first is busy. Over {}, one of {} workers got {:.0}% of the \
             connections that arrived one by one.",
            list(steep.iter().map(|cell| cell.family.as_str())),
            cell.workers,
            100.0 * most(&cell.accepts),
        ));
    } else if let Some(cell) = exclusive.first() {
        lines.push(format!(
            "This kernel does not distribute connections as a ladder: workers that wait with epoll and EPOLLEXCLUSIVE share \
             connections that arrive one by one (Jain's index {:.2}).",
            jain(cell)
        ));
    }
    let mut even: Vec<&str> = Vec::new();
    for cell in &light {
        let all = light.iter().filter(|other| other.policy == cell.policy).all(|other| jain(other) >= EVEN);
        if all && !even.contains(&cell.policy.as_str()) {
            even.push(&cell.policy);
        }
    }
    if !even.is_empty() {
        lines.push(format!(
            "Policies with an even distribution under light load: {}. An even distribution is not always the shortest wait, which \
             `fourtuple lab keepalive` measures.",
            list(even.iter().copied())
        ));
    }
    let one = light.iter().find(|cell| cell.policy == "shared-oneshot" && jain(cell) < LADDER);
    if one.is_some() {
        lines.push(
            "shared-oneshot gives connections that arrive one by one to the worker that began to wait last. Its distribution is \
             uneven, but no request waits for a busy worker, because connections belong to no worker."
                .to_owned(),
        );
    }
    let herd = results
        .cells
        .iter()
        .filter(|cell| cell.policy == "plain" && cell.load == "light")
        .filter_map(|cell| cell.wakeups_per_accept)
        .fold(0.0_f64, f64::max);
    if herd >= 2.0 {
        lines.push(format!(
            "plain wakes {herd:.1} workers for each connection, and one of them gets it: the other wakeups waste CPU time."
        ));
    }
    if steep.is_empty() || even.is_empty() {
        return lines;
    }
    let policy = if even.contains(&"rotate") { "rotate" } else { even[0] };
    lines.push(format!(
        "An even distribution on this kernel: fourtuple::listen::ListenerGroupBuilder::at(endpoint).policy({}). Without the library: \
         after each accept4() and before the work, remove the listener from the epoll (EPOLL_CTL_DEL) and add it again \
         (EPOLL_CTL_ADD), which puts the worker at the end of the order. A server that you do not write, with a listener of \
         SO_REUSEPORT for each worker: `fourtuple fix accept`.",
        in_rust(policy)
    ));
    lines
}

/// Returns the largest share, 0 to 1.
fn most(counts: &[u64]) -> f64 {
    let sum: u64 = counts.iter().sum();
    counts.iter().copied().max().unwrap_or_default() as f64 / sum.max(1) as f64
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::Family;

    use super::*;
    use crate::lab::pool::sums::tests::label;
    use crate::lab::pool::sums::{Label, Sums};

    fn cell(policy: &str, family: Family, accepts: &[u64], jain: f64) -> AcceptCell {
        let label = label(accepts.len());
        let label =
            Label { policy: policy.to_owned(), family, load: "light", balance_of_accepts: true, ..label };
        AcceptCell { accepts: accepts.to_vec(), jain: Some(jain), ..Sums::new(label).cell() }
    }

    fn lines(cells: Vec<AcceptCell>) -> Vec<String> {
        advice(&AcceptResults { cells, skipped: vec![], timeline: None, break_even: None, advice: vec![] })
    }

    #[test]
    fn the_ladder_is_named_with_its_remedy() {
        let mut plain = cell("plain", Family::Unix, &[20, 28], 0.98);
        plain.wakeups_per_accept = Some(3.5);
        let found = lines(vec![
            cell("exclusive", Family::Unix, &[48, 0], 0.5),
            cell("exclusive", Family::Tcp4, &[48, 0], 0.5),
            cell("rotate", Family::Unix, &[24, 24], 1.0),
            cell("shared-oneshot", Family::Unix, &[0, 48], 0.5),
            plain,
        ]);
        assert!(found[0].contains("Over unix, tcp4, one of 2 workers got 100%"), "{}", found[0]);
        let even = "Policies with an even distribution under light load: rotate, plain.";
        assert!(found[1].starts_with(even), "{}", found[1]);
        assert!(found[2].starts_with("shared-oneshot gives"), "{}", found[2]);
        assert!(found[3].starts_with("plain wakes 3.5 workers"), "{}", found[3]);
        assert!(found[4].contains("policy(AcceptPolicy::ROTATE)"), "{}", found[4]);
    }

    #[test]
    fn a_kernel_without_the_ladder_needs_no_remedy() {
        let even = ["exclusive", "rotate"].map(|policy| cell(policy, Family::Unix, &[24, 24], 1.0));
        let found = lines(even.to_vec());
        let no_ladder = "This kernel does not distribute connections as a ladder";
        assert!(found[0].starts_with(no_ladder), "{}", found[0]);
        assert_eq!(found.len(), 2, "{found:#?}");
        assert!(lines(vec![]).is_empty());
    }
}
