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

/// Settings that were checked, with the values that their texts name.
struct Checked<'a> {
    settings: &'a PlanesSettings,
    kinds: Vec<PlaneKind>,
    spreads: Vec<SpreadBy>,
    over: NetworkKind,
}

/// Checks the settings, without a system call.
///
/// # Errors
///
/// [`LabError::Setting`]
pub fn check(settings: &PlanesSettings) -> Result<(), LabError> {
    Checked::new(settings).map(drop)
}

/// Runs every cell, each run in namespaces of its own; odd repeats run in the reverse order. A kind of plane that this host lacks is
/// skipped if all kinds are asked for.
///
/// # Errors
///
/// Returns an error if this host lacks one of the kinds, if a setting is out of range, or if a run fails before the first result.
pub fn run(settings: &PlanesSettings, watch: &Watch<'_>) -> Result<(PlanesResults, Vec<Remark>), LabError> {
    let checked = Checked::new(settings)?;
    let (kinds, skipped) = checked.available_kinds()?;
    let mut cells: Vec<Sums> = checked.cells(&kinds).into_iter().map(Sums::new).collect();
    let mut remarks = checked.run_cells(&mut cells, watch)?;
    remarks.extend(sums::doubts(&cells));
    let mut random = fastrand::Rng::with_seed(settings.seed);
    let found = sums::results(&cells, &mut random);
    let planes_help_above_ns = advice::planes_help_above(&found);
    let mut results = PlanesResults { cells: found, skipped, planes_help_above_ns, advice: Vec::new() };
    results.advice = advice(&results);
    Ok((results, remarks))
}

impl Checked<'_> {
    fn new(settings: &PlanesSettings) -> Result<Checked<'_>, LabError> {
        for (setting, values, accepted) in [
            ("planes", &settings.planes[..], 1..=64),
            ("bytes", &settings.bytes, generator::MIN_BYTES..=9000),
            ("flows", &settings.flows, 1..=256),
            ("repeats", &[settings.repeats], 1..=100),
        ] {
            LabError::if_empty(setting, values)?;
            values.iter().try_for_each(|value| LabError::unless_within(setting, *value, accepted.clone()))?;
        }
        LabError::if_empty("work", &settings.work_ns)?;
        if let Some(long) = settings.work_ns.iter().find(|work| **work > 1_000_000) {
            let long = format!("{:?}", Duration::from_nanos(*long));
            return Err(LabError::setting("work", long, "accepted is up to 1ms"));
        }
        LabError::unless_within("packets", settings.packets, 1_000..=100_000_000)?;
        Ok(Checked {
            settings,
            kinds: LabError::named("plane", &settings.plane, |name| name.parse().ok())?,
            spreads: LabError::named("spread", &settings.spread, SpreadBy::named)?,
            over: NetworkKind::named(&settings.over)
                .ok_or_else(|| LabError::setting("over", &settings.over, "accepted are veth and loopback"))?,
        })
    }

    fn run_cells(&self, cells: &mut [Sums], watch: &Watch<'_>) -> Result<Vec<Remark>, LabError> {
        let mut remarks = Vec::new();
        let packets = self.settings.packets;
        'repeats: for repeat in 0..self.settings.repeats {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            if repeat % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let spec = cells[index].spec;
                watch.progress.begin(&spec.title(), packets);
                let result = if watch.stopped() {
                    Err(LabError::Interrupted)
                } else {
                    spec.run(packets, self.over, watch)
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

    /// Probes the kinds of plane.
    fn available_kinds(&self) -> Result<(Vec<PlaneKind>, Vec<PlanesSkipped>), LabError> {
        let all = PlaneKind::ALL.iter().all(|kind| self.kinds.contains(kind));
        let (mut here, mut skipped) = (Vec::new(), Vec::new());
        for &kind in &self.kinds {
            match probe(kind) {
                Ok(()) => here.push(kind),
                Err(LabError::Forward(
                    error @ (ForwardError::Absent { .. } | ForwardError::NotPermitted { .. }),
                )) if all => {
                    skipped.push(PlanesSkipped { plane: kind.to_string(), why: error.to_string() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((here, skipped))
    }

    /// Returns the cells with these kinds of plane, each once.
    fn cells(&self, kinds: &[PlaneKind]) -> Vec<Spec> {
        if !self.settings.every_combination {
            return in_order(selected(kinds).into_iter());
        }
        let PlanesSettings { planes, bytes, flows, work_ns, .. } = self.settings;
        let mut cells = Vec::new();
        // Cells that are compared most often run next to each other: packets of one length and work.
        for &bytes in bytes {
            for work in work_ns.iter().map(|work| Duration::from_nanos(*work)) {
                for &kind in kinds {
                    for &spread in &self.spreads {
                        for &flows in flows {
                            let cell = |planes| Spec { kind, planes, bytes, spread, flows, work };
                            cells.extend(planes.iter().copied().map(cell));
                        }
                    }
                }
            }
        }
        in_order(cells.into_iter())
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

    pub fn named(name: &str) -> Option<NetworkKind> {
        NetworkKind::ALL.into_iter().find(|over| over.name() == name)
    }

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

    pub fn named(name: &str) -> Option<SpreadBy> {
        SpreadBy::ALL.into_iter().find(|spread| spread.name() == name)
    }

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

/// Returns the settings of the cells that answer the questions of this lab.
pub fn usual() -> PlanesSettings {
    let cells = selected(&PlaneKind::ALL);
    PlanesSettings {
        every_combination: false,
        planes: in_order(cells.iter().map(|spec| spec.planes)),
        bytes: in_order(cells.iter().map(|spec| spec.bytes)),
        spread: in_order(cells.iter().map(|spec| spec.spread.name().to_owned())),
        flows: in_order(cells.iter().map(|spec| spec.flows)),
        work_ns: in_order(cells.iter().map(|spec| spec.work.as_nanos() as u64)),
        ..combinations()
    }
}

/// Returns the defaults of a run of every combination.
pub fn combinations() -> PlanesSettings {
    PlanesSettings {
        every_combination: true,
        plane: PlaneKind::ALL.map(|kind| kind.to_string()).to_vec(),
        planes: PLANES.to_vec(),
        bytes: vec![64],
        spread: vec![SpreadBy::Flow.name().to_owned()],
        flows: vec![1],
        work_ns: vec![0],
        packets: 10_000,
        repeats: 3,
        over: NetworkKind::Veth.name().to_owned(),
        seed: 1,
    }
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

/// Payloads that fill the MTUs of the published figure: 1500 and 3000.
const FULL: [u32; 2] = [1472, 2972];

/// Approximate time that the published router spent on a packet besides moving it: 1.3 Gbit/s of 1500 bytes on one plane.
const AS_PUBLISHED: Duration = Duration::from_micros(6);
/// CPU time per packet, from none to the time of a route look-up and a signature.
const WORKS: [Duration; 3] = [Duration::ZERO, AS_PUBLISHED, Duration::from_micros(20)];
const PLANES: [u32; 3] = [1, 2, 4];
/// The axis of the published figure. A host with fewer CPUs shows the gain by the counted capacity.
const AXIS: [u32; 5] = [1, 2, 4, 8, 10];

/// Returns the cells that answer the questions: cost of a packet by plane kind, distribution over planes, gain from planes, and the published figure.
fn selected(kinds: &[PlaneKind]) -> Vec<Spec> {
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

    fn cells(settings: &PlanesSettings) -> Vec<Spec> {
        let checked = Checked::new(settings).unwrap();
        checked.cells(&checked.kinds)
    }

    #[test]
    fn default_cells_include_their_reference_cells() {
        let cells = cells(&usual());
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
        let kinds = |kinds: &[PlaneKind]| kinds.iter().map(ToString::to_string).collect();
        let some = PlanesSettings {
            plane: kinds(&[PlaneKind::Batched, PlaneKind::Offload]),
            bytes: vec![64, 9000, 64],
            spread: SpreadBy::ALL.map(|spread| spread.name().to_owned()).to_vec(),
            ..combinations()
        };
        assert_eq!(cells(&some).len(), 2 * 4 * 2 * 3);
        let one = PlanesSettings {
            plane: kinds(&[PlaneKind::Offload]),
            planes: vec![10],
            work_ns: vec![6_000],
            ..combinations()
        };
        let [cell] = cells(&one)[..] else { panic!("one combination") };
        assert_eq!((cell.kind, cell.planes, cell.bytes, cell.mtu()), (PlaneKind::Offload, 10, 64, 1500));
        assert_eq!(Spec { bytes: 9000, ..cell }.mtu(), 9028);
    }
}
