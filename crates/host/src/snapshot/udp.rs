//! UDP sockets.

use std::cmp::Reverse;
use std::collections::HashMap;

use fourtuple_record::snapshot::{UdpSocketView, UdpSockets};
use fourtuple_syscalls::sock_diag::{self, Detail};

use crate::snapshot::counters::since;
use crate::snapshot::processes::Sockets;
use crate::snapshot::reading::{LISTED, reason};

/// Drops of each socket, by cookie.
pub(super) type Before = HashMap<u64, u64>;

pub(super) fn read(
    sockets: &Sockets,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Result<UdpSockets, String> {
    let mut all: Vec<Detail> = Vec::new();
    let mut by_port: HashMap<u16, u32> = HashMap::new();
    sock_diag::each_udp_detail(|detail| {
        *by_port.entry(detail.local.port()).or_default() += 1;
        all.push(detail);
    })
    .map_err(|error| format!("sock_diag(7): {}", reason(&error)))?;
    let drops_of = |detail: &Detail| detail.memory.map(|memory| u64::from(memory.drops));
    let during = |detail: &Detail| {
        drops_of(detail).map_or(0, |total| since(before.get(&detail.cookie), total, is_first).during)
    };
    let total = all.len() as u64;
    now.extend(all.iter().filter_map(|detail| Some((detail.cookie, drops_of(detail)?))));
    all.retain(|detail| detail.queue > 0 || drops_of(detail) > Some(0) || by_port[&detail.local.port()] > 1);
    let is_alone = |detail: &Detail| by_port[&detail.local.port()] == 1;
    all.sort_by_key(|detail| (Reverse(during(detail)), is_alone(detail), detail.local, detail.cookie));
    let left_out = all.len().saturating_sub(LISTED) as u64;
    all.truncate(LISTED);
    let view = |detail: &Detail| UdpSocketView {
        local: detail.local,
        remote: (detail.remote.port() != 0).then_some(detail.remote),
        interface: detail.interface,
        cookie: detail.cookie,
        queued_bytes: detail.queue.into(),
        limit_bytes: detail.memory.map(|memory| memory.receive_limit.into()),
        drops: drops_of(detail).map(|total| since(before.get(&detail.cookie), total, is_first)),
        user: detail.user,
        owners: sockets.owners(detail.inode),
    };
    Ok(UdpSockets { total, sockets: all.iter().map(view).collect(), left_out })
}
