use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::budget::Budget;
use crate::draft::{Draft, Remedy};
use crate::remedies::{drawn_ports, more_sources, printed, running_fix, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P02",
    title: "connect() searches half of the port range before it finds a port",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, and probes of the search over loopback",
    threshold: Some(Threshold { default: 95.0, unit: "% of the ports of the first parity in use" }),
    explanation: &[
        "connect() of a socket without a port looks for one in steps of 2 from a random start: first at all ports with the parity of the first \
         port of the range, then at the others (__inet_hash_connect). bind() to port 0 begins with the others (inet_csk_find_open_port), so \
         that the two do not compete.",
        "Once a source and a destination use all ports of the first parity, which is half of the range, each connect() passes over all of \
         them, one hash lookup each, before it finds a port of the second parity. With the default range these are 14,116 lookups. Measured on \
         Linux 6.18 with 56,512 ports: 17 us for a port of the first parity, 4,682 us for one of the second.",
        "The time is CPU time of the calling thread within connect(), also of a non-blocking one: an event loop stands still meanwhile.",
        "What helps: `fourtuple fix ports` for programs that run, which draws free ports at random; `fourtuple run` for programs that can be \
         restarted; in a program the socket option IP_LOCAL_PORT_RANGE (51) with the value 0xFFFF0000, the whole range, which makes the search \
         linear since Linux 6.8; the crate fourtuple, which does it and shows what the kernel can. Fewer connections to one destination, \
         more source addresses and a wider range keep the use below half.",
        "What does not help: the option on Linux 6.3 to 6.7 (and 6.1 with the backport), where the search stays by parity; \
         net.ipv4.ip_local_port_step_width (Linux 7.1), which keeps the two halves; a faster network.",
        "Ports in TIME_WAIT that connect() may take again (net.ipv4.tcp_tw_reuse) end the search; with them the rule has no finding. It has \
         none either if less than 1% of the ports are free: then ports are missing (P01), and no search finds one sooner.",
    ],
    check,
};

/// Lookups from which on a search is worth a finding: about 0.1 ms.
const LONG_SEARCH: u32 = 500;
/// Nanoseconds of a lookup: measured on Linux 6.18 and 7.2.
const LOOKUP_NS: (f64, f64) = (100.0, 170.0);

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let search = snapshot.search.seen()?;
    let ports = snapshot.ports.seen()?;
    let connections = snapshot.connections.seen()?;
    if search.default != "parity" {
        return Ok(Vec::new());
    }
    let mut past_half = Vec::new();
    for tuple in &connections.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if tuple.in_use * 2 > budget.total {
            past_half.push((tuple, budget));
        }
    }
    if past_half.is_empty() {
        return Ok(Vec::new());
    }
    let is_low = |port: u16| ports.contains(port) && port & 1 == ports.low & 1;
    let low = (ports.low..=ports.high).filter(|port| is_low(*port)).count() as u32;
    let low = low.saturating_sub(connections.held_tcp_low_parity);
    let is_long = |(tuple, budget): &(&Tuple, Budget)| {
        low >= LONG_SEARCH
            && f64::from(tuple.low_parity) >= f64::from(low) * limit / 100.0
            && budget.draws_pay()
    };
    let long = past_half.iter().filter(|past| is_long(past));
    Ok(long.map(|(tuple, budget)| draft(snapshot, tuple, low, budget)).collect())
}

fn draft(snapshot: &Snapshot, subject: &Tuple, low: u32, budget: &Budget) -> Draft {
    let parity = match snapshot.ports.seen() {
        Ok(ports) if ports.low & 1 == 1 => "odd",
        _ => "even",
    };
    let caller = subject.owners.first().map_or_else(|| "this host".to_owned(), process);
    let verdict = format!(
        "{} uses {} of {} {parity} ports: each connect() of {caller} looks at up to {} before it finds a free one",
        tuple(subject),
        count(subject.low_parity.into()),
        count(low.into()),
        counted(low.into(), "port")
    );
    let time = |ns: f64| f64::from(low) * ns / 1e3;
    let mut draft = Draft::new(Severity::Warning, tuple(subject), verdict)
        .because(format!(
            "{} of {} ports are in use",
            count(budget.in_use.into()),
            count(budget.total.into())
        ))
        .because(format!(
            "about {:.0} to {:.0} us of CPU time in each connect(), at 0.10 to 0.17 us a port",
            time(LOOKUP_NS.0),
            time(LOOKUP_NS.1)
        ));
    draft = draft.because_if(running_fix(subject));
    draft.now.extend(drawn_ports(subject));
    draft.now.extend(more_sources(snapshot, subject));
    draft.now.extend(wider_range(snapshot, Some(subject)));
    draft.proper.extend(printed(snapshot, subject));
    // The probe has connected with the option, in a network namespace of its own.
    let is_tested = snapshot.search.seen().is_ok_and(|search| search.option == "linear");
    if is_tested {
        let option = Remedy::advice(
            "in the program: setsockopt(fd, IPPROTO_IP, 51 /* IP_LOCAL_PORT_RANGE */, &(uint32_t){0xFFFF0000}, 4) before connect()",
            "the search goes port by port; the crate `fourtuple` and `fourtuple fix --print go`, `python` and `netty` have the code",
        );
        draft = draft.proper(option.tested(is_tested));
    }
    draft.proper(Remedy::advice(
        "restart the program with `fourtuple run -- PROGRAM`",
        "the same without a change of the program, from its start, also without root",
    ))
}
