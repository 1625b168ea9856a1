//! A generator of connections that tells the truth about them.
//!
//! A run is an engine (how bytes get to the kernel), a workload (what is said on a connection) and an arrival (when
//! operations begin). [`Load::run`] makes it; [`preflight`] says before and after what this host had for it.
#![forbid(unsafe_code)]

mod arrival;
mod board;
mod driver;
mod engine;
mod error;
mod forecast;
mod origin;
pub mod preflight;
mod result;
mod run;
mod settings;
mod tally;
mod target;
mod workload;

pub use arrival::Arrival;
pub use engine::EngineChoice;
pub use error::LoadError;
pub use run::{News, Outcome};
pub use settings::{Close, Load};
pub use target::{Scheme, Target, TargetError};
pub use workload::{HttpRequest, Trust, Workload};
