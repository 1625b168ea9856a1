//! Fuzz targets. A target is a function that takes arbitrary bytes, calls one parser and panics if a property is violated.
//!
//! The package in `fuzz/` runs the targets under libFuzzer and AddressSanitizer. `tests/corpora.rs` runs them on the stored
//! corpora.
#![forbid(unsafe_code)]

mod forward;
mod http;
mod kernel;
mod saved;
mod text;

/// The parser of the `fourtuple forward` configuration. It is compiled here because the crate `cli` is a binary without a library.
#[path = "../../crates/cli/src/commands/forward/config.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the parsers are called here")]
mod config;
#[path = "../../crates/cli/src/input.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the parsers are called here")]
mod input;
#[path = "../../crates/cli/src/units.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the parsers are called here")]
mod units;

/// The error type that `config` imports from the command.
mod exit {
    #[derive(Debug)]
    pub(crate) struct UsageError(pub(crate) String);
}

pub use saved::mutate;

pub type Target = fn(&[u8]);

/// All targets with their names.
pub const TARGETS: &[(&str, Target)] = &[
    ("http_request", http::request),
    ("http_response", http::response),
    ("http_chunks", http::chunks),
    ("handover", forward::handover),
    ("saved", saved::record),
    ("netlink", kernel::netlink),
    ("control", kernel::control),
    ("bfd_packet", forward::bfd_packet),
    ("bfd_session", forward::bfd_session),
    ("forward_toml", text::configuration),
    ("text", text::settings),
];

/// Runs the target `name`.
///
/// # Panics
///
/// Panics if no target has this name, or if the target finds a violation for `bytes`.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(its, _)| *its == name).expect("a target of TARGETS");
    target(bytes);
}
