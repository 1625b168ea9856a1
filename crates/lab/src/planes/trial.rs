//! One run of one cell.

use std::panic;
use std::sync::atomic::Ordering;
use std::thread;

use fourtuple::spread::Spread;
use fourtuple_forward::{Forward, Link, PlaneCounts, Running};
use fourtuple_syscalls::schedule;

use super::generator::{self, Generator, Place, Sent};
use super::sink::{Arrivals, QUEUE, Seen, Sink};
use super::topology::Topology;
use super::{Over, Spec, SpreadBy, packet};
use crate::{LabError, Namespace, Watch};

/// What one pass of packets gave.
pub(super) struct Measured {
    pub(super) sent: Sent,
    pub(super) arrived: u64,
    /// When the last packet arrived, CLOCK_MONOTONIC; 0: none did.
    pub(super) last_ns: u64,
    pub(super) planes: Vec<PlaneCounts>,
    pub(super) sink: Seen,
}

/// What a run gave.
pub(super) struct Passes {
    /// Generator, planes and sink beside each other, as far as there are processors.
    pub(super) abreast: Measured,
    /// Of one plane: generator and plane one after the other on one processor. A plane that is faster than the generator finds a
    /// packet or two whenever it looks, and spends its time on being woken; here its queue is full.
    pub(super) in_turns: Option<Measured>,
}

impl Passes {
    /// Whether it was told to stop.
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
    /// Runs it in namespaces of its own.
    pub(super) fn run(&self, packets: u64, over: Over, watch: &Watch<'_>) -> Result<Passes, LabError> {
        Namespace::run(|namespace| {
            let topology = Topology::new(namespace, over, self.mtu())?;
            let abreast = self.pass(&topology, packets, Place::Apart, watch)?;
            let again = self.planes == 1 && !abreast.sent.cut;
            let in_turns = again.then(|| self.pass(&topology, packets, Place::Between, watch)).transpose()?;
            Ok(Passes { abreast, in_turns })
        })
    }

    fn pass(
        &self,
        topology: &Topology,
        packets: u64,
        place: Place,
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
        let (sent, planes, seen) = thread::scope(|scope| {
            let counting = scope.spawn(|| sink.run(generator::inner_flows(self.flows), place, &arrivals));
            let sending = scope.spawn(|| generator.run(packets, window, place, &arrivals, watch));
            let sent = join(sending);
            let planes = running.drain();
            arrivals.over.store(true, Ordering::Release);
            (sent, planes, join(counting))
        });
        Ok(Measured {
            sent: sent.map_err(LabError::call(format!("send to {listen}")))?,
            arrived: arrivals.packets.into_inner(),
            last_ns: arrivals.last_ns.into_inner(),
            planes: planes?.pop().unwrap_or_default(),
            sink: seen,
        })
    }

    /// Threads have where they may run, and how they are scheduled, of the one that starts them.
    fn start(&self, topology: &Topology, place: Place) -> Result<Running, LabError> {
        let forward = self.forward(topology);
        if place == Place::Apart {
            return Ok(forward.start()?);
        }
        let start = || {
            let settled = place.processor().and_then(|processor| {
                processor.map_or(Ok(()), schedule::pin_to)?;
                schedule::give_way()
            });
            settled.map_err(LabError::call("schedule planes"))?;
            Ok(forward.start()?)
        };
        thread::scope(|scope| join(scope.spawn(start)))
    }

    fn forward(&self, topology: &Topology) -> Forward {
        let mut link = Link::new(topology.listen, topology.to);
        link.spread = match self.spread {
            SpreadBy::Hash => Spread::Hash,
            SpreadBy::Random => Spread::Random,
            SpreadBy::Flow => Spread::Key(packet::key()),
            SpreadBy::Cpu => Spread::Cpu,
        };
        Forward {
            kind: self.kind,
            // A plane that changes its processor lets packets of one flow overtake each other behind it.
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
