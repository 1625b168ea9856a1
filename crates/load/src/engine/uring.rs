use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fourtuple::dial::Wanted;
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::option;
use fourtuple_syscalls::ring::{self, Opening, Ring, Step};
use fourtuple_syscalls::socket::{self, Transport};

use super::{Engine, Event, Options, Stage};

/// Bytes that are received at a time.
const ROOM: usize = 16 * 1024;

/// One connection of so many is opened by system calls of its own, so that connect() can be timed: within a chain the
/// kernel does not say when the search for a port was over.
const SAMPLE: u64 = 64;

/// io_uring: chains of socket, options, connect, send and receive on direct descriptors, many connections per system call; of
/// UDP the socket is connected by system calls of its own.
pub(crate) struct UringEngine {
    ring: Ring,
    transport: Transport,
    destination: Endpoint,
    options: Options,
    opened: u64,
    /// How long connect() of a slot took, where it was sampled.
    sampled: Vec<Option<u64>>,
    /// Events that no completion brings.
    failed: Vec<(u32, io::Error)>,
    /// System calls beside the ring's.
    calls: u64,
}

impl UringEngine {
    pub(crate) fn new(
        transport: Transport,
        destination: &Endpoint,
        slots: u32,
        options: Options,
    ) -> io::Result<Self> {
        Ok(UringEngine {
            ring: Ring::new(transport, destination, slots, ROOM)?,
            transport,
            destination: destination.clone(),
            options,
            opened: 0,
            sampled: vec![None; slots as usize],
            failed: Vec::new(),
            calls: 0,
        })
    }

    /// connect() with a stopwatch, and the socket into the ring.
    fn open_timed(
        &mut self,
        slot: u32,
        destination: SocketAddr,
        wanted: Wanted,
        bytes: &[u8],
    ) -> io::Result<()> {
        let socket = socket::open(self.transport, destination, true)?;
        self.calls += 4 + super::epoll::prepare(socket.as_fd(), wanted, self.options, bytes)?;
        let begun = Instant::now();
        socket::connect(socket.as_fd(), destination)?;
        self.sampled[slot as usize] = Some(begun.elapsed().as_nanos() as u64);
        // A socket that does not block is one on which the ring does not wait.
        socket::set_nonblocking(socket.as_fd(), false)?;
        self.ring.adopt(slot, socket, bytes)
    }
}

impl Engine for UringEngine {
    fn open(&mut self, slot: u32, wanted: Wanted, bytes: &[u8]) -> io::Result<()> {
        self.opened += 1;
        self.sampled[slot as usize] = None;
        // UDP says EAGAIN when there is no port, which the ring takes for a socket that is not ready: it would try 128 times
        // (APOLL_MAX_RETRY), once a turn, before it said so.
        let by_hand = self.transport == Transport::Udp || self.opened % SAMPLE == 1;
        if let Some(destination) = self.destination.inet()
            && by_hand
        {
            if let Err(error) = self.open_timed(slot, destination, wanted, bytes) {
                self.failed.push((slot, error));
            }
            return Ok(());
        }
        let opening = Opening {
            source: wanted.source,
            window: wanted.window.map(|window| (window.low(), window.high())),
            reset_on_close: self.options.reset_on_close,
            ack_with_data: self.options.ack_with_request && !bytes.is_empty(),
        };
        self.ring.open(slot, &opening, bytes)
    }

    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        self.ring.exchange(slot, bytes)
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
        if let Some((slot, error)) = self.failed.pop() {
            return Some(Event::Failed { slot, stage: Stage::Connect, error });
        }
        let ring::Event { slot, step, result } = self.ring.event()?;
        Some(match (step, result) {
            (Step::Connect, Ok(_)) => {
                Event::Connected { slot, search_ns: self.sampled[slot as usize].take() }
            }
            (Step::Watch, Ok(_)) => Event::Lost { slot },
            (_, Ok(count)) => Event::Received { slot, count },
            (Step::Open | Step::Option | Step::Bind | Step::Connect, Err(error)) => {
                Event::Failed { slot, stage: Stage::Connect, error }
            }
            (_, Err(error)) => Event::Failed { slot, stage: Stage::Talk, error },
        })
    }

    fn received(&self, slot: u32, count: usize) -> &[u8] {
        self.ring.received(slot, count)
    }

    fn system_calls(&self) -> u64 {
        self.ring.enters() + self.calls
    }
}

/// An address of loopback that nobody else is likely to use: on it there is a port to listen on and another one to come from,
/// also when TIME_WAIT has all those of 127.0.0.1.
const SELF_TEST: (Ipv4Addr, u16) = (Ipv4Addr::new(127, 244, 17, 84), 0);

/// Whether chains work here as they must, tried on a listener of our own: an answer, an option before connect(), and a
/// failure in the middle. Some kernels lack a step, some lose completions of linked steps.
///
/// # Errors
///
/// What does not, in words.
pub(crate) fn self_test(with_options: bool, with_bind: bool) -> Result<(), String> {
    let test = || -> io::Result<Result<(), String>> {
        let listener = TcpListener::bind(SELF_TEST)?;
        let address = listener.local_addr()?;
        let mut ring = Ring::new(Transport::Tcp, &Endpoint::Inet(address), 2, 64)?;
        let opening = Opening {
            source: with_bind.then(|| SocketAddr::new(address.ip(), 0)),
            // RST, so that the test leaves nothing in TIME_WAIT.
            reset_on_close: with_options,
            ack_with_data: with_options,
            ..Opening::default()
        };
        ring.open(0, &opening, b"?")?;
        let connected = next(&mut ring)?;
        let ring::Event { step: Step::Connect, result: Ok(_), .. } = connected else {
            return Ok(Err(told(&connected)));
        };
        let accepted = listener.accept()?.0;
        socket::send(accepted.as_fd(), b"!")?;
        let received = next(&mut ring)?;
        let ring::Event { step: Step::Receive, result: Ok(1), .. } = received else {
            return Ok(Err(told(&received)));
        };
        option::set_reset_on_close(accepted.as_fd())?;
        drop(accepted);
        ring.close(0)?;
        drop(listener);
        ring.open(1, &opening, b"?")?;
        let refused = next(&mut ring)?;
        match refused.result {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && !ring.is_busy(1) => Ok(Ok(())),
            other => Ok(Err(format!("a chain to a closed port gave {other:?}"))),
        }
    };
    match test() {
        Ok(answer) => answer,
        Err(error) => Err(fourtuple_syscalls::errno_name(&error)),
    }
}

fn told(event: &ring::Event) -> String {
    match &event.result {
        Ok(count) => format!("{:?} in a chain gave {count}", event.step),
        Err(error) => format!("{:?} in a chain: {}", event.step, fourtuple_syscalls::errno_name(error)),
    }
}

fn next(ring: &mut Ring) -> io::Result<ring::Event> {
    for _ in 0..20 {
        if let Some(event) = ring.event() {
            return Ok(event);
        }
        ring.wait(Duration::from_millis(50))?;
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "a completion is missing"))
}
