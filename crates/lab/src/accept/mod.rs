//! `lab accept`: measures which worker accepts a connection under each accept policy.
//!
//! Published: "Why does one NGINX worker take all the load?" and "Keepalives considered harmful" (both Cloudflare). The lab
//! repeats their test with rising load and their table of open sockets on this kernel.

mod advice;
mod light;

use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Family, Recycle};
use fourtuple_record::{AcceptResults, AcceptSettings, Remark};

use crate::keepalive::client_ports;
use crate::namespace::Namespace;
use crate::pool::address::ListenAddress;
use crate::pool::client::nanos;
use crate::pool::matrix::Pair;
use crate::pool::run::ClientLoad;
use crate::pool::series::{self, Cell};
use crate::pool::sums::Label;
use crate::pool::workers::{BACKLOG, Pool};
use crate::pool::{Mix, Selection, Spend};
use crate::{LabError, Watch};

pub use advice::advice;

/// The arrival process of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Sequential connections, each opened while all workers wait, so that only the kernel chooses the worker.
    Light,
    /// Connections from many clients that do not pause: the kernel skips busy workers.
    Heavy,
}

impl Load {
    /// The two loads, light first.
    pub const ALL: [Load; 2] = [Load::Light, Load::Heavy];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        match self {
            Load::Light => "light",
            Load::Heavy => "heavy",
        }
    }

    /// Returns the load with this name.
    pub fn named(name: &str) -> Option<Load> {
        Load::ALL.into_iter().find(|load| load.name() == name)
    }
}

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct Accept {
    /// Policies and families.
    pub selection: Selection,
    /// Loads, in this order.
    pub loads: Vec<Load>,
    /// Number of workers, 1 to 64.
    pub workers: u32,
    /// Connections of a run of light load, 1 to 10000.
    pub connections: u32,
    /// Clients of heavy load, 1 to 1024.
    pub clients: u32,
    /// Service time of every request.
    pub work: Duration,
    /// How a worker spends the service time.
    pub spend: Spend,
    /// Requests that wait longer than this count as slow.
    pub slow: Duration,
    /// Length of one run of heavy load.
    pub length: Duration,
    /// Number of runs of every cell.
    pub repeats: u32,
    /// Seed of all random numbers.
    pub seed: u64,
}

struct Spec {
    pair: Pair,
    load: Load,
}

impl Accept {
    /// Checks the settings, without system calls.
    pub fn check(&self) -> Result<(), LabError> {
        if !(1..=64).contains(&self.workers) {
            return Err(LabError::setting("workers", self.workers, "accepted are 1 to 64"));
        }
        if !(1..=10_000).contains(&self.connections) {
            return Err(LabError::setting("connections", self.connections, "accepted are 1 to 10000"));
        }
        if !(1..=1024).contains(&self.clients) {
            return Err(LabError::setting("clients", self.clients, "accepted are 1 to 1024"));
        }
        if !(1..=100).contains(&self.repeats) {
            return Err(LabError::setting("repeats", self.repeats, "accepted are 1 to 100"));
        }
        if self.length < Duration::from_millis(10) {
            return Err(LabError::setting("for", format!("{:?}", self.length), "at least 10ms are needed"));
        }
        if self.loads.is_empty() {
            return Err(LabError::setting("load", "(none)", "at least one is needed"));
        }
        self.selection.check()
    }

    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> AcceptSettings {
        AcceptSettings {
            workers: self.workers,
            clients: self.clients,
            connections: self.connections.into(),
            families: self.selection.families.iter().map(Family::to_string).collect(),
            policies: self.selection.policies.iter().map(AcceptPolicy::to_string).collect(),
            close_every: vec![1],
            load: self.loads.iter().map(|load| load.name().to_owned()).collect(),
            service: self.spend.name().to_owned(),
            short_ns: nanos(self.work),
            long_ns: nanos(self.work),
            long_share: 0.0,
            pause_ns: 0,
            slow_ns: nanos(self.slow),
            for_ns: nanos(self.length),
            repeats: self.repeats,
            backlog: BACKLOG,
            seed: self.seed,
            server: None,
        }
    }

    /// Runs every cell, each in a namespace of its own; odd repeats run in the reverse order.
    ///
    /// # Errors
    ///
    /// Returns an error if a named policy cannot run here, if a setting is out of range, or if a run fails before the first
    /// result.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(AcceptResults, Vec<Remark>), LabError> {
        self.check()?;
        let workers = self.workers as usize;
        let runnable = self.selection.runnable(workers)?;
        let skipped = runnable.skipped.into_iter().map(|(pair, why)| series::skipped(pair, 1, why)).collect();
        let mut cells = Vec::new();
        for load in &self.loads {
            for &pair in &runnable.pairs {
                cells.push(Cell::new(self.label(pair, *load), Spec { pair, load: *load }));
            }
        }
        let length_ms = self.length.as_millis() as u64;
        let remarks = series::run(&mut cells, self.repeats, length_ms, watch, |spec, repeat| {
            Namespace::run(|namespace| {
                namespace.set_range(client_ports())?;
                let room = ListenAddress::new(spec.pair.family)?;
                let pool =
                    Pool::start(&room.endpoint, spec.pair.policy, workers, self.spend, Recycle::Never)?;
                match spec.load {
                    Load::Light => light::run(self, spec.pair.policy, pool, watch),
                    Load::Heavy => self.client_load(repeat).run(pool, watch),
                }
            })
        })?;
        let mut results = series::results(cells, skipped);
        results.advice = advice(&results);
        Ok((results, remarks))
    }

    fn client_load(&self, repeat: u32) -> ClientLoad {
        ClientLoad {
            clients: self.clients,
            close_every: 1,
            mix: Mix::all(self.work),
            pause: Duration::ZERO,
            probe: None,
            length: self.length,
            seed: self.seed ^ u64::from(repeat).rotate_left(48),
        }
    }

    fn label(&self, pair: Pair, load: Load) -> Label {
        Label {
            policy: pair.policy.to_string(),
            server: None,
            family: pair.family,
            close_every: 1,
            load: load.name(),
            workers: self.workers as usize,
            clients: if load == Load::Light { 1 } else { self.clients },
            balance_of_accepts: true,
            slow: self.slow,
        }
    }
}
