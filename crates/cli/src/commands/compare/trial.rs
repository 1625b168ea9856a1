use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use fourtuple_record::{Host, Saved};
use fourtuple_syscalls::child;

use super::metric::{self, Metric, NoNumber};
use super::words;
use crate::exit::UsageError;
use crate::{Arguments, Command as Subcommand, one_line};

/// How long a Ctrl-C may go unnoticed.
const NOTICE: Duration = Duration::from_millis(20);

/// A command that is compared.
pub(super) struct Side {
    /// `A` or `B`.
    pub(super) name: &'static str,
    /// As typed.
    pub(super) text: String,
    words: Vec<String>,
    has_connect_times: bool,
}

/// What came of a trial.
pub(super) enum Trial {
    Measured(f64, Box<Host>),
    /// Its own exit code says that it is not to be believed.
    Dropped(String),
    Interrupted,
}

impl Side {
    /// Reads a command and refuses what gives no number, before anything runs.
    pub(super) fn read(name: &'static str, text: &str) -> anyhow::Result<Side> {
        let refuse = |why: String| anyhow::Error::from(UsageError(format!("{name}, '{text}': {why}")));
        let mut words = words::split(text).map_err(refuse)?;
        if words.first().is_some_and(|word| word == "fourtuple") {
            words.remove(0);
        }
        let line = ["fourtuple".to_owned()].into_iter().chain(words.iter().cloned());
        let arguments = Arguments::try_parse_from(line).map_err(|error| {
            refuse(if error.use_stderr() {
                one_line(&error)
            } else {
                "there is nothing to measure".to_owned()
            })
        })?;
        let Subcommand::Lab(lab) = &arguments.command else {
            return Err(refuse("lab ports and lab time-wait are compared, no other command".to_owned()));
        };
        let has_connect_times = lab.comparable().map_err(refuse)?;
        for flag in ["--json", "--quiet"] {
            if !words.iter().any(|word| word == flag) {
                words.push(flag.to_owned());
            }
        }
        Ok(Side { name, text: text.to_owned(), words, has_connect_times })
    }

    /// Whether its records have this metric.
    pub(super) fn has(&self, metric: Metric) -> bool {
        metric == Metric::Rate || self.has_connect_times
    }

    /// One trial, in a process of its own.
    pub(super) fn run(&self, metric: Metric, stop: &AtomicBool) -> anyhow::Result<Trial> {
        if stop.load(Ordering::Relaxed) {
            return Ok(Trial::Interrupted);
        }
        let output = self.output(stop)?;
        let name = self.name;
        let line = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        let line = line.strip_prefix("fourtuple: ").unwrap_or(&line).to_owned();
        if stop.load(Ordering::Relaxed) {
            return Ok(Trial::Interrupted);
        }
        match output.status.code() {
            Some(0) => {}
            Some(2) => return Err(UsageError(line).into()),
            Some(3) => return Ok(Trial::Dropped(remarks(&output.stdout).unwrap_or(line))),
            Some(4) => bail!("{line}"),
            Some(code) => bail!("a trial of {name} ended with code {code}: {line}"),
            None => bail!("a trial of {name} was ended by signal {}", output.status.signal().unwrap_or(0)),
        }
        let text = String::from_utf8(output.stdout).with_context(|| format!("the record of {name}"))?;
        let saved = Saved::parse(&text).with_context(|| format!("the record of {name}"))?;
        match metric::numbers(&saved, metric) {
            Ok(numbers) => {
                let [number] = numbers[..] else {
                    bail!("{} numbers in the record of {name}", numbers.len())
                };
                Ok(Trial::Measured(number, Box::new(metric::envelope(saved).0)))
            }
            Err(NoNumber::Usage(why)) => Err(UsageError(format!("{name}: {why}")).into()),
            Err(NoNumber::ThisRun(why)) => Ok(Trial::Dropped(why)),
        }
    }

    /// Runs the command to its end, or until Ctrl-C ends it.
    fn output(&self, stop: &AtomicBool) -> anyhow::Result<Output> {
        let program = env::current_exe().context("cannot find this program")?;
        let child = Command::new(&program)
            .args(&self.words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let id = child.id();
        let (sender, receiver) = mpsc::channel();
        let waiting = thread::spawn(move || sender.send(child.wait_with_output()));
        let mut told = false;
        let output = loop {
            match receiver.recv_timeout(NOTICE) {
                Ok(output) => break output,
                Err(RecvTimeoutError::Disconnected) => bail!("nobody waits for a trial of {}", self.name),
                Err(RecvTimeoutError::Timeout) if !told && stop.load(Ordering::Relaxed) => {
                    told = true;
                    // Whoever is gone already has ended by itself. From a terminal this is the second signal, which
                    // ends it at once: what it has measured is not used.
                    let _ = child::interrupt(id);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        let _ = waiting.join();
        output.with_context(|| format!("cannot wait for a trial of {}", self.name))
    }
}

/// What a record that was printed has against itself.
fn remarks(stdout: &[u8]) -> Option<String> {
    let saved = Saved::parse(std::str::from_utf8(stdout).ok()?).ok()?;
    let messages: Vec<String> = metric::envelope(saved).1.into_iter().map(|remark| remark.message).collect();
    (!messages.is_empty()).then(|| messages.join("; "))
}
