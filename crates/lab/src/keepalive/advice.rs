use fourtuple_measure::words::{counted, grouped, percent};
use fourtuple_record::{AcceptCell, AcceptResults, format_duration};

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
        "How to set it: fourtuple::listen::ListenerGroupBuilder::at(endpoint).policy({}), or `fourtuple serve http --policy {policy}`. {closing}.",
        crate::pool::words::in_rust(policy)
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
    use fourtuple::listen::Family;

    use super::*;
    use crate::pool::sums::{Label, Sums};

    fn cell(policy: &str, close_every: u64, p999_ms: u64) -> AcceptCell {
        let label = Label {
            policy: policy.to_owned(),
            server: None,
            family: Family::Unix,
            close_every,
            load: "sleep",
            workers: 8,
            clients: 24,
            balance_of_accepts: false,
            slow: std::time::Duration::from_millis(5),
        };
        let mut cell = Sums::new(label).cell();
        (cell.operations, cell.cpu_ns_per_request) = (1000, 20_000);
        cell.wait_ns.p999 = p999_ms * 1_000_000;
        cell
    }

    fn lines(cells: Vec<AcceptCell>) -> Vec<String> {
        advice(
            &AcceptResults { cells, skipped: vec![], timeline: None, break_even: None, advice: vec![] },
            5_000_000,
        )
    }

    #[test]
    fn advice_names_the_longer_tail_and_its_remedy() {
        let lines = lines(vec![
            cell("exclusive", 1, 11),
            cell("exclusive", 5, 33),
            cell("exclusive", 0, 34),
            cell("shared-oneshot", 1, 7),
            cell("shared-oneshot", 0, 6),
        ]);
        assert_eq!(lines.len(), 4, "{lines:#?}");
        assert!(lines[0].contains("34.0ms when connections are never closed, and 11.0ms"), "{}", lines[0]);
        assert!(lines[0].contains("3.1 times"), "{}", lines[0]);
        assert!(lines[1].contains("shared-oneshot with connections never closed"), "{}", lines[1]);
        assert!(
            lines[1].contains("5.7 times shorter than of exclusive with connections never closed, at 100%"),
            "{}",
            lines[1]
        );
        assert!(lines[2].starts_with("Connections can stay open: with shared-oneshot"), "{}", lines[2]);
        assert!(lines[3].contains("policy(AcceptPolicy::SharedOneshot)"), "{}", lines[3]);
        assert!(lines[3].ends_with("Leave keep-alive on."), "{}", lines[3]);
    }

    #[test]
    fn without_a_gain_there_is_no_recommendation() {
        let lines = lines(vec![cell("exclusive", 1, 11), cell("exclusive", 0, 12)]);
        assert!(lines[0].contains("does not make the tail of exclusive longer"), "{}", lines[0]);
        assert!(!lines.iter().any(|line| line.contains("can stay open")), "{lines:#?}");
        assert!(
            advice(
                &AcceptResults {
                    cells: vec![],
                    skipped: vec![],
                    timeline: None,
                    break_even: None,
                    advice: vec![]
                },
                1
            )
            .is_empty()
        );
    }
}
