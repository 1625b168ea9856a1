use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One line on stderr that says how it goes, with a picture below it if there is one, if that is a terminal.
pub(super) struct Line(Option<ProgressBar>);

impl Line {
    pub(super) fn new(quiet: bool) -> Self {
        if quiet || !io::stderr().is_terminal() {
            return Line(None);
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        bar.set_style(
            ProgressStyle::with_template("{spinner} {wide_msg}{prefix}")
                .expect("the template names fields that there are"),
        );
        Line(Some(bar))
    }

    pub(super) fn tell(&self, words: &[String]) {
        if let Some(bar) = &self.0 {
            bar.set_message(words.join("  "));
            bar.tick();
        }
    }

    /// Lines below the one that tells.
    pub(super) fn show(&self, picture: &str) {
        if let Some(bar) = &self.0 {
            bar.set_prefix(format!("\n{}", picture.trim_end()));
        }
    }

    /// Whether anybody sees it.
    pub(super) fn is_seen(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}
