use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Part, Snapshot};

use crate::accepting::{during, time};
use crate::command::Setting;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, percent};

pub(super) const RULE: Rule = Rule {
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
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
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
                .now(Remedy::sysctl("net.ipv4.tcp_max_orphans", (most * 2).to_string(), "room for twice as many"))
                .now(Remedy::sysctl("net.ipv4.tcp_orphan_retries", "2", "new orphans end sooner").unproven())
                .proper(Remedy::advice(
                    "let the program read what the peer has sent before it closes, and close idle peers by a timeout",
                    "fewer sockets are left to the kernel",
                )),
        );
    }
    let drafts: Vec<Draft> = drafts.into_iter().map(explains_memory).collect();
    if drafts.is_empty() && (high == 0 || orphans.is_err()) {
        return Err("net.ipv4.tcp_mem and net.ipv4.tcp_max_orphans belong to the host; this network namespace does not show them".to_owned());
    }
    Ok(drafts)
}

/// Declares what a lack of memory explains.
fn explains_memory(draft: Draft) -> Draft {
    let counters = [
        "TcpExt.TCPAbortOnMemory",
        "TcpExt.TCPMemoryPressures",
        "TcpExt.RcvPruned",
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
