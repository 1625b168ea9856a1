//! The check for other sockets at the address of a link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::Transport;

use crate::error::ForwardError;

/// Refuses an address at which more UDP sockets are bound than the `own` sockets of this process: with SO_REUSEPORT the kernel would
/// distribute packets over all of them without an error.
///
/// If the kernel cannot list UDP sockets (no udp_diag), a bind(2) without SO_REUSEPORT detects other sockets while this process has none.
/// Such a bind(2) also fails if a socket is bound to the wildcard address.
pub(crate) fn refuse(listen: SocketAddr, own: usize) -> Result<(), ForwardError> {
    if listen.port() == 0 {
        return Ok(());
    }
    let nowhere: IpAddr =
        if listen.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let filter = Filter {
        transport: Transport::Udp,
        source: Some(listen.ip()),
        source_port: Some(listen.port()),
        destination: SocketAddr::new(nowhere, 0),
    };
    let mut sockets = 0;
    let listed = sock_diag::each(&filter, |_| sockets += 1);
    let is_taken = match listed {
        Ok(()) => sockets > own,
        Err(_) if own == 0 => {
            UdpSocket::bind(listen).is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
        }
        Err(_) => false,
    };
    if is_taken { Err(ForwardError::Taken { listen }) } else { Ok(()) }
}
