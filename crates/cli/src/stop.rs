use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Returns a flag that SIGINT (Ctrl-C) or SIGTERM sets: the command then ends early and keeps its measurements. A second signal
/// ends the process with code 130 or 143.
pub(crate) fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
        // In this order, the first signal finds the flag unset and only sets it.
        flag::register_conditional_shutdown(signal, code, Arc::clone(&stop))
            .context("cannot handle signals")?;
        flag::register(signal, Arc::clone(&stop)).context("cannot handle signals")?;
    }
    Ok(stop)
}
