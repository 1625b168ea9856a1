//! Files of saved records.

use std::path::Path;

use fourtuple_record::Saved;

use crate::exit::UsageError;
use crate::input;

/// Maximum size of a file that is read: a record has at most a few megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// Returns the records of a file or, for `-`, of stdin, at least one: one record on any number of lines, or several, one on each line.
///
/// # Errors
/// An invalid file or record; the message names the record.
pub(crate) fn read(path: &Path) -> Result<Vec<Saved>, UsageError> {
    let is_stdin = path == Path::new("-");
    let place = if is_stdin { "stdin".to_owned() } else { path.display().to_string() };
    let bytes = if is_stdin { input::stdin(MAX_BYTES) } else { input::read(path, MAX_BYTES) };
    let text =
        bytes.and_then(input::utf8).map_err(|error| UsageError(format!("cannot read {place}: {error}")))?;
    if text.trim().is_empty() {
        return Err(UsageError(format!("{place} is empty: expected a record, as --json prints it")));
    }
    let whole = match Saved::parse(&text) {
        Ok(record) => return Ok(vec![record]),
        Err(error) => error,
    };
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    // If one record spans several lines, its first line is not valid JSON.
    let is_json = |line: &&&str| serde_json::from_str::<serde::de::IgnoredAny>(line).is_ok();
    if lines.len() < 2 || lines.first().filter(is_json).is_none() {
        return Err(UsageError(format!("{place}: {whole}")));
    }
    let record = |(at, line): (usize, &&str)| {
        Saved::parse(line).map_err(|error| UsageError(format!("{place}, record {}: {error}", at + 1)))
    };
    lines.iter().enumerate().map(record).collect()
}
