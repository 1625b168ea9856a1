//! `lab accept`: which worker gets the connection, under each wait policy?
//!
//! Published: "Why does one NGINX worker take all the load?" and seed 001, whose ladder of load and table of open sockets
//! it repeats on this kernel.

mod advice;
mod light;

use std::time::Duration;

use fourtuple::listen::{Family, Policy, Recycle};
use fourtuple_record::{AcceptResults, AcceptSettings, Remark};

use crate::keepalive::client_ports;
use crate::namespace::Namespace;
use crate::pool::client::nanos;
use crate::pool::matrix::Pair;
use crate::pool::place::Room;
use crate::pool::run::Crowd;
use crate::pool::series::{self, Cell};
use crate::pool::sums::Label;
use crate::pool::workers::{BACKLOG, Pool};
use crate::pool::{Mix, Selection, Spend};
use crate::{LabError, Watch};

pub use advice::advice;

/// How connections come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// One after the other, each when all workers wait again: who is woken is the kernel's choice alone.
    Light,
    /// From many clients that do not pause: workers that are busy are passed over.
    Heavy,
}

impl Load {
    /// Both.
    pub const ALL: [Load; 2] = [Load::Light, Load::Heavy];

    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            Load::Light => "light",
            Load::Heavy => "heavy",
        }
    }

    /// The load of a name.
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
    /// Workers, 1 to 64.
    pub workers: u32,
    /// Connections of a run of light load, 1 to 10000.
    pub connections: u32,
    /// Clients of heavy load, 1 to 1024.
    pub clients: u32,
    /// Service time of every request.
    pub work: Duration,
    /// How it is spent.
    pub spend: Spend,
    /// Requests that wait longer are slow.
    pub slow: Duration,
    /// Length of one run of heavy load.
    pub length: Duration,
    /// Runs of every cell.
    pub repeats: u32,
    /// Seed of whatever is drawn.
    pub seed: u64,
}

struct Spec {
    pair: Pair,
    load: Load,
}

impl Accept {
    /// Checks what can be checked without a kernel.
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

    /// The settings as a record keeps them.
    pub fn settings(&self) -> AcceptSettings {
        AcceptSettings {
            workers: self.workers,
            clients: self.clients,
            connections: self.connections.into(),
            families: self.selection.families.iter().map(Family::to_string).collect(),
            policies: self.selection.policies.iter().map(Policy::to_string).collect(),
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

    /// Runs every cell, each in a namespace of its own; every second repeat in the reverse order.
    ///
    /// # Errors
    ///
    /// A policy that was named and cannot be run, a setting, or a failure before there was anything to keep.
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
                let room = Room::new(spec.pair.family)?;
                let pool =
                    Pool::start(&room.endpoint, spec.pair.policy, workers, self.spend, Recycle::Never)?;
                match spec.load {
                    Load::Light => light::run(self, spec.pair.policy, pool, watch),
                    Load::Heavy => self.crowd(repeat).run(pool, watch),
                }
            })
        })?;
        let mut results = series::results(cells, skipped);
        results.advice = advice(&results);
        Ok((results, remarks))
    }

    fn crowd(&self, repeat: u32) -> Crowd {
        Crowd {
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
