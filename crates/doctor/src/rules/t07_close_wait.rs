use fourtuple_record::Severity;
use fourtuple_record::snapshot::{CloseWait, Process, Snapshot, UnixCloseWait};

use crate::command::Scope;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, percent, process, time};

pub(super) const RULE: Rule = Rule {
    id: "T07",
    title: "a process does not close connections that the peer has closed",
    source: "sock_diag(7) (inet_diag, tcpi_last_data_recv and tcpi_last_ack_recv), descriptors in /proc/PID/fd; unix_diag \
             (UNIX_DIAG_SHUTDOWN, UNIX_DIAG_PEER), read twice",
    threshold: Some(Threshold { default: 50.0, unit: "sockets in CLOSE_WAIT for a minute or more" }),
    explanation: &[
        "CLOSE_WAIT means: the peer has sent FIN, and the program has not called close(). The kernel waits for the program without a limit; no timer \
         ends the state. Each socket keeps a descriptor, memory and, on a client, a source port.",
        "Many sockets that stay in CLOSE_WAIT are a fault of the program: it does not read to the end of the stream (read() returns 0), it lost the \
         descriptor on an error path, a thread is blocked, or a pool of connections keeps closed ones until it needs one. A few sockets of a \
         pool are normal. At the end the program has no descriptor left (EMFILE, rule F01) or no source port (P01).",
        "The age is the time since the last packet of the peer, which is its FIN or later. The rule counts sockets with an age of a minute or more by \
         process. As many sockets with an age of 5 s or more are a notice: a program may be slow to close, or have begun to leak.",
        "Unix sockets have no such state and no times: the rule counts sockets whose peer had closed at both readings (unix_release_sock). They are a \
         notice; with an interval of a minute (`doctor --for 60s`) they are a leak.",
        "What helps: the change in the program; as a pool, a check of idle connections (an idle timeout below the server's). A restart of the process \
         frees the sockets.",
        "What does not help: net.ipv4.tcp_fin_timeout and net.ipv4.tcp_keepalive_time. Keepalives end such a connection only if the peer answers \
         with RST, and the descriptor stays with the program also then.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let processes = snapshot.processes.seen().map(Vec::as_slice).unwrap_or_default();
    let drafts = connections.close_wait.iter().filter_map(|leak| {
        let process = processes.iter().find(|process| process.pid == leak.owner.pid);
        let (is_leak, may_be_leak) = (f64::from(leak.old) >= limit, f64::from(leak.settled) >= limit);
        (is_leak || may_be_leak).then(|| draft(leak, is_leak, process))
    });
    let unix = connections.unix_close_wait.iter().filter(|leak| f64::from(leak.settled) >= limit);
    Ok(drafts.chain(unix.filter_map(|leak| of_unix(leak, processes))).collect())
}

/// Closed peers of unix sockets that are younger may be on their way to close().
const MIN_UNIX_NS: u64 = 1_000_000_000;

fn of_unix(leak: &UnixCloseWait, processes: &[Process]) -> Option<Draft> {
    let seconds = leak.settled_ns as f64 / 1e9;
    let is_leak = seconds >= 60.0;
    if leak.settled_ns < MIN_UNIX_NS {
        return None;
    }
    let name = process(&leak.owner);
    let at = match leak.path.as_str() {
        "" => "without a path of their own".to_owned(),
        path => format!("most at {path}"),
    };
    let verdict = format!(
        "{name} has not closed {} whose peer closed {} ago or more, {at}",
        counted(leak.settled.into(), "unix socket"),
        time(seconds)
    );
    let limits = processes.iter().find(|process| process.pid == leak.owner.pid);
    let severity = if is_leak { Severity::Warning } else { Severity::Notice };
    let draft = Draft::new(severity, format!("{name} unix"), verdict)
        .because(format!(
            "{} whose peer has closed in all",
            counted(leak.owner.sockets.into(), "unix socket")
        ))
        .because_if(share(leak.owner.sockets, limits));
    if !is_leak {
        return Some(draft.now(Remedy::own(
            "doctor --for 60s",
            "shows whether the sockets stay for a minute, which the rule then calls a leak",
        )));
    }
    Some(
        draft
            .now(Remedy::advice("restart the process", "frees the sockets and their descriptors"))
            .proper(Remedy::advice(
                "in the program: close() when read() returns 0, also on error paths and for idle connections of a pool",
                "no timer of the kernel closes a unix socket",
            )),
    )
}

/// Returns the share of the descriptors of a process that its sockets take.
fn share(sockets: u32, limits: Option<&Process>) -> Option<String> {
    let limit = limits.and_then(|process| process.descriptor_limit)?;
    Some(format!(
        "they take {} of the {} descriptors of the process (RLIMIT_NOFILE)",
        percent(sockets.into(), limit),
        count(limit)
    ))
}

fn draft(leak: &CloseWait, is_leak: bool, limits: Option<&Process>) -> Draft {
    let name = match leak.owner.pid {
        // The census cannot see the process.
        0 => "a process of another user or namespace".to_owned(),
        _ => process(&leak.owner),
    };
    let (severity, sockets, ago) = match is_leak {
        true => (Severity::Warning, leak.old, "a minute ago or more"),
        false => (Severity::Notice, leak.settled, "5 s ago or more"),
    };
    let verdict = format!(
        "{name} has not closed {} that the peer closed {ago} (CLOSE_WAIT), the oldest silent for {}, most with {}",
        counted(sockets.into(), "connection"),
        time(leak.oldest_ns as f64 / 1e9),
        // A client has one port of the server; a server has many ports of a client.
        if leak.remote.port() == 0 { leak.remote.ip().to_string() } else { leak.remote.to_string() }
    );
    let list = match leak.owner.pid {
        0 => "ss -tnp state close-wait".to_owned(),
        pid => format!("ss -tnp state close-wait | grep pid={pid},"),
    };
    let draft = Draft::new(severity, name, verdict)
        .because(format!("{} in CLOSE_WAIT in all", counted(leak.owner.sockets.into(), "socket")))
        .because_if(share(leak.owner.sockets, limits));
    if !is_leak {
        return draft.now(Remedy::own(
            "doctor",
            "in a minute: shows whether the sockets stay, which the rule then calls a leak",
        ));
    }
    draft
        .now(Remedy::other(
            Scope::Namespace,
            list,
            "lists the connections, with the descriptors",
        ))
        .now(Remedy::advice("restart the process", "frees the sockets, their descriptors and ports"))
        .proper(Remedy::advice(
            "in the program: close() when read() returns 0, also on error paths and for idle connections of a pool",
            "no timer of the kernel ends CLOSE_WAIT",
        ))
}
