//! Renders records: [`terminal::render`] as text, [`html::page`] as one self-contained HTML file. [`flame::graph`]
//! draws stacks, which are not part of a record. [`exposition`] has metrics, and the endpoint that serves them.
//!
//! A record becomes a document of blocks (headings, tables, charts, ...), with one file per record in `records`. The
//! two renderers show blocks and know no record. Everything is a pure function of the records. The crate neither
//! measures nor judges: it shows figures and advice as the record has them, and remarks on validity first. Equal records
//! give equal bytes.
//!
//! A block or a column may be for one renderer only (`Medium`): the page has charts where the terminal has sparklines. A narrow terminal
//! omits columns of low priority. The page fetches nothing, and its content security policy forbids it.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the endpoint listens")]
pub mod exposition;
pub mod flame;
pub mod html;
pub mod terminal;

mod document;
mod records;
mod table;
mod words;

pub use words::duration;
