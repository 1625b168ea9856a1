use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use fourtuple_syscalls::signals;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Returns a flag that SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal is gone) sets: the command then ends early and keeps its
/// measurements. A second signal ends the process with 128 and the number of the signal as code: 130, 143 or 129. With nohup(1) SIGHUP
/// has no effect.
pub fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = flag_without_hangup()?;
    if !signals::is_ignored(SIGHUP).context("cannot handle signals")? {
        register(SIGHUP, &stop)?;
    }
    Ok(stop)
}

/// Returns such a flag for a command to which SIGHUP means something else.
pub fn flag_without_hangup() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    register(SIGINT, &stop)?;
    register(SIGTERM, &stop)?;
    Ok(stop)
}

fn register(signal: i32, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    // In this order, the first signal finds the flag unset and only sets it.
    flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop))
        .and_then(|_| flag::register(signal, Arc::clone(stop)))
        .context("cannot handle signals")?;
    Ok(())
}
