//! What the namespace has at the addresses of failed calls: routes, and the holders of ports.

use std::net::SocketAddr;

use fourtuple_record::errno;
use fourtuple_record::snapshot::{FailedCall, PortHolder};
use fourtuple_syscalls::route;
use fourtuple_syscalls::sock_diag::state;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::socket_census::{self, Query, Socket};

use crate::host::snapshot::processes::{self, Sockets};
use crate::host::snapshot::{LISTED, reason, sums};

/// Maximum number of failed calls whose address is looked up.
const LOOKED_UP: usize = 32;

/// Adds to calls that failed what is known of their address.
pub(super) fn look_up<'a>(calls: impl IntoIterator<Item = &'a mut FailedCall>, sockets: &Sockets) {
    const OF_ROUTES: [&str; 4] = [errno::EACCES, errno::EHOSTUNREACH, errno::EINVAL, errno::ENETUNREACH];
    let mut left = LOOKED_UP;
    for call in calls {
        if call.is_without_port() && call.processes == 1 {
            call.running_ns = processes::running_ns(sockets.root(), call.owner.pid);
        }
        let Some(Ok(address)) = call.address.as_ref().map(|address| address.parse::<SocketAddr>()) else {
            continue;
        };
        match (call.call.as_str(), call.errno.as_str()) {
            _ if left == 0 => return,
            ("connect" | "send", errno) if OF_ROUTES.contains(&errno) => call.route = route_to(address),
            ("bind", errno::EADDRINUSE) if address.port() != 0 => {
                call.holder = holder(&call.protocol, address, sockets);
            }
            _ => continue,
        }
        left -= 1;
    }
}

/// Returns the type of the route to an address, or the errno of the lookup. The route to a link-local address is by the device of the socket.
pub(super) fn route_to(to: SocketAddr) -> Option<String> {
    if matches!(to, SocketAddr::V6(to) if to.ip().is_unicast_link_local()) {
        return None;
    }
    Some(match route::kind(to.ip().to_canonical()) {
        Ok(kind) => route::name(kind).to_owned(),
        Err(error) => reason(&error),
    })
}

/// Returns the socket that has the port of an address, at this address or at one that includes it: one with a process if there is one.
fn holder(protocol: &str, address: SocketAddr, sockets: &Sockets) -> Option<PortHolder> {
    let (transport, states) = match protocol {
        "udp" => (Transport::Udp, 1 << state::CLOSE | 1 << state::ESTABLISHED),
        "tcp" => (Transport::Tcp, !0),
        _ => return None,
    };
    let query = Query { transport, states, peer: None, port: address.port(), times: false };
    let mut found: Vec<Socket> = Vec::new();
    let overlaps = |own: SocketAddr| {
        let (own, other) = (own.ip().to_canonical(), address.ip().to_canonical());
        own == other || own.is_unspecified() || other.is_unspecified()
    };
    let add = |socket: &Socket| {
        if overlaps(socket.local) && found.len() < LISTED {
            found.push(*socket);
        }
    };
    socket_census::each(&query, add).ok()?;
    let socket = found.iter().find(|socket| socket.inode != 0).or(found.first())?;
    let owner = sockets.holder(socket.inode).and_then(|pid| sockets.owner(pid, 1));
    let remote = Some(socket.remote).filter(|remote| remote.port() != 0);
    Some(PortHolder { owner, local: socket.local, remote, state: sums::name(socket.state).to_owned() })
}
