//! Advice from the counters of a forwarder.

use fourtuple::spread::{Selector, SlotRule};
use fourtuple_forward::{ClientLimit, Forward, Reception};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{ForwardBfd, ForwardPlane, Remark};

/// Returns a remark when clients were evicted or refused: replies of next hops to these clients were lost.
pub(super) fn crowded(planes: &[ForwardPlane], limit: ClientLimit) -> Option<Remark> {
    let evicted: u64 = planes.iter().map(|plane| plane.evicted).sum();
    let refused: u64 = planes.iter().filter_map(|plane| plane.dropped.get("no-client")).sum();
    let ClientLimit { clients, ports, descriptors } = limit;
    (evicted + refused > 0).then(|| {
        let message = format!(
            "too many clients: {evicted} forgotten early, {} dropped. All planes may have {clients} \
             (--clients-total; {}, {}), a plane as many as --clients says",
            counted(refused, "packet"),
            counted(ports as u64, "ephemeral port"),
            counted(descriptors as u64, "descriptor")
        );
        Remark::new("clients", message)
    })
}

/// Returns the lines of advice.
pub(super) fn lines(
    planes: &[ForwardPlane],
    bfd: &[ForwardBfd],
    forward: &Forward,
    lacks_gro: bool,
) -> Vec<String> {
    let mut lines = Vec::new();
    let received: u64 = planes.iter().map(|plane| plane.received).sum();
    let busy = planes.iter().filter(|plane| plane.received > 0).count();
    if received > 0 && busy < planes.len() {
        let spreads: Vec<Selector> = forward.links.iter().map(|link| link.spread).collect();
        lines.push(format!("{busy} of {} planes got packets: {}", planes.len(), too_few(&spreads)));
    }
    let dropped = |reason: &str| planes.iter().filter_map(|plane| plane.dropped.get(reason)).sum::<u64>();
    let (checksum, truncated) = (dropped("checksum"), dropped("truncated"));
    if checksum > 0 {
        lines.push(format!(
            "{} had a wrong UDP checksum: the sender, or a device between that leaves checksums to its hardware (ethtool -K DEVICE tx off).",
            counted(checksum, "packet")
        ));
    }
    if truncated > 0 {
        lines.push(format!(
            "{} had more bytes than --plane {} receives (docs/forward.md); --plane offload receives 64 KiB.",
            counted(truncated, "packet"),
            forward.kind
        ));
    }
    let overflow = dropped("overflow");
    if overflow > 0 {
        lines.push(format!(
            "{} met a full receive queue: planes are too slow or too few, or bursts are longer than \
             net.core.rmem_default.",
            counted(overflow, "packet")
        ));
    }
    let uncut: u64 = planes.iter().map(|plane| plane.unsegmented).sum();
    if uncut > 0 {
        lines.push(format!(
            "{} could not be cut by the kernel (UDP_SEGMENT) and went packet by packet: packets longer than the \
             path's MTU, or a device without checksums.",
            counted(uncut, "message")
        ));
    }
    for session in bfd.iter().filter(|session| session.reception == Reception::Planes.name()) {
        lines.push(format!(
            "Control packets of BFD with {} wait behind data, and are lost with them: no filter goes with --spread hash on more \
             planes than one. --spread map:hash is the same hash with one; flow:OFFSET:WIDTH and random have one too.",
            session.peer,
        ));
    }
    for session in bfd.iter().filter(|session| session.ups == 0) {
        lines.push(format!(
            "BFD with {} never came up: {}.",
            session.peer,
            if session.received == 0 { "nothing was heard of it" } else { "it does not hear what is sent" },
        ));
    }
    if lacks_gro {
        lines.push(format!(
            "This kernel has no UDP_GRO (Linux 5.0): --plane {} received each packet by itself.",
            forward.kind
        ));
    }
    lines
}

/// Explains why some planes received no packets.
fn too_few(spreads: &[Selector]) -> String {
    const ELSE: &str = "Where packets have a flow of their own in the payload, --spread flow:OFFSET:WIDTH uses all planes and \
                        keeps flows in order; --spread random does not keep them.";
    let (first, rest) = match spreads.split_first() {
        Some((first, rest)) => (*first, rest),
        None => (Selector::Hash, spreads),
    };
    if rest.iter().any(|spread| *spread != first) {
        return format!("the --spread of the links gave the others none. {ELSE}");
    }
    match first {
        Selector::Hash | Selector::Map(SlotRule::Hash) => {
            format!("the 4-tuples are too few for the hash. {ELSE}")
        }
        Selector::XdpSourcePort { .. } => {
            "the ports that --spread xdp gives packets are too few: take more.".to_owned()
        }
        Selector::Cpu | Selector::Map(SlotRule::Cpu) | Selector::Cpumap { .. } => format!(
            "--spread {first} gives each plane what its CPU handles, and packets came to too few CPUs: the card has fewer \
             receive queues, or its hash (RSS) gives all packets of one 4-tuple to one. {ELSE}"
        ),
        Selector::Key(_) | Selector::Map(SlotRule::Key(_)) => {
            format!("--spread {first} found too few flows: see whether the key is where packets have it.")
        }
        Selector::Random | Selector::Map(SlotRule::Random) => {
            "so few packets came that chance left some out.".to_owned()
        }
        other => format!("--spread {other} gave the others none. {ELSE}"),
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_forward::{Link, PlaneKind};

    use super::*;

    #[test]
    fn each_reason_of_drops_has_its_advice() {
        let link = Link::new("0.0.0.0:4000".parse().unwrap(), "192.0.2.1:4000".parse().unwrap());
        let forward = Forward { kind: PlaneKind::Batched, ..Forward::new(link, 1) };
        let advice = |reason: &str, number: u64| {
            let dropped = [(reason.to_owned(), number)].into();
            lines(&[ForwardPlane { dropped, ..ForwardPlane::default() }], &[], &forward, false)
        };
        for (reason, start) in [
            (
                "truncated",
                "7 packets had more bytes than --plane batched receives (docs/forward.md); --plane offload receives 64 KiB.",
            ),
            ("checksum", "7 packets had a wrong UDP checksum: "),
            ("overflow", "7 packets met a full receive queue: planes are too slow or too few"),
        ] {
            let said = advice(reason, 7);
            assert!(said.len() == 1 && said[0].starts_with(start), "{reason}: {said:?}");
            assert_eq!(advice(reason, 0), <[String; 0]>::default());
        }
    }

    #[test]
    fn advice_names_the_spread_that_was_used() {
        let hash = "too few for the hash";
        for (spread, expected) in [
            ("hash", hash),
            ("map:hash", hash),
            ("cpu", "--spread cpu gives each plane what its CPU handles"),
            ("map:cpu", "--spread map:cpu gives"),
            ("cpumap:2", "--spread cpumap:2 gives"),
            ("flow:4:4", "--spread flow:4:4 found too few flows"),
            ("random", "so few packets"),
            ("xdp:2", "ports that --spread xdp gives"),
        ] {
            let advice = too_few(&[spread.parse().unwrap()]);
            assert!(advice.contains(expected), "{spread}: {advice}");
            assert_eq!(advice.contains(hash), expected == hash, "{spread}: {advice}");
        }
        let two = too_few(&[Selector::Hash, Selector::Cpu]);
        assert!(!two.contains(hash), "{two}");
    }
}
