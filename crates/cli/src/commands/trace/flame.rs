//! `--flame FILE`, which the trace commands share.

use std::path::Path;

use fourtuple_report::flame::{self, Caption};

use crate::output::{self, Output};
use crate::save::save;

/// Writes the flame graph of the stacks to a file. Without stacks it writes no file but one line on stderr.
pub(super) fn write(
    path: &Path,
    folded: &[(String, u64)],
    caption: &Caption<'_>,
    output: &Output,
) -> anyhow::Result<()> {
    let Some(svg) = flame::graph(folded, caption) else {
        output::say(&format!("no stacks for a flame graph: {} was not written", path.display()));
        return Ok(());
    };
    save(path, &svg)?;
    if !output.json && !output.quiet {
        output::say(&format!("wrote {}", path.display()));
    }
    Ok(())
}
