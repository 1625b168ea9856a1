use std::fmt;

use crate::output::{self, Output};

/// Says on stderr that a fix is attached, also where stderr is not a terminal, because scripts wait for this line.
pub(super) fn announce(output: &Output, is_dry_run: bool, what: fmt::Arguments<'_>) {
    if !output.quiet {
        let verb = if is_dry_run { "observing" } else { "fixing" };
        // Without stderr the fix works all the same.
        output::say(&format!("{verb} {what}"));
    }
}
