//! How the kernel is asked: what one tier of instrument cannot do on a kernel, the next one may.

/// A tier of instrument. Which one was used belongs beside every number that it gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Stable tracepoints, typed by BTF: they stay where they are from kernel to kernel.
    TpBtf,
    /// Beginning and end of the function itself (fentry, fexit; Linux 5.5, CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS), which a
    /// kernel may rename.
    Fexit,
}

impl Tier {
    /// All, in the order in which they are tried.
    pub const ALL: [Tier; 2] = [Tier::TpBtf, Tier::Fexit];

    /// As records have it.
    pub fn name(self) -> &'static str {
        match self {
            Tier::TpBtf => "tp_btf",
            Tier::Fexit => "fexit",
        }
    }
}
