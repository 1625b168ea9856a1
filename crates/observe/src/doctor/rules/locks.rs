//! Locks and searches that cost processor time.

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{LockWaits, Snapshot, TracedLocks};

use crate::doctor::accepting::time;
use crate::doctor::draft::{Draft, Remedy};
use crate::doctor::remedies::{shorter_searches, wider_range};
use crate::doctor::rules::{Checked, Rule, Threshold};
use crate::doctor::words::{count, counted, doing};

pub(super) const L01: Rule = Rule {
    id: "L01",
    title: "the network stack waits for locks",
    source: "the tracer of `fourtuple trace locks`",
    threshold: Some(Threshold { default: 5.0, unit: "% of the time of all processors" }),
    explanation: &[
        "A lock of the network stack that several processors want makes all but one of them wait, spinning or asleep. The classes are \
         the classes of `fourtuple trace locks`: the listener and its accept queue, the tables of connections (ehash) and of local ports (bhash), \
         TIME_WAIT, the owner of a socket.",
        "The rule compares the time of all waits of a class, of the threads of the network namespace, with the time of all processors during the interval. The tracepoints \
         lock:contention_begin and lock:contention_end give the waits; in a virtual machine with paravirtualized spinlocks switched off \
         (virt_spin_lock), and for the first waiter of a queued spinlock, waits are missing, so that the true share is greater.",
        "What helps depends on the class: listener and accept queue: a listener for each worker (SO_REUSEPORT); bhash: a port range for \
         each worker, fewer bind() with a port; ehash and time-wait: kept-alive connections; socket owner: one thread for each \
         connection. What does not help: more threads, which add waiters.",
    ],
    check: l01,
};

fn l01(snapshot: &Snapshot, limit: f64) -> Checked {
    let see = |reason| {
        format!("{reason}; `fourtuple trace locks --for 10s` shows the waits, and what this host hides")
    };
    let TracedLocks { interval_ns, classes } = snapshot.locks.seen().map_err(see)?;
    let available = *interval_ns as f64 * f64::from(snapshot.processors.max(1));
    let share = |waits: &LockWaits| waits.waited_ns as f64 * 100.0 / available.max(1.0);
    let long = classes.iter().filter(|(_, waits)| share(waits) >= limit);
    Ok(long.map(|(class, waits)| draft(class, waits, *interval_ns)).collect())
}

fn draft(class: &str, waits: &LockWaits, interval_ns: u64) -> Draft {
    // A waiter spins or sleeps, so its time is not CPU time, and there may be more waiters than processors.
    let at_a_time = waits.waited_ns as f64 / interval_ns.max(1) as f64;
    let verdict = format!(
        "threads wait for locks of the class {class}, {at_a_time:.1} of them at any time: {}, {} in {}",
        counted(waits.waits, "wait"),
        time(waits.waited_ns),
        time(interval_ns)
    );
    let change = match class {
        "listener" | "accept queue" => {
            "a listener for each worker: SO_REUSEPORT (nginx: `reuseport`; HAProxy: `shards by-thread`)"
        }
        "ehash" | "time-wait" => "kept-alive connections, so that fewer are opened and closed",
        "bhash" => {
            "a port range for each worker (IP_LOCAL_PORT_RANGE), and connect() without bind() to a port"
        }
        "socket owner" => "one thread for each connection",
        _ => "look at the call paths of `fourtuple trace locks`",
    };
    let mean = waits.waited_ns.checked_div(waits.waits).unwrap_or(0);
    Draft::new(Severity::Warning, class, verdict)
        .because(format!("mean wait {}", time(mean)))
        .now(Remedy::own("trace locks --for 10s", "shows the call paths, the ports and the processes"))
        .proper(Remedy::advice(change, "the processors no longer want the same lock"))
}

pub(super) const L02: Rule = Rule {
    id: "L02",
    title: "many sockets share each local port",
    source: "sock_diag(7), net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 1000.0, unit: "sockets for each usable port" }),
    explanation: &[
        "All sockets with the same local port are in one list (struct inet_bind_bucket; since Linux 6.1 also struct inet_bind2_bucket, \
         for port and address). connect() without a port does not walk the list. bind() with a port and SO_REUSEADDR walks it to look for \
         a conflict (inet_csk_bind_conflict), under the lock of the bucket, unless all sockets of the port were bound with SO_REUSEADDR \
         too.",
        "Measured with Linux 6.18 on a port that connect() had chosen, time of one bind() to the same address and port: 0.6 us with 1 \
         socket, 1.4 us with 100, 8.7 us with 1,000, 49 us with 3,000, 500 us with 12,000. connect() took 3 us throughout.",
        "The rule divides the outgoing connections of the namespace by the usable ports, which is the mean length of the lists. Accepted \
         connections, all of which have the port of their listener, do not count: they concern only a bind() to this port.",
        "What helps: a wider net.ipv4.ip_local_port_range; connect() that chooses the port instead of bind() with a port \
         (IP_BIND_ADDRESS_NO_PORT, IP_LOCAL_PORT_RANGE); `fourtuple fix ports` binds by port only where a tuple is nearly full. What does \
         not help: more destinations, which make the lists longer.",
    ],
    check: l02,
};

fn l02(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let usable = u64::from(snapshot.ports.seen()?.usable()).max(1);
    let listed = connections.tuples.iter().flat_map(|tuple| tuple.states.values());
    let outgoing: u64 = listed.chain(connections.tuples_left_out_states.values()).sum();
    let mean = outgoing as f64 / usable as f64;
    if mean < limit {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} {}, {} for each: a bind() to such a port walks them all",
        doing(outgoing, "outgoing connection", "share"),
        counted(usable, "port"),
        count(mean as u64)
    );
    let mut draft = Draft::new(Severity::Notice, "bind buckets", verdict);
    draft.now.extend(wider_range(snapshot, None));
    Ok(vec![
        draft
            .proper(Remedy::advice(
                "connect() without bind() to a port (IP_BIND_ADDRESS_NO_PORT); `fourtuple fix --print nginx` and others print the setting",
                "the lists are not walked",
            )),
    ])
}

pub(super) const L03: Rule = Rule {
    id: "L03",
    title: "connect() spends CPU time in the port search",
    source: "the tracer of `fourtuple trace connect`",
    threshold: Some(Threshold { default: 5.0, unit: "% of the CPU time of all processors" }),
    explanation: &[
        "connect() looks for a local port whose 4-tuple is free (__inet_hash_connect), on the CPU, with softirqs disabled while it looks \
         at a port. While few ports are in use a search takes a few microseconds; once half of the range towards a destination is in use, \
         the search passes over half of the range first, which takes milliseconds (P02).",
        "The rule compares the time of all searches with the time of all processors during the interval.",
        "What helps: `fourtuple fix ports`, for programs that run; IP_LOCAL_PORT_RANGE on Linux 6.8 or later, which makes the search \
         linear; more source addresses or destinations; kept-alive connections. What does not help: more processors, because searches \
         towards one destination look at the same ports.",
    ],
    check: l03,
};

fn l03(snapshot: &Snapshot, limit: f64) -> Checked {
    let traced = snapshot
        .traced
        .seen()
        .map_err(|reason| format!("{reason}; `fourtuple trace connect --for 10s` shows the searches"))?;
    let available = snapshot.interval_ns as f64 * f64::from(snapshot.processors.max(1));
    let share = traced.search_ns as f64 * 100.0 / available.max(1.0);
    if share < limit {
        return Ok(Vec::new());
    }
    let mean = traced.search_ns.checked_div(traced.searches).unwrap_or(0);
    let verdict = format!(
        "{share:.0}% of the CPU time is the port search of connect(): {}, {} each",
        counted(traced.searches, "search"),
        time(mean)
    );
    let mut draft = Draft::new(Severity::Warning, "port search", verdict);
    if let Some(p99) = traced.search_p99_ns {
        draft = draft.because(format!("1% of the searches took {} or longer", time(p99)));
    }
    let draft = shorter_searches(draft, snapshot, traced);
    Ok(vec![
        draft.now(Remedy::own("trace connect --for 10s", "shows the searches by process and destination")),
    ])
}
