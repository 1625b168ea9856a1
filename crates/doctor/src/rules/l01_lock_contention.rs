use fourtuple_record::Severity;
use fourtuple_record::snapshot::{LockWaits, Snapshot, TracedLocks};

use crate::accepting::time;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::counted;

pub(super) const RULE: Rule = Rule {
    id: "L01",
    title: "the network stack waits for locks",
    source: "the tracer of `fourtuple trace locks`",
    threshold: Some(Threshold { default: 5.0, unit: "% of the CPU time of all processors" }),
    explanation: &[
        "A lock of the network stack that several processors want makes all but one of them wait, spinning or asleep. The classes are \
         the classes of `fourtuple trace locks`: the listener and its accept queue, the tables of connections (ehash) and of local ports (bhash), \
         TIME_WAIT, the owner of a socket.",
        "The rule compares the time of all waits of a class with the time of all processors during the interval. The tracepoints \
         lock:contention_begin and lock:contention_end give the waits; in a virtual machine with paravirtualized spinlocks switched off \
         (virt_spin_lock), and for the first waiter of a queued spinlock, waits are missing, so that the true share is greater.",
        "What helps depends on the class: listener and accept queue: a listener for each worker (SO_REUSEPORT); bhash: a port range for \
         each worker, fewer bind() with a port; ehash and time-wait: kept-alive connections; socket owner: one thread for each \
         connection. What does not help: more threads, which add waiters.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let see = |reason| format!("{reason}; `fourtuple trace locks --for 10s` shows the waits");
    let TracedLocks { interval_ns, classes } = snapshot.locks.seen().map_err(see)?;
    let available = *interval_ns as f64 * f64::from(snapshot.processors.max(1));
    let share = |waits: &LockWaits| waits.waited_ns as f64 * 100.0 / available.max(1.0);
    let long = classes.iter().filter(|(_, waits)| share(waits) >= limit);
    Ok(long.map(|(class, waits)| draft(class, waits, share(waits))).collect())
}

fn draft(class: &str, waits: &LockWaits, share: f64) -> Draft {
    let verdict = format!(
        "{share:.0}% of the CPU time is waits for locks of the class {class}: {}, {} in all",
        counted(waits.waits, "wait"),
        time(waits.waited_ns)
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
