use fourtuple_bpf::BpfError;

use crate::host::cgroup;

/// Why a trace could not start or could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The BPF programs that trace connect() could not be loaded or attached, or their maps could not be read.
    #[error("cannot trace connect(): {0}")]
    Bpf(#[from] BpfError),
    /// The BPF programs that trace accept() could not be loaded or attached, or their maps could not be read.
    #[error("cannot trace accept(): {0}")]
    Accept(BpfError),
    /// The BPF programs that count failed system calls could not be loaded or attached, or their maps could not be read.
    #[error("cannot count failed system calls: {0}")]
    Failed(BpfError),
    /// The requested tier could not be attached.
    #[error("cannot trace connect() with tier {tier}: {error}")]
    Tier {
        tier: &'static str,
        /// Why the tier could not be attached.
        #[source]
        error: BpfError,
    },
    /// No tier could be attached.
    #[error("cannot trace connect(): {reasons}")]
    NoTier {
        /// Each tier with its error.
        reasons: String,
    },
    /// The root of the cgroup2 hierarchy, to which the programs for UDP attach, could not be opened.
    #[error("cannot trace connect() of UDP: the root of a cgroup2 file system: {0}{remedy}", remedy = cgroup::remedy(.0))]
    NoCgroup(std::io::Error),
    /// The processors could not be sampled for a flame graph.
    #[error("cannot sample for a flame graph: {0}")]
    Flame(BpfError),
    /// /proc/kallsyms could not be read.
    #[error("cannot name the functions of a flame graph: /proc/kallsyms: {0}")]
    Symbols(std::io::Error),
    /// /proc/kallsyms hides the addresses of the kernel's functions.
    #[error(
        "cannot name the functions of a flame graph: /proc/kallsyms shows no addresses because of kernel.kptr_restrict; \
         grant CAP_SYSLOG, or set kernel.kptr_restrict=0"
    )]
    HiddenSymbols,
    /// The BPF programs that trace locks could not be loaded or attached, or their maps could not be read.
    #[error("cannot trace locks: {0}")]
    Locks(BpfError),
}
