//! `lab keepalive`: measures what a kept connection costs a request that waits for a busy worker, and which remedy helps.
//!
//! Published: Cloudflare ("Keepalives considered harmful"): closing the connections between a TLS terminator and its workers
//! after every request made the 99.9th percentile of the wait a quarter of what it had been.

mod advice;
mod break_even;

use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Family, Recycle};
use fourtuple::ports::PortRange;
use fourtuple_record::{AcceptResults, AcceptSettings, Remark};

use crate::namespace::Namespace;
use crate::pool::address::{ListenAddress, ServerAddress};
use crate::pool::client::nanos;
use crate::pool::matrix::Pair;
use crate::pool::run::{ClientLoad, Measured};
use crate::pool::series::{self, Cell};
use crate::pool::sums::Label;
use crate::pool::workers::{BACKLOG, Pool};
use crate::pool::{Mix, Selection, Spend};
use crate::{LabError, Watch};

pub use advice::advice;

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct Keepalive {
    /// Policies and families; ignored with a `server`.
    pub selection: Selection,
    /// Number of workers, 1 to 64. With a `server`: its number of workers, or 0 to count the workers that answers name.
    pub workers: u32,
    /// Clients besides the probe, 1 to 1024.
    pub clients: u32,
    /// Numbers of requests after which connections are closed, in this order; 0: never.
    pub close_every: Vec<u64>,
    /// How workers spend the service time.
    pub spend: Spend,
    /// The service times.
    pub mix: Mix,
    /// Mean pause of a client after an answer.
    pub pause: Duration,
    /// Requests that wait longer than this count as slow.
    pub slow: Duration,
    /// Length of one run.
    pub length: Duration,
    /// Number of runs of every cell.
    pub repeats: u32,
    /// Seed of service times and pauses.
    pub seed: u64,
    /// The URL of an external server. The lab then starts only the clients, and makes no namespace.
    pub server: Option<String>,
}

/// A run against the lab's own server.
struct Spec {
    pair: Pair,
    close_every: u64,
}

impl Keepalive {
    /// Checks the settings, without system calls.
    pub fn check(&self) -> Result<(), LabError> {
        let least = u32::from(self.server.is_none());
        if !(least..=64).contains(&self.workers) {
            return Err(LabError::setting("workers", self.workers, format!("accepted are {least} to 64")));
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
        if !(0.0..=1.0).contains(&self.mix.long_share) {
            return Err(LabError::setting(
                "long-share",
                self.mix.long_share,
                "accepted is a share from 0 to 1",
            ));
        }
        if self.close_every.is_empty() {
            return Err(LabError::setting("close-every", "(none)", "at least one is needed"));
        }
        match &self.server {
            Some(url) => ServerAddress::of_url(url).map(drop),
            None => self.selection.check(),
        }
    }

    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> AcceptSettings {
        let names = |server: &str| match ServerAddress::of_url(server) {
            Ok(place) => vec![Family::of(&place.endpoint).to_string()],
            Err(_) => Vec::new(),
        };
        AcceptSettings {
            workers: self.workers,
            clients: self.clients,
            connections: 0,
            families: match &self.server {
                Some(server) => names(server),
                None => self.selection.families.iter().map(Family::to_string).collect(),
            },
            policies: match &self.server {
                Some(_) => vec![EXTERNAL.to_owned()],
                None => self.selection.policies.iter().map(AcceptPolicy::to_string).collect(),
            },
            close_every: self.close_every.clone(),
            load: vec![self.spend.name().to_owned()],
            service: self.spend.name().to_owned(),
            short_ns: nanos(self.mix.short),
            long_ns: nanos(self.mix.long),
            long_share: self.mix.long_share,
            pause_ns: nanos(self.pause),
            slow_ns: nanos(self.slow),
            for_ns: nanos(self.length),
            repeats: self.repeats,
            backlog: BACKLOG,
            seed: self.seed,
            server: self.server.clone(),
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
        let (mut results, remarks) = match &self.server {
            Some(server) => self.run_there(server, watch)?,
            None => self.run_here(watch)?,
        };
        let mut advice = advice(&results, nanos(self.slow));
        advice.append(&mut results.advice);
        results.advice = advice;
        Ok((results, remarks))
    }

    fn run_here(&self, watch: &Watch<'_>) -> Result<(AcceptResults, Vec<Remark>), LabError> {
        let workers = self.workers as usize;
        let runnable = self.selection.runnable(workers)?;
        let pinned = runnable.pairs.iter().copied().find(|pair| pair.policy.pins_connections());
        let (mut cells, mut skipped) = (Vec::new(), Vec::new());
        for (pair, why) in runnable.skipped {
            skipped.extend(self.close_every.iter().map(|every| series::skipped(pair, *every, why.as_str())));
        }
        for pair in runnable.pairs {
            for &close_every in &self.close_every {
                match self.starves(pair.policy, close_every) {
                    Some(why) => skipped.push(series::skipped(pair, close_every, why)),
                    None => cells.push(Cell::new(
                        self.label(pair.policy.to_string(), None, pair.family, close_every),
                        Spec { pair, close_every },
                    )),
                }
            }
        }
        for policy in self.selection.policies.iter().filter(|_| self.selection.policies_named) {
            let is_of = |cell: &Cell<Spec>| cell.spec.pair.policy == *policy;
            if let (false, Some(why)) = (
                cells.iter().any(is_of),
                self.close_every.iter().find_map(|every| self.starves(*policy, *every)),
            ) {
                return Err(LabError::setting("policy", policy, why));
            }
        }
        let length_ms = self.length.as_millis() as u64;
        let mut remarks = series::run(&mut cells, self.repeats, length_ms, watch, |spec, repeat| {
            Namespace::run(|namespace| {
                namespace.set_range(client_ports())?;
                let room = ListenAddress::new(spec.pair.family)?;
                let pool =
                    Pool::start(&room.endpoint, spec.pair.policy, workers, self.spend, Recycle::Never)?;
                self.client_load(spec.close_every, repeat).run(pool, watch)
            })
        })?;
        let mut results = series::results(cells, skipped);
        let cut = remarks.iter().any(|remark| ["interrupted", "failed"].contains(&remark.id.as_str()));
        if let Some(pair) = pinned.filter(|_| !cut) {
            let (found, remark) = break_even::measure(self, pair, watch);
            remarks.extend(remark);
            results.advice.extend(found.map(|found| break_even::advice(pair, &found)));
            results.break_even = found;
        }
        Ok((results, remarks))
    }

    fn run_there(&self, server: &str, watch: &Watch<'_>) -> Result<(AcceptResults, Vec<Remark>), LabError> {
        let place = ServerAddress::of_url(server)?;
        let family = Family::of(&place.endpoint);
        let mut cells: Vec<Cell<u64>> = self
            .close_every
            .iter()
            .map(|&close_every| {
                let label = self.label(EXTERNAL.to_owned(), Some(server.to_owned()), family, close_every);
                Cell::new(label, close_every)
            })
            .collect();
        let length_ms = self.length.as_millis() as u64;
        let remarks = series::run(&mut cells, self.repeats, length_ms, watch, |&close_every, repeat| {
            let (measured, connections) = self.client_load(close_every, repeat).run_against(&place, watch)?;
            drop(connections);
            Ok::<Measured, LabError>(measured)
        })?;
        Ok((series::results(cells, Vec::new()), remarks))
    }

    fn client_load(&self, close_every: u64, repeat: u32) -> ClientLoad {
        ClientLoad {
            clients: self.clients,
            close_every,
            mix: self.mix,
            pause: self.pause,
            probe: Some(self.mix.short),
            length: self.length,
            // All cells of a repeat use the same seed.
            seed: self.seed ^ u64::from(repeat).rotate_left(48),
        }
    }

    fn label(&self, policy: String, server: Option<String>, family: Family, close_every: u64) -> Label {
        Label {
            policy,
            server,
            family,
            close_every,
            load: self.spend.name(),
            workers: self.workers as usize,
            clients: self.clients,
            balance_of_accepts: false,
            slow: self.slow,
        }
    }

    /// Returns the reason if this combination starves some clients for the whole run.
    fn starves(&self, policy: AcceptPolicy, close_every: u64) -> Option<&'static str> {
        // The probe is one client more.
        let more_clients = self.clients >= self.workers;
        (policy == AcceptPolicy::Blocking && close_every == 0 && more_clients).then_some(
            "a worker that blocks is its one connection's until that connection ends: with connections that are never \
             closed, clients beyond the number of workers are never served",
        )
    }
}

/// The policy name recorded for a server that the lab did not start.
const EXTERNAL: &str = "external";

/// Returns the ephemeral range of clients in the namespace; the server's port is below the range.
pub(crate) fn client_ports() -> PortRange {
    PortRange::new(10_000, u16::MAX).expect("not backwards")
}
