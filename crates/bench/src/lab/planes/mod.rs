//! `lab planes`: measures the gain from more data planes, and the cost of moving a packet.
//!
//! Published: "Performance Optimisation using SO_REUSEPORT" (High Performance Network Programming, 2022); the lab repeats its
//! figure on this kernel: throughput against the number of planes, for two MTUs.

mod advice;
mod generator;
mod sums;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use fourtuple::spread::Selector;
use fourtuple_forward::{Forward, ForwardError, Link, PlaneCounts, PlaneKind, Running};
use fourtuple_record::{PlanesResults, PlanesSettings, PlanesSkipped, Remark};
use fourtuple_syscalls::{netns, schedule, veth};

use crate::lab::planes::generator::{Arrivals, Generator, Placement, QUEUE, SendCounts, Sink, SinkCounts};
use crate::lab::planes::sums::Sums;
use crate::lab::{LabError, Namespace, Watch, start_thread};

pub use advice::advice;

impl Planes {
    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> PlanesSettings {
        let cells = self.cells(&PlaneKind::ALL);
        PlanesSettings {
            every_combination: self.has_lists(),
            plane: in_order(cells.iter().map(|spec| spec.kind.to_string())),
            planes: in_order(cells.iter().map(|spec| spec.planes)),
            bytes: in_order(cells.iter().map(|spec| spec.bytes)),
            spread: in_order(cells.iter().map(|spec| spec.spread.name().to_owned())),
            flows: in_order(cells.iter().map(|spec| spec.flows)),
            work_ns: in_order(cells.iter().map(|spec| spec.work.as_nanos() as u64)),
            packets: self.packets,
            repeats: self.repeats,
            over: self.over.name().to_owned(),
            seed: self.seed,
        }
    }

    /// Runs every cell, each run in namespaces of its own; odd repeats run in the reverse order.
    ///
    /// # Errors
    ///
    /// Returns an error if this host lacks a named kind of plane, if a setting is out of range, or if a run fails before
    /// the first result.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(PlanesResults, Vec<Remark>), LabError> {
        self.check()?;
        let (kinds, skipped) = self.available_kinds()?;
        let mut cells: Vec<Sums> = self.cells(&kinds).into_iter().map(Sums::new).collect();
        let mut remarks = self.run_cells(&mut cells, watch)?;
        remarks.extend(sums::doubts(&cells));
        let mut random = fastrand::Rng::with_seed(self.seed);
        let found = sums::results(&cells, &mut random);
        let planes_help_above_ns = advice::planes_help_above(&found);
        let mut results = PlanesResults { cells: found, skipped, planes_help_above_ns, advice: Vec::new() };
        results.advice = advice(&results);
        Ok((results, remarks))
    }

    fn run_cells(&self, cells: &mut [Sums], watch: &Watch<'_>) -> Result<Vec<Remark>, LabError> {
        let mut remarks = Vec::new();
        'repeats: for repeat in 0..self.repeats {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            if repeat % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let spec = cells[index].spec;
                watch.progress.begin(&spec.title(), self.packets);
                let result = if watch.stopped() {
                    Err(LabError::Interrupted)
                } else {
                    spec.run(self.packets, self.over, watch)
                };
                let kept = cells.iter().any(|cell| cell.runs() > 0);
                match result {
                    Ok(passes) if !passes.is_cut() => cells[index].add(repeat, &passes),
                    Ok(_) | Err(LabError::Interrupted) if kept => {
                        let title = spec.title();
                        remarks.push(Remark::new(
                            "interrupted",
                            format!("interrupted at {title}: this run and what should follow are missing"),
                        ));
                        break 'repeats;
                    }
                    Ok(_) => return Err(LabError::Interrupted),
                    // The results of earlier runs are kept.
                    Err(error) if kept => {
                        remarks.push(Remark::new("failed", format!("{} failed: {error}", spec.title())));
                        break 'repeats;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(remarks)
    }

    /// Probes the kinds of plane. A kind that the settings name must work; with no kind named, kinds that this kernel lacks or
    /// does not permit are skipped.
    fn available_kinds(&self) -> Result<(Vec<PlaneKind>, Vec<PlanesSkipped>), LabError> {
        let named = !self.kinds.is_empty();
        let wanted = if named { in_order(self.kinds.iter().copied()) } else { PlaneKind::ALL.to_vec() };
        let (mut here, mut skipped) = (Vec::new(), Vec::new());
        for kind in wanted {
            match probe(kind) {
                Ok(()) => here.push(kind),
                Err(LabError::Forward(
                    error @ (ForwardError::Absent { .. } | ForwardError::NotPermitted { .. }),
                )) if !named => {
                    skipped.push(PlanesSkipped { plane: kind.to_string(), why: error.to_string() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((here, skipped))
    }
}

/// The network between the generator, the planes and the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkKind {
    /// Pairs of veth devices between three network namespaces.
    Veth,
    /// The loopback device of one namespace.
    Loopback,
}

impl NetworkKind {
    /// The two kinds of network.
    pub const ALL: [NetworkKind; 2] = [NetworkKind::Veth, NetworkKind::Loopback];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            NetworkKind::Veth => "veth",
            NetworkKind::Loopback => "loopback",
        }
    }
}

/// The selector of the plane that receives a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpreadBy {
    /// The kernel's hash of the 4-tuple.
    Hash,
    Random,
    /// The flow within the 4-tuple.
    Flow,
    /// The processor that handles the packet.
    Cpu,
}

impl SpreadBy {
    /// All selectors.
    pub const ALL: [SpreadBy; 4] = [SpreadBy::Hash, SpreadBy::Random, SpreadBy::Flow, SpreadBy::Cpu];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            SpreadBy::Hash => "hash",
            SpreadBy::Random => "random",
            SpreadBy::Flow => "flow",
            SpreadBy::Cpu => "cpu",
        }
    }
}

/// The settings of `lab planes`. If all lists are empty, the lab runs a fixed set of cells. Otherwise it runs every combination of the
/// lists, with these values for an empty list: all plane kinds; 1, 2 and 4 planes; 64 bytes; spread by flow; one 4-tuple; no work.
#[derive(Clone, Debug)]
pub struct Planes {
    pub kinds: Vec<PlaneKind>,
    /// Numbers of planes: 1 to 64.
    pub planes: Vec<u32>,
    /// Payload lengths in bytes: 16 to 9000.
    pub bytes: Vec<u32>,
    /// Selectors of the plane.
    pub spreads: Vec<SpreadBy>,
    /// Numbers of 4-tuples: 1 to 256.
    pub flows: Vec<u32>,
    /// Processor time that a plane spends on each packet besides moving it: up to 1 ms.
    pub work: Vec<Duration>,
    /// Packets of one run: 1,000 to 100 million.
    pub packets: u64,
    /// Runs of every cell: 1 to 100.
    pub repeats: u32,
    /// The network to run over.
    pub over: NetworkKind,
    /// Seed of the resampling that gives the confidence intervals.
    pub seed: u64,
}

/// The settings of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spec {
    kind: PlaneKind,
    planes: u32,
    bytes: u32,
    spread: SpreadBy,
    flows: u32,
    work: Duration,
}

/// IPv4 and UDP headers.
const HEADERS: u32 = 28;

impl Spec {
    /// Returns the smaller of the MTUs 1500 and 3000 that the packet fits into, or else the length of the packet.
    fn mtu(&self) -> u32 {
        let needed = self.bytes + HEADERS;
        [1500, 3000].into_iter().find(|mtu| needed <= *mtu).unwrap_or(needed)
    }

    fn title(&self) -> String {
        let Spec { kind, planes, bytes, spread, flows, work } = self;
        let tuples = if *flows == 1 { "one 4-tuple".to_owned() } else { format!("{flows} 4-tuples") };
        format!("{kind} x{planes}, {bytes} B, {}, {tuples}, work {work:?}", spread.name())
    }
}

impl Planes {
    /// Checks the ranges of the settings, without a system call.
    ///
    /// # Errors
    ///
    /// [`LabError::Setting`]
    pub fn check(&self) -> Result<(), LabError> {
        for (setting, values, accepted) in [
            ("planes", &self.planes[..], 1..=64),
            ("bytes", &self.bytes, generator::MIN_BYTES..=9000),
            ("flows", &self.flows, 1..=256),
            ("repeats", &[self.repeats], 1..=100),
        ] {
            values.iter().try_for_each(|value| LabError::unless_within(setting, *value, accepted.clone()))?;
        }
        if let Some(long) = self.work.iter().find(|work| **work > Duration::from_millis(1)) {
            return Err(LabError::setting("work", format!("{long:?}"), "accepted is up to 1ms"));
        }
        LabError::unless_within("packets", self.packets, 1_000..=100_000_000)
    }
}

/// Payloads that fill the MTUs of the published figure: 1500 and 3000.
const FULL: [u32; 2] = [1472, 2972];

/// Approximate time that the published router spent on a packet besides moving it: 1.3 Gbit/s of 1500 bytes on one plane.
const AS_PUBLISHED: Duration = Duration::from_micros(6);
/// CPU time per packet, from none to the time of a route look-up and a signature.
const WORKS: [Duration; 3] = [Duration::ZERO, AS_PUBLISHED, Duration::from_micros(20)];
const PLANES: [u32; 3] = [1, 2, 4];
/// The axis of the published figure. A host with fewer CPUs shows the gain by the counted capacity.
const AXIS: [u32; 5] = [1, 2, 4, 8, 10];

impl Planes {
    /// Returns whether any list was given.
    fn has_lists(&self) -> bool {
        let Planes { kinds, planes, bytes, spreads, flows, work, .. } = self;
        [kinds.len(), planes.len(), bytes.len(), spreads.len(), flows.len(), work.len()] != [0; 6]
    }

    /// Returns the cells with these kinds of plane, each once.
    fn cells(&self, kinds: &[PlaneKind]) -> Vec<Spec> {
        let cells = if self.has_lists() { self.every_combination(kinds) } else { default_cells(kinds) };
        in_order(cells.into_iter())
    }

    fn every_combination(&self, kinds: &[PlaneKind]) -> Vec<Spec> {
        let kinds = if self.kinds.is_empty() { kinds.to_vec() } else { self.kinds.clone() };
        let (planes, bytes) = (or(&self.planes, &PLANES), or(&self.bytes, &[64]));
        let (spreads, flows) = (or(&self.spreads, &[SpreadBy::Flow]), or(&self.flows, &[1]));
        let works = or(&self.work, &[Duration::ZERO]);
        let mut cells = Vec::new();
        // Cells that are compared most often run next to each other: packets of one length and work.
        for &bytes in &bytes {
            for &work in &works {
                for &kind in &kinds {
                    for &spread in &spreads {
                        for &flows in &flows {
                            cells.extend(planes.iter().map(|&planes| Spec {
                                kind,
                                planes,
                                bytes,
                                spread,
                                flows,
                                work,
                            }));
                        }
                    }
                }
            }
        }
        cells
    }
}

/// Returns the default cells: cost of a packet by plane kind, distribution over planes, gain from planes, and the published figure.
fn default_cells(kinds: &[PlaneKind]) -> Vec<Spec> {
    let mut cells = Vec::new();
    let cell = |kind, planes, bytes| Spec {
        kind,
        planes,
        bytes,
        spread: SpreadBy::Flow,
        flows: 1,
        work: Duration::ZERO,
    };
    for bytes in [64, 1400] {
        cells.extend(kinds.iter().map(|kind| cell(*kind, 1, bytes)));
    }
    let batched = PlaneKind::Batched;
    for flows in [1, 64] {
        for spread in [SpreadBy::Hash, SpreadBy::Random, SpreadBy::Flow] {
            cells.push(Spec { spread, flows, ..cell(batched, 4, 64) });
        }
    }
    for work in WORKS {
        cells.extend(PLANES.iter().map(|planes| Spec { work, ..cell(batched, *planes, 64) }));
    }
    for bytes in FULL {
        let one_by_one = PlaneKind::OneByOne;
        cells.extend(
            AXIS.iter().map(|planes| Spec { work: AS_PUBLISHED, ..cell(one_by_one, *planes, bytes) }),
        );
    }
    cells
}

fn or<T: Copy>(given: &[T], others: &[T]) -> Vec<T> {
    if given.is_empty() { others.to_vec() } else { given.to_vec() }
}

/// Removes duplicates, keeping the first of each.
fn in_order<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut left = Vec::new();
    for value in values {
        if !left.contains(&value) {
            left.push(value);
        }
    }
    left
}

/// Starts a forwarder of this kind and ends it, to check that the host supports the kind.
fn probe(kind: PlaneKind) -> Result<(), LabError> {
    Namespace::run(|_| {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let link = Link::new(any, SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        Forward { kind, ..Forward::new(link, 1) }.start()?.drain()?;
        Ok(())
    })
}

/// The measurements of one pass of packets.
struct Measured {
    sent: SendCounts,
    arrived: u64,
    /// Time of the last arrival, CLOCK_MONOTONIC; 0 if no packet arrived.
    last_ns: u64,
    planes: Vec<PlaneCounts>,
    sink: SinkCounts,
}

/// The results of a run.
struct RunMeasurements {
    /// Measurements with generator, planes and sink in parallel, as far as there are processors.
    abreast: Measured,
    /// Measurements of one plane that takes turns with the generator on one processor. A plane faster than the generator
    /// finds only a packet or two per wakeup, and spends its time on wakeups; here its queue is full.
    in_turns: Option<Measured>,
}

impl RunMeasurements {
    /// Returns whether the run was told to stop.
    fn is_cut(&self) -> bool {
        self.abreast.sent.cut || self.in_turns.as_ref().is_some_and(|pass| pass.sent.cut)
    }
}

impl Measured {
    /// Packets that the planes received, and their processor time.
    fn moved(&self) -> (u64, u64) {
        let planes = self.planes.iter();
        planes.fold((0, 0), |(packets, ns), plane| (packets + plane.received, ns + plane.cpu_ns))
    }
}

impl Spec {
    /// Runs the cell in namespaces of its own.
    fn run(&self, packets: u64, over: NetworkKind, watch: &Watch<'_>) -> Result<RunMeasurements, LabError> {
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
                start_thread(scope, || sink.run(generator::inner_flows(self.flows), place, &arrivals))?;
            let sending = start_thread(scope, || generator.run(packets, window, place, &arrivals, watch));
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
        thread::scope(|scope| join(start_thread(scope, begin)?))
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
struct Topology {
    generator: OwnedFd,
    router: OwnedFd,
    sink: OwnedFd,
    /// Address on which planes listen.
    listen: SocketAddr,
    /// Destination of the packets.
    to: SocketAddr,
}

impl Topology {
    /// Sets up the topology around the calling thread's namespace, with devices whose MTU allows packets of `mtu` bytes.
    fn new(_router: &Namespace, over: NetworkKind, mtu: u32) -> Result<Topology, LabError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing_given() -> Planes {
        Planes {
            kinds: Vec::new(),
            planes: Vec::new(),
            bytes: Vec::new(),
            spreads: Vec::new(),
            flows: Vec::new(),
            work: Vec::new(),
            packets: 1000,
            repeats: 1,
            over: NetworkKind::Veth,
            seed: 1,
        }
    }

    #[test]
    fn default_cells_include_their_reference_cells() {
        let cells = nothing_given().cells(&PlaneKind::ALL);
        assert_eq!(cells.len(), in_order(cells.iter().copied()).len(), "no cell occurs twice");
        for spec in &cells {
            let of_one = Spec { planes: 1, ..*spec };
            assert!(cells.contains(&of_one) || spec.spread != SpreadBy::Flow || spec.flows > 1, "{spec:?}");
        }
        for mtu in [1500, 3000] {
            let full = cells.iter().filter(|spec| spec.mtu() == mtu && spec.bytes + 28 == mtu);
            assert_eq!(full.map(|spec| spec.planes).collect::<Vec<_>>(), AXIS, "MTU {mtu}");
        }
    }

    #[test]
    fn lists_are_combined() {
        let some = Planes { bytes: vec![64, 9000, 64], spreads: SpreadBy::ALL.to_vec(), ..nothing_given() };
        let kinds = [PlaneKind::Batched, PlaneKind::Offload];
        assert_eq!(some.cells(&kinds).len(), 2 * 4 * 2 * 3);
        let one = Planes {
            kinds: vec![PlaneKind::Offload],
            planes: vec![10],
            work: vec![Duration::from_micros(6)],
            ..nothing_given()
        };
        let [cell] = one.cells(&kinds)[..] else { panic!("one combination") };
        assert_eq!((cell.kind, cell.planes, cell.bytes, cell.mtu()), (PlaneKind::Offload, 10, 64, 1500));
        assert_eq!(Spec { bytes: 9000, ..cell }.mtu(), 9028);
    }
}
