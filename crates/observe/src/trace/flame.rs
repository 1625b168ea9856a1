//! Sampled stacks of the traced programs, with function names, for a flame graph.

use std::collections::{BTreeMap, HashSet};

use fourtuple_bpf::filter::TaskFilter;
use fourtuple_bpf::flame::{Flame, SAMPLES_PER_S, Stack};
use fourtuple_record::TraceFlame;

use crate::trace::error::TraceError;
use crate::trace::instrument::Folded;
use crate::trace::symbols::Symbols;

/// Functions one of which is in every stack of a connect(): the system call, io_uring, the protocols.
const CONNECT: [&str; 7] = [
    "__sys_connect",
    "__sys_connect_file",
    "io_connect",
    "inet_stream_connect",
    "__inet_stream_connect",
    "tcp_v4_connect",
    "tcp_v6_connect",
];
/// Functions that search for a source port.
const SEARCH: [&str; 4] =
    ["inet_hash_connect", "inet6_hash_connect", "__inet_hash_connect", "udp_lib_get_port"];

/// Frame name for a sample taken in user space.
const IN_PROGRAM: &str = "[user]";

/// A running sampler of stacks.
#[derive(Debug)]
pub(crate) struct Sampling {
    flame: Flame,
    symbols: Symbols,
}

impl Sampling {
    /// Reads the names of the kernel's functions, then attaches the sampler.
    pub(crate) fn begin(tasks: &TaskFilter) -> Result<Sampling, TraceError> {
        let symbols = Symbols::read().map_err(TraceError::Symbols)?;
        if symbols.is_empty() {
            return Err(TraceError::HiddenSymbols);
        }
        Ok(Sampling { flame: Flame::attach(tasks).map_err(TraceError::Flame)?, symbols })
    }

    /// Detaches the sampler and returns its stacks. With `only`, the samples of other processes are dropped.
    pub(crate) fn end(mut self, only: Option<&HashSet<u32>>) -> Result<(TraceFlame, Folded), TraceError> {
        self.flame.detach();
        let stacks = self.flame.stacks().map_err(TraceError::Flame)?;
        let stacks = stacks.into_iter().filter(|stack| only.is_none_or(|only| only.contains(&stack.process)));
        let lost = self.flame.lost().map_err(TraceError::Flame)?;
        Ok(fold(stacks, lost, |address| self.symbols.name(address)))
    }
}

/// Counts samples per stack of names, and the shares of connect() and of the search.
fn fold<'a>(
    stacks: impl Iterator<Item = Stack>,
    mut lost: u64,
    name: impl Fn(u64) -> Option<&'a str>,
) -> (TraceFlame, Folded) {
    let mut folded: BTreeMap<String, u64> = BTreeMap::new();
    let (mut samples, mut in_connect, mut in_search) = (0, 0, 0);
    for stack in stacks {
        let Some(frames) = stack.frames else {
            lost += stack.samples;
            continue;
        };
        // A return address follows the call, so it may lie past the end of the caller.
        let addresses = frames.iter().enumerate().map(|(depth, address)| address - u64::from(depth > 0));
        let names: Vec<&str> = addresses.rev().map(|address| name(address).unwrap_or("[unknown]")).collect();
        let is_in = |functions: &[&str]| names.iter().any(|name| functions.contains(&base(name)));
        samples += stack.samples;
        in_connect += if is_in(&CONNECT) { stack.samples } else { 0 };
        in_search += if is_in(&SEARCH) { stack.samples } else { 0 };
        let inner = if names.is_empty() { IN_PROGRAM.to_owned() } else { names.join(";") };
        // A thread name may contain the separator of frames.
        let thread = stack.name.replace(';', ":");
        *folded.entry(format!("{thread};{inner}")).or_default() += stack.samples;
    }
    let share = |part: u64| if samples > 0 { part as f64 / samples as f64 } else { 0.0 };
    let flame = TraceFlame {
        samples,
        samples_per_s: SAMPLES_PER_S,
        in_connect: share(in_connect),
        in_search: share(in_search),
        lost,
    };
    (flame, folded.into_iter().collect())
}

/// Removes a suffix that the compiler added, as in `tcp_v4_connect.isra.0`.
fn base(name: &str) -> &str {
    name.split_once('.').map_or(name, |(base, _)| base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_stacks_are_merged_and_connect_is_counted() {
        let names = |address: u64| match address {
            100..200 => Some("__sys_connect"),
            200..300 => Some("__inet_hash_connect.isra.0"),
            300..400 => Some("vfs_read"),
            _ => None,
        };
        let stack = |process, frames: &[u64], samples| Stack {
            name: "a;b".into(),
            process,
            frames: Some(frames.to_vec()),
            samples,
        };
        let stacks = [
            // 200 is a return address right after the end of the first function.
            stack(1, &[250, 200], 3),
            stack(2, &[210, 150], 4),
            stack(1, &[110], 1),
            stack(1, &[300, 900], 1),
            stack(1, &[], 1),
            Stack { frames: None, ..stack(1, &[], 3) },
        ];
        let (flame, folded) = fold(stacks.into_iter(), 2, names);
        assert_eq!((flame.samples, flame.lost), (10, 5));
        assert_eq!((flame.in_connect, flame.in_search), (0.8, 0.7));
        let expected = [
            ("a:b;[unknown];vfs_read", 1),
            ("a:b;[user]", 1),
            ("a:b;__sys_connect", 1),
            ("a:b;__sys_connect;__inet_hash_connect.isra.0", 7),
        ];
        assert_eq!(folded, expected.map(|(frames, samples)| (frames.to_owned(), samples)));
        let (flame, folded) = fold(std::iter::empty(), 0, names);
        assert_eq!((flame.in_connect, folded.len()), (0.0, 0));
    }
}
