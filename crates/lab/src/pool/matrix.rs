//! Which policies are run over which families, and what of them cannot be.

use fourtuple::listen::{Family, ListenError, Policy, Recycle};

use super::mix::Spend;
use super::place::Room;
use super::workers::Pool;
use crate::{LabError, Namespace};

/// What to compare.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The policies, in this order.
    pub policies: Vec<Policy>,
    /// The user has named them: what cannot be run is then an error.
    pub policies_named: bool,
    /// The families, in this order.
    pub families: Vec<Family>,
    /// The user has named them.
    pub families_named: bool,
}

/// A policy over a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) policy: Policy,
    pub(crate) family: Family,
}

/// What is left of a [`Selection`] on this host.
#[derive(Debug)]
pub(crate) struct Runnable {
    pub(crate) pairs: Vec<Pair>,
    /// The others, each with the reason.
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

    /// Tries every pair, each in a namespace of its own: asking is the only test that holds.
    ///
    /// What a kernel cannot do at all is skipped, unless both policy and family were named; what this kernel lacks or does
    /// not permit is skipped, unless the policy was named. Then it is an error, and so it is when nothing is left.
    pub(crate) fn runnable(&self, workers: usize) -> Result<Runnable, LabError> {
        let mut left = Runnable { pairs: Vec::new(), skipped: Vec::new() };
        let mut first = None;
        for &family in &self.families {
            for &policy in &self.policies {
                let pair = Pair { policy, family };
                let tried = Namespace::run(|_| {
                    let room = Room::new(family)?;
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
