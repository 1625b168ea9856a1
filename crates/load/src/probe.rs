//! The choice among the addresses of a name: a connection to each in turn, before the run.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use fourtuple::dial::{DialError, Dialer};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, errno_name, option};

use crate::preflight::{Finding, Remedy, Severity};
use crate::settings::Load;

/// Maximum time for which an address may leave the probe unanswered. The kernel repeats a SYN after 1 s.
const PROBE: Duration = Duration::from_secs(1);

/// The answer of an address to its probe.
enum Answer {
    Accepts,
    /// The reason why the address is passed over.
    Fails(String),
}

/// Returns the addresses that the run loads, and a finding if an address of the name was passed over. One address needs no probe.
pub(crate) fn choose(load: &Load, mut candidates: Vec<Endpoint>) -> (Vec<Endpoint>, Option<Finding>) {
    if candidates.len() < 2 || load.all_addresses {
        return (candidates, None);
    }
    let mut failed = Vec::new();
    let mut chosen = None;
    for (number, address) in candidates.iter().filter_map(Endpoint::inet).enumerate() {
        match answer(load, address) {
            Answer::Accepts => {
                chosen = Some(number);
                break;
            }
            Answer::Fails(why) => failed.push(format!("{address} ({why})")),
        }
    }
    let address = candidates.swap_remove(chosen.unwrap_or(0));
    let (name, failed) = (load.target.host(), failed.join(", "));
    let message = match chosen {
        Some(0) => None,
        Some(_) => Some(format!("{name}: {address} is loaded, not {failed}")),
        None => Some(format!("no address of {name} answers: {failed}; {address} is loaded")),
    };
    let finding = |message| Finding {
        id: "address",
        severity: Severity::Warn,
        message,
        remedies: match chosen {
            Some(_) => Vec::new(),
            None => vec![Remedy::Other("start the server".to_owned())],
        },
    };
    (vec![address], message.map(finding))
}

fn answer(load: &Load, address: SocketAddr) -> Answer {
    let timeout = PROBE.min(load.timeout);
    match load.transport() {
        Transport::Tcp => match connect(load, address, timeout) {
            Ok(()) => Answer::Accepts,
            // A lack of ports says nothing about the address.
            Err(error) if error.is_exhausted() => Answer::Accepts,
            Err(error) => {
                let errno = error.raw_os_error().map(io::Error::from_raw_os_error);
                Answer::Fails(errno.map_or(error.to_string(), |errno| errno_name(&errno).to_string()))
            }
        },
        Transport::Udp => match exchange(load, address, timeout) {
            Ok(()) => Answer::Accepts,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Answer::Fails("no answer".to_owned()),
            Err(error) => Answer::Fails(errno_name(&error).to_string()),
        },
    }
}

fn connect(load: &Load, address: SocketAddr, timeout: Duration) -> Result<(), DialError> {
    let dialer = Dialer::to(address).sources(load.sources.clone()).timeout(timeout).without_census();
    // What the probe cannot prepare, the run reports.
    let Ok(dialer) = dialer.build() else { return Ok(()) };
    let (stream, _) = dialer.dial()?;
    // RST: the probe leaves no TIME_WAIT socket. Without the option it leaves one.
    let _ = option::set_reset_on_close(stream.as_fd());
    Ok(())
}

/// Sends a request and waits for a datagram in return. An address without a server often answers with ICMP: ECONNREFUSED.
fn exchange(load: &Load, address: SocketAddr, timeout: Duration) -> io::Result<()> {
    let any = match address {
        SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((load.sources.addresses().first().copied().unwrap_or(any), 0))?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(timeout))?;
    let mut protocol = load.workload.protocol();
    protocol.begin(true);
    socket.send(protocol.outgoing())?;
    socket.recv(&mut [0; 1]).map(drop)
}
