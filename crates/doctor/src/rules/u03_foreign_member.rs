use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, Snapshot};

use crate::accepting::{groups as listener_groups, process_of};
use crate::command::Scope;
use crate::datagram::groups as udp_groups;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule};
use crate::words::process;

pub(super) const RULE: Rule = Rule {
    id: "U03",
    title: "an unrelated process shares the address of a server",
    source: "sock_diag(7) (address and user ID of each socket), /proc/PID/stat (parent and process group)",
    threshold: None,
    explanation: &[
        "Any process of the same user may open another socket with SO_REUSEPORT at an address whose sockets have the option \
         (inet_csk_get_port, udp_lib_get_port compare the user IDs). The kernel then gives that socket its share of the connections or \
         datagrams, without a message to the server. With SO_REUSEADDR on UDP sockets even another user's process can, and the newest \
         socket gets all unicast datagrams.",
        "Typical causes: a second copy of a server that was started by hand, a test or a debugging tool with the default port, an old \
         process that did not end. The clients that reach it see wrong or missing answers, at random.",
        "The rule has a finding if two processes that share an address have different process groups, neither is the parent of the second, and \
         they differ in name or parent, or if they have different users. Ports for multicast discovery (mDNS, SSDP, LLMNR) and DHCP are left out, because programs \
         share them on purpose.",
        "What helps: ending the foreign process, or giving it another port; a user ID for each service, which the kernel then enforces. \
         What does not help: fourtuple fix accept, which treats all sockets of the group as workers.",
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
    if is_copy {
        draft = draft.because(format!(
            "both are called {}, with different parents: perhaps a copy that an earlier start left behind, or that was started by hand",
            own.name
        ));
    }
    if let (Some(first), Some(second)) = (process_of(snapshot, own.pid), process_of(snapshot, other.pid)) {
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
        // Instances of one service have the same name and the same parent.
        (Some(a), Some(b)) => {
            a.group == b.group
                || a.parent == b.pid
                || b.parent == a.pid
                || one.name == other.name && a.parent == b.parent
        }
        // A process that ended meanwhile, or that is not visible, is not foreign for that reason.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Listener, Part, Process};

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
        let found = |parent| {
            let snapshot = Snapshot {
                listeners: Part::Seen(vec![listener(1, 70), listener(2, 90)]),
                udp: Part::Seen(Default::default()),
                processes: Part::Seen(vec![process(70, 1, 100), process(90, parent, 7_300)]),
                ..Snapshot::default()
            };
            check(&snapshot, 0.0).unwrap_or_default()
        };
        assert!(found(1).is_empty(), "instances of one service");
        let found = found(80);
        assert_eq!(found.len(), 1);
        assert!(found[0].verdict.starts_with("server[70] has 1 of the 2 sockets"), "{}", found[0].verdict);
        assert!(
            found[0].evidence[1].contains("server[70] started 7200 s before server[90]"),
            "{:?}",
            found[0].evidence
        );
    }
}
