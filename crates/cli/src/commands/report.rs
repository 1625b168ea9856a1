use std::path::{Path, PathBuf};

use clap::Args;
use fourtuple_record::Saved;
use fourtuple_report::html;

use crate::exit::{Exit, UsageError};
use crate::save::{self, save};
use crate::{input, output};

/// Render saved records as tables or as one HTML page
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Files of records, as --json prints them; - for stdin
    ///
    /// One record, or one on each line.
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<PathBuf>,
    /// Show all findings of `doctor` with all facts and remedies
    #[arg(long)]
    all: bool,
    /// Print the records as JSON, one on each line
    #[arg(long)]
    json: bool,
    /// Write all records as one self-contained HTML page
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    html: Option<PathBuf>,
}

impl Report {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let mut all = Vec::new();
        for path in &self.records {
            all.extend(read_records(path)?);
        }
        for saved in &all {
            if self.json {
                output::print_json(saved)?;
            } else {
                let text = if self.all { output::text_in_full } else { output::text };
                output::print(&text(saved))?;
            }
        }
        if let Some(path) = &self.html {
            save(path, &html::page(&all))?;
        }
        Ok(Exit::Fine)
    }
}

/// Maximum size of a file that is read: a record has at most a few megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// Returns the records of a file or, for `-`, of stdin, at least one: one record on any number of lines, or several, one on each line.
///
/// # Errors
/// An invalid file or record; the message names the record.
pub(crate) fn read_records(path: &Path) -> Result<Vec<Saved>, UsageError> {
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
