use std::net::{IpAddr, SocketAddr};

use fourtuple_syscalls::sock_diag::{self, Filter, state};
use fourtuple_syscalls::socket::Transport;

use super::error::Census;
use crate::capabilities;

/// Counts who holds the ports from `source` to `destination`; `None` where the kernel cannot be asked.
pub(super) fn take(transport: Transport, source: Option<IpAddr>, destination: SocketAddr) -> Option<Census> {
    let (range, reserved) = capabilities::local_ports().ok()?;
    let mut census = Census {
        ports: u64::from(range.len() - reserved.count_in(range)),
        established: 0,
        time_wait: 0,
        otherwise: 0,
    };
    let filter = Filter { transport, source, source_port: None, destination };
    sock_diag::each(&filter, |entry| match entry.state {
        state::ESTABLISHED => census.established += 1,
        state::TIME_WAIT => census.time_wait += 1,
        _ => {}
    })
    .ok()?;
    census.otherwise = census.ports.saturating_sub(census.established + census.time_wait);
    Some(census)
}
