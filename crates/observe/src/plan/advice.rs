use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::ports::{Budget, Closer, PortRange, TIME_WAIT};
use fourtuple_record::measure::words::{counted, decimal, grouped};
use fourtuple_record::{PlanOther, format_duration, format_time};

use crate::plan::{Plan, PlanOutcome, Reuse, WindowSearch};

/// Returns the advice for a plan, one sentence or two a line: how many connections fit, when the ports run out and when
/// connect() gets slow, and which settings help.
pub(super) fn lines(
    plan: &Plan,
    budget: &Budget,
    outcome: &PlanOutcome,
    others: &[PlanOther],
    reuse: Option<Reuse>,
) -> Vec<String> {
    let mut lines = vec![format!(
        "{} {}: {} x {} x {}.",
        counted(outcome.capacity, "connection"),
        if outcome.capacity == 1 { "fits" } else { "fit" },
        counted(u64::from(budget.ports()), "port"),
        counted(plan.sources, "source"),
        counted(plan.destinations, "destination"),
    )];
    lines.extend(churn(plan, budget, outcome));
    lines.extend(cliff(plan, outcome));
    lines.extend(ordinary(plan, others));
    lines.extend(failures(plan, budget, outcome));
    lines.extend(odd(plan, outcome));
    lines.extend(remedies(plan, budget, outcome, others, reuse));
    lines
}

fn churn(plan: &Plan, budget: &Budget, outcome: &PlanOutcome) -> Option<String> {
    let (rate, steady) = (plan.arrival_per_s?, outcome.steady_tuples?);
    let open = match plan.hold {
        Duration::ZERO => "closed at once".to_owned(),
        hold => format!("open for {}", format_time(hold)),
    };
    let wait = match plan.closer {
        Closer::Us => format!(" and then {} in TIME_WAIT", format_time(plan.time_wait)),
        Closer::Them => String::new(),
    };
    let unit = if budget.pairs() == 1 { "port" } else { "tuple" };
    let connections = format!("New connections at {}/s, each {open}{wait},", decimal(rate));
    let all = outcome.capacity;
    Some(match outcome.exhausted_after {
        None => format!("{connections} use {} of {} at a time.", grouped(steady), counted(all, unit)),
        Some(after) => format!(
            "{connections} need {} and have {}: the {unit}s run out after {}, and from then on at most {}/s find one.",
            counted(steady, unit),
            grouped(all),
            format_time(after),
            decimal(budget.ceiling_per_s(plan.in_use())),
        ),
    })
}

/// Returns `, after 7.06s at 2,000/s`, or that it never happens at this rate.
fn when(rate: Option<f64>, after: Option<Duration>) -> String {
    match (rate, after) {
        (Some(rate), Some(after)) => format!(", after {} at {}/s", format_time(after), decimal(rate)),
        (Some(rate), None) => format!(", which {}/s never reach", decimal(rate)),
        (None, _) => String::new(),
    }
}

fn cliff(plan: &Plan, outcome: &PlanOutcome) -> Option<String> {
    // With a single port there is nothing beyond.
    let at = counted(outcome.cliff_connections.filter(|cliff| *cliff < outcome.capacity)?, "connection");
    let (first, last) = (outcome.by_fill.first()?, outcome.by_fill.last()?);
    Some(format!(
        "connect() turns slow at {at}{}: it then looks through half of the ports in vain, which takes about {} instead of {}.",
        when(plan.arrival_per_s, outcome.cliff_after),
        format_duration(last.mean_ns),
        format_duration(first.mean_ns),
    ))
}

/// Returns what the plan would be for an ordinary program, if it is for another strategy.
fn ordinary(plan: &Plan, others: &[PlanOther]) -> Option<String> {
    let other = others.iter().find(|other| other.strategy == Strategy::KernelDefault.to_string())?;
    Some(format!(
        "An ordinary program (strategy kernel-default) turns slow at {}{}.",
        counted(other.cliff_connections?, "connection"),
        when(plan.arrival_per_s, other.cliff_after_ns.map(Duration::from_nanos)),
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
            "Dials that fail though ports are free, while one pair fills up: {} of {}. To avoid them {way_out}.",
            grouped(outcome.failed_dials),
            grouped(u64::from(budget.ports())),
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

fn remedies(
    plan: &Plan,
    budget: &Budget,
    outcome: &PlanOutcome,
    others: &[PlanOther],
    reuse: Option<Reuse>,
) -> Vec<String> {
    let mut lines = Vec::new();
    let never = plan.arrival_per_s.is_some() && outcome.cliff_after.is_none();
    if outcome.cliff_connections.is_some_and(|cliff| cliff < outcome.capacity) && !never {
        let takes = others
            .iter()
            .find(|other| other.cliff_connections.is_none())
            .and_then(|other| other.last_mean_ns);
        let takes = takes.map_or_else(String::new, |ns| {
            format!(", about {} with nearly all ports in use", format_duration(ns))
        });
        lines.push(match plan.search {
            WindowSearch::Linear => format!(
                "Set IP_LOCAL_PORT_RANGE to 0xFFFF0000 on the socket (strategy full-range of fourtuple): the kernel then goes from \
                 port to port, and connect() stays fast{takes}."
            ),
            WindowSearch::Parity => format!(
                "This kernel searches windows by parity too: take small ones at random places and the full range as a last try \
                 (strategy random-window:500 of fourtuple), and connect() stays fast{takes}."
            ),
        });
    }
    if outcome.sources_needed > plan.sources {
        let goal = if outcome.cliff_connections.is_some() {
            "connect() never turns slow"
        } else {
            "the ports never run out"
        };
        lines.push(format!("With {} {goal}.", counted(outcome.sources_needed, "source address")));
    }
    lines.extend(wider(plan, outcome));
    if outcome.exhausted_after.is_some() {
        lines.extend(tcp_tw_reuse(plan, budget, reuse));
        if plan.closer == Closer::Us {
            lines.push(
                "If the server closed first, this host would hold no port after the end of a connection. Connections kept for more \
                 than one request need fewer ports."
                    .to_owned(),
            );
        }
    }
    lines
}

/// Returns whether a wider port range is enough for the rate.
fn wider(plan: &Plan, outcome: &PlanOutcome) -> Option<String> {
    let (rate, steady) = (plan.arrival_per_s?, outcome.steady_tuples?);
    let range = PortRange::new(1024, u16::MAX).expect("1024 is below 65535");
    if plan.range.len() >= range.len() || outcome.exhausted_after.is_none() && outcome.cliff_after.is_none() {
        return None;
    }
    let wide = Plan { range, ..plan.clone() }.budget().ok()?;
    let cliff = outcome.cliff_connections.map(|_| wide.before_the_cliff());
    let rate = decimal(rate);
    let enough = if steady > wide.capacity() {
        format!("not enough for {rate}/s, but for {}/s", decimal(wide.ceiling_per_s(plan.in_use()).floor()))
    } else if let Some(cliff) = cliff.filter(|cliff| steady > *cliff) {
        format!("enough for {rate}/s, though connect() turns slow at {}", counted(cliff, "connection"))
    } else {
        format!("enough for {rate}/s")
    };
    Some(format!(
        "net.ipv4.ip_local_port_range=\"1024 65535\" gives {}: {enough}. Reserve the ports of servers in it \
         (net.ipv4.ip_local_reserved_ports).",
        counted(wide.ports().into(), "port")
    ))
}

/// Returns what net.ipv4.tcp_tw_reuse does, unless the plan has another TIME_WAIT than Linux.
fn tcp_tw_reuse(plan: &Plan, budget: &Budget, reuse: Option<Reuse>) -> Option<String> {
    let rate = plan.arrival_per_s?;
    if plan.closer != Closer::Us || plan.time_wait != TIME_WAIT {
        return None;
    }
    let after = reuse.map_or(Duration::from_secs(1), |reuse| reuse.after);
    let ceiling = budget.ceiling_per_s(plan.hold.saturating_add(after));
    let enough = if ceiling >= rate { "enough" } else { "not enough" };
    let effect = format!(
        "connect() takes a port again {} after its close where the peer sends TCP timestamps: up to {}/s, {enough} for {}/s",
        format_time(after),
        decimal(ceiling.floor()),
        decimal(rate),
    );
    let timestamps = match reuse {
        Some(Reuse { timestamps: false, .. }) => {
            " It needs net.ipv4.tcp_timestamps=1, which is 0 on this host."
        }
        _ => "",
    };
    Some(match reuse.map(|reuse| reuse.tcp_tw_reuse) {
        Some(1) => format!(
            "This host has net.ipv4.tcp_tw_reuse=1: {effect} (--time-wait {} plans with it).{timestamps}",
            fourtuple_record::exact_duration(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX))
        ),
        Some(2) => format!(
            "This host has net.ipv4.tcp_tw_reuse=2, which concerns loopback only. With net.ipv4.tcp_tw_reuse=1 {effect}.{timestamps}"
        ),
        Some(value) => {
            format!(
                "This host has net.ipv4.tcp_tw_reuse={value}. With net.ipv4.tcp_tw_reuse=1 {effect}.{timestamps}"
            )
        }
        None => format!("With net.ipv4.tcp_tw_reuse=1 {effect}."),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice_on(plan: &Plan, reuse: Option<Reuse>) -> Vec<String> {
        crate::plan::results(plan, reuse).unwrap().advice
    }

    fn advice(plan: &Plan) -> Vec<String> {
        advice_on(plan, None)
    }

    fn churning(rate: f64, strategy: Strategy) -> Plan {
        Plan { closer: Closer::Us, arrival_per_s: Some(rate), ..Plan::new(strategy) }
    }

    #[test]
    fn advice_names_the_rate_that_succeeds() {
        let advice = advice(&churning(471.0, Strategy::FullRange)).join("\n");
        let line = "New connections at 471/s, each closed at once and then 60.0s in TIME_WAIT, need 28,260 ports and \
                    have 28,232: the ports run out after 59.9s, and from then on at most 470.5/s find one.";
        assert!(advice.contains(line), "{advice}");
    }

    #[test]
    fn advice_names_the_cliff_the_time_and_the_settings() {
        let plan = churning(2_000.0, Strategy::KernelDefault);
        let text = advice(&plan).join("\n");
        for part in [
            "28,232 connections fit",
            "connect() turns slow at 14,116 connections, after 7.06s at 2,000/s: ",
            "IP_LOCAL_PORT_RANGE to 0xFFFF0000",
            "connect() stays fast, about ",
            "With 9 source addresses connect() never turns slow.",
            "ip_local_port_range=\"1024 65535\" gives 64,512 ports: not enough for 2,000/s, but for 1,075/s.",
            "With net.ipv4.tcp_tw_reuse=1 connect() takes a port again 1.00s after its close",
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
    fn a_plan_for_another_strategy_names_the_ordinary_program() {
        let text = advice(&churning(2_000.0, Strategy::FullRange)).join("\n");
        let line = "An ordinary program (strategy kernel-default) turns slow at 14,116 connections, after 7.06s at 2,000/s.";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("With 5 source addresses the ports never run out."), "{text}");
    }

    #[test]
    fn a_wider_range_is_enough_or_not() {
        for (rate, strategy, expected) in [
            (2_000.0, Strategy::FullRange, "not enough for 2,000/s, but for 1,075/s."),
            (1_000.0, Strategy::FullRange, "64,512 ports: enough for 1,000/s. "),
            (
                1_000.0,
                Strategy::KernelDefault,
                "enough for 1,000/s, though connect() turns slow at 32,256 connections. ",
            ),
            (500.0, Strategy::KernelDefault, "enough for 500/s. "),
        ] {
            let text = advice(&churning(rate, strategy)).join("\n");
            assert!(text.contains(expected), "{rate}: {text}");
        }
        let wide =
            Plan { range: PortRange::new(1024, 65535).unwrap(), ..churning(2_000.0, Strategy::FullRange) };
        assert!(!advice(&wide).join("\n").contains("ip_local_port_range="));
    }

    #[test]
    fn the_reuse_of_this_host_is_named_with_its_rate() {
        let after = Duration::from_secs(1);
        let plan = churning(2_000.0, Strategy::FullRange);
        for (value, expected) in [
            (0, "This host has net.ipv4.tcp_tw_reuse=0. With net.ipv4.tcp_tw_reuse=1 connect()"),
            (1, "This host has net.ipv4.tcp_tw_reuse=1: connect() takes a port again 1.00s"),
            (2, "This host has net.ipv4.tcp_tw_reuse=2, which concerns loopback only. With "),
        ] {
            let text =
                advice_on(&plan, Some(Reuse { tcp_tw_reuse: value, timestamps: true, after })).join("\n");
            assert!(text.contains(expected) && text.contains("up to 28,232/s, enough for 2,000/s"), "{text}");
            assert_eq!(text.contains("--time-wait 1s plans with it"), value == 1, "{text}");
        }
        let fast = Plan { arrival_per_s: Some(30_000.0), ..plan.clone() };
        let without = Some(Reuse { tcp_tw_reuse: 1, timestamps: false, after });
        let text = advice_on(&fast, without).join("\n");
        assert!(
            text.contains("not enough for 30,000/s") && text.contains("which is 0 on this host"),
            "{text}"
        );
        let other = Plan { time_wait: Duration::from_secs(15), arrival_per_s: Some(5_000.0), ..plan };
        assert!(!advice(&other).join("\n").contains("tcp_tw_reuse"));
    }

    #[test]
    fn a_rate_below_the_cliff_gets_no_remedy() {
        let advice = advice(&churning(10.0, Strategy::KernelDefault));
        assert!(advice[2].contains("which 10/s never reach") && advice.len() == 3, "{advice:?}");
        assert!(advice[1].ends_with("use 600 of 28,232 ports at a time."), "{advice:?}");
    }

    #[test]
    fn one_of_everything_reads_well() {
        let one = Plan { range: PortRange::single(4000), ..churning(1.0, Strategy::KernelDefault) };
        let text = advice(&one).join("\n");
        assert!(text.starts_with("1 connection fits: 1 port x 1 source x 1 destination.\n"), "{text}");
        assert!(text.contains("need 60 ports and have 1: the ports run out after 1.00s"), "{text}");
        assert!(
            !["1 ports", "1 connections", "0 tuples"]
                .iter()
                .any(|wrong| format!(" {text}").contains(&format!(" {wrong}"))),
            "{text}"
        );
        let none = advice(&Plan { arrival_per_s: Some(0.0), ..one }).join("\n");
        assert!(none.contains("use 0 of 1 port at a time."), "{none}");
    }

    #[test]
    fn advice_names_an_odd_range() {
        let range = PortRange::new(32768, 32796).unwrap();
        let advice = advice(&Plan { range, ..Plan::new(Strategy::KernelDefault) });
        assert!(advice.iter().any(|line| line.contains("odd number of ports")));
    }
}
