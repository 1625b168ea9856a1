//! Shows the made-up records of the tests: text on stdout, and a page when a file is named.
//! `cargo run -p fourtuple-report --example sample_report -- 80 page.html`

#[path = "../tests/samples/mod.rs"]
mod samples;

use fourtuple_record::Saved;
use fourtuple_report::{html, save, terminal};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let width = arguments.next().and_then(|width| width.parse().ok()).unwrap_or(80);
    let mut records: Vec<Saved> = samples::all().into_iter().map(|(_, saved)| saved).collect();
    for saved in &records {
        println!("{}\n{}", terminal::render(saved, width, false), "=".repeat(width));
    }
    if let Some(path) = arguments.next() {
        records.insert(0, Saved::Ports(samples::full_ports()));
        save(path.as_ref(), &html::page(&records))?;
    }
    Ok(())
}
