//! `lab keepalive`: measures what a kept connection costs a request that waits for a busy worker, and which remedy helps.
//!
//! Published: Cloudflare ("Keepalives considered harmful"): closing the connections between a TLS terminator and its workers
//! after every request made the 99.9th percentile of the wait a quarter of what it had been.

use fourtuple::listen::{AcceptPolicy, Family, Recycle};
use fourtuple_record::measure::words::{counted, grouped, percent};
use fourtuple_record::{AcceptCell, AcceptResults, AcceptSettings, BreakEven, Remark, format_duration};

use crate::lab::pool::address::ServerAddress;
use crate::lab::pool::client::{ClientLoad, nanos};
use crate::lab::pool::sums::Label;
use crate::lab::pool::{self, Cell, Checked, Named, Pair, in_rust};
use crate::lab::{LabError, Watch};

/// A run against the lab's own server.
struct Spec {
    pair: Pair,
    close_every: u64,
}

/// Checks the settings; looks the name of an external server up.
pub fn check(settings: &AcceptSettings) -> Result<(), LabError> {
    checked(settings, Named::default()).map(drop)
}

fn checked(
    settings: &AcceptSettings,
    named: Named,
) -> Result<(Checked<'_>, Option<ServerAddress>), LabError> {
    let server = settings.server.as_deref().map(ServerAddress::of_url).transpose()?;
    Ok((Checked::new(settings, named)?, server))
}

/// Runs every cell, each in a namespace of its own; odd repeats run in the reverse order. With an external server, the lab starts only the
/// clients, and makes no namespace.
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
    let (checked, server) = checked(settings, named)?;
    let (mut results, remarks) = match server {
        Some(place) => run_there(&checked, &place, watch)?,
        None => run_here(&checked, watch)?,
    };
    let mut advice = advice(&results, settings.slow_ns);
    advice.append(&mut results.advice);
    results.advice = advice;
    Ok((results, remarks))
}

fn run_here(checked: &Checked<'_>, watch: &Watch<'_>) -> Result<(AcceptResults, Vec<Remark>), LabError> {
    let every_close = &checked.settings.close_every;
    let runnable = checked.runnable()?;
    let pinned = runnable.pairs.iter().copied().find(|pair| pair.policy.pins_connections());
    let (mut cells, mut skipped) = (Vec::new(), Vec::new());
    for (pair, why) in runnable.skipped {
        skipped.extend(every_close.iter().map(|every| pool::skipped(pair, *every, why.as_str())));
    }
    for pair in runnable.pairs {
        for &close_every in every_close {
            match starves(checked.settings, pair.policy, close_every) {
                Some(why) => skipped.push(pool::skipped(pair, close_every, why)),
                None => cells.push(Cell::new(
                    label(checked, pair.policy.to_string(), pair.family, close_every),
                    Spec { pair, close_every },
                )),
            }
        }
    }
    for policy in checked.policies.iter().filter(|_| checked.named.policies) {
        let is_of = |cell: &Cell<Spec>| cell.spec.pair.policy == *policy;
        let starved = || every_close.iter().find_map(|every| starves(checked.settings, *policy, *every));
        if let (false, Some(why)) = (cells.iter().any(is_of), starved()) {
            return Err(LabError::setting("policy", policy, why));
        }
    }
    let mut remarks = checked.run_cells(&mut cells, watch, |spec, repeat| {
        checked.with_workers(spec.pair, Recycle::Never, |pool| {
            client_load(checked, spec.close_every, repeat).run(pool, watch)
        })
    })?;
    let mut results = pool::results(cells, skipped);
    let cut = remarks.iter().any(|remark| ["interrupted", "failed"].contains(&remark.id.as_str()));
    if let Some(pair) = pinned.filter(|_| !cut) {
        let (found, remark) = measure_break_even(checked, pair, watch);
        remarks.extend(remark);
        results.advice.extend(found.map(|found| break_even_advice(pair, &found)));
        results.break_even = found;
    }
    Ok((results, remarks))
}

fn run_there(
    checked: &Checked<'_>,
    place: &ServerAddress,
    watch: &Watch<'_>,
) -> Result<(AcceptResults, Vec<Remark>), LabError> {
    let family = Family::of(&place.endpoint);
    let mut cells: Vec<Cell<u64>> = checked
        .settings
        .close_every
        .iter()
        .map(|every| Cell::new(label(checked, EXTERNAL.to_owned(), family, *every), *every))
        .collect();
    let remarks = checked.run_cells(&mut cells, watch, |&close_every, repeat| {
        let (measured, connections) = client_load(checked, close_every, repeat).run_against(place, watch)?;
        drop(connections);
        Ok(measured)
    })?;
    Ok((pool::results(cells, Vec::new()), remarks))
}

fn client_load(checked: &Checked<'_>, close_every: u64, repeat: u32) -> ClientLoad {
    // All cells of a repeat use the same seed.
    let seed = checked.settings.seed ^ u64::from(repeat).rotate_left(48);
    checked.client_load(close_every, Some(checked.mix.short), seed)
}

fn label(checked: &Checked<'_>, policy: String, family: Family, close_every: u64) -> Label {
    Label {
        policy,
        server: checked.settings.server.clone(),
        family,
        close_every,
        load: checked.spend.name(),
        workers: checked.workers(),
        clients: checked.settings.clients,
        balance_of_accepts: false,
        slow_ns: checked.settings.slow_ns,
    }
}

/// Returns the reason if this combination starves some clients for the whole run.
fn starves(settings: &AcceptSettings, policy: AcceptPolicy, close_every: u64) -> Option<&'static str> {
    // The probe is one client more.
    let more_clients = settings.clients >= settings.workers;
    (policy == AcceptPolicy::Blocking && close_every == 0 && more_clients).then_some(
        "a worker that blocks is its one connection's until that connection ends: with connections that are never \
         closed, clients beyond the number of workers are never served",
    )
}

/// The policy name recorded for a server that the lab did not start.
const EXTERNAL: &str = "external";

/// Returns settings that measure an external server; its URL is checked by [`check`].
pub fn external(server: String, settings: AcceptSettings) -> AcceptSettings {
    let place = ServerAddress::of_url(&server);
    let families = place.map(|place| vec![Family::of(&place.endpoint).to_string()]).unwrap_or_default();
    AcceptSettings { families, policies: vec![EXTERNAL.to_owned()], server: Some(server), ..settings }
}

/// Minimum number of requests for a decision.
const MIN_REQUESTS: u64 = 200;

/// Runs the measurement. A failure becomes a remark, so that earlier results are kept.
fn measure_break_even(
    checked: &Checked<'_>,
    pair: Pair,
    watch: &Watch<'_>,
) -> (Option<BreakEven>, Option<Remark>) {
    let title = format!("{} {} break-even", pair.policy, pair.family);
    watch.progress.begin(&title, checked.settings.for_ns / 1_000_000);
    match break_even(checked, pair, watch) {
        Ok(Some(found)) => (Some(found), None),
        Ok(None) => {
            let message = format!("interrupted at {title}: whether closing pays is not known");
            (None, Some(Remark::new("interrupted", message)))
        }
        Err(error) => (None, Some(Remark::new("failed", format!("{title} failed: {error}")))),
    }
}

/// Returns `None` if the run was stopped early.
fn break_even(checked: &Checked<'_>, pair: Pair, watch: &Watch<'_>) -> Result<Option<BreakEven>, LabError> {
    checked.with_workers(pair, Recycle::Measured, |pool| {
        let group = pool.group().clone();
        let measured = client_load(checked, 0, 0).run(pool, watch)?;
        Ok(group.break_even().filter(|_| !measured.cut).map(|found| BreakEven {
            fresh_connection_ns: nanos(found.fresh_connection),
            misplaced_wait_ns: nanos(found.misplaced_wait),
            requests: found.samples,
            closes: found.closes,
        }))
    })
}

/// Returns the break-even point in words, and the setting that follows from it.
fn break_even_advice(pair: Pair, found: &BreakEven) -> String {
    let time = |ns| format_duration(ns);
    let Pair { policy, family } = pair;
    format!(
        "Break-even of {policy} over {family}: a fresh connection costs {}, and a request on a kept one waits {} for its worker \
         while another is idle (mean of {}): {}.",
        time(found.fresh_connection_ns),
        time(found.misplaced_wait_ns),
        counted(found.requests, "request"),
        match (found.closes, found.requests < MIN_REQUESTS) {
            (true, _) => format!(
                "closing after each request pays. Workers that find this out by themselves: \
                 ListenerGroupBuilder::at(endpoint).policy({}).recycle(Recycle::Measured)",
                in_rust(&policy.to_string())
            ),
            (false, true) => "too few to tell whether closing pays; take a longer --for".to_owned(),
            (false, false) => "keeping connections pays".to_owned(),
        }
    )
}

/// Ratio of two tails from which advice mentions the difference.
const WORTH_A_WORD: f64 = 1.5;

/// Returns advice: what the results show about this kernel, and what to set. `slow_ns` is the latency from which a request is slow.
pub fn advice(results: &AcceptResults, slow_ns: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for family in families(&results.cells) {
        let cells: Vec<&AcceptCell> =
            results.cells.iter().filter(|cell| cell.family == family && cell.operations > 0).collect();
        lines.extend(of_family(family, &cells, slow_ns));
    }
    lines
}

fn families(cells: &[AcceptCell]) -> Vec<&str> {
    let mut families: Vec<&str> = Vec::new();
    for cell in cells {
        if !families.contains(&cell.family.as_str()) {
            families.push(&cell.family);
        }
    }
    families
}

fn of_family(family: &str, cells: &[&AcceptCell], slow_ns: u64) -> Vec<String> {
    let mut lines = Vec::new();
    let exclusive: Vec<&AcceptCell> =
        cells.iter().filter(|cell| cell.policy == "exclusive").copied().collect();
    if let (Some(kept), Some(closed)) = (most_kept(&exclusive), find(&exclusive, 1)) {
        let times = ratio(kept.wait_ns.p999, closed.wait_ns.p999);
        lines.push(if times >= WORTH_A_WORD {
            format!(
                "Over {family}, requests on kept connections wait behind busy workers: with exclusive (epoll and EPOLLEXCLUSIVE) \
                 p99.9 of the wait is {} when connections are {}, and {} when they are closed after every request: \
                 {times:.1} times. {} of 10,000 requests waited longer than {} on kept connections, {} on new ones.",
                format_duration(kept.wait_ns.p999),
                closing(kept.close_every),
                format_duration(closed.wait_ns.p999),
                tenth(kept.slow_per_10k),
                format_duration(slow_ns),
                tenth(closed.slow_per_10k),
            )
        } else {
            format!(
                "Over {family}, keeping connections does not make the tail of exclusive longer under this load: p99.9 of the \
                 wait is {} when they are {}, and {} when they are closed after every request.",
                format_duration(kept.wait_ns.p999),
                closing(kept.close_every),
                format_duration(closed.wait_ns.p999),
            )
        });
    }
    let best = best_of(cells);
    let worst = most_kept(&exclusive).or_else(|| cells.iter().max_by_key(|cell| cell.wait_ns.p999).copied());
    if let (Some(best), Some(worst)) = (best, worst)
        && (best.policy != worst.policy || best.close_every != worst.close_every)
    {
        let times = ratio(worst.wait_ns.p999, best.wait_ns.p999);
        let cpu = ratio(best.cpu_ns_per_request, worst.cpu_ns_per_request);
        lines.push(format!(
            "Best over {family}: {} with connections {}. p99.9 of the wait is {}, {times:.1} times shorter than of {} with \
             connections {}{}.",
            name(best),
            closing(best.close_every),
            format_duration(best.wait_ns.p999),
            name(worst),
            closing(worst.close_every),
            if cpu > 0.0 { format!(", at {} of its CPU time per request", percent(cpu)) } else { String::new() },
        ));
    }
    let keepers: Vec<&AcceptCell> = cells.iter().filter(|cell| cell.close_every == 0).copied().collect();
    let free = keepers.iter().filter(|cell| is_free_of_pinning(cell)).min_by_key(|cell| cell.wait_ns.p999);
    if let Some(free) = free
        && let Some(closed) =
            cells.iter().filter(|cell| cell.close_every == 1).min_by_key(|cell| cell.wait_ns.p999)
        && ratio(free.wait_ns.p999, closed.wait_ns.p999) <= WORTH_A_WORD
    {
        lines.push(format!(
            "Connections can stay open: with {} they belong to no worker until they have a request, and p99.9 of the wait is \
             {} (closing after every request: {}).",
            free.policy,
            format_duration(free.wait_ns.p999),
            format_duration(closed.wait_ns.p999),
        ));
    }
    if let Some(best) = best.filter(|best| best.server.is_none()) {
        lines.push(what_to_set(best));
    }
    lines
}

/// Returns the cell with the least CPU time among the cells whose tail is at most 10% longer than the shortest: runs differ by
/// as much.
fn best_of<'a>(cells: &[&'a AcceptCell]) -> Option<&'a AcceptCell> {
    const NEARLY: f64 = 1.1;
    let shortest = cells.iter().map(|cell| cell.wait_ns.p999).min()?;
    let near = cells.iter().filter(|cell| cell.wait_ns.p999 as f64 <= NEARLY * shortest as f64);
    near.min_by_key(|cell| cell.cpu_ns_per_request).copied()
}

/// Returns the cell that keeps connections longest: a cell that never closes them, else the cell with the most requests per
/// connection.
fn most_kept<'a>(cells: &[&'a AcceptCell]) -> Option<&'a AcceptCell> {
    let kept = cells.iter().filter(|cell| cell.close_every != 1);
    kept.max_by_key(|cell| if cell.close_every == 0 { u64::MAX } else { cell.close_every }).copied()
}

fn find<'a>(cells: &[&'a AcceptCell], close_every: u64) -> Option<&'a AcceptCell> {
    cells.iter().find(|cell| cell.close_every == close_every).copied()
}

/// Returns whether the policy hands the next request of a connection to an idle worker.
fn is_free_of_pinning(cell: &AcceptCell) -> bool {
    ["shared-oneshot", "dispatcher"].contains(&cell.policy.as_str())
}

fn what_to_set(best: &AcceptCell) -> String {
    let policy = best.policy.as_str();
    let closing = match best.close_every {
        0 => "Leave keep-alive on".to_owned(),
        1 => "Have the client send \"Connection: close\", or the server close after each answer".to_owned(),
        every => format!("Close connections after {}", counted(every, "request")),
    };
    format!(
        "How to set it: fourtuple::listen::ListenerGroupBuilder::at(endpoint).policy({}), or `fourtuple serve http --policy {policy}`. \
         {closing}. A server that you do not write, with a listener of SO_REUSEPORT for each worker: `fourtuple fix accept`.",
        in_rust(policy)
    )
}

fn name(cell: &AcceptCell) -> &str {
    cell.server.as_deref().unwrap_or(&cell.policy)
}

/// Returns the words for the number of requests after which a connection is closed.
fn closing(close_every: u64) -> String {
    match close_every {
        0 => "never closed".to_owned(),
        1 => "closed after every request".to_owned(),
        every => format!("closed after {}", counted(every, "request")),
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

fn tenth(number: f64) -> String {
    if number < 10.0 { format!("{number:.1}") } else { grouped(number.round() as u64) }
}

#[cfg(test)]
mod tests {
    use fourtuple::listen::{AcceptPolicy, Family};

    use super::*;
    use crate::lab::pool::sums::tests::label;
    use crate::lab::pool::sums::{Label, Sums};

    #[test]
    fn break_even_advice_contains_its_figures() {
        let pair = Pair { policy: AcceptPolicy::ROTATE, family: Family::Tcp4 };
        let said = |misplaced_wait_ns, requests, closes| {
            let fresh_connection_ns = 12_200;
            break_even_advice(pair, &BreakEven { fresh_connection_ns, misplaced_wait_ns, requests, closes })
        };
        let closes = said(1_200_000, 2000, true);
        for part in ["rotate over tcp4", "costs 12.2us", "waits 1.20ms", "mean of 2,000 requests"] {
            assert!(closes.contains(part), "{part:?} in {closes}");
        }
        assert!(closes.ends_with("policy(AcceptPolicy::ROTATE).recycle(Recycle::Measured)."), "{closes}");
        assert!(said(0, 2000, false).ends_with("keeping connections pays."));
        assert!(said(9000, 1, false).contains("mean of 1 request): too few"));
    }

    fn cell(policy: &str, close_every: u64, p999_ms: u64) -> AcceptCell {
        let label = Label { policy: policy.to_owned(), close_every, slow_ns: 5_000_000, ..label(8) };
        let mut cell = Sums::new(label).cell();
        (cell.operations, cell.cpu_ns_per_request) = (1000, 20_000);
        cell.wait_ns.p999 = p999_ms * 1_000_000;
        cell
    }

    fn lines(cells: Vec<AcceptCell>, slow_ns: u64) -> Vec<String> {
        let results =
            AcceptResults { cells, skipped: vec![], timeline: None, break_even: None, advice: vec![] };
        advice(&results, slow_ns)
    }

    #[test]
    fn advice_names_the_longer_tail_and_its_remedy() {
        let exclusive = [(1, 11), (5, 33), (0, 34)].map(|(every, ms)| cell("exclusive", every, ms));
        let shared = [(1, 7), (0, 6)].map(|(every, ms)| cell("shared-oneshot", every, ms));
        let lines = lines([&exclusive[..], &shared].concat(), 5_000_000);
        assert_eq!(lines.len(), 4, "{lines:#?}");
        for (line, part) in [
            (0, "34.0ms when connections are never closed, and 11.0ms"),
            (0, "3.1 times"),
            (1, "shared-oneshot with connections never closed"),
            (1, "5.7 times shorter than of exclusive with connections never closed, at 100%"),
            (3, "policy(AcceptPolicy::SharedOneshot)"),
        ] {
            assert!(lines[line].contains(part), "{part:?} is missing in {lines:#?}");
        }
        assert!(lines[2].starts_with("Connections can stay open: with shared-oneshot"), "{}", lines[2]);
        assert!(lines[3].contains("Leave keep-alive on."), "{}", lines[3]);
    }

    #[test]
    fn without_a_gain_there_is_no_recommendation() {
        let found = lines(vec![cell("exclusive", 1, 11), cell("exclusive", 0, 12)], 5_000_000);
        assert!(found[0].contains("does not make the tail of exclusive longer"), "{}", found[0]);
        assert!(!found.iter().any(|line| line.contains("can stay open")), "{found:#?}");
        assert!(lines(vec![], 1).is_empty());
    }
}
