//! Output of a record, which all commands share: table or JSON on stdout, an optional page, the exit code.

use std::env;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::Context;
use clap::Args;
use fourtuple_record::{Host, Record, Remark, SCHEMA, Saved, printable, printable_lines};
use fourtuple_report::{html, terminal};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::exit::Exit;
use crate::save::{self, save};
use crate::units;

/// Flags of every command that makes a record.
#[derive(Clone, Debug, Args)]
pub struct Output {
    /// Print the record as JSON, and nothing else
    #[arg(long)]
    pub json: bool,
    /// Write the record as one self-contained HTML page
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    pub html: Option<PathBuf>,
    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
}

/// The flag of every command that draws random numbers.
#[derive(Clone, Debug, Args)]
pub struct Random {
    /// Seed of random choices
    ///
    /// It gives fourtuple's own choices again; the kernel's choices cannot be seeded.
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::seed, allow_hyphen_values = true)]
    pub seed: u64,
}

/// Builds a record from settings and results.
pub fn record<S, R>(
    command: &str,
    started: OffsetDateTime,
    host: Host,
    settings: S,
    validity: Vec<Remark>,
    results: R,
) -> Record<S, R> {
    Record {
        schema: SCHEMA.to_owned(),
        command: command.to_owned(),
        started: rfc3339(started),
        host,
        settings,
        validity,
        results,
    }
}

/// Returns a time in whole seconds, as in records.
pub fn rfc3339(time: OffsetDateTime) -> String {
    let whole = time.replace_nanosecond(0).unwrap_or(time);
    whole.format(&Rfc3339).unwrap_or_else(|_| "1970-01-01T00:00:00Z".to_owned())
}

impl Output {
    /// Prints the record, writes the page, and returns the exit status. If one of them fails, saves the record to a temporary
    /// file, unless the JSON was printed.
    pub fn finish(&self, saved: &Saved) -> anyhow::Result<Exit> {
        self.finish_with(saved, text)
    }

    /// The same with another text for the terminal.
    pub fn finish_with(&self, saved: &Saved, text: fn(&Saved) -> String) -> anyhow::Result<Exit> {
        let printed = if self.json { print_json(saved) } else { print(&text(saved)) };
        let page = match &self.html {
            Some(path) => save(path, &html::page(std::slice::from_ref(saved))).map_err(Into::into),
            None => Ok(()),
        };
        if let (Some(path), Ok(()), false) = (&self.html, &page, self.json || self.quiet) {
            say(&format!("wrote {}", path.display()));
        }
        match (printed, page) {
            (Ok(()), Ok(())) => {
                Ok(if saved.common().validity.is_empty() { Exit::Fine } else { Exit::NotValid })
            }
            // The printed JSON is the complete record.
            (Ok(()), Err(error)) if self.json => Err(error),
            (Ok(()), Err(error)) | (Err(error), Ok(())) => Err(rescue(saved, &error)),
            (Err(error), Err(page)) => Err(rescue(saved, &anyhow::anyhow!("{error:#}; {page:#}"))),
        }
    }
}

/// Saves a record whose output failed to the directory for temporary files, else to the working directory. Returns the error
/// with the path of the file.
fn rescue(saved: &Saved, error: &anyhow::Error) -> anyhow::Error {
    let text = match json(saved) {
        Ok(text) => text,
        Err(also) => return anyhow::anyhow!("{error:#}; {also:#}"),
    };
    match [env::temp_dir(), PathBuf::from(".")].iter().find_map(|directory| keep(directory, &text)) {
        Some(path) => {
            anyhow::anyhow!("{error:#}; the record is saved: fourtuple report --html FILE {}", path.display())
        }
        None => anyhow::anyhow!("{error:#}; the record could not be saved as a temporary file either"),
    }
}

/// Writes a new file into `directory` with mode 0600. Never overwrites a file or follows a link, because other users may have
/// created them.
fn keep(directory: &Path, text: &str) -> Option<PathBuf> {
    let names = (0..100).map(|number| directory.join(format!("fourtuple-{}-{number}.json", process::id())));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let open = |path: PathBuf| options.open(&path).ok().map(|file| (path, file));
    let (path, mut file) = names.into_iter().find_map(open)?;
    match file.write_all(text.as_bytes()).and_then(|()| file.sync_all()) {
        Ok(()) => Some(path),
        Err(_) => {
            // An incomplete record is useless.
            let _ = fs::remove_file(&path);
            None
        }
    }
}

/// Returns the record as JSON, without a line end.
pub fn json(saved: &Saved) -> anyhow::Result<String> {
    serde_json::to_string(saved).context("cannot write the record as JSON")
}

/// Returns the record as tables for this terminal.
pub fn text(saved: &Saved) -> String {
    text_for(saved, &io::stdout())
}

/// Returns the record for this terminal, with the facts and remedies that [`text`] leaves out.
pub fn text_in_full(saved: &Saved) -> String {
    terminal::render_in_full(saved, width(), has_colour(&io::stdout()))
}

/// Returns the record as tables for the terminal at a stream.
pub fn text_for(saved: &Saved, stream: &impl IsTerminal) -> String {
    terminal::render(saved, width(), has_colour(stream))
}

/// Returns whether the stream is a terminal with colours and NO_COLOR is not set.
pub fn has_colour(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && allows_colour(env::var_os("TERM"), env::var_os("NO_COLOR"))
}

fn allows_colour(term: Option<OsString>, no_color: Option<OsString>) -> bool {
    let is_dumb = term.is_some_and(|name| name.is_empty() || name == "dumb");
    !is_dumb && no_color.is_none_or(|value| value.is_empty())
}

/// Returns the width for a live picture: at most the width of the terminal, even if COLUMNS is larger.
pub fn terminal_width() -> usize {
    fourtuple_syscalls::resource::terminal_width().map_or(width(), |terminal| terminal.min(width()))
}

/// Returns COLUMNS if it is set, else the width of the terminal, else 100.
pub fn width() -> usize {
    let columns = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    columns.or_else(fourtuple_syscalls::resource::terminal_width).unwrap_or(100)
}

/// Returns a text as this terminal can show it: in ASCII with the locale C or POSIX, and on a dumb terminal.
pub fn shown(text: &str) -> String {
    if is_ascii() { ascii(text) } else { text.to_owned() }
}

/// Returns whether this terminal shows only ASCII.
pub fn is_ascii() -> bool {
    needs_ascii(["LC_ALL", "LC_CTYPE", "LANG"].map(env::var_os), env::var_os("TERM"))
}

/// The first variable that is set names the locale (setlocale(3)). Without one the terminal decides: most containers set none, and show UTF-8.
fn needs_ascii(locale: [Option<OsString>; 3], term: Option<OsString>) -> bool {
    let name = locale.into_iter().flatten().find(|name| !name.is_empty());
    name.is_some_and(|name| name == "C" || name == "POSIX") || term.is_some_and(|term| term == "dumb")
}

/// Replaces each other character by one of ASCII, so that columns keep their width.
pub fn ascii(text: &str) -> String {
    let replaced = |glyph: char| match glyph {
        '→' => '>',
        '·' | '–' => '-',
        '…' => '.',
        '“' | '”' => '"',
        '┤' => '|',
        '└' => '+',
        '▴' | '↑' => '^',
        '▾' | '↓' => 'v',
        '─' => '-',
        '▁' | '▂' | '░' => '.',
        '▃' | '▄' | '▒' => ':',
        '▅' | '▆' | '▓' => '*',
        '▇' | '█' => '#',
        '²' => '2',
        other if other.is_ascii() => other,
        _ => '?',
    };
    text.chars().map(replaced).collect()
}

/// Prints a line on stderr. The names and messages of others in it cannot control the terminal, and are not a line of their own.
///
/// Without a reader of stderr a command works all the same. `cargo xtask tidy` accepts no other way to write to stdout and stderr.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{}", shown(&printable(line)));
}

/// Prints a record on stderr, for commands whose stdout belongs to another program.
pub fn say_record(saved: &Saved) {
    let _ = io::stderr().write_all(shown(&printable_lines(&text_for(saved, &io::stderr()))).as_bytes());
}

/// Prints lines on stdout, as [`say`] does. Ignores EPIPE: the reader has closed the pipe.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_exactly(&shown(&printable_lines(text)))
}

/// Prints JSON on stdout.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print_exactly(&format!("{}\n", serde_json::to_string(value)?))
}

fn print_exactly(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}

/// Returns the host for a record, with these sysctls and capabilities.
pub fn host(sysctls: &[&str], capabilities: &[(&str, &str)]) -> Host {
    let mut host = fourtuple_observe::host::read(Path::new("/"), sysctls);
    host.capabilities =
        capabilities.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locale_c_and_dumb_terminals_get_ascii() {
        let asks = |locale: [&str; 3], term: &str| {
            needs_ascii(locale.map(|name| Some(name.into())), Some(term.into()))
        };
        assert!(asks(["", "", "C"], "xterm") && asks(["POSIX", "en_US.UTF-8", ""], "xterm"));
        assert!(asks(["C.UTF-8", "", ""], "dumb"));
        assert!(!asks(["C.UTF-8", "C", "C"], "xterm") && !needs_ascii([None, None, None], None));
        let picture = "10.0.0.1 → 10.0.0.2:80 · ▁▂▃▄▅▆▇█ ░▒▓ 3² “x”…";
        assert_eq!(ascii(picture), "10.0.0.1 > 10.0.0.2:80 - ..::**## .:* 32 \"x\".");
    }

    #[test]
    fn a_dumb_terminal_gets_no_colours() {
        let allows = |term: Option<&str>, no_color: Option<&str>| {
            allows_colour(term.map(OsString::from), no_color.map(OsString::from))
        };
        assert!(allows(Some("xterm-256color"), None));
        assert!(allows(None, Some("")), "an empty NO_COLOR allows colours");
        for (term, no_color) in [(Some("dumb"), None), (Some(""), None), (Some("xterm"), Some("1"))] {
            assert!(!allows(term, no_color), "{term:?} {no_color:?}");
        }
    }
}
