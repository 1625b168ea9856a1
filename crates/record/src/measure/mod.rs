//! Statistics without a clock and without a socket: summaries, histograms, intervals, comparisons.
//!
//! The module measures nothing. Samples come in as numbers, so that every claim in a record can be tested on made-up
//! data.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod balance;
mod comparison;
mod latency;
pub mod misplaced;
mod summary;
pub mod words;

pub use comparison::{Comparison, Conclusion, FIRST_LOOK, Interval, Verdict, compare_saved, median_interval};
pub use latency::{Histogram, HistogramLog, LogLinear, MAX_NS, NotAHistogram, log};
pub use summary::summary;
