//! What commands show on stderr while they work, if it is a terminal.

use std::io::{self, IsTerminal};
use std::sync::Mutex;

use fourtuple_bench::lab::Progress;
use fourtuple_record::{printable, printable_lines};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::shown;

/// A live line on stderr with an optional picture below; hidden if stderr is not a terminal.
pub struct Line(Option<ProgressBar>);

impl Line {
    /// Creates the line; `quiet` hides it.
    pub fn new(quiet: bool) -> Self {
        if quiet || !io::stderr().is_terminal() {
            return Line(None);
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        let style =
            ProgressStyle::with_template("{spinner} {wide_msg}{prefix}").expect("the template is valid");
        bar.set_style(style.tick_chars("-\\|/ "));
        Line(Some(bar))
    }

    /// Replaces the text of the line.
    pub fn set(&self, words: &[String]) {
        if let Some(bar) = &self.0 {
            bar.set_message(shown(&printable(&words.join("  "))));
            bar.tick();
        }
    }

    /// Replaces the picture below the line.
    pub fn set_picture(&self, picture: &str) {
        if let Some(bar) = &self.0 {
            bar.set_prefix(format!("\n{}", shown(&printable_lines(picture.trim_end()))));
        }
    }

    /// Returns whether the line is on a terminal.
    pub fn is_visible(&self) -> bool {
        self.0.is_some()
    }

    /// Removes the line from the terminal.
    pub fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}

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
