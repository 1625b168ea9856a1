//! TODO

pub mod boot;
