use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// A flag that Ctrl-C (or SIGTERM) sets: the run ends early and keeps what was measured. A second one ends the process.
pub(crate) fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for (signal, code) in [(SIGINT, 130), (SIGTERM, 143)] {
        // In this order: the first signal finds the flag unset and only sets it.
        flag::register_conditional_shutdown(signal, code, Arc::clone(&stop))
            .context("cannot handle signals")?;
        flag::register(signal, Arc::clone(&stop)).context("cannot handle signals")?;
    }
    Ok(stop)
}
