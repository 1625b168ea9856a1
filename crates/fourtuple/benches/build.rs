//! Measures [`DialerBuilder::build`](fourtuple::dial::DialerBuilder::build) while the namespace has 9,000 TCP sockets to other
//! destinations: `cargo bench -p fourtuple --bench build`. Needs root, for a network namespace.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

use fourtuple::dial::Dialer;
use fourtuple_syscalls::netns;
use fourtuple_syscalls::socket::{self, Transport};

/// Sockets in the namespace: both ends of each connection.
const SOCKETS: usize = 9000;
const BUILDS: usize = 101;

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    fs::write("/proc/sys/net/core/somaxconn", "65535")?;
    let destination: SocketAddr = "127.0.0.1:4000".parse()?;
    // Half of the sockets are to the port, and half to the address, of the destination.
    let others = ["127.0.0.2:4000", "127.0.0.1:4001"];
    let (mut listeners, mut held) = (Vec::new(), Vec::new());
    for other in others {
        let other: SocketAddr = other.parse()?;
        let listener = socket::open(Transport::Tcp, other, false)?;
        socket::bind(listener.as_fd(), other)?;
        socket::listen(listener.as_fd(), 65_535)?;
        listeners.push(listener);
        for _ in 0..SOCKETS / 2 / others.len() {
            held.push(TcpStream::connect(other)?);
        }
    }
    // The first build probes the kernel.
    let mut times = Vec::new();
    for _ in 0..=BUILDS {
        let begun = Instant::now();
        Dialer::builder(destination).build()?;
        times.push(begun.elapsed());
    }
    let times = &mut times[1..];
    times.sort_unstable();
    let micros = |quarter: usize| times[BUILDS * quarter / 4].as_secs_f64() * 1e6;
    println!(
        "build() at {SOCKETS} sockets to other destinations: median {:.0} us, quartiles {:.0} and {:.0} us, {BUILDS} builds",
        micros(2),
        micros(1),
        micros(3)
    );
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}
