use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Part, Process, Snapshot};

use crate::accepting::{explains_listener, explains_unix};
use crate::command::{Scope, Setting, Step};
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, doing, percent};

pub(super) const RULE: Rule = Rule {
    id: "F01",
    title: "a process runs out of descriptors",
    source: "/proc/PID/fd, /proc/PID/limits (RLIMIT_NOFILE)",
    threshold: Some(Threshold { default: 90.0, unit: "% of RLIMIT_NOFILE" }),
    explanation: &[
        "Each socket has a descriptor, and a process has at most as many as the soft limit of RLIMIT_NOFILE. At the limit accept() and \
         socket() fail with EMFILE (alloc_fd). The connection that accept() did not take stays in the accept queue, so that an event loop \
         wakes again and again without progress, and the queue fills (A01).",
        "The soft limit is often 1,024 for historical reasons (select()), while the hard limit is 524,288 (systemd). A proxy needs two \
         descriptors for each connection: one to the client, one to the server.",
        "What helps at once: prlimit, which changes the limit of a running process, up to the hard limit without privilege, and \
         with CAP_SYS_RESOURCE up to fs.nr_open; HAProxy computes its maxconn from the limit when it starts, and needs a restart. What lasts: LimitNOFILE= of systemd, \
         worker_rlimit_nofile of nginx.",
        "What does not help: fs.file-max, the limit of the whole host; a leak is not a limit: descriptors that grow without connections \
         (T07 for CLOSE_WAIT) use up any limit.",
    ],
    check,
};

/// Sandboxes set limits below this value to forbid new descriptors.
const SANDBOX: u64 = 64;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let processes = snapshot.processes.seen()?.iter();
    let near = processes.filter_map(|process| {
        let most = process.descriptor_limit.filter(|most| *most >= SANDBOX)?;
        let is_near = f64::from(process.descriptors) >= most as f64 * limit / 100.0;
        is_near.then(|| draft(snapshot, process, most))
    });
    Ok(near.collect())
}

fn draft(snapshot: &Snapshot, process: &Process, most: u64) -> Draft {
    let name = format!("{}[{}]", process.name, process.pid);
    let used = u64::from(process.descriptors);
    let severity = if used >= most { Severity::Critical } else { Severity::Warning };
    let verdict =
        format!("{name} has {} of {} descriptors, {}", count(used), count(most), percent(used, most));
    let ceiling = process.descriptor_ceiling.map_or("unlimited".to_owned(), count);
    let mut draft = Draft::new(severity, &name, verdict).because(format!("the hard limit is {ceiling}"));
    // prlimit() refuses a hard limit above fs.nr_open, with EPERM also for root.
    let highest = snapshot.number("fs.nr_open").unwrap_or(u64::MAX);
    let is_highest = highest <= most;
    let wanted = if is_highest { most * 4 } else { (most * 4).min(highest) };
    let (limit, command) = match process.descriptor_ceiling {
        Some(ceiling) if ceiling <= most => {
            (wanted, format!("prlimit --pid {} --nofile={wanted}:{wanted}", process.pid))
        }
        Some(ceiling) => {
            let limit = wanted.min(ceiling);
            (limit, format!("prlimit --pid {} --nofile={limit}:", process.pid))
        }
        None => (wanted, format!("prlimit --pid {} --nofile={wanted}:", process.pid)),
    };
    let raised = is_highest.then(|| Step::Set(vec![Setting::new("fs.nr_open", wanted.to_string())]));
    let limited = Step::Other { line: command, scope: Scope::Process, needs_root: true };
    let steps = raised.into_iter().chain([limited]).collect();
    let pid = process.pid;
    let effect = match process.descriptor_ceiling {
        Some(ceiling) if ceiling <= most => {
            "the running process may open more; needs CAP_SYS_RESOURCE, because the hard limit rises too"
        }
        _ => "the running process may open more",
    };
    draft = draft.now(Remedy::steps(steps, effect).with(move |snapshot| {
        if let Part::Seen(processes) = &mut snapshot.processes {
            let found = processes.iter_mut().filter(|process| process.pid == pid);
            found.for_each(|process| process.descriptor_limit = Some(limit));
        }
    }));
    for call in ["accept", "socket"] {
        let (process, address) = (Some(pid), None);
        draft = draft.explains(What::Calls { call, errno: errno::EMFILE, process, address });
    }
    // Without a descriptor accept() leaves the queue as it is.
    let listeners = snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default();
    for listener in listeners.iter().filter(|listener| listener.owners.iter().any(|owner| owner.pid == pid)) {
        draft = explains_listener(draft, snapshot, listener);
    }
    let unix = snapshot.unix_listeners.seen().map(Vec::as_slice).unwrap_or_default();
    for listener in unix.iter().filter(|listener| listener.owners.iter().any(|owner| owner.pid == pid)) {
        draft = explains_unix(draft, listener);
        if listener.waiting > 0 {
            let waits = doing(listener.waiting.into(), "connection", "wait");
            draft = draft.because(format!("{waits} in the accept queue of {}", listener.path));
        }
    }
    draft.proper(Remedy::advice(
        format!("LimitNOFILE={limit} in the unit of {} (nginx also: worker_rlimit_nofile)", process.name),
        "the limit holds after a restart",
    ))
}
