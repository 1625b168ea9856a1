use std::io::{self, IsTerminal};

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
