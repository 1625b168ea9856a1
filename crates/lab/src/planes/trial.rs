//! One run of one cell.

use std::panic;
use std::sync::atomic::Ordering;
use std::thread;

use fourtuple::spread::Selector;
use fourtuple_forward::{Forward, Link, PlaneCounts, Running};
use fourtuple_syscalls::schedule;

use crate::planes::generator::{self, Generator, Placement, SendCounts};
use crate::planes::packet;
use crate::planes::settings::{NetworkKind, Spec, SpreadBy};
use crate::planes::sink::{Arrivals, QUEUE, Sink, SinkCounts};
use crate::planes::topology::Topology;
use crate::{LabError, Namespace, Watch, start};

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
            SpreadBy::Flow => Selector::Key(packet::key()),
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
