use fourtuple_record::{AcceptCell, AcceptResults};

use crate::pool::words::in_rust;

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
         (EPOLL_CTL_ADD), which puts the worker at the end of the order.",
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
    use std::time::Duration;

    use fourtuple::listen::Family;

    use super::*;
    use crate::pool::sums::{Label, Sums};

    fn cell(policy: &str, family: Family, accepts: &[u64], jain: f64) -> AcceptCell {
        let label = Label {
            policy: policy.to_owned(),
            server: None,
            family,
            close_every: 1,
            load: "light",
            workers: accepts.len(),
            clients: 1,
            balance_of_accepts: true,
            slow: Duration::ZERO,
        };
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
        assert!(
            found[1].starts_with("Policies with an even distribution under light load: rotate, plain."),
            "{}",
            found[1]
        );
        assert!(found[2].starts_with("shared-oneshot gives"), "{}", found[2]);
        assert!(found[3].starts_with("plain wakes 3.5 workers"), "{}", found[3]);
        assert!(found[4].contains("policy(AcceptPolicy::ROTATE)"), "{}", found[4]);
    }

    #[test]
    fn a_kernel_without_the_ladder_needs_no_remedy() {
        let found = lines(vec![
            cell("exclusive", Family::Unix, &[24, 24], 1.0),
            cell("rotate", Family::Unix, &[24, 24], 1.0),
        ]);
        assert!(
            found[0].starts_with("This kernel does not distribute connections as a ladder"),
            "{}",
            found[0]
        );
        assert_eq!(found.len(), 2, "{found:#?}");
        assert!(lines(vec![]).is_empty());
    }
}
