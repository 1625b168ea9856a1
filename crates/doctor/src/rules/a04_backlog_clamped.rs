use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Owner, Snapshot, UnixListener};

use crate::accepting::{Settings, acceptors, drops, during, subject, unix_acceptors};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold, joined};
use crate::words::{count, counted, doing};

pub(super) const RULE: Rule = Rule {
    id: "A04",
    title: "net.core.somaxconn cuts a backlog",
    source: "sock_diag(7) (sk_max_ack_backlog, UNIX_DIAG_RQLEN), net.core.somaxconn",
    threshold: Some(Threshold { default: 50.0, unit: "% of the backlog" }),
    explanation: &[
        "listen(fd, backlog) stores the lower of backlog and net.core.somaxconn (__sys_listen) and reports no error. A listener whose \
         limit equals net.core.somaxconn was probably meant to have a longer queue: the kernel does not keep the value that the program asked \
         for, and a program may have chosen the same one, as Go does. The default is 4096 since Linux 5.4 and 128 before.",
        "The rule has a finding only if the cut matters: the queue held this share of the limit at both readings, or the listener dropped \
         connections during the interval while the namespace had overflows.",
        "What helps: a greater net.core.somaxconn, then a restart of the server, because the value is read by listen() only. In a \
         container the sysctl belongs to the network namespace of the container (Kubernetes: securityContext.sysctls; Docker: --sysctl).",
        "What does not help: a greater backlog in the program alone, and a longer queue for a server that is overloaded: connections then \
         wait longer.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    joined(of_tcp(snapshot, limit), of_unix(snapshot, limit))
}

fn of_unix(snapshot: &Snapshot, limit: f64) -> Checked {
    let somaxconn = snapshot.number("net.core.somaxconn")?;
    let matters = |listener: &&UnixListener| {
        let standing = f64::from(listener.waiting.min(listener.waiting_before));
        standing > 0.0 && standing >= f64::from(listener.backlog) * limit / 100.0
    };
    let is_cut = |listener: &&UnixListener| u64::from(listener.backlog) == somaxconn;
    let listeners = snapshot.unix_listeners.seen()?.iter().filter(is_cut).filter(matters);
    let drafts = listeners.map(|listener| {
        let UnixListener { path, owners, waiting, .. } = listener;
        draft(path.clone(), path, owners, &unix_acceptors(snapshot, listener), *waiting, somaxconn)
    });
    Ok(drafts.collect())
}

fn of_tcp(snapshot: &Snapshot, limit: f64) -> Checked {
    let somaxconn = snapshot.number("net.core.somaxconn")?;
    let overflows = during(snapshot, "TcpExt.ListenOverflows");
    let matters = |listener: &&Listener| {
        let standing = listener.waiting.min(listener.waiting_before);
        let has_drops = overflows > 0 && drops(snapshot, listener) > 0;
        has_drops || (standing > 0 && f64::from(standing) >= f64::from(listener.backlog) * limit / 100.0)
    };
    let is_cut = |listener: &&Listener| u64::from(listener.backlog) == somaxconn;
    let listeners = snapshot.listeners.seen()?.iter();
    Ok(listeners
        .filter(is_cut)
        .filter(matters)
        .map(|listener| {
            let server = acceptors(snapshot, listener);
            let address = listener.address.to_string();
            draft(subject(listener), &address, &listener.owners, &server, listener.waiting, somaxconn)
        })
        .collect())
}

fn draft(
    subject: String,
    address: &str,
    owners: &[Owner],
    server: &str,
    waiting: u32,
    somaxconn: u64,
) -> Draft {
    let verdict = format!(
        "the backlog of {address} ({server}) is net.core.somaxconn, {}: the kernel has probably cut it; {}",
        count(somaxconn),
        doing(waiting.into(), "connection", "wait")
    );
    let wider = (somaxconn * 8).max(4096);
    let settings = owners.first().and_then(|owner| Settings::of(&owner.name));
    // Programs in Go have no setting: the library reads net.core.somaxconn.
    let backlog = settings
        .map_or("the argument of listen() (Go takes net.core.somaxconn)", |settings| settings.backlog);
    Draft::new(Severity::Notice, subject, verdict)
        .now(Remedy::sysctl(
            "net.core.somaxconn",
            wider.to_string(),
            format!("a queue of up to {}, after a restart of {server}", counted(wider, "connection")),
        ))
        .proper(Remedy::advice(
            format!("net.core.somaxconn = {wider} in a file of /etc/sysctl.d, and for {server} {backlog}"),
            "the limit is there before the server starts",
        ))
}
