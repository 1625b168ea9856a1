//! Rules that find faults in a [`Snapshot`](fourtuple_record::snapshot::Snapshot).
//!
//! The rules of a family are a file in `rules`. A rule is what it looks for, where its figures come from, its threshold, its
//! explanation, and a function from a snapshot to findings. The module reads nothing itself.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

mod accepting;
mod attribute;
mod budget;
mod causes;
mod command;
mod counters;
mod datagram;
mod diagnose;
mod draft;
mod remedies;
mod rules;
mod symptom;
mod words;

pub use attribute::with_callers;
pub use budget::{Budget, Shortage, shortages};
pub use causes::causes;
pub use command::{Cure, Place};
pub use diagnose::{Diagnosis, diagnose, diagnose_at};
pub use rules::balance::{Imbalance, ImbalanceKind, imbalances};
pub use rules::{ALL, LimitError, Limits, Rule, Threshold, about, explain, named};
pub use symptom::Unexplained;
