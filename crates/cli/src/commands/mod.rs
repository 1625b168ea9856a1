//! The subcommands, a module each; `fleet` has `agent` too, `doctor` has `explain`.

pub(crate) mod compare;
pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod fix;
pub(crate) mod fleet;
pub(crate) mod forward;
pub(crate) mod guard;
pub(crate) mod lab;
pub(crate) mod load;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod top;
pub(crate) mod trace;
