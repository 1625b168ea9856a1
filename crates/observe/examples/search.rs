//! Measures what connections to a listener of one's own show of the port search: `cargo run --release -p fourtuple-observe --example search`.
//!
//! Prints the median CPU time of connect() to an own listener, and to a destination whose connections use all ports of the first
//! parity, in a network namespace of its own. Needs root.

use std::error::Error;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option, resource};
use fourtuple_testing::set_sysctl;

const FIRST: u16 = 20_000;
/// Half of the ports fit into a limit of 20,000 descriptors.
const PORTS: u16 = 16_000;
const CONNECTS: usize = 99;

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    resource::raise_descriptor_limit()?;
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{FIRST} {}", FIRST + PORTS - 1));
    let (own, destination) = (listener(4_000)?, listener(4_001)?);
    println!("no port in use: {:?} to an own listener", time(own.1)?);
    let connections = (0..PORTS / 2).map(|_| connection(destination.1)).collect::<Result<Vec<_>, _>>()?;
    println!(
        "{} ports in use by connections to a destination: {:?} to an own listener, {:?} to the destination",
        connections.len(),
        time(own.1)?,
        time(destination.1)?
    );
    drop(connections);
    let bound = (0..PORTS / 2).map(|number| bound(FIRST + 2 * number)).collect::<Result<Vec<_>, _>>()?;
    println!("{} ports held by bind(): {:?} to an own listener", bound.len(), time(own.1)?);
    Ok(())
}

fn listener(port: u16) -> std::io::Result<(OwnedFd, SocketAddr)> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let listener = socket::open(Transport::Tcp, address, false)?;
    socket::bind(listener.as_fd(), address)?;
    // The accept queue holds the other ends.
    socket::listen(listener.as_fd(), i32::from(PORTS))?;
    Ok((listener, address))
}

/// Connects; the connection is reset when it is dropped, and leaves no TIME_WAIT.
fn connection(to: SocketAddr) -> std::io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, to, true)?;
    option::set_reset_on_close(socket.as_fd())?;
    socket::connect(socket.as_fd(), to)?;
    Ok(socket)
}

fn bound(port: u16) -> std::io::Result<OwnedFd> {
    let address = SocketAddr::from(([127, 0, 0, 2], port));
    let socket = socket::open(Transport::Tcp, address, false)?;
    socket::bind(socket.as_fd(), address)?;
    Ok(socket)
}

/// Returns the median CPU time of a connection that is opened and reset.
fn time(to: SocketAddr) -> std::io::Result<Duration> {
    let one = |_| {
        let began = resource::thread_cpu_time();
        drop(connection(to)?);
        Ok(resource::thread_cpu_time().saturating_sub(began))
    };
    let mut times = (0..CONNECTS).map(one).collect::<std::io::Result<Vec<Duration>>>()?;
    times.sort_unstable();
    Ok(times[CONNECTS / 2])
}
