use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, Process, Snapshot};

use crate::accepting::{groups as listener_groups, process_of};
use crate::command::Scope;
use crate::datagram::groups as udp_groups;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule};
use crate::words::process;

pub(super) const RULE: Rule = Rule {
    id: "U03",
    title: "an unrelated process shares the address of a server",
    source: "sock_diag(7) (address and user ID of each socket), /proc/PID/stat (parent and process group), /proc/PID/exe, \
             /proc/PID/cgroup",
    threshold: None,
    explanation: &[
        "Any process of the same user may open another socket with SO_REUSEPORT at an address whose sockets have the option \
         (inet_csk_get_port, udp_lib_get_port compare the user IDs). The kernel then gives that socket its share of the connections or \
         datagrams, without a message to the server. With SO_REUSEADDR on UDP sockets even another user's process can, and the newest \
         socket gets all unicast datagrams.",
        "Typical causes: a second copy of a server that was started by hand, a test or a debugging tool with the default port, an old \
         process that did not end. The clients that reach it see wrong or missing answers, at random.",
        "The rule has a finding if two processes that share an address have different process groups, neither is the parent of the second, and \
         they differ in name or parent, or if they have different users. Two processes with the same name in different cgroups, as two units of \
         systemd or two containers, are instances of a service, unless one of them belongs to a login session. Two daemons of init with the same name \
         and executable are a server and its stale copy if they started 10 s or more apart in the same cgroup, or in a login session; without \
         cgroups, if the file of the older one was replaced since (/proc/PID/exe is deleted). A supervisor restarts its instances one by one: \
         children of another parent than init are not copies. Ports for multicast discovery (mDNS, SSDP, LLMNR) and DHCP are left out, because programs \
         share them on purpose.",
        "What helps: ending the foreign process, or giving it another port; a user ID for each service, which the kernel then enforces. \
         What does not help: `fourtuple fix accept`, which treats all sockets of the group as workers.",
    ],
    check,
};

/// A socket of a group: its holders, and its user if the transport lets several users share an address.
struct Member<'a> {
    owners: &'a [Owner],
    user: Option<u32>,
}

fn check(snapshot: &Snapshot, _limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for group in listener_groups(snapshot.listeners.seen()?) {
        let members: Vec<Member<'_>> =
            group.iter().map(|listener| Member { owners: &listener.owners, user: None }).collect();
        drafts.extend(draft(snapshot, &format!("TCP {}", group[0].address), &members));
    }
    for group in udp_groups(snapshot.udp.seen()?) {
        let members: Vec<Member<'_>> =
            group.iter().map(|socket| Member { owners: &socket.owners, user: Some(socket.user) }).collect();
        drafts.extend(draft(snapshot, &format!("UDP {}", group[0].local), &members));
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, address: &str, members: &[Member<'_>]) -> Option<Draft> {
    // The server is the process that has been there for longest.
    let started = |member: &&Member<'_>| {
        let starts = member.owners.iter().filter_map(|owner| process_of(snapshot, owner.pid));
        starts.map(|process| process.started_ns).min().unwrap_or(u64::MAX)
    };
    let server = members.iter().filter(|member| !member.owners.is_empty()).min_by_key(started)?;
    let foreign = members.iter().find(|member| {
        let has_other_user = member.user != server.user;
        let is_related = || {
            let mut pairs =
                member.owners.iter().flat_map(|one| server.owners.iter().map(move |other| (one, other)));
            pairs.any(|(one, other)| are_related(snapshot, one, other))
        };
        !member.owners.is_empty() && (has_other_user || !is_related())
    })?;
    let (mut own, mut other) = (server.owners.first()?, foreign.owners.first()?);
    let is_copy = own.name == other.name && server.user == foreign.user;
    if is_copy {
        // Of two copies the older was left behind.
        (own, other) = (other, own);
    }
    let shared =
        members.iter().filter(|member| member.owners.iter().any(|owner| owner.pid == other.pid)).count();
    let verdict = format!(
        "{} has {shared} of the {} sockets at {address}, which {} serves: it gets a share of the traffic",
        process(other),
        members.len(),
        process(own)
    );
    let mut draft = Draft::new(Severity::Warning, address, verdict);
    let both = process_of(snapshot, own.pid).zip(process_of(snapshot, other.pid));
    if is_copy {
        let parents = match both {
            Some((first, second)) if first.parent == second.parent => {
                format!("both children of {}", first.parent_name.as_deref().unwrap_or("init"))
            }
            _ => "with different parents".to_owned(),
        };
        draft = draft.because(format!(
            "both are called {}, {parents}: perhaps a copy that an earlier start left behind, or that was started by hand",
            own.name
        ));
    }
    if let Some(file) = both.and_then(|(own, other)| replaced(own, other)) {
        draft = draft
            .because(format!("{} runs a file that was replaced since its start: {file}", process(other)));
    }
    if let Some((first, second)) = both {
        draft = draft.because(format!(
            "process groups {} and {}, parents {} and {}; {} started {:.0} s {} {}",
            first.group,
            second.group,
            first.parent,
            second.parent,
            process(other),
            second.started_ns.abs_diff(first.started_ns) as f64 / 1e9,
            if second.started_ns < first.started_ns { "before" } else { "after" },
            process(own)
        ));
    }
    if let (Some(user), Some(foreign)) = (server.user, foreign.user)
        && user != foreign
    {
        draft = draft.because(format!("user IDs {user} and {foreign}"));
    }
    Some(
        draft
            .now(Remedy::other(
                Scope::Process,
                format!("cat /proc/{}/cmdline | tr '\\0' ' '", other.pid),
                "shows what the foreign process is",
            ))
            .now(Remedy::privileged(
                Scope::Process,
                format!("kill {}", other.pid),
                "its sockets leave the group, if the process should not be there",
            ))
            .proper(Remedy::advice(
                "another port for the foreign process, and a user ID for each service",
                "the kernel refuses SO_REUSEPORT across users",
            )),
    )
}

fn are_related(snapshot: &Snapshot, one: &Owner, other: &Owner) -> bool {
    if one.pid == other.pid {
        return true;
    }
    match (process_of(snapshot, one.pid), process_of(snapshot, other.pid)) {
        // Instances of one service have the same name, and the same parent or a unit each.
        (Some(a), Some(b)) => {
            let is_service = || are_units(a, b) == Some(true) || a.parent == b.parent && !is_stale_copy(a, b);
            a.group == b.group
                || a.parent == b.pid
                || b.parent == a.pid
                || one.name == other.name && is_service()
        }
        // A process that ended meanwhile, or that is not visible, is not foreign for that reason.
        _ => true,
    }
}

/// Time by which a stale copy is older. The processes of one start come within seconds.
const STALE_NS: u64 = 10_000_000_000;

/// Returns whether one of two processes with the same name and parent is a copy that an earlier start left behind.
fn is_stale_copy(a: &Process, b: &Process) -> bool {
    let (old, new) = if a.started_ns <= b.started_ns { (a, b) } else { (b, a) };
    // Another parent is a supervisor, which restarts one instance at a time.
    let is_of_init = matches!(new.parent_name.as_deref(), Some("systemd" | "init"));
    let file = |process: &Process| Some(process.executable.as_ref()?.trim_end_matches(DELETED).to_owned());
    let is_same_file = file(old) == file(new);
    let is_apart = new.started_ns - old.started_ns >= STALE_NS;
    is_of_init
        && is_same_file
        && is_apart
        && match are_units(old, new) {
            Some(are_units) => !are_units,
            None => replaced(new, old).is_some(),
        }
}

/// What the kernel appends to the path of a file that was removed.
const DELETED: &str = " (deleted)";

/// Returns the path of the executable of `old` if another file has taken its place, which `new` runs.
fn replaced<'a>(new: &Process, old: &'a Process) -> Option<&'a str> {
    let path = old.executable.as_ref()?.strip_suffix(DELETED)?;
    (new.executable.as_deref() == Some(path)).then_some(path)
}

/// Returns whether two processes are in different units of a service manager, or in different containers; `None`: their cgroups are unknown.
fn are_units(a: &Process, b: &Process) -> Option<bool> {
    let (a, b) = (a.cgroup.as_deref()?, b.cgroup.as_deref()?);
    // The root has processes that nobody put elsewhere, such as all of a container.
    if a == "/" && b == "/" {
        return None;
    }
    let is_unit = |cgroup: &str| {
        let last = cgroup.rsplit('/').next().unwrap_or("");
        cgroup != "/" && !(last.starts_with("session-") && last.ends_with(".scope"))
    };
    Some(a != b && is_unit(a) && is_unit(b))
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Listener, Part};

    use super::*;

    #[test]
    fn a_stale_copy_with_the_same_name_is_named() {
        let process = |pid, parent, started_s: u64| Process {
            pid,
            name: "server".to_owned(),
            parent,
            group: pid,
            started_ns: started_s * 1_000_000_000,
            ..Process::default()
        };
        let listener = |cookie, pid| Listener {
            address: "127.0.0.1:4000".parse().unwrap(),
            interface: 0,
            cookie,
            waiting: 0,
            waiting_before: 0,
            standing: 0,
            given_up: 0,
            waited_ns: 0,
            backlog: 128,
            handshakes: 0,
            drops: None,
            owners: vec![Owner { pid, name: "server".to_owned(), sockets: 1 }],
        };
        let with = |parent, change: &dyn Fn(&mut [Process])| {
            let mut processes = vec![process(70, 1, 100), process(90, parent, 7_300)];
            change(&mut processes);
            let snapshot = Snapshot {
                listeners: Part::Seen(vec![listener(1, 70), listener(2, 90)]),
                udp: Part::Seen(Default::default()),
                processes: Part::Seen(processes),
                ..Snapshot::default()
            };
            check(&snapshot, 0.0).unwrap_or_default()
        };
        assert!(with(1, &|_| ()).is_empty(), "instances of one service");
        let found = with(80, &|_| ());
        assert_eq!(found.len(), 1);
        assert!(found[0].verdict.starts_with("server[70] has 1 of the 2 sockets"), "{}", found[0].verdict);
        assert!(
            found[0].evidence[1].contains("server[70] started 7200 s before server[90]"),
            "{:?}",
            found[0].evidence
        );
        // Daemons of init: a unit each, or one unit whose earlier start left a copy behind.
        let daemons = |cgroups: [Option<&str>; 2], change: &dyn Fn(&mut [Process])| {
            let found = with(1, &|processes| {
                for (process, cgroup) in processes.iter_mut().zip(cgroups) {
                    process.cgroup = cgroup.map(str::to_owned);
                    process.parent_name = Some("systemd".to_owned());
                    process.executable = Some("/usr/sbin/server".to_owned());
                }
                change(processes);
            });
            found.first().map(|draft| draft.evidence.clone())
        };
        let (web, other) = (Some("/system.slice/web.service"), Some("/system.slice/web@2.service"));
        let session = Some("/user.slice/user-0.slice/session-7.scope");
        let nothing = |_: &mut [Process]| ();
        assert_eq!(daemons([web, other], &nothing), None, "a unit each");
        let evidence = daemons([web, web], &nothing).expect("a copy in the same unit");
        assert!(
            evidence[0].starts_with("both are called server, both children of systemd: "),
            "{evidence:?}"
        );
        assert!(daemons([session, web], &nothing).is_some(), "started by hand");
        let young =
            |processes: &mut [Process]| processes[0].started_ns = processes[1].started_ns - 1_000_000_000;
        assert_eq!(daemons([web, web], &young), None, "one start");
        let supervised =
            |processes: &mut [Process]| processes[1].parent_name = Some("supervisord".to_owned());
        assert_eq!(daemons([web, web], &supervised), None, "an instance was restarted");
        let replaced = |processes: &mut [Process]| {
            processes[0].executable = Some("/usr/sbin/server (deleted)".to_owned())
        };
        assert_eq!(daemons([web, other], &replaced), None, "an upgrade restarts unit by unit");
        assert_eq!(daemons([None, None], &nothing), None, "nothing tells the copy");
        let evidence = daemons([None, None], &replaced).expect("a copy from before an upgrade");
        assert!(
            evidence[1].ends_with("a file that was replaced since its start: /usr/sbin/server"),
            "{evidence:?}"
        );
        assert!(daemons([Some("/"), Some("/")], &replaced).is_some());
        // Containers with the network of the host have different parents.
        let apart = |processes: &mut [Process]| processes[1].parent = 80;
        assert_eq!(daemons([web, other], &apart), None);
        assert!(daemons([web, web], &apart).is_some());
    }
}
