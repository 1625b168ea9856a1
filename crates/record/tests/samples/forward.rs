//! A forwarder with one link, two planes and a BFD session.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::record;

pub(crate) fn forward() -> ForwardRecord {
    let link = ForwardLink {
        listen: "0.0.0.0:4000".into(),
        to: Some("192.0.2.1:4000".into()),
        routes: vec!["7=192.0.2.2:4000".into()],
        key: Some("4:4".into()),
        spread: "flow:4:4".into(),
        replies: true,
        idle_ns: 60_000_000_000,
        clients: 4096,
        bfd: Some("192.0.2.1".into()),
        bfd_in_band: Some("192.0.2.1:4000".into()),
        bfd_timers: Some(ForwardBfdTimers {
            interval_ns: 300_000_000,
            receive_interval_ns: 300_000_000,
            multiplier: 3,
        }),
    };
    let settings = ForwardSettings {
        links: vec![link],
        planes: 2,
        plane: "offload".into(),
        pin: true,
        for_ns: Some(10_000_000_000),
    };
    let plane = |received: u64, dropped: u64| ForwardPlane {
        received,
        received_bytes: received * 64,
        sent: received - dropped,
        sent_bytes: (received - dropped) * 64,
        failed_later: 0,
        returned: received / 3,
        dropped: if dropped > 0 { BTreeMap::from([("no-route".into(), dropped)]) } else { BTreeMap::new() },
        dropped_replies: BTreeMap::from([("queue-full".into(), 4)]),
        clients: 17,
        evicted: 2,
        unanswered: 3,
        unsegmented: 1,
        failed_receives: 0,
        cpu_ns: received * 572,
        share: received as f64 / 2_000_000.0,
    };
    let bfd = ForwardBfd {
        peer: "192.0.2.1".into(),
        reception: "port".into(),
        state: "up".into(),
        diagnostic: "none".into(),
        ups: 1,
        downs: 0,
        sent: 105,
        received: 104,
        discarded: BTreeMap::from([("version".into(), 1)]),
    };
    let results = ForwardResults {
        elapsed_ns: 10_000_000_000,
        listen: vec!["0.0.0.0:4000".into()],
        planes: vec![plane(1_200_000, 31), plane(800_000, 0)],
        jain: Some(0.9615),
        client_limit: Some(21_174),
        bfd: vec![bfd],
        advice: vec!["31 packets had no route: add --to or a --route for their keys.".into()],
    };
    record("forward", settings, results)
}

/// Returns a record without a default next hop, key, BFD or end, and without packets: every field that may be null is null.
pub(crate) fn bare_forward() -> ForwardRecord {
    let mut record = forward();
    let link = &mut record.settings.links[0];
    (link.to, link.key) = (None, None);
    (link.bfd, link.bfd_in_band, link.bfd_timers) = (None, None, None);
    record.results.client_limit = None;
    (record.settings.for_ns, record.results.jain) = (None, None);
    record
}
