//! The settings of `lab locks`, and their ranges.

use crate::LabError;
use crate::locks::change::Change;

/// Minimum number of queries of a trial. Fewer give no useful rate.
pub const MIN_QUERIES: u32 = 100;

/// Maximum number of queries of a trial. With more, one source address would run out of even ports in the setups that need them.
pub const MAX_QUERIES: u32 = 30_000;

/// The settings of `lab locks`.
#[derive(Clone, Debug)]
pub struct Locks {
    /// The changes to try, in this order.
    pub changes: Vec<Change>,
    /// Worker threads, which accept connections and answer queries: 2 to 256.
    pub workers: u32,
    /// Client threads, which connect: 2 to 256.
    pub clients: u32,
    /// Queries of one trial: [`MIN_QUERIES`] to [`MAX_QUERIES`].
    pub queries: u32,
    /// Source addresses of the setups with more than one: 2 to 1024.
    pub sources: u32,
    /// Pairs of timed trials for each change. Results have a confidence interval from 8 pairs on.
    pub repeats: u32,
    /// Whether to count lock waits. The counting trials are separate from the timed ones.
    pub trace: bool,
    /// Seed of the resampling that gives the confidence intervals.
    pub seed: u64,
}

impl Locks {
    /// Returns settings for a host with `cpus` processors: a worker for every second processor and a client for each, so that all
    /// processors are busy.
    pub fn on(cpus: u32, changes: Vec<Change>, seed: u64) -> Locks {
        let clients = cpus.clamp(4, 256);
        Locks {
            changes,
            workers: (cpus / 2).clamp(2, 256),
            clients,
            queries: 10_000,
            sources: clients,
            repeats: 8,
            trace: true,
            seed,
        }
    }

    /// Checks the ranges of the settings, without a system call.
    ///
    /// # Errors
    ///
    /// [`LabError::Setting`]
    pub fn check(&self) -> Result<(), LabError> {
        let within = |setting, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(LabError::setting(setting, value, format!("accepted are {low} to {high}")))
        };
        within("workers", self.workers, 2, 256)?;
        within("clients", self.clients, 2, 256)?;
        within("queries", self.queries, MIN_QUERIES, MAX_QUERIES)?;
        within("sources", self.sources, 2, 1024)?;
        within("repeats", self.repeats, 1, 100)?;
        if self.changes.is_empty() {
            return Err(LabError::setting("change", "(none)", "at least one is needed"));
        }
        Ok(())
    }
}
