//! Records as people see them: [`terminal::render`] gives text, [`html::page`] one self-contained HTML file. What no record
//! holds are stacks: [`flame::graph`] draws them.
//!
//! Everything here is a pure function of the records, except [`save`], which puts a text into a file whole or not at
//! all. Nothing is measured or judged: figures are taken as the record has them, remarks on validity come first, and the
//! advice is the record's own. The same record always gives the same bytes.
#![forbid(unsafe_code)]

pub mod flame;
pub mod html;
pub mod terminal;

mod accept;
mod comparison;
mod envelope;
mod figures;
mod forward;
mod heat;
mod lab_locks;
mod load;
mod number;
mod planes;
mod save;
mod serve;
mod strategies;
mod trace;
mod trace_accept;
mod trace_locks;

pub use save::save;
