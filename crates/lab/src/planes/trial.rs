//! One run of one cell.

use std::io;
use std::panic;
use std::thread;

use fourtuple::spread::Spread;
use fourtuple_forward::{Forward, Link, PlaneCounts};

use super::generator::{self, Generator, Sent};
use super::sink::{Arrivals, QUEUE, Seen, Sink};
use super::topology::Topology;
use super::{Over, Spec, packet};
use crate::{LabError, Namespace, Watch};

/// What a run gave.
pub(super) struct Measured {
    pub(super) sent: Sent,
    pub(super) arrived: u64,
    /// When the last packet arrived, CLOCK_MONOTONIC; 0: none did.
    pub(super) last_ns: u64,
    pub(super) planes: Vec<PlaneCounts>,
    pub(super) sink: Seen,
}

impl Spec {
    /// Runs it in namespaces of its own.
    pub(super) fn run(&self, packets: u64, over: Over, watch: &Watch<'_>) -> Result<Measured, LabError> {
        Namespace::run(|namespace| self.run_within(namespace, packets, over, watch))
    }

    fn run_within(
        &self,
        namespace: &Namespace,
        packets: u64,
        over: Over,
        watch: &Watch<'_>,
    ) -> Result<Measured, LabError> {
        let topology = Topology::new(namespace, over, self.mtu())?;
        let (listen, to) = (topology.listen, topology.to);
        let sink = topology.at_sink(|| Sink::open(to)).map_err(LabError::call(format!("open {to}")))?;
        let running = self.forward(&topology).start()?;
        let generator = topology
            .at_generator(|| Generator::open(listen, self.flows, self.bytes))
            .map_err(LabError::call(format!("connect to {listen}")))?;
        let window = generator::window(self.bytes, sink.queue);
        let arrivals = Arrivals::default();
        let (sent, planes, seen) = thread::scope(|scope| {
            let counting = scope.spawn(|| sink.run(generator::inner_flows(self.flows), &arrivals));
            let sending = scope.spawn(|| generator.run(packets, window, &arrivals, watch));
            let sent = join(sending);
            let planes = running.drain();
            arrivals.over.store(true, std::sync::atomic::Ordering::Release);
            (sent, planes, join(counting))
        });
        let sent = sent.map_err(|error: io::Error| LabError::call(format!("send to {listen}"))(error))?;
        Ok(Measured {
            sent,
            arrived: arrivals.packets.into_inner(),
            last_ns: arrivals.last_ns.into_inner(),
            planes: planes?.pop().unwrap_or_default(),
            sink: seen,
        })
    }

    fn forward(&self, topology: &Topology) -> Forward {
        let mut link = Link::new(topology.listen, topology.to);
        link.spread = match self.spread {
            super::SpreadBy::Hash => Spread::Hash,
            super::SpreadBy::Random => Spread::Random,
            super::SpreadBy::Flow => Spread::Key(packet::key()),
            super::SpreadBy::Cpu => Spread::Cpu,
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
