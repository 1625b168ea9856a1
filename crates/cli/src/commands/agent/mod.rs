#[cfg(not(feature = "fleet"))]
pub(crate) use crate::commands::fleet::absent::Absent as AgentFlags;

#[cfg(feature = "fleet")]
mod serve;

#[cfg(feature = "fleet")]
pub(crate) use serve::AgentFlags;
