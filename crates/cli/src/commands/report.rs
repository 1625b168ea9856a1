use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use fourtuple_record::Saved;
use fourtuple_report::html;

use crate::exit::Exit;
use crate::output;

/// Draw saved records again: tables on stdout, or one HTML page of all of them
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Records that --json printed
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<PathBuf>,
    /// Print the records as JSON as they are understood, one a line
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
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            all.push(Saved::parse(&text).with_context(|| path.display().to_string())?);
        }
        for saved in &all {
            if self.json {
                output::print(&format!("{}\n", output::json(saved)?))?;
            } else {
                output::print(&output::text(saved))?;
            }
        }
        if let Some(path) = &self.html {
            fourtuple_report::save(path, &html::page(&all))?;
        }
        Ok(Exit::Fine)
    }
}
