//! Queueing disciplines of network devices (tc(8), rtnetlink(7)).

use std::collections::BTreeMap;
use std::io;

use crate::netlink::{self, word};
use crate::{Errno, device};

const RTM_GETQDISC: u16 = 38;
// Constants of include/uapi/linux/rtnetlink.h, pkt_sched.h and gen_stats.h.
const TCA_KIND: u16 = 1;
const TCA_STATS2: u16 = 7;
const TCA_STATS_BASIC: u16 = 1;
const TCA_STATS_QUEUE: u16 = 3;
const TCA_STATS_PKT64: u16 = 8;
const TC_H_ROOT: u32 = 0xffff_ffff;
/// Also the parent of `clsact`.
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// Size of struct tcmsg.
pub(crate) const HEADER: usize = 20;

/// A queueing discipline at the root of a device, or at its ingress. Packets of its classes and queues are in its counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qdisc {
    pub index: u32,
    /// `pfifo_fast`, `tbf`, `mq`, ...
    pub kind: String,
    /// Packets that it has passed on.
    pub packets: u64,
    /// Packets that it has dropped. The kernel counts them in 32 bits.
    pub drops: u64,
}

/// Returns the queueing disciplines in the calling thread's network namespace, each with the name of its device. Devices without a queue
/// (`noqueue`) have none.
///
/// # Errors
///
/// The errors of netlink(7). A kernel without CONFIG_NET_SCHED has no queueing disciplines; that is not an error.
pub fn all() -> io::Result<Vec<(String, Qdisc)>> {
    let mut found = BTreeMap::new();
    let answer = |body: &[u8]| {
        let qdisc = parse(body).filter(|qdisc| qdisc.kind != "noqueue");
        found.extend(qdisc.map(|qdisc| ((qdisc.index, qdisc.kind.clone()), qdisc)));
    };
    match netlink::ask_again(libc::NETLINK_ROUTE, RTM_GETQDISC, &[0; HEADER], answer) {
        Err(error) if Errno::of(&error) != Some(Errno::EOPNOTSUPP) => return Err(error),
        _ => {}
    }
    // A device may go away in the meantime.
    let named = found.into_values().filter_map(|qdisc| Some((device::name(qdisc.index).ok()?, qdisc)));
    Ok(named.collect())
}

/// Parses an answer; `None` for a qdisc below another one, whose counts are part of the other one's.
pub(crate) fn parse(body: &[u8]) -> Option<Qdisc> {
    let (header, attributes) = body.split_at_checked(HEADER)?;
    if ![TC_H_ROOT, TC_H_INGRESS].contains(&word(header, 12)?) {
        return None;
    }
    let kind = netlink::attribute(attributes, TCA_KIND)?;
    let end = kind.iter().position(|byte| *byte == 0).unwrap_or(kind.len());
    let statistics = netlink::attribute(attributes, TCA_STATS2)?;
    let packets = || {
        let whole = netlink::attribute(statistics, TCA_STATS_PKT64).and_then(|value| value.first_chunk());
        // Struct gnet_stats_basic: bytes, packets.
        let short = || word(netlink::attribute(statistics, TCA_STATS_BASIC)?, 8).map(u64::from);
        whole.map(|bytes| u64::from_ne_bytes(*bytes)).or_else(short)
    };
    Some(Qdisc {
        index: word(header, 4)?,
        kind: String::from_utf8_lossy(&kind[..end]).into_owned(),
        packets: packets().unwrap_or(0),
        // Struct gnet_stats_queue: packets in the queue, bytes in it, drops.
        drops: word(netlink::attribute(statistics, TCA_STATS_QUEUE)?, 8)?.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of a kernel of 64 bits: `tc -s qdisc show dev v0`: tbf, sent 5 packets, dropped 497.
    fn answer(parent: u32, with_long_count: bool) -> Vec<u8> {
        let mut body: Vec<u8> =
            [0, 3, 0x8001_0000, parent, 3].into_iter().flat_map(u32::to_ne_bytes).collect();
        netlink::put_attribute(&mut body, TCA_KIND, b"tbf\0");
        let mut statistics = Vec::new();
        let basic = [&1378_u64.to_ne_bytes()[..], &5_u32.to_ne_bytes(), &[0; 4]].concat();
        netlink::put_attribute(&mut statistics, TCA_STATS_BASIC, &basic);
        if with_long_count {
            netlink::put_attribute(&mut statistics, TCA_STATS_PKT64, &(1_u64 << 32 | 5).to_ne_bytes());
        }
        let queue: Vec<u8> = [3_u32, 2174, 497, 0, 500].into_iter().flat_map(u32::to_ne_bytes).collect();
        netlink::put_attribute(&mut statistics, TCA_STATS_QUEUE, &queue);
        netlink::put_attribute(&mut body, TCA_STATS2, &statistics);
        body
    }

    #[test]
    fn the_root_of_a_device_has_the_counts() {
        let qdisc = Qdisc { index: 3, kind: "tbf".to_owned(), packets: 5, drops: 497 };
        assert_eq!(parse(&answer(TC_H_ROOT, false)), Some(qdisc.clone()));
        let long = Qdisc { packets: 1 << 32 | 5, ..qdisc };
        assert_eq!(parse(&answer(TC_H_INGRESS, true)), Some(long));
        assert_eq!(parse(&answer(0x8001_0001, false)), None, "the root counts the drops of a qdisc below it");
        let whole = answer(TC_H_ROOT, false);
        assert!((0..whole.len()).all(|length| parse(&whole[..length]).is_none()));
    }
}
