//! Dialing: the [`Strategy`] that chooses a source port.

pub mod strategy;

pub use strategy::{Step, Strategy};
