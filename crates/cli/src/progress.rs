use std::io::{self, IsTerminal};
use std::sync::Mutex;

use fourtuple_bench::lab::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar on stderr for each part of an experiment; hidden if stderr is not a terminal.
pub(crate) struct Bars {
    current: Mutex<Option<ProgressBar>>,
    shown: bool,
}

impl Bars {
    pub(crate) fn new(quiet: bool) -> Self {
        Bars { current: Mutex::new(None), shown: !quiet && io::stderr().is_terminal() }
    }
}

impl Progress for Bars {
    fn begin(&self, part: &str, total: u64) {
        if !self.shown {
            return;
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        let style = ProgressStyle::with_template("{prefix:<22} {wide_bar} {pos:>6}/{len:<6} {elapsed:>3}");
        bar.set_style(style.expect("the template is valid"));
        bar.set_prefix(part.to_owned());
        let mut current = self.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(last) = current.replace(bar) {
            last.finish_and_clear();
        }
    }

    fn at(&self, done: u64) {
        if let Some(bar) = &*self.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            bar.set_position(done);
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        if let Ok(Some(bar)) = self.current.get_mut() {
            bar.finish_and_clear();
        }
    }
}
