//! What the programs of a live system do, seen from the kernel: where their connect() spends its time, what becomes of a
//! connection until accept() has it, and which locks of TCP are waited for.
//!
//! Nothing is asked of the programs that are traced, nothing on the host is changed, and what is attached goes with the
//! process that attached it.
#![forbid(unsafe_code)]

mod accept;
mod blind_spots;
mod cgroup;
mod connect;
mod fill;
mod flame;
mod heat;
mod lock_class;
mod lock_sums;
mod lock_table;
mod locks;
mod reservoir;
mod stacks;
mod symbols;
mod tier;
mod times;

pub use accept::{Accept, AcceptNews, AcceptOutcome};
pub use connect::{Connect, News, Outcome, Protocol};
pub use fourtuple_bpf::Tier;
pub use locks::{LockNews, Locks, LocksOutcome};
pub use symbols::Symbols;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The programs cannot be loaded or attached, or do not answer.
    #[error("cannot trace connect(): {0}")]
    Bpf(#[from] fourtuple_bpf::BpfError),
    /// The same, for accepts.
    #[error("cannot trace accept(): {0}")]
    Accept(fourtuple_bpf::BpfError),
    /// The tier that was asked for cannot be had.
    #[error("cannot trace connect() with tier {tier}: {error}")]
    Tier {
        /// Its name.
        tier: &'static str,
        /// Why.
        #[source]
        error: fourtuple_bpf::BpfError,
    },
    /// No tier can be had.
    #[error("cannot trace connect(): {reasons}")]
    NoTier {
        /// Each with its error.
        reasons: String,
    },
    /// connect() of UDP is seen from the root of the cgroups, which is not there.
    #[error(
        "cannot trace connect() of UDP: the root of a cgroup2 file system: {0}; it takes one that is mounted \
         (mount -t cgroup2 none DIRECTORY)"
    )]
    NoCgroup(std::io::Error),
    /// What processors do cannot be sampled for a flame graph.
    #[error("cannot sample for a flame graph: {0}")]
    Flame(fourtuple_bpf::BpfError),
    /// The kernel's functions have no names.
    #[error("cannot name the functions of a flame graph: /proc/kallsyms: {0}")]
    Symbols(std::io::Error),
    /// Their addresses are hidden.
    #[error(
        "cannot name the functions of a flame graph: /proc/kallsyms shows no addresses, as kernel.kptr_restrict has it; \
         it takes CAP_SYSLOG, or kernel.kptr_restrict=0"
    )]
    HiddenSymbols,
    /// The same of the programs that look at locks.
    #[error("cannot trace locks: {0}")]
    Locks(fourtuple_bpf::BpfError),
}
