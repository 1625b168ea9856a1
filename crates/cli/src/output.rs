//! What every command does with its record: table or JSON on stdout, a page if asked for, the exit code.

use std::env;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process;

use anyhow::Context;
use clap::Args;
use fourtuple_record::{Host, Record, Remark, SCHEMA, Saved};
use fourtuple_report::{html, terminal};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::exit::Exit;
use crate::units;

/// Flags that every command has.
#[derive(Clone, Debug, Args)]
pub(crate) struct Output {
    /// Print the record as JSON, and nothing else, on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the record as one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Show no progress
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Seed of fourtuple's own random choices; the kernel's cannot be seeded
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::seed, allow_hyphen_values = true)]
    pub(crate) seed: u64,
}

/// The envelope around settings and results.
pub(crate) fn record<S, R>(
    command: &str,
    started: OffsetDateTime,
    host: Host,
    settings: S,
    validity: Vec<Remark>,
    results: R,
) -> Record<S, R> {
    let whole = started.replace_nanosecond(0).unwrap_or(started);
    Record {
        schema: SCHEMA.to_owned(),
        command: command.to_owned(),
        started: whole.format(&Rfc3339).unwrap_or_else(|_| "1970-01-01T00:00:00Z".to_owned()),
        host,
        settings,
        validity,
        results,
    }
}

impl Output {
    /// Prints the record, writes the page, and says how the command ends.
    pub(crate) fn finish(&self, saved: &Saved) -> anyhow::Result<Exit> {
        let printed = if self.json { print(&format!("{}\n", json(saved)?)) } else { print(&text(saved)) };
        let page = match &self.html {
            Some(path) => {
                fourtuple_report::save(path, &html::page(std::slice::from_ref(saved))).map_err(Into::into)
            }
            None => Ok(()),
        };
        if let (Some(path), Ok(()), false) = (&self.html, &page, self.json || self.quiet) {
            let _ = writeln!(io::stderr(), "wrote {}", path.display());
        }
        match (printed, page) {
            (Ok(()), Ok(())) => Ok(if validity(saved).is_empty() { Exit::Fine } else { Exit::NotValid }),
            // Whoever has the JSON has lost nothing.
            (Ok(()), Err(error)) if self.json => Err(error),
            (Ok(()), Err(error)) | (Err(error), Ok(())) => Err(rescue(saved, &error)),
            (Err(error), Err(page)) => Err(rescue(saved, &anyhow::anyhow!("{error:#}; {page:#}"))),
        }
    }
}

/// What cannot be written must not cost the measurement: the record then goes where temporary files go, else here.
fn rescue(saved: &Saved, error: &anyhow::Error) -> anyhow::Error {
    let text = match json(saved) {
        Ok(text) => text,
        Err(also) => return anyhow::anyhow!("{error:#}; {also:#}"),
    };
    match [env::temp_dir(), PathBuf::from(".")].iter().find_map(|room| keep(room, &text)) {
        Some(path) => {
            anyhow::anyhow!("{error:#}; the record is saved: fourtuple report --html FILE {}", path.display())
        }
        None => anyhow::anyhow!("{error:#}; nor can the record be saved as a temporary file"),
    }
}

/// Writes a new file into `room`: never over what is there, nor through a link that somebody else has put there.
fn keep(room: &Path, text: &str) -> Option<PathBuf> {
    let names = (0..100).map(|number| room.join(format!("fourtuple-{}-{number}.json", process::id())));
    let (path, mut file) =
        names.into_iter().find_map(|path| Some((path.clone(), File::create_new(path).ok()?)))?;
    match file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
        Ok(()) => Some(path),
        Err(_) => {
            // Half a record is none.
            let _ = fs::remove_file(&path);
            None
        }
    }
}

/// The record as JSON, without a line end.
pub(crate) fn json(saved: &Saved) -> anyhow::Result<String> {
    let text = match saved {
        Saved::Lab(record) => serde_json::to_string(record),
        Saved::Ports(record) => serde_json::to_string(record),
        Saved::TimeWait(record) => serde_json::to_string(record),
        Saved::LabAccept(record) | Saved::LabKeepalive(record) => serde_json::to_string(record),
        Saved::LabLocks(record) => serde_json::to_string(record),
        Saved::LabPlanes(record) => serde_json::to_string(record),
        Saved::Plan(record) => serde_json::to_string(record),
        Saved::Compare(record) => serde_json::to_string(record),
        Saved::Load(record) => serde_json::to_string(record),
        Saved::Serve(record) => serde_json::to_string(record),
        Saved::Forward(record) => serde_json::to_string(record),
        Saved::TraceConnect(record) => serde_json::to_string(record),
        Saved::TraceAccept(record) => serde_json::to_string(record),
        Saved::TraceLocks(record) => serde_json::to_string(record),
    };
    text.context("cannot write the record as JSON")
}

fn validity(saved: &Saved) -> Vec<Remark> {
    match saved {
        Saved::Lab(record) => record.validity.clone(),
        Saved::Ports(record) => record.validity.clone(),
        Saved::TimeWait(record) => record.validity.clone(),
        Saved::LabAccept(record) | Saved::LabKeepalive(record) => record.validity.clone(),
        Saved::LabLocks(record) => record.validity.clone(),
        Saved::LabPlanes(record) => record.validity.clone(),
        Saved::Plan(record) => record.validity.clone(),
        Saved::Compare(record) => record.validity.clone(),
        Saved::Load(record) => record.validity.clone(),
        Saved::Serve(record) => record.validity.clone(),
        Saved::Forward(record) => record.validity.clone(),
        Saved::TraceConnect(record) => record.validity.clone(),
        Saved::TraceAccept(record) => record.validity.clone(),
        Saved::TraceLocks(record) => record.validity.clone(),
    }
}

/// The record as a table for this terminal.
pub(crate) fn text(saved: &Saved) -> String {
    terminal::render(saved, width(), has_colour(&io::stdout()))
}

/// Whether this stream is a terminal, and NO_COLOR allows.
pub(crate) fn has_colour(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// As many columns as a picture that moves may have: no more than the terminal has, whatever COLUMNS says.
pub(crate) fn terminal_width() -> usize {
    fourtuple_syscalls::resource::terminal_width().map_or(width(), |terminal| terminal.min(width()))
}

/// COLUMNS where it is set, else what the terminal says, else 100.
fn width() -> usize {
    let columns = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    columns.or_else(fourtuple_syscalls::resource::terminal_width).unwrap_or(100)
}

/// Prints on stdout; a reader that has gone away is no failure of ours.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}

/// The host as a record shows it, with what was found of the kernel.
pub(crate) fn host(sysctls: &[&str], capabilities: &[(&str, &str)]) -> Host {
    let mut host = fourtuple_host::read(Path::new("/"), sysctls);
    host.capabilities =
        capabilities.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    host
}
