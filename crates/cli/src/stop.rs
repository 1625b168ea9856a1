use std::io;
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

/// Returns a flag that SIGHUP sets, any number of times.
pub(crate) fn hangup() -> anyhow::Result<Arc<AtomicBool>> {
    let reload = Arc::new(AtomicBool::new(false));
    held_back(|| flag::register(SIGHUP, Arc::clone(&reload)).map(drop))?;
    Ok(reload)
}

fn register(signal: i32, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    held_back(|| {
        // In this order, the first signal finds the flag unset and only sets it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop))?;
        flag::register(signal, Arc::clone(stop)).map(drop)
    })
}

/// Holds signals back while handlers are set: one that came between the handler and its action would be lost.
fn held_back(set: impl FnOnce() -> io::Result<()>) -> anyhow::Result<()> {
    let held = || {
        let mask = signals::block_all()?;
        let done = set();
        mask.restore()?;
        done
    };
    held().context("cannot handle signals")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn no_signal_comes_while_a_handler_is_set() {
        let blocked = || -> io::Result<u64> {
            let status = fs::read_to_string("/proc/thread-self/status")?;
            let set = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
            Ok(u64::from_str_radix(set, 16).unwrap())
        };
        let before = blocked().unwrap();
        let to_end = [SIGHUP, SIGINT, SIGTERM].map(|signal| 1 << (signal - 1)).iter().sum::<u64>();
        held_back(|| {
            assert_eq!(blocked()? & to_end, to_end);
            Ok(())
        })
        .unwrap();
        assert_eq!((before & to_end, blocked().unwrap()), (0, before));
    }
}
