use std::net::{IpAddr, SocketAddr};

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{LocalAddress, Part, Snapshot, Tuple};

use crate::accepting::time;
use crate::budget::state;
use crate::command::Scope;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::network;
use crate::rule::{Checked, Rule};
use crate::words::{caller, counted, process};

pub(super) const RULE: Rule = Rule {
    id: "P11",
    title: "the source address of connections is not an address of this host",
    source: "sock_diag(7) (inet_diag), rtnetlink(7) (RTM_GETADDR, RTM_GETROUTE)",
    threshold: None,
    explanation: &[
        "Connections keep their source address when the address is removed from its device: a changed lease, a floating address that moved to another \
         host, a container network that was built again. The kernel does not tell the program. It still sends packets from the address, \
         but drops what comes back, so that writes fail with ETIMEDOUT only after net.ipv4.tcp_retries2 (15 retransmissions, 13 to 30 \
         minutes), and reads wait without end unless keepalives are on.",
        "New sockets get EADDRNOTAVAIL from bind() to such an address (inet_bind checks inet_addr_valid_or_nonlocal), which is easily taken for \
         exhausted ports. Only the call tells them apart: bind() to an address fails for the address, connect() for the ports. A trace sees such calls, and the rule \
         names the process and the address, also of a source that is only in a configuration file.",
        "Local are all addresses of devices, also of devices in a VRF, and what a route of type `local` covers (127.0.0.0/8, AnyIP). Sources of sockets \
         with IP_TRANSPARENT or IP_FREEBIND, which transparent proxies use, are not reported. Sockets that the program has closed already are not either.",
        "What helps: the address back on its device; closing the connections (`ss -K`, or a restart of the program), so that the program connects \
         again from an address that exists; TCP_USER_TIMEOUT or keepalives in the program, so that it notices.",
        "What does not help: net.ipv4.ip_nonlocal_bind = 1, with which bind() succeeds and no answer arrives.",
    ],
    check,
};

/// States of sockets that a program has.
const OPEN: [&str; 3] = ["established", "syn-sent", "close-wait"];

fn check(snapshot: &Snapshot, _: f64) -> Checked {
    let lost = snapshot.lost_sources.seen()?;
    let tuples = &snapshot.connections.seen()?.tuples;
    let mut drafts = Vec::new();
    for source in lost {
        let of_source: Vec<&Tuple> = tuples.iter().filter(|tuple| tuple.source == *source).collect();
        let open = |tuple: &&Tuple| OPEN.iter().map(|name| state(tuple, name)).sum::<u64>();
        let sockets: u64 = of_source.iter().map(open).sum();
        let Some(first) = of_source.first().filter(|_| sockets > 0) else { continue };
        let owner = of_source.iter().find_map(|tuple| tuple.owners.first());
        let verdict = format!(
            "{} has {} from {source}, which is not an address of this host: answers do not arrive (first destination {})",
            owner.map_or_else(|| "this host".to_owned(), process),
            counted(sockets, "connection"),
            first.destination
        );
        let source = *source;
        let mut draft = Draft::new(Severity::Warning, source.to_string(), verdict);
        for tuple in of_source.iter().take(5) {
            draft = draft.because(format!("{} to {}", counted(open(tuple), "connection"), tuple.destination));
        }
        if snapshot.number("net.ipv4.ip_nonlocal_bind").is_ok_and(|value| value == 1) {
            draft = draft.because("net.ipv4.ip_nonlocal_bind is 1: bind() to any address succeeds");
        }
        let forget = move |snapshot: &mut Snapshot| {
            if let Part::Seen(lost) = &mut snapshot.lost_sources {
                lost.retain(|address| *address != source);
            }
        };
        drafts.push(
            draft
                .now(Remedy::privileged(Scope::Namespace, format!("ss -K src {}", filter(source)), "ends these connections with ECONNABORTED, and the program connects again (needs CONFIG_INET_DIAG_DESTROY)").with(forget))
                .now(Remedy::advice(
                    addition(snapshot, source, Some(first.destination.ip())),
                    "the connections go on if the peers still have them",
                ))
                .proper(Remedy::advice(
                    "in the program: TCP_USER_TIMEOUT, or SO_KEEPALIVE with TCP_KEEPIDLE of a minute",
                    "the program notices dead connections within minutes",
                )),
        );
    }
    drafts.extend(refused_binds(snapshot));
    Ok(drafts)
}

/// Returns a finding for each process and address with calls of bind() that failed because the address is not on this host.
fn refused_binds(snapshot: &Snapshot) -> Vec<Draft> {
    let addresses = snapshot.addresses.seen().map(Vec::as_slice).unwrap_or_default();
    let calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    let refused = calls.filter(|call| call.call == "bind" && call.errno == errno::EADDRNOTAVAIL);
    let mut drafts = Vec::new();
    for call in refused {
        let Some(Ok(address)) = call.address.as_ref().map(|address| address.parse::<SocketAddr>()) else {
            continue;
        };
        let source = address.ip();
        if addresses.is_empty() || addresses.iter().any(|local| local.address == source) {
            continue;
        }
        let name = process(&caller(&call.owner, call.processes));
        let verdict = format!(
            "{name} cannot use {source}, which is not an address of this host: {} of bind() failed with EADDRNOTAVAIL in {}",
            counted(call.failed, "call"),
            time(snapshot.interval_ns)
        );
        let owner = &call.owner;
        let configured = format!("{}: another source address in its configuration, or none", owner.name);
        drafts.push(
            Draft::new(Severity::Critical, format!("bind() of {name} to {address}"), verdict)
                .explains(What::Calls {
                    call: "bind",
                    errno: errno::EADDRNOTAVAIL,
                    process: Some(owner.pid),
                    address: Some(address.to_string()),
                })
                .now(Remedy::advice(addition(snapshot, source, None), "bind() succeeds at once"))
                .proper(Remedy::advice(configured, "the program binds to an address that is there"))
                .proper(Remedy::advice(
                    "net.ipv4.ip_nonlocal_bind=1, only for an address that moves between hosts (VRRP)",
                    "bind() succeeds before the address is there; connections from it still get no answer",
                )),
        );
    }
    drafts
}

/// Returns the command that adds an address: beside an address of the same network, else as a single address on the device of the network
/// of the destination.
fn addition(snapshot: &Snapshot, source: IpAddr, destination: Option<IpAddr>) -> String {
    let addresses = snapshot.addresses.seen().map(Vec::as_slice).unwrap_or_default();
    let is_plain = |name: &&String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._@-".contains(c));
    // The prefix of a neighbour and the name of its device.
    let beside = |address: IpAddr| {
        let holds = |local: &&LocalAddress| {
            local.address.is_ipv4() == address.is_ipv4()
                && network(local.address, local.prefix) == network(address, local.prefix)
        };
        let nearest = addresses.iter().filter(holds).max_by_key(|local| local.prefix)?;
        Some((nearest.prefix, nearest.device.as_ref().filter(is_plain)?))
    };
    let single = if source.is_ipv4() { 32 } else { 128 };
    let there = beside(source).or_else(|| Some((single, beside(destination?)?.1)));
    match there {
        Some((prefix, device)) => {
            format!("`ip addr add {source}/{prefix} dev {device}`, if the address should be on this host")
        }
        None => format!(
            "`ip addr add {source}/{single} dev DEVICE` with the device that had it, if the address should be on this host"
        ),
    }
}

/// Returns an address as `ss` reads it, for a shell, which could take brackets for a pattern.
fn filter(address: IpAddr) -> String {
    if address.is_ipv4() { address.to_string() } else { format!("'[{address}]'") }
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::{Connections, FailedCall, Failures, Owner};

    use super::*;

    fn local(address: [u8; 4], prefix: u8, device: &str) -> LocalAddress {
        LocalAddress { address: address.into(), prefix, tentative: false, device: Some(device.to_owned()) }
    }

    #[test]
    fn the_addition_names_what_is_known() {
        let addresses = vec![
            local([10, 0, 0, 1], 24, "eth0"),
            local([10, 0, 0, 9], 16, "eth1"),
            local([10, 1, 0, 1], 16, "a;b"),
        ];
        let snapshot = Snapshot { addresses: Part::Seen(addresses), ..Snapshot::default() };
        let of = |source: &str, destination: Option<[u8; 4]>| {
            let line = addition(&snapshot, source.parse().unwrap(), destination.map(IpAddr::from));
            line.split('`').nth(1).unwrap().to_owned()
        };
        assert_eq!(of("10.0.0.99", None), "ip addr add 10.0.0.99/24 dev eth0");
        assert_eq!(of("10.0.7.99", None), "ip addr add 10.0.7.99/16 dev eth1");
        assert_eq!(of("10.9.0.1", Some([10, 0, 0, 2])), "ip addr add 10.9.0.1/32 dev eth0");
        assert_eq!(of("10.9.0.1", Some([8, 8, 8, 8])), "ip addr add 10.9.0.1/32 dev DEVICE");
        assert_eq!(of("10.1.0.2", None), "ip addr add 10.1.0.2/32 dev DEVICE", "a name for a shell");
        assert_eq!(of("2001:db8::1", None), "ip addr add 2001:db8::1/128 dev DEVICE");
    }

    #[test]
    fn a_refused_bind_names_the_missing_address() {
        let call = |address: &str| FailedCall {
            call: "bind".to_owned(),
            errno: "EADDRNOTAVAIL".to_owned(),
            protocol: "tcp".to_owned(),
            owner: Owner { pid: 7, name: "haproxy".to_owned(), sockets: 12 },
            processes: 1,
            address: Some(address.to_owned()),
            failed: 12,
            ..FailedCall::default()
        };
        let snapshot = Snapshot {
            interval_ns: 2_000_000_000,
            lost_sources: Part::Seen(Vec::new()),
            connections: Part::Seen(Connections::default()),
            addresses: Part::Seen(vec![local([10, 0, 0, 1], 24, "eth0")]),
            failures: Part::Seen(Failures {
                calls: vec![call("10.0.0.99:0"), call("10.0.0.1:0")],
                ..Failures::default()
            }),
            ..Snapshot::default()
        };
        let drafts = check(&snapshot, 0.0).unwrap();
        let [draft] = &drafts[..] else { panic!("{} findings", drafts.len()) };
        let expected = "haproxy[7] cannot use 10.0.0.99, which is not an address of this host: 12 calls of bind() failed with EADDRNOTAVAIL in 2.0 s";
        assert_eq!(draft.verdict, expected);
        let left = crate::diagnose(&snapshot, &crate::Limits::default()).findings;
        let of = |id: &str| left.iter().filter(|finding| finding.id == id).count();
        assert_eq!((of("P11"), of("X01")), (1, 1), "the other address is not explained: {left:#?}");
    }
}
