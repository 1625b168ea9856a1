//! `--flame FILE`, which the trace commands share.

use std::io::{self, Write};
use std::path::Path;

use fourtuple_report::flame::{self, Caption};

use crate::output::Output;
use crate::save::save;

/// Writes the flame graph of the stacks to a file. Without stacks it writes no file but one line on stderr.
pub(super) fn write(
    path: &Path,
    folded: &[(String, u64)],
    caption: &Caption<'_>,
    output: &Output,
) -> anyhow::Result<()> {
    let Some(svg) = flame::graph(folded, caption) else {
        let _ = writeln!(io::stderr(), "no stacks for a flame graph: {} was not written", path.display());
        return Ok(());
    };
    save(path, &svg)?;
    if !output.json && !output.quiet {
        let _ = writeln!(io::stderr(), "wrote {}", path.display());
    }
    Ok(())
}
