//! Tiers of instruments: where a kernel does not support one tier, the next tier may work.

/// A tier of instrument. Reports name the tier beside every number that it measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Stable tracepoints, typed by BTF, whose names do not change between kernels.
    TpBtf,
    /// Entry and return of the function itself (fentry, fexit; Linux 5.5, CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS),
    /// which a kernel may rename.
    Fexit,
}

impl Tier {
    /// All tiers, in the order in which they are tried.
    pub const ALL: [Tier; 2] = [Tier::TpBtf, Tier::Fexit];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            Tier::TpBtf => "tp_btf",
            Tier::Fexit => "fexit",
        }
    }
}
