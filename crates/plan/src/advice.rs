use fourtuple::dial::Strategy;
use fourtuple::ports::{Budget, Closer, Plan, PlanOutcome, WindowSearch, steady_tuples};
use fourtuple_measure::words::{counted, decimal, grouped};
use fourtuple_record::{format_duration, format_time};

/// Returns the advice for a plan, one sentence or two a line: how many connections fit, when the ports run out and when
/// connect() gets slow, and which settings help.
pub(super) fn lines(plan: &Plan, budget: &Budget, outcome: &PlanOutcome) -> Vec<String> {
    let mut lines = vec![format!(
        "{} connections fit: {} ports x {} x {}.",
        grouped(outcome.capacity),
        grouped(u64::from(budget.ports())),
        counted(plan.sources, "source"),
        counted(plan.destinations, "destination"),
    )];
    lines.extend(churn(plan, budget, outcome));
    lines.extend(cliff(plan, outcome));
    lines.extend(failures(plan, budget, outcome));
    lines.extend(odd(plan, outcome));
    lines.extend(remedies(plan, outcome));
    lines
}

fn churn(plan: &Plan, budget: &Budget, outcome: &PlanOutcome) -> Option<String> {
    let (rate, steady) = (plan.arrival_per_s?, outcome.steady_tuples?);
    let wait = match plan.closer {
        Closer::Us => ", then 60.0s in TIME_WAIT",
        Closer::Them => "",
    };
    let held = format!(
        "{}/s, each open for {}{wait}, hold {} tuples",
        decimal(rate),
        format_time(plan.hold),
        grouped(steady)
    );
    Some(match outcome.exhausted_after {
        None => format!("{held}: there is room for them."),
        Some(after) => format!(
            "{held}: more than fit. The ports run out after {}; from then on {} new connections a second succeed.",
            format_time(after),
            decimal(budget.ceiling_per_s(plan.hold, plan.closer)),
        ),
    })
}

fn cliff(plan: &Plan, outcome: &PlanOutcome) -> Option<String> {
    let at = format!("The cliff is at {} connections", grouped(outcome.cliff_connections?));
    let when = match (plan.arrival_per_s, outcome.cliff_after) {
        (Some(rate), Some(after)) => {
            format!("{at}; at {}/s you are there in {}.", decimal(rate), format_time(after))
        }
        (Some(rate), None) => format!("{at}; at {}/s you never get there.", decimal(rate)),
        (None, _) => format!("{at}."),
    };
    let (first, last) = (outcome.by_fill.first()?, outcome.by_fill.last()?);
    Some(format!(
        "{when} Beyond it connect() looks through half of the ports in vain: about {} instead of {}.",
        format_duration(last.mean_ns),
        format_duration(first.mean_ns),
    ))
}

fn failures(plan: &Plan, budget: &Budget, outcome: &PlanOutcome) -> Option<String> {
    let way_out = match plan.strategy {
        Strategy::RandomWindow { .. } => "let the last try search the full range",
        Strategy::SelectTestRepeat { .. } => "after the last try let the kernel search",
        _ => return None,
    };
    (outcome.failed_dials > 0).then(|| {
        format!(
            "Of {} dials that fill one pair {} fail though ports are free: {way_out}.",
            grouped(u64::from(budget.ports())),
            grouped(outcome.failed_dials),
        )
    })
}

fn odd(plan: &Plan, outcome: &PlanOutcome) -> Option<String> {
    let loses = outcome.cliff_connections.is_some() && plan.range.len() % 2 == 1 && plan.range.len() > 1;
    loses.then(|| {
        format!(
            "{} has an odd number of ports, and a search by parity passes over one of them, not always the same: make it even.",
            plan.range
        )
    })
}

fn remedies(plan: &Plan, outcome: &PlanOutcome) -> Vec<String> {
    let mut lines = Vec::new();
    let never = plan.arrival_per_s.is_some() && outcome.cliff_after.is_none();
    if outcome.cliff_connections.is_some() && !never {
        lines.push(match plan.search {
            WindowSearch::Linear => {
                "Set IP_LOCAL_PORT_RANGE to 0xFFFF0000 on the socket (strategy full-range): the kernel \
                               then goes from port to port, and there is no cliff."
                    .to_owned()
            }
            WindowSearch::Parity => {
                "This kernel searches windows by parity too: take small ones at random places and the \
                               full range as a last try (strategy random-window:500), and there is no cliff."
                    .to_owned()
            }
        });
    }
    if outcome.sources_needed > plan.sources {
        let goal =
            if outcome.cliff_connections.is_some() { "stay before the cliff" } else { "never run out" };
        lines.push(format!("{} would {goal}.", counted(outcome.sources_needed, "source address")));
    }
    if outcome.exhausted_after.is_some() {
        if plan.range.len() < 60_000 {
            lines.push("net.ipv4.ip_local_port_range of \"1024 65535\" would give 64,512 ports.".to_owned());
        }
        if let (Closer::Us, Some(rate)) = (plan.closer, plan.arrival_per_s) {
            let without = steady_tuples(rate, plan.hold, Closer::Them);
            lines.push(format!(
                "If the other end closed first, TIME_WAIT would not be ours, and {} tuples in use at a time. Connections \
                 kept for more than one request need fewer dials.",
                grouped(without)
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use fourtuple::ports::PortRange;

    use super::*;

    fn advice(plan: &Plan) -> Vec<String> {
        super::lines(plan, &plan.budget().unwrap(), &plan.outcome().unwrap())
    }

    #[test]
    fn advice_names_the_rate_that_succeeds() {
        let plan = Plan { closer: Closer::Us, arrival_per_s: Some(471.0), ..Plan::new(Strategy::FullRange) };
        let advice = advice(&plan).join("\n");
        assert!(advice.contains("from then on 470.5 new connections a second succeed"), "{advice}");
    }

    #[test]
    fn advice_names_the_cliff_the_time_and_the_settings() {
        let plan =
            Plan { arrival_per_s: Some(2_000.0), closer: Closer::Us, ..Plan::new(Strategy::KernelDefault) };
        let text = advice(&plan).join("\n");
        for part in [
            "28,232 connections fit",
            "The cliff is at 14,116 connections; at 2,000/s you are there in 7.06s.",
            "IP_LOCAL_PORT_RANGE to 0xFFFF0000",
            "9 source addresses would stay before the cliff.",
            "ip_local_port_range of \"1024 65535\"",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let old = advice(&Plan { search: WindowSearch::Parity, ..plan }).join("\n");
        assert!(old.contains("random-window:500") && !old.contains("0xFFFF0000"), "{old}");
        let windows = Plan::new(Strategy::RandomWindow {
            width: 1_000.try_into().unwrap(),
            tries: 1.try_into().unwrap(),
            then_full_range: false,
        });
        assert!(advice(&windows).join("\n").contains("let the last try search the full range"));
    }

    #[test]
    fn a_rate_below_the_cliff_gets_no_remedy() {
        let plan =
            Plan { arrival_per_s: Some(10.0), closer: Closer::Us, ..Plan::new(Strategy::KernelDefault) };
        let advice = advice(&plan);
        assert!(advice[2].contains("at 10/s you never get there") && advice.len() == 3, "{advice:?}");
    }

    #[test]
    fn advice_names_an_odd_range() {
        let range = PortRange::new(32768, 32796).unwrap();
        let advice = advice(&Plan { range, ..Plan::new(Strategy::KernelDefault) });
        assert!(advice.iter().any(|line| line.contains("odd number of ports")));
    }
}
