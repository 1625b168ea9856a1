use fourtuple_record::Severity;
use fourtuple_record::snapshot::{ConfiguredSysctl, Part, Snapshot};

use crate::command::Scope;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::counted;

pub(super) const RULE: Rule = Rule {
    id: "T05",
    title: "sysctls that do not shorten TIME_WAIT",
    source: "net.ipv4.tcp_fin_timeout, /etc/sysctl.conf and sysctl.d(5), /proc/net/sockstat (tw), sock_diag(7) (inet_diag)",
    threshold: Some(Threshold {
        default: 25.0,
        unit: "% of the usable ports, the number of TIME_WAIT sockets",
    }),
    explanation: &[
        "TIME_WAIT lasts 60 s: TCP_TIMEWAIT_LEN is a constant (include/net/tcp.h). No sysctl changes it.",
        "net.ipv4.tcp_fin_timeout is the time in FIN_WAIT_2 of a socket that the program has closed, while the peer has not (tcp_rcv_state_process, \
         inet_csk_reset_keepalive_timer; TIME_WAIT sockets with the substate FIN_WAIT_2). Lower values make the kernel forget such connections \
         sooner, so that a slow peer gets RST. The number of TIME_WAIT sockets stays.",
        "net.ipv4.tcp_tw_recycle was removed in Linux 4.12. Before, it refused connections of clients behind a NAT device, because it compared their \
         timestamps by address. A line in a file of sysctl.d now only makes `sysctl --system` print an error.",
        "The rule has a finding only while TIME_WAIT sockets are many, because only then was the setting meant to help, and for \
         net.ipv4.tcp_fin_timeout only while sockets in FIN_WAIT_2 are less than a tenth of them.",
        "What helps against many TIME_WAIT sockets: connections that are used again, net.ipv4.tcp_tw_reuse for clients (T03), a peer that closes first \
         (T06). By themselves TIME_WAIT sockets are harmless: they take about 250 bytes each and no processor time.",
    ],
    check,
};

const FIN_TIMEOUT: &str = "net.ipv4.tcp_fin_timeout";
const RECYCLE: &str = "net.ipv4.tcp_tw_recycle";
/// TCP_FIN_TIMEOUT in seconds, the default.
const DEFAULT: u64 = 60;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let time_wait = snapshot.memory.seen()?.time_wait;
    let usable = snapshot.ports.seen()?.usable();
    if time_wait == 0 || (time_wait as f64) < f64::from(usable) * limit / 100.0 {
        return Ok(Vec::new());
    }
    // A container without the files has no lines.
    let configured = snapshot.configured.seen().map(Vec::as_slice).unwrap_or_default();
    let lines = |name: &str| configured.iter().filter(|line| line.name == name).cloned().collect::<Vec<_>>();
    let now = snapshot.number(FIN_TIMEOUT)?;
    let mut drafts = Vec::new();
    // Where sockets are in FIN_WAIT_2, the sysctl has the effect that it is for.
    let connections = snapshot.connections.seen()?;
    let half_closed = connections.states.get("fin-wait-2").copied().unwrap_or(0);
    if now != DEFAULT && half_closed * 10 < time_wait {
        drafts.push(fin_timeout(now, time_wait, &lines(FIN_TIMEOUT)));
    }
    let has_sysctl = snapshot.sysctls.contains_key(RECYCLE);
    if let (Some(line), false) = (lines(RECYCLE).first(), has_sysctl) {
        drafts.push(recycle(line, time_wait));
    }
    Ok(drafts)
}

fn fin_timeout(now: u64, time_wait: u64, lines: &[ConfiguredSysctl]) -> Draft {
    let verdict = format!(
        "{FIN_TIMEOUT} is {now} s instead of {DEFAULT} s and does not shorten TIME_WAIT, which has {}: it is the time in FIN_WAIT_2",
        counted(time_wait, "socket")
    );
    let mut draft = Draft::new(Severity::Notice, FIN_TIMEOUT, verdict);
    for line in lines {
        draft = draft.because(format!("{}:{} sets {}", line.file, line.line, line.value));
    }
    let effect = "the default; TIME_WAIT lasts 60 s with any value";
    draft.now(Remedy::sysctl(FIN_TIMEOUT, DEFAULT.to_string(), effect)).proper(Remedy::advice(
        format!("remove {FIN_TIMEOUT} from /etc/sysctl.conf and /etc/sysctl.d, unless FIN_WAIT_2 was meant"),
        "the default is 60 s",
    ))
}

fn recycle(line: &ConfiguredSysctl, time_wait: u64) -> Draft {
    let ConfiguredSysctl { file, line: number, .. } = line;
    let verdict = format!(
        "{file}:{number} sets {RECYCLE}, which Linux 4.12 removed: it does nothing about {} in TIME_WAIT",
        counted(time_wait, "socket")
    );
    let path = file.clone();
    let remove = move |snapshot: &mut Snapshot| {
        if let Part::Seen(lines) = &mut snapshot.configured {
            lines.retain(|line| line.name != RECYCLE || line.file != path);
        }
    };
    Draft::new(Severity::Notice, RECYCLE, verdict).proper(
        Remedy::privileged(
            Scope::Host,
            format!("sed -i -E '/^[[:space:]]*-?net[./]ipv4[./]tcp_tw_recycle/d' {file}"),
            "removes the line",
        )
        .with(remove),
    )
}
