//! Runs an instrument: signals, the ready line, the live line and the record.

use fourtuple_observe::trace::{Folded, Instrument, Progress, Results};
use fourtuple_record::Record;
use time::OffsetDateTime;

use crate::line::Line;
use crate::output::{self, Output};
use crate::stop;

/// Texts and sysctls that differ between traces.
pub(super) struct Description<'a> {
    /// The command of the record: `trace connect`.
    pub(super) command: &'a str,
    /// The object of the ready line: `connect()`.
    pub(super) target: &'a str,
    /// Sysctls of the host that the record contains.
    pub(super) sysctls: &'a [&'a str],
}

/// Traces until the end of `--for` or a signal, and shows progress on the live line with `show`. Returns the record and
/// the stacks for a flame graph.
///
/// The ready line goes to stderr also when stderr is not a terminal, because scripts wait for it.
pub(super) fn run<I: Instrument, S>(
    description: &Description<'_>,
    instrument: &I,
    settings: S,
    output: &Output,
    mut show: impl FnMut(&Line, &Progress<I>),
) -> anyhow::Result<(Record<S, Results<I>>, Folded)> {
    let stop = stop::flag()?;
    let started = OffsetDateTime::now_utc();
    let line = Line::new(output.quiet);
    let attached = || {
        if !output.quiet {
            output::say(&format!("tracing {}", description.target));
        }
    };
    let outcome = instrument.run(&stop, attached, |progress| {
        if line.is_visible() {
            show(&line, progress);
        }
    })?;
    line.finish();
    let host = output::host(description.sysctls, &[]);
    let record =
        output::record(description.command, started, host, settings, outcome.validity, outcome.results);
    Ok((record, outcome.folded))
}
