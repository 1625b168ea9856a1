//! Selects the pairs of policy and family to run, and lists the pairs that cannot run.

use fourtuple::listen::{AcceptPolicy, Family, ListenError, Recycle};

use crate::pool::address::ListenAddress;
use crate::pool::mix::Spend;
use crate::pool::workers::Pool;
use crate::{LabError, Namespace};

/// The cells to compare.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The policies, in this order.
    pub policies: Vec<AcceptPolicy>,
    /// Whether the user named the policies; a named policy that cannot run is an error.
    pub policies_named: bool,
    /// The families, in this order.
    pub families: Vec<Family>,
    /// Whether the user named the families.
    pub families_named: bool,
}

/// A policy over a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) policy: AcceptPolicy,
    pub(crate) family: Family,
}

/// The part of a [`Selection`] that this host can run.
#[derive(Debug)]
pub(crate) struct Runnable {
    pub(crate) pairs: Vec<Pair>,
    /// The pairs that cannot run, each with the reason.
    pub(crate) skipped: Vec<(Pair, String)>,
}

impl Selection {
    pub(crate) fn check(&self) -> Result<(), LabError> {
        if self.policies.is_empty() {
            return Err(LabError::setting("policy", "(none)", "at least one is needed"));
        }
        if self.families.is_empty() {
            return Err(LabError::setting("family", "(none)", "at least one is needed"));
        }
        Ok(())
    }

    /// Probes every pair, each in a namespace of its own, by opening a listener group.
    ///
    /// Skips a pair that no kernel supports, unless both policy and family were named. Skips a pair that this kernel lacks
    /// or does not permit, unless the policy was named. Otherwise such a pair is an error, and so is an empty selection.
    pub(crate) fn runnable(&self, workers: usize) -> Result<Runnable, LabError> {
        let mut left = Runnable { pairs: Vec::new(), skipped: Vec::new() };
        let mut first = None;
        for &family in &self.families {
            for &policy in &self.policies {
                let pair = Pair { policy, family };
                let tried = Namespace::run(|_| {
                    let room = ListenAddress::new(family)?;
                    Pool::start(&room.endpoint, policy, workers, Spend::Sleep, Recycle::Never)?.end()
                });
                match tried {
                    Ok(_) => left.pairs.push(pair),
                    Err(LabError::Listen(error)) if self.forgives(&error) => {
                        left.skipped.push((pair, error.to_string()));
                        first.get_or_insert(error);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        match first {
            Some(error) if left.pairs.is_empty() => Err(error.into()),
            _ => Ok(left),
        }
    }

    fn forgives(&self, error: &ListenError) -> bool {
        match error {
            ListenError::Impossible { .. } => !(self.policies_named && self.families_named),
            ListenError::NotPermitted { .. } | ListenError::Absent { .. } => !self.policies_named,
            _ => false,
        }
    }
}
