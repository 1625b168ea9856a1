//! Limits of descriptors and of the memory of TCP.

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Part, Process, Snapshot};

use crate::doctor::accepting::{during, explains_listener, explains_unix, time};
use crate::doctor::command::{Scope, Setting, Step};
use crate::doctor::draft::{Draft, Remedy, Subject, What};
use crate::doctor::remedies::close_after_peer;
use crate::doctor::rules::{Checked, Rule, Threshold, of_visible};
use crate::doctor::words::{count, counted, doing, percent};
use fourtuple_record::errno;

pub(super) const F01: Rule = Rule {
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
    check: f01,
};

/// Sandboxes set limits below this value to forbid new descriptors.
const SANDBOX: u64 = 64;

fn f01(snapshot: &Snapshot, limit: f64) -> Checked {
    let processes = snapshot.processes.seen()?;
    // Between fork() and execve() a child has copies of all descriptors.
    let is_copy = |process: &Process| {
        let of_parent =
            |other: &Process| other.pid == process.parent && other.descriptors >= process.descriptors;
        process.cpu_ns.is_none() && processes.iter().any(of_parent)
    };
    let near = processes.iter().filter(|process| !is_copy(process)).filter_map(|process| {
        let most = process.descriptor_limit.filter(|most| *most >= SANDBOX)?;
        let is_near = f64::from(process.descriptors) >= most as f64 * limit / 100.0;
        is_near.then(|| draft(snapshot, process, most))
    });
    let hidden = snapshot.connections.seen().map_or(0, |connections| connections.processes_hidden);
    // Each process with sockets has descriptors: their number was not readable.
    let is_unread = |process: &Process| {
        process.descriptors == 0 && process.descriptor_limit.is_some() && process.state != 'Z'
    };
    of_visible(near.collect(), hidden > 0 || processes.iter().any(is_unread))
}

fn draft(snapshot: &Snapshot, process: &Process, most: u64) -> Draft {
    let name = format!("{}[{}]", process.name, process.pid);
    let used = u64::from(process.descriptors);
    let severity = if used >= most { Severity::Critical } else { Severity::Warning };
    let verdict = if used >= most {
        // The limit is one of numbers: a descriptor that is above it was inherited, or open when the limit was lowered.
        let above =
            (used > most).then(|| format!(", not counting {} from before it was set", count(used - most)));
        format!(
            "{name} has {} and may open no more: its limit is {}{}",
            counted(used, "descriptor"),
            count(most),
            above.unwrap_or_default()
        )
    } else {
        format!("{name} has {} of {} descriptors, {}", count(used), count(most), percent(used, most))
    };
    let ceiling = process.descriptor_ceiling.map_or("unlimited".to_owned(), count);
    let mut draft = Draft::new(severity, Subject::Process(process.pid, process.name.clone()), verdict)
        .because(format!("the hard limit is {ceiling}"));
    let connections = snapshot.connections.seen().ok();
    let tuples = connections.into_iter().flat_map(|connections| &connections.tuples);
    let of_process =
        tuples.flat_map(|tuple| tuple.owners.iter().map(move |owner| (owner, tuple.destination)));
    let most_of =
        of_process.filter(|(owner, _)| owner.pid == process.pid).max_by_key(|(owner, _)| owner.sockets);
    if let Some((owner, to)) = most_of.filter(|(owner, _)| u64::from(owner.sockets) * 2 > used) {
        draft = draft.because(format!("{} of them are connections to {to}", count(owner.sockets.into())));
    }
    let unclosed = connections.into_iter().flat_map(|connections| &connections.close_wait);
    let unclosed =
        unclosed.filter(|leak| leak.owner.pid == process.pid && u64::from(leak.settled) * 2 > used);
    for leak in unclosed {
        let number = count(leak.settled.into());
        draft = draft
            .because_first(format!("{number} of them are connections that the peer has closed (CLOSE_WAIT): a higher limit postpones the end"))
            .now(Remedy::advice(format!("restart {name}"), "frees the descriptors, until as many wait for close() again"))
            .proper(close_after_peer(&name));
    }
    // prlimit() refuses a hard limit above fs.nr_open, with EPERM also for root.
    let highest = snapshot.number("fs.nr_open").unwrap_or(u64::MAX);
    let is_highest = highest <= most;
    // At least what systemd gives to services, four times.
    let wanted = (most * 4).max(4_096);
    let wanted = if is_highest { wanted } else { wanted.min(highest) };
    // The soft limit alone, which the colon without a number after it means, as long as the hard limit allows.
    let (limit, hard) = match process.descriptor_ceiling {
        Some(ceiling) if ceiling <= most => (wanted, wanted.to_string()),
        Some(ceiling) => (wanted.min(ceiling), String::new()),
        None => (wanted, String::new()),
    };
    let command = format!("prlimit --pid {} --nofile={limit}:{hard}", process.pid);
    let raised = is_highest.then(|| Step::Set(vec![Setting::new("fs.nr_open", wanted.to_string())]));
    let limited = Step::Other { line: command, scope: Scope::Process, needs_root: true };
    let steps = raised.into_iter().chain([limited]).collect();
    let pid = process.pid;
    let effect = match process.descriptor_ceiling {
        Some(ceiling) if ceiling <= most => {
            "the running process may open more; needs CAP_SYS_RESOURCE, because the hard limit rises too"
        }
        _ => "the running process may open more: its soft limit rises, the hard limit stays",
    };
    // One number alone in a unit file is both limits (systemd.exec(5)), and would lower the hard limit of a service that has a higher one.
    let lasting = match process.descriptor_ceiling {
        Some(ceiling) if ceiling <= limit => limit.to_string(),
        Some(ceiling) => format!("{limit}:{ceiling}"),
        None => format!("{limit}:infinity"),
    };
    let before =
        process.descriptor_ceiling.filter(|_| !hard.is_empty()).map_or(String::new(), |was| was.to_string());
    let undo = format!("prlimit --pid {} --nofile={most}:{before}", process.pid);
    draft = draft.now(Remedy::steps(steps, effect).undone_by(Scope::Process, undo).with(move |snapshot| {
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
        format!("LimitNOFILE={lasting} in the unit of {} (nginx has worker_rlimit_nofile too)", process.name),
        "the limit holds after a restart",
    ))
}

pub(super) const F02: Rule = Rule {
    id: "F02",
    title: "TCP runs out of memory or orphans",
    source: "/proc/net/sockstat, net.ipv4.tcp_mem, net.ipv4.tcp_max_orphans, TcpExt.TCPAbortOnMemory and TCPMemoryPressures",
    threshold: Some(Threshold {
        default: 90.0,
        unit: "% of net.ipv4.tcp_max_orphans or of the high value of net.ipv4.tcp_mem",
    }),
    explanation: &[
        "The three values of net.ipv4.tcp_mem are pages of all TCP sockets of the host. From the second on TCP is under pressure: receive \
         windows shrink and buffers do not grow (tcp_enter_memory_pressure). At the third, TCP allocates nothing more: sends block, \
         received packets and new connections are dropped (__sk_mem_raise_allocated; tcp_check_oom writes \"TCP: out of memory\" to the \
         kernel log).",
        "An orphan is a socket that its process has closed and TCP has not: the peer does not acknowledge the data or the FIN. With more \
         than net.ipv4.tcp_max_orphans the kernel resets them (tcp_too_many_orphans); sockets whose peer has been silent for long are \
         counted twice or four times. TcpExt.TCPAbortOnMemory counts connections that were reset for either reason.",
        "What helps: finding the sockets with long queues (ss -tnm: a peer that does not read, a process that does not), \
         net.ipv4.tcp_orphan_retries=2 to end orphans sooner, more memory by net.ipv4.tcp_mem. What does not help: net.ipv4.tcp_rmem and \
         tcp_wmem with greater values, which let sockets take more.",
    ],
    check: f02,
};

fn f02(snapshot: &Snapshot, limit: f64) -> Checked {
    let memory = snapshot.memory.seen()?;
    let aborts = during(snapshot, "TcpExt.TCPAbortOnMemory");
    let mut drafts = Vec::new();
    let [_, pressure, high] = memory.limits_pages;
    let is_high = high > 0 && memory.pages as f64 >= high as f64 * limit / 100.0;
    let is_pressed = pressure > 0 && memory.pages >= pressure;
    if is_high || is_pressed {
        let severity = if is_high { Severity::Critical } else { Severity::Warning };
        let verdict = format!(
            "TCP sockets use {} of memory, {} of the limit of {} (net.ipv4.tcp_mem); pressure begins at {}",
            counted(memory.pages, "page"),
            percent(memory.pages, high),
            count(high),
            count(pressure)
        );
        drafts.push(
            Draft::new(severity, "TCP memory", verdict)
                .because(format!(
                    "resets for lack of memory or for too many orphans in {1}: {0}",
                    count(aborts),
                    time(snapshot.interval_ns)
                ))
                .now(more_memory(memory.limits_pages))
                .proper(Remedy::advice(
                    "find the sockets with long queues: `ss -tnm`, columns Recv-Q (the process does not read) and Send-Q (the peer does not read)",
                    "the memory is given back",
                )),
        );
    }
    let orphans = snapshot.number("net.ipv4.tcp_max_orphans");
    if let Ok(most) = orphans
        && most > 0
        && memory.orphans as f64 >= most as f64 * limit / 100.0
    {
        let severity = if aborts > 0 { Severity::Critical } else { Severity::Warning };
        let verdict = format!(
            "{} of {} orphaned TCP sockets (net.ipv4.tcp_max_orphans); {} in {}",
            count(memory.orphans),
            count(most),
            counted(aborts, "reset"),
            time(snapshot.interval_ns)
        );
        drafts.push(
            Draft::new(severity, "orphans", verdict)
                .now(Remedy::sysctl("net.ipv4.tcp_max_orphans", (most * 2).to_string(), "space for twice as many"))
                .now(Remedy::sysctl("net.ipv4.tcp_orphan_retries", "2", "new orphans end sooner").unproven())
                .proper(Remedy::advice(
                    "let the program read what the peer has sent before it closes, and close idle peers by a timeout",
                    "fewer sockets are left to the kernel",
                )),
        );
    }
    let drafts: Vec<Draft> = drafts.into_iter().map(explains_memory).collect();
    if drafts.is_empty() && (high == 0 || orphans.is_err()) {
        return Err("net.ipv4.tcp_mem and tcp_max_orphans belong to the host; this network namespace does not show them".to_owned());
    }
    Ok(drafts)
}

/// Declares what a lack of memory explains.
fn explains_memory(draft: Draft) -> Draft {
    let counters = [
        "TcpExt.TCPAbortOnMemory",
        "TcpExt.TCPMemoryPressures",
        "TcpExt.RcvPruned",
        "TcpExt.OfoPruned",
        "TcpExt.TCPOFODrop",
        "TcpExt.TCPRcvQDrop",
        "TcpExt.TCPBacklogDrop",
    ];
    let draft = counters.into_iter().fold(draft, |draft, name| draft.explains(What::Counter(name)));
    let calls = ["accept", "connect", "send", "socket"].into_iter();
    calls.fold(draft, |draft, call| {
        draft.explains(What::calls(call, errno::ENOMEM)).explains(What::calls(call, errno::ENOBUFS))
    })
}

fn more_memory(limits: [u64; 3]) -> Remedy {
    let doubled = limits.map(|pages| pages * 2);
    let [low, pressure, high] = doubled;
    let old = limits.map(|pages| pages.to_string()).join(" ");
    let setting =
        Setting { old: Some(old), ..Setting::new("net.ipv4.tcp_mem", format!("{low} {pressure} {high}")) };
    Remedy::sysctls(vec![setting], "twice the memory, if the host has it free").with(move |snapshot| {
        if let Part::Seen(memory) = &mut snapshot.memory {
            memory.limits_pages = doubled;
        }
    })
}
