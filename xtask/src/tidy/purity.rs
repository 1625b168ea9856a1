//! Checks modules to which the clock, randomness and the kernel are passed as arguments, so that tests need no socket and
//! no sleep.

use std::path::Path;

use crate::tidy::lexer::{Kind, Token};
use crate::tidy::tree::{Fault, Tree};

/// Directories, or files of the same name.
const PURE: &[&str] = &[
    "crates/fix/src/print",
    "crates/fleet/src/clock",
    "crates/fleet/src/interval",
    "crates/fleet/src/merge",
    "crates/fleet/src/merged",
    "crates/fleet/src/overview",
    "crates/fleet/src/permission",
    "crates/fleet/src/protocol",
    "crates/fleet/src/request",
    "crates/fleet/src/session",
    "crates/fleet/src/split",
    "crates/fleet/src/summary",
    "crates/fleet/src/verdict",
    "crates/fleet/src/watch",
    "crates/forward/src/bfd/demultiplexer",
    "crates/forward/src/bfd/discard",
    "crates/forward/src/bfd/packet",
    "crates/forward/src/bfd/poll_sequence",
    "crates/forward/src/bfd/session",
    "crates/forward/src/bfd/timers",
    "crates/fourtuple/src/ports",
    "crates/fourtuple/src/dial/strategy.rs",
    "crates/fourtuple/src/listen/break_even",
    "crates/load/src/preflight/findings",
    "crates/load/src/preflight/forecast",
    "crates/load/src/preflight/hindsight",
    "crates/load/src/preflight/judge",
    "crates/load/src/preflight/remedy",
    "crates/load/src/preflight/snapshot",
    "crates/measure",
    "crates/plan",
    "crates/record",
    "crates/report/src",
    "crates/doctor",
];

/// Modules of the standard library that make system calls.
const MODULES: &[&str] = &["env", "fs", "process"];

/// Types of the standard library that make system calls, in modules that otherwise make none.
const TYPES: &[&str] = &[
    "net::TcpListener",
    "net::TcpStream",
    "net::UdpSocket",
    "os::unix::net::UnixDatagram",
    "os::unix::net::UnixListener",
    "os::unix::net::UnixStream",
    "time::Instant",
    "time::SystemTime",
];

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in tree.sources.iter().filter(|source| is_pure(&source.path)) {
        for (line, path) in paths(&source.product_tokens()) {
            if let Some(why) = impure(&path) {
                faults.push(Fault::at(&source.path, line, format!("{path} in a pure place: {why}")));
            }
        }
    }
    faults
}

fn is_pure(path: &Path) -> bool {
    PURE.iter().any(|place| path.starts_with(place) || path.to_str() == Some(&format!("{place}.rs")))
}

/// Returns the reason why a path is not permitted in a pure module.
fn impure(path: &str) -> Option<&'static str> {
    let (is_std, rest) = match path.strip_prefix("std::") {
        Some(rest) => (true, rest),
        None => (false, path),
    };
    let (first, _) = rest.split_once("::").unwrap_or((rest, ""));
    if is_std && (MODULES.contains(&first) || matches!(rest, "*" | "net::*" | "time::*" | "os::unix::net::*"))
    {
        return Some("pass in what it would give");
    }
    let within =
        |item: &str| rest.strip_prefix(item).is_some_and(|more| more.is_empty() || more.starts_with("::"));
    if TYPES.iter().any(|item| within(item)) {
        return Some("pass in what it would give");
    }
    // Both take their seed from the clock and the thread; so do the free functions of the crate.
    let seeds_itself = path.ends_with("Rng::new") || path.ends_with("Rng::default");
    let is_global =
        path.strip_prefix("fastrand::").is_some_and(|item| item.starts_with(|c: char| c.is_lowercase()));
    (seeds_itself || is_global).then_some("pass the generator in")
}

/// Returns every path in the code with its line; braces of `use` are expanded.
pub(super) fn paths(tokens: &[Token<'_>]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        at = if tokens[at].kind == Kind::Word { path(tokens, at, "", &mut found) } else { at + 1 };
    }
    found
}

/// Reads one path, or the tree of paths of a `use`, after a prefix; returns the position of its end.
fn path(tokens: &[Token<'_>], mut at: usize, prefix: &str, found: &mut Vec<(usize, String)>) -> usize {
    let mut so_far = prefix.to_owned();
    while let Some(token) = tokens.get(at) {
        if token.kind == Kind::Word {
            if !so_far.is_empty() {
                so_far.push_str("::");
            }
            so_far.push_str(token.text);
            at += 1;
            if !is_separator(tokens, at) {
                found.push((token.line, so_far));
                return at;
            }
            at += 2;
        } else if token.is('{') {
            at += 1;
            while tokens
                .get(at)
                .is_some_and(|token| token.kind == Kind::Word || token.is('*') || token.is('{'))
            {
                at = path(tokens, at, &so_far, found);
                if tokens.get(at).is_some_and(|token| token.text == "as") {
                    at += 2;
                }
                if tokens.get(at).is_some_and(|token| token.is(',')) {
                    at += 1;
                }
            }
            return at + 1;
        } else {
            let glob = if token.is('*') { "::*" } else { "" };
            found.push((token.line, so_far + glob));
            return at + 1;
        }
    }
    at
}

fn is_separator(tokens: &[Token<'_>], at: usize) -> bool {
    tokens.get(at..at + 2).is_some_and(|pair| pair.iter().all(|token| token.is(':')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, tree};

    fn faults(path: &str, text: &str) -> Vec<String> {
        lines(check(&tree(Vec::new(), &[(path, text)])))
    }

    #[test]
    fn pure_code_passes() {
        let text = "use std::{collections::HashMap, net::{IpAddr, SocketAddr}, time::Duration};
            // std::fs and std::time::Instant
            fn a(rng: &mut fastrand::Rng, elapsed: Duration) -> u16 { rng.u16(..) }
            const A: &str = \"std::env::var\";
            #[cfg(test)]
            mod tests { use std::time::Instant; fn b() { fastrand::Rng::new(); } }";
        assert_eq!(faults("crates/measure/src/lib.rs", text), Vec::<String>::new());
    }

    #[test]
    fn impure_paths_are_caught_in_every_spelling() {
        let text = "use std::{fs::{self, File}, time::{Duration, Instant as Clock}};
            use std::time;
            fn a() { time::SystemTime::now(); ::std::env::var(\"A\"); }
            fn b() { std::net::TcpStream::connect(0); fastrand::u16(..); fastrand::Rng::new(); }
            use std::net::*;
            fn c<T: std::process::Termination>() {}";
        let found = faults("crates/fourtuple/src/dial/strategy.rs", text);
        let expected = [
            (1, "std::fs::self"),
            (1, "std::fs::File"),
            (1, "std::time::Instant"),
            (3, "time::SystemTime::now"),
            (3, "std::env::var"),
            (4, "std::net::TcpStream::connect"),
            (4, "fastrand::u16"),
            (4, "fastrand::Rng::new"),
            (5, "std::net::*"),
            (6, "std::process::Termination"),
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (fault, (line, path)) in found.iter().zip(expected) {
            let start = format!("crates/fourtuple/src/dial/strategy.rs:{line}: {path} in a pure place");
            assert!(fault.starts_with(&start), "{fault}");
        }
    }

    #[test]
    fn impure_code_is_allowed_elsewhere_and_in_tests() {
        let text = "use std::time::Instant;";
        assert!(faults("crates/fourtuple/src/dial/mod.rs", text).is_empty());
        assert!(faults("crates/measure/tests/speed.rs", text).is_empty());
        assert_eq!(faults("crates/fourtuple/src/ports.rs", text).len(), 1);
    }
}
