//! Measures on this kernel how long connect() takes, and how much longer for each port that its search passes over.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, resource};

/// Sizes of the range. Half of it is ports of one parity, which the search passes over first. More ports are nearer to the cost in
/// a large table, whose sockets are not in the caches.
const SIZES: [u16; 2] = [4_000, 1_000];
const FIRST: u16 = 20_000;
/// Connects in each mean.
const SAMPLES: usize = 100;

/// The costs of connect() over loopback, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Calibration {
    /// Median of a connect to a destination without other connections.
    pub(crate) floor_ns: u64,
    /// Additional time for each port in use that the search looks at.
    pub(crate) probe_ns: f64,
}

/// Measures in a network namespace of its own, which ends with the measurement. `None` where that is not possible: without the
/// right to make a namespace, or with too few descriptors; and when `stop` is set.
pub(crate) fn calibrate(stop: &AtomicBool) -> Option<Calibration> {
    let builder = thread::Builder::new().name("calibrate".to_owned());
    thread::scope(|scope| builder.spawn_scoped(scope, || measure(stop)).ok()?.join().ok()?.ok())
}

fn measure(stop: &AtomicBool) -> io::Result<Calibration> {
    netns::enter_new()?;
    let limit = resource::raise_descriptor_limit()?;
    let fits = |ports: &u16| u64::from(*ports) + 256 < limit;
    let ports = SIZES.into_iter().find(fits).ok_or(io::ErrorKind::OutOfMemory)?;
    // Of this thread's namespace.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{FIRST} {}", FIRST + ports - 1))?;
    let at = SocketAddr::from(([127, 0, 0, 1], 4_000));
    let listener = socket::open(Transport::Tcp, at, false)?;
    socket::bind(listener.as_fd(), at)?;
    socket::listen(listener.as_fd(), i32::from(ports))?;
    let mut held: Vec<OwnedFd> = Vec::new();
    let mut times = Vec::new();
    // 3 of 4 ports, so that all ports of the first parity are in use.
    for _ in 0..ports / 4 * 3 {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let client = socket::open(Transport::Tcp, at, false)?;
        let began = Instant::now();
        socket::connect(client.as_fd(), at)?;
        times.push(began.elapsed().as_nanos() as u64);
        held.push(client);
    }
    let first = median(&times[..SAMPLES]);
    let last = median(&times[times.len() - SAMPLES..]);
    let probe_ns = last.saturating_sub(first) as f64 / f64::from(ports / 2);
    Ok(Calibration { floor_ns: first, probe_ns })
}

fn median(times: &[u64]) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}
