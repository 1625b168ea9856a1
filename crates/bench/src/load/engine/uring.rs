use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fourtuple::dial::ConnectRequest;
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::option;
use fourtuple_syscalls::ring::{self, OpenOptions, Ring, Step};
use fourtuple_syscalls::socket::{self, Transport};

use crate::load::engine::{Engine, Event, Options, Stage};

/// Size of the receive buffer of a connection, in bytes.
const BUFFER: usize = 16 * 1024;

/// One connection in this many is opened by separate system calls, in order to measure connect(): within a chain the kernel
/// does not report when the port search ended.
const SAMPLE: u64 = 64;

/// An engine on io_uring: linked socket, setsockopt, connect, send and recv on direct descriptors, with many connections per
/// system call. UDP sockets are opened and connected by separate system calls.
pub(crate) struct UringEngine {
    ring: Ring,
    transport: Transport,
    destinations: Vec<Endpoint>,
    options: Options,
    opened: u64,
    /// Duration of connect() of each slot in nanoseconds, if it was measured.
    sampled: Vec<Option<u64>>,
    /// Failures of separate system calls, which have no completion.
    failed: Vec<(u32, Stage, io::Error)>,
    /// Number of system calls besides io_uring_enter().
    calls: u64,
}

impl UringEngine {
    pub(crate) fn new(
        transport: Transport,
        destinations: &[Endpoint],
        slots: u32,
        options: Options,
    ) -> io::Result<Self> {
        Ok(UringEngine {
            ring: Ring::new(transport, destinations, slots, BUFFER)?,
            transport,
            destinations: destinations.to_vec(),
            options,
            opened: 0,
            sampled: vec![None; slots as usize],
            failed: Vec::new(),
            calls: 0,
        })
    }

    /// Opens a connection by separate system calls, measures connect(), and adds the socket to the ring.
    fn open_timed(
        &mut self,
        slot: u32,
        (to, destination): (usize, SocketAddr),
        request: ConnectRequest,
        bytes: &[u8],
    ) -> Result<(), (Stage, io::Error)> {
        let failed = |error| (Stage::Connect, error);
        let socket = socket::open(self.transport, destination, true).map_err(failed)?;
        self.calls += 4 + crate::load::engine::epoll::prepare(
            socket.as_fd(),
            request,
            self.options,
            !bytes.is_empty(),
        )?;
        let begun = Instant::now();
        socket::connect(socket.as_fd(), destination).map_err(failed)?;
        self.sampled[slot as usize] = Some(begun.elapsed().as_nanos() as u64);
        // On a non-blocking socket the ring would complete with EAGAIN instead of waiting.
        socket::set_nonblocking(socket.as_fd(), false).map_err(failed)?;
        self.ring.adopt(slot, to, socket, bytes).map_err(failed)
    }
}

impl Engine for UringEngine {
    fn open(&mut self, slot: u32, to: usize, request: ConnectRequest, bytes: &[u8]) -> io::Result<()> {
        self.opened += 1;
        self.sampled[slot as usize] = None;
        // On a UDP socket connect() fails with EAGAIN when no port is free. The ring would take that for a socket that is not
        // ready and try 128 times (APOLL_MAX_RETRY) before it completed.
        let by_hand = self.transport == Transport::Udp || self.opened % SAMPLE == 1;
        if let Some(destination) = self.destinations[to].inet()
            && by_hand
        {
            if let Err((stage, error)) = self.open_timed(slot, (to, destination), request, bytes) {
                self.failed.push((slot, stage, error));
            }
            return Ok(());
        }
        let opening = OpenOptions {
            destination: to,
            source: request.source,
            window: request.window.map(|window| (window.low(), window.high())),
            reset_on_close: self.options.reset_on_close,
            ack_with_data: self.options.ack_with_request && !bytes.is_empty(),
        };
        self.ring.open(slot, &opening, bytes)
    }

    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        self.ring.exchange(slot, bytes)
    }

    fn probe(&mut self, slot: u32) -> io::Result<()> {
        self.ring.probe(slot)
    }

    fn watch(&mut self, slot: u32) -> io::Result<()> {
        self.ring.watch(slot)
    }

    fn close(&mut self, slot: u32) -> io::Result<()> {
        self.ring.close(slot)
    }

    fn cancel(&mut self, slot: u32) -> io::Result<()> {
        self.ring.cancel(slot)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.ring.wait(if self.failed.is_empty() { timeout } else { Duration::ZERO })
    }

    fn event(&mut self) -> Option<Event> {
        if let Some((slot, stage, error)) = self.failed.pop() {
            return Some(Event::Failed { slot, stage, error });
        }
        let ring::Event { slot, step, result } = self.ring.event()?;
        Some(match (step, result) {
            (Step::Connect, Ok(_)) => {
                Event::Connected { slot, search_ns: self.sampled[slot as usize].take() }
            }
            (Step::Watch, Ok(_)) => Event::Lost { slot },
            (_, Ok(count)) => Event::Received { slot, count },
            (Step::Bind, Err(error)) => Event::Failed { slot, stage: Stage::Bind, error },
            (Step::Open | Step::Option | Step::Connect, Err(error)) => {
                Event::Failed { slot, stage: Stage::Connect, error }
            }
            (_, Err(error)) => Event::Failed { slot, stage: Stage::Exchange, error },
        })
    }

    fn received(&self, slot: u32, count: usize) -> &[u8] {
        self.ring.received(slot, count)
    }

    fn system_calls(&self) -> u64 {
        self.ring.enters() + self.calls
    }
}

/// A loopback address that other programs are unlikely to use: it has free ports even if TIME_WAIT sockets hold all ports of
/// 127.0.0.1.
const SELF_TEST: (Ipv4Addr, u16) = (Ipv4Addr::new(127, 244, 17, 84), 0);

/// Tests chains on this kernel with a listener of its own: a response, a socket option before connect(), and a failure in the
/// middle of a chain. Some kernels lack an operation, and some lose completions of linked operations.
///
/// # Errors
///
/// A description of what does not work.
pub(crate) fn self_test(with_options: bool, with_bind: bool) -> Result<(), String> {
    let test = || -> io::Result<Result<(), String>> {
        let listener = TcpListener::bind(SELF_TEST)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        // Bound without listen(): connect() is refused. The port of a listener that was closed would stay open while a process that
        // another thread forked has a copy of it.
        let closed = socket::open(Transport::Tcp, address, true)?;
        socket::bind(closed.as_fd(), SELF_TEST.into())?;
        let refusing = Endpoint::Inet(socket::local_address(closed.as_fd())?);
        let mut ring = Ring::new(Transport::Tcp, &[Endpoint::Inet(address), refusing], 2, 64)?;
        let opening = OpenOptions {
            source: with_bind.then(|| SocketAddr::new(address.ip(), 0)),
            // RST: the test leaves no TIME_WAIT socket.
            reset_on_close: with_options,
            ack_with_data: with_options,
            ..OpenOptions::default()
        };
        ring.open(0, &opening, b"?")?;
        let connected = next(&mut ring)?;
        let ring::Event { step: Step::Connect, result: Ok(_), .. } = connected else {
            return Ok(Err(describe(&connected)));
        };
        let accepted = accept(&listener, &mut ring)?;
        socket::send(accepted.as_fd(), b"!")?;
        let received = next(&mut ring)?;
        let ring::Event { step: Step::Receive, result: Ok(1), .. } = received else {
            return Ok(Err(describe(&received)));
        };
        option::set_reset_on_close(accepted.as_fd())?;
        drop(accepted);
        ring.close(0)?;
        ring.open(1, &OpenOptions { destination: 1, ..opening }, b"?")?;
        let refused = next(&mut ring)?;
        match refused.result {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && !ring.is_busy(1) => Ok(Ok(())),
            other => Ok(Err(format!("a chain to a closed port gave {other:?}"))),
        }
    };
    match test() {
        Ok(answer) => answer,
        Err(error) => Err(fourtuple_syscalls::errno_name(&error).to_string()),
    }
}

/// Accepts the connection of the chain. The ring sends the request, and with it the last ACK of the handshake, only while the
/// thread is in the kernel for the ring: a blocking accept() would return after the timer of delayed ACKs, 200 ms later. Waits for 3 s, as
/// [`next`] does.
fn accept(listener: &TcpListener, ring: &mut Ring) -> io::Result<TcpStream> {
    for _ in 0..3000 {
        match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ring.wait(Duration::from_millis(1))?;
            }
            accepted => return Ok(accepted?.0),
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "no connection in the accept queue"))
}

fn describe(event: &ring::Event) -> String {
    match &event.result {
        Ok(count) => format!("{:?} in a chain gave {count}", event.step),
        Err(error) => format!("{:?} in a chain: {}", event.step, fourtuple_syscalls::errno_name(error)),
    }
}

/// Waits for an event for 3 s: the kernel repeats a SYN after 1 s if a busy host has dropped it.
fn next(ring: &mut Ring) -> io::Result<ring::Event> {
    for _ in 0..60 {
        if let Some(event) = ring.event() {
            return Ok(event);
        }
        ring.wait(Duration::from_millis(50))?;
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "a completion is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fourtuple_testing::{in_namespace, skip};

    /// Returns the number of ACKs that the timer of delayed ACKs sent in this namespace.
    fn delayed_acks() -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
        let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:")).map(str::split_whitespace);
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let (_, value) = names.zip(values).find(|(name, _)| *name == "DelayedACKs").unwrap();
        value.parse().unwrap()
    }

    #[test]
    fn the_self_test_waits_for_no_delayed_ack() {
        in_namespace(|| {
            // The timer may expire on a host that stops this thread for 200 ms: one test without it suffices.
            let without = (0..20).any(|_| {
                let before = delayed_acks();
                if let Err(why) = self_test(true, false) {
                    skip("uring::the_self_test_waits_for_no_delayed_ack", "uring", &why);
                    return true;
                }
                delayed_acks() == before
            });
            assert!(without, "each test waited for the timer");
        });
    }
}
