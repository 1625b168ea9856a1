use fourtuple_record::{PortsResults, StrategyResult};
use fourtuple_syscalls::socket::Transport;

/// What the results say about this kernel, and what to set here, in plain words.
pub fn advice(results: &PortsResults, transport: Transport) -> Vec<String> {
    match transport {
        Transport::Tcp => tcp(results),
        Transport::Udp => udp(results),
    }
}

fn udp(results: &PortsResults) -> Vec<String> {
    let mut lines = failures(results);
    if let Some(run) = results.strategies.iter().find(|run| run.strategy == "kernel-default")
        && let (Some(even), Some(odd)) = (run.connect_ns.even, run.connect_ns.odd)
    {
        lines.insert(
            0,
            format!(
                "UDP ports are not searched by halves: bind() and connect() take {} on average for even ports and {} for \
                 odd ones. A socket has its port for every destination, so there are {} in all; \
                 fourtuple::dial::UdpDialer can share them (Sharing::Shared).",
                us(even.mean),
                us(odd.mean),
                results.tuples
            ),
        );
    }
    lines
}

fn tcp(results: &PortsResults) -> Vec<String> {
    let find = |name: &str| results.strategies.iter().find(|run| run.strategy == name);
    let mut lines = Vec::new();
    if let Some(run) = find("kernel-default")
        && let (Some(even), Some(odd)) = (run.connect_ns.even, run.connect_ns.odd)
    {
        let (slow, fast, parity) =
            if odd.mean > even.mean { (odd, even, "odd") } else { (even, odd, "even") };
        if slow.mean > 2 * fast.mean {
            lines.push(format!(
                "By default this kernel looks for a port among one half of the range first: connect() takes {} on \
                 average until {} connections to one destination are held, and {} beyond ({} ports).",
                us(fast.mean),
                fast.count,
                us(slow.mean),
                parity
            ));
        } else {
            lines.push(format!(
                "By default connect() takes {} on average here, with no cliff at half of the range at this fill.",
                us(run.connect_ns.all.map_or(0, |all| all.mean))
            ));
        }
    }
    let best = results
        .strategies
        .iter()
        .filter(|run| run.failed() == 0 && run.connections > 0)
        .max_by(|a, b| a.rate_per_s.total_cmp(&b.rate_per_s));
    if let (Some(best), Some(default)) = (best, find("kernel-default"))
        && best.strategy != default.strategy
    {
        lines.push(format!(
            "{} opens the same connections at {:.0} times the rate of the default, without an error.",
            best.strategy,
            best.rate_per_s / default.rate_per_s.max(1e-9)
        ));
    }
    if find("full-range").is_some_and(is_linear) {
        lines.push(
            "Set this on every socket before connect(): setsockopt(fd, SOL_IP, IP_LOCAL_PORT_RANGE (51), \
             &(uint32_t){0xFFFF0000}, 4). It asks for the full range and makes the search linear; bind(source, 0) \
             needs IP_BIND_ADDRESS_NO_PORT (24) first. In Rust: fourtuple::dial::Dialer, whose default is auto."
                .to_owned(),
        );
    } else if find("full-range").is_some() {
        lines.push(
            "This kernel has IP_LOCAL_PORT_RANGE but still searches by halves: give each socket a random window of \
             about 500 ports, and the full range when two windows were full. fourtuple::dial::Dialer does it (auto)."
                .to_owned(),
        );
    }
    lines.extend(failures(results));
    lines
}

fn failures(results: &PortsResults) -> Vec<String> {
    results
        .strategies
        .iter()
        .filter(|run| run.failed() > 0 && run.strategy != "kernel-default")
        .map(|run| {
            format!("{} failed {} of {} dials though ports were free.", run.strategy, run.failed(), run.dials)
        })
        .collect()
}

/// Whether a run took even and odd ports alike.
fn is_linear(run: &StrategyResult) -> bool {
    match (run.connect_ns.even, run.connect_ns.odd) {
        (Some(even), Some(odd)) => odd.mean < 2 * even.mean && even.mean < 2 * odd.mean,
        _ => false,
    }
}

fn us(ns: u64) -> String {
    if ns < 1_000_000 { format!("{:.1} us", ns as f64 / 1e3) } else { format!("{:.2} ms", ns as f64 / 1e6) }
}
