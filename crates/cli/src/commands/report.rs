use std::path::PathBuf;

use clap::Args;
use fourtuple_report::html;

use crate::exit::Exit;
use crate::save::save;
use crate::{output, records};

/// Render saved records: tables on stdout, or one HTML page
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Files of records printed by --json, - for stdin: one record, or one on each line
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<PathBuf>,
    /// Print the parsed records as JSON, one on each line
    #[arg(long)]
    json: bool,
    /// Write all records as one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

impl Report {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let mut all = Vec::new();
        for path in &self.records {
            all.extend(records::read(path)?);
        }
        for saved in &all {
            if self.json {
                output::print_json(saved)?;
            } else {
                output::print(&output::text(saved))?;
            }
        }
        if let Some(path) = &self.html {
            save(path, &html::page(&all))?;
        }
        Ok(Exit::Fine)
    }
}
