//! Shows the sample records of the tests: as text on stdout, and as pages in a directory if one is named.
//! `cargo run -p fourtuple-report --example sample_report -- 80 DIRECTORY`

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use std::path::PathBuf;

use fourtuple_record::Saved;
use fourtuple_report::{html, terminal};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let width = arguments.next().and_then(|width| width.parse().ok()).unwrap_or(80);
    let directory = arguments.next().map(PathBuf::from);
    let mut records = samples::all();
    records.push(("full", Saved::Ports(samples::full_ports())));
    for (name, saved) in records {
        println!("{}\n{}", terminal::render(&saved, width, false), "=".repeat(width));
        if let Some(directory) = &directory {
            std::fs::write(directory.join(format!("{name}.html")), html::page(&[saved]))?;
        }
    }
    Ok(())
}
