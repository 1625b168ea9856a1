//! Idle times and TCP timestamps of the sockets of single tuples.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use fourtuple_bpf::PlainTimeWait;
use fourtuple_record::snapshot::{IdleTimes, Tuple};
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket_census::{self, Query};

use crate::snapshot::fast::Fast;
use crate::snapshot::sums::Key;

/// Maximum number of tuples whose open sockets are read.
const MAX_TUPLES: usize = 4;
/// ESTABLISHED, FIN_WAIT_1, FIN_WAIT_2, CLOSE_WAIT, LAST_ACK and CLOSING.
const OPEN: u32 = 1 << state::ESTABLISHED | 1 << 4 | 1 << 5 | 1 << state::CLOSE_WAIT | 1 << 9 | 1 << 11;

/// The TIME_WAIT sockets of connections without TCP timestamps.
#[derive(Debug, Default)]
pub(super) enum Plain {
    /// Not decided yet how they are read.
    #[default]
    Undecided,
    /// By a BPF iterator over TCP sockets.
    Bpf(PlainTimeWait),
    /// Not: without the iterator only open sockets of the same tuple tell.
    Unknown,
}

impl Plain {
    /// Returns the number of such sockets by tuple; `None`: unknown.
    pub(super) fn read(&mut self, root: &Path) -> Option<HashMap<Key, u32, Fast>> {
        if matches!(self, Plain::Undecided) {
            let iterator = (root == Path::new("/")).then(PlainTimeWait::load).and_then(Result::ok);
            *self = iterator.map_or(Plain::Unknown, Plain::Bpf);
        }
        let Plain::Bpf(iterator) = self else { return None };
        let mut found: HashMap<Key, u32, Fast> = HashMap::default();
        let pass = iterator.each(|local, remote| {
            *found.entry(Key::of_tuple(local.ip().to_canonical(), remote)).or_default() += 1;
        });
        match pass {
            Ok(()) => Some(found),
            Err(_) => {
                *self = Plain::Unknown;
                None
            }
        }
    }
}

/// Adds to the tuples with a quarter of `ports` or more, at most [`MAX_TUPLES`], what their open sockets tell.
pub(super) fn add(tuples: &mut [Tuple], ports: u32, query: &Query) -> io::Result<()> {
    for tuple in tuples.iter_mut().take(MAX_TUPLES).filter(|tuple| is_large(tuple, ports)) {
        let peer = Some((tuple.destination.ip(), Some(tuple.destination.port())));
        let (mut idle, mut open, mut plain) = (Vec::new(), 0_u64, 0_u64);
        socket_census::each(&Query { states: OPEN, peer, times: true, ..*query }, |socket| {
            let Some(info) = socket.info.filter(|_| socket.local.ip().to_canonical() == tuple.source) else {
                return;
            };
            open += 1;
            plain += u64::from(!info.timestamps);
            if socket.state == state::ESTABLISHED {
                idle.push(info.idle);
            }
        })?;
        tuple.idle = times(idle);
        if tuple.time_wait_plain.is_none() {
            let waiting = tuple.states.get("time-wait").copied().unwrap_or(0);
            tuple.time_wait_plain = (waiting * plain).checked_div(open).map(|plain| plain as u32);
        }
    }
    Ok(())
}

/// Returns whether a tuple uses a quarter of the ports.
pub(super) fn is_large(tuple: &Tuple, ports: u32) -> bool {
    tuple.in_use > 0 && u64::from(tuple.in_use) * 4 >= u64::from(ports)
}

fn times(mut idle: Vec<Duration>) -> Option<IdleTimes> {
    idle.sort_unstable();
    let nanoseconds = |time: &Duration| time.as_nanos() as u64;
    Some(IdleTimes {
        median_ns: idle.get(idle.len() / 2).map(nanoseconds)?,
        longest_ns: idle.last().map(nanoseconds)?,
    })
}
