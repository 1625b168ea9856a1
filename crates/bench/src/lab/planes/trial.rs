//! One run of one cell.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use fourtuple::spread::Selector;
use fourtuple_forward::{Forward, Link, PlaneCounts, Running};
use fourtuple_syscalls::{netns, schedule, veth};

use crate::lab::planes::generator::{
    self, Arrivals, Generator, Placement, QUEUE, SendCounts, Sink, SinkCounts,
};
use crate::lab::planes::{NetworkKind, Spec, SpreadBy};
use crate::lab::{LabError, Namespace, Watch, start};

/// The measurements of one pass of packets.
pub(super) struct Measured {
    pub(super) sent: SendCounts,
    pub(super) arrived: u64,
    /// Time of the last arrival, CLOCK_MONOTONIC; 0 if no packet arrived.
    pub(super) last_ns: u64,
    pub(super) planes: Vec<PlaneCounts>,
    pub(super) sink: SinkCounts,
}

/// The results of a run.
pub(super) struct RunMeasurements {
    /// Measurements with generator, planes and sink in parallel, as far as there are processors.
    pub(super) abreast: Measured,
    /// Measurements of one plane that takes turns with the generator on one processor. A plane faster than the generator
    /// finds only a packet or two per wakeup, and spends its time on wakeups; here its queue is full.
    pub(super) in_turns: Option<Measured>,
}

impl RunMeasurements {
    /// Returns whether the run was told to stop.
    pub(super) fn is_cut(&self) -> bool {
        self.abreast.sent.cut || self.in_turns.as_ref().is_some_and(|pass| pass.sent.cut)
    }
}

impl Measured {
    /// Packets that the planes received, and their processor time.
    pub(super) fn moved(&self) -> (u64, u64) {
        let planes = self.planes.iter();
        planes.fold((0, 0), |(packets, ns), plane| (packets + plane.received, ns + plane.cpu_ns))
    }
}

impl Spec {
    /// Runs the cell in namespaces of its own.
    pub(super) fn run(
        &self,
        packets: u64,
        over: NetworkKind,
        watch: &Watch<'_>,
    ) -> Result<RunMeasurements, LabError> {
        Namespace::run(|namespace| {
            let topology = Topology::new(namespace, over, self.mtu())?;
            let abreast = self.pass(&topology, packets, Placement::Apart, watch)?;
            let again = self.planes == 1 && !abreast.sent.cut;
            let in_turns =
                again.then(|| self.pass(&topology, packets, Placement::Between, watch)).transpose()?;
            Ok(RunMeasurements { abreast, in_turns })
        })
    }

    fn pass(
        &self,
        topology: &Topology,
        packets: u64,
        place: Placement,
        watch: &Watch<'_>,
    ) -> Result<Measured, LabError> {
        let (listen, to) = (topology.listen, topology.to);
        let sink = topology.at_sink(|| Sink::open(to)).map_err(LabError::call(format!("open {to}")))?;
        let running = self.start(topology, place)?;
        let generator = topology
            .at_generator(|| Generator::open(listen, self.flows, self.bytes))
            .map_err(LabError::call(format!("connect to {listen}")))?;
        let window = generator::window(self.bytes, sink.queue);
        let arrivals = Arrivals::default();
        let (sent, planes, seen) = thread::scope(|scope| -> Result<_, LabError> {
            let counting =
                start::thread(scope, || sink.run(generator::inner_flows(self.flows), place, &arrivals))?;
            let sending = start::thread(scope, || generator.run(packets, window, place, &arrivals, watch));
            let sent = sending.map(join);
            let planes = running.drain();
            arrivals.over.store(true, Ordering::Release);
            let seen = join(counting);
            Ok((sent?, planes, seen))
        })?;
        Ok(Measured {
            sent: sent.map_err(LabError::call(format!("send to {listen}")))?,
            arrived: arrivals.packets.into_inner(),
            last_ns: arrivals.last_ns.into_inner(),
            planes: planes?.pop().unwrap_or_default(),
            sink: seen,
        })
    }

    /// Starts the planes. A thread inherits the CPU affinity and the scheduling policy of the thread that starts it.
    fn start(&self, topology: &Topology, place: Placement) -> Result<Running, LabError> {
        let forward = self.forward(topology);
        if place == Placement::Apart {
            return Ok(forward.start()?);
        }
        let begin = || {
            let settled = place.processor().and_then(|processor| {
                processor.map_or(Ok(()), schedule::pin_to)?;
                schedule::give_way()
            });
            settled.map_err(LabError::call("schedule planes"))?;
            Ok(forward.start()?)
        };
        thread::scope(|scope| join(start::thread(scope, begin)?))
    }

    fn forward(&self, topology: &Topology) -> Forward {
        let mut link = Link::new(topology.listen, topology.to);
        link.spread = match self.spread {
            SpreadBy::Hash => Selector::Hash,
            SpreadBy::Random => Selector::Random,
            SpreadBy::Flow => Selector::Key(generator::key()),
            SpreadBy::Cpu => Selector::Cpu,
        };
        Forward {
            kind: self.kind,
            // If a plane moves to another processor, packets of one flow can overtake each other behind it.
            pin: true,
            work: self.work,
            receive_buffer: Some(QUEUE),
            ..Forward::new(link, self.planes as usize)
        }
    }
}

fn join<R>(thread: thread::ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Addresses of two networks that RFC 5737 reserves for documentation; they exist only between the namespaces.
const GENERATOR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const ROUTER_TO_SINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const SINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// The addresses on which the planes and the sink listen.
const PORT: u16 = 4000;
const SINK_PORT: u16 = 4001;

/// Number of attempts to pass a packet through, and the length of each. Attempts are counted instead of time, since a
/// machine may be suspended for a while.
const TRIES: u32 = 2000;
const TRY: Duration = Duration::from_millis(5);

/// Three namespaces in a row, or one namespace in all three roles. The thread that created them is in the router's
/// namespace.
pub(super) struct Topology {
    generator: OwnedFd,
    router: OwnedFd,
    sink: OwnedFd,
    /// Address on which planes listen.
    pub(super) listen: SocketAddr,
    /// Destination of the packets.
    pub(super) to: SocketAddr,
}

impl Topology {
    /// Sets up the topology around the calling thread's namespace, with devices whose MTU allows packets of `mtu` bytes.
    pub(super) fn new(_router: &Namespace, over: NetworkKind, mtu: u32) -> Result<Topology, LabError> {
        let here = || netns::current().map_err(LabError::Namespace);
        let localhost = Ipv4Addr::LOCALHOST;
        if over == NetworkKind::Loopback {
            return Ok(Topology {
                generator: here()?,
                router: here()?,
                sink: here()?,
                listen: SocketAddr::from((localhost, PORT)),
                to: SocketAddr::from((localhost, SINK_PORT)),
            });
        }
        let router = here()?;
        let mut others = Vec::new();
        for _ in 0..2 {
            netns::enter_new().map_err(LabError::Namespace)?;
            others.push(here()?);
        }
        let [generator, sink] = others.try_into().expect("two were made");
        let topology = Topology {
            generator,
            router,
            sink,
            listen: SocketAddr::from((ROUTER, PORT)),
            to: SocketAddr::from((SINK, SINK_PORT)),
        };
        topology.cable(mtu).map_err(LabError::call("make veth devices"))?;
        for (from, to, address) in
            [(&topology.generator, &topology.router, ROUTER), (&topology.router, &topology.sink, SINK)]
        {
            topology
                .reach(from, to, address)
                .map_err(LabError::call(format!("reach {address} over veth")))?;
        }
        Ok(topology)
    }

    fn cable(&self, mtu: u32) -> io::Result<()> {
        self.within(&self.router, || {
            veth::create("veth-in", "veth", self.generator.as_fd(), mtu)?;
            veth::create("veth-out", "veth", self.sink.as_fd(), mtu)?;
            veth::set_up("veth-in", ROUTER, 24)?;
            veth::set_up("veth-out", ROUTER_TO_SINK, 24)
        })?;
        self.within(&self.generator, || veth::set_up("veth", GENERATOR, 24))?;
        self.within(&self.sink, || veth::set_up("veth", SINK, 24))
    }

    /// Sends until a packet arrives: a kernel worker enables a device some time after its setup (linkwatch_event), and
    /// neighbour discovery takes time. The counted packets then wait for neither.
    fn reach(&self, from: &OwnedFd, to: &OwnedFd, address: Ipv4Addr) -> io::Result<()> {
        let there = self.within(to, || UdpSocket::bind((address, 0)))?;
        let here = self.within(from, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        there.set_read_timeout(Some(TRY))?;
        let to = there.local_addr()?;
        // A send that fails now may succeed in the next attempt.
        let mut last = Ok(());
        for _ in 0..TRIES {
            last = here.send_to(b"?", to).and_then(|_| there.recv(&mut [0; 8])).map(drop);
            match &last {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => thread::sleep(TRY),
            }
        }
        last
    }

    /// Opens a socket in the sink's namespace; a socket stays in the namespace in which it was created.
    fn at_sink<R>(&self, open: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        self.within(&self.sink, open)
    }

    /// Opens a socket in the generator's namespace.
    fn at_generator<R>(&self, open: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        self.within(&self.generator, open)
    }

    fn within<R>(&self, namespace: &OwnedFd, work: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        netns::enter(namespace.as_fd())?;
        let done = work();
        netns::enter(self.router.as_fd())?;
        done
    }
}
