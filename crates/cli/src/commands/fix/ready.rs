use std::fmt;
use std::io::{self, Write};

use crate::output::Output;

/// Says on stderr that a fix is attached, also where stderr is no terminal, because scripts wait for this line.
pub(super) fn announce(output: &Output, is_dry_run: bool, what: fmt::Arguments<'_>) {
    if !output.quiet {
        let verb = if is_dry_run { "observing" } else { "fixing" };
        // Without stderr the fix works all the same.
        let _ = writeln!(io::stderr(), "{verb} {what}");
    }
}
