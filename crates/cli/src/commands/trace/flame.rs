//! `--flame FILE`: what all of `trace` does with stacks.

use std::io::{self, Write};
use std::path::Path;

use fourtuple_report::flame::{self, Caption};

use crate::output::Output;

/// Draws the stacks into a file. Without any there is nothing to draw, and one line says so.
pub(super) fn write(
    path: &Path,
    folded: &[(String, u64)],
    caption: &Caption<'_>,
    output: &Output,
) -> anyhow::Result<()> {
    let Some(svg) = flame::graph(folded, caption) else {
        let _ = writeln!(io::stderr(), "nothing for a flame graph: {} was not written", path.display());
        return Ok(());
    };
    fourtuple_report::save(path, &svg)?;
    if !output.json && !output.quiet {
        let _ = writeln!(io::stderr(), "wrote {}", path.display());
    }
    Ok(())
}
