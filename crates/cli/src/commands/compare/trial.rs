use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use fourtuple_load::Load;
use fourtuple_record::{Host, Saved};
use fourtuple_syscalls::child;

use super::metric::{self, Metric, NoNumber};
use super::server::{Arena, Held, Place};
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
    kind: Kind,
}

/// What a side runs.
enum Kind {
    Lab { has_connect_times: bool },
    Load(Box<Load>),
}

/// What came of a trial.
pub(super) enum Trial {
    Measured {
        value: f64,
        host: Box<Host>,
        /// The client of a load was busy all the time.
        saturated: bool,
    },
    /// Its own exit code says that it is not to be believed.
    Dropped(String),
    /// It did not begin, because it would not be valid; nor will the next.
    Refused(String),
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
        let kind = match &arguments.command {
            Subcommand::Lab(lab) => Kind::Lab { has_connect_times: lab.comparable().map_err(refuse)? },
            Subcommand::Load(load) => Kind::Load(Box::new(load.comparable().map_err(refuse)?)),
            _ => {
                let message = "load, lab ports and lab time-wait are compared, no other command";
                return Err(refuse(message.to_owned()));
            }
        };
        for flag in ["--json", "--quiet"] {
            if !words.iter().any(|word| word == flag) {
                words.push(flag.to_owned());
            }
        }
        Ok(Side { name, text: text.to_owned(), words, kind })
    }

    /// Whether its records have this metric.
    pub(super) fn has(&self, metric: Metric) -> bool {
        match self.kind {
            Kind::Lab { has_connect_times } => metric == Metric::Rate || has_connect_times,
            Kind::Load(_) => true,
        }
    }

    /// The load, if it is one.
    pub(super) fn load(&self) -> Option<&Load> {
        match &self.kind {
            Kind::Lab { .. } => None,
            Kind::Load(load) => Some(load),
        }
    }

    /// Where a load finds the server that is started for it.
    pub(super) fn place(&self) -> anyhow::Result<Place> {
        let Some(load) = self.load() else {
            let message =
                format!("'--server' is for load, and {}, '{}', makes its own", self.name, self.text);
            return Err(UsageError(message).into());
        };
        Place::of(&load.target).map_err(|why| UsageError(format!("{}, {why}", self.name)).into())
    }

    /// One trial, in a process of its own; with an arena in a namespace of its own, beside its server.
    pub(super) fn run(
        &self,
        metric: Metric,
        arena: Option<&Arena<'_>>,
        stop: &AtomicBool,
    ) -> anyhow::Result<Trial> {
        if stop.load(Ordering::Relaxed) {
            return Ok(Trial::Interrupted);
        }
        let name = self.name;
        let output = match arena {
            None => self.output(stop)?,
            Some(arena) => match arena.hold(name, stop, || self.output(stop))? {
                Held::Done(output) => output,
                Held::WithoutServer(why) => return Ok(Trial::Dropped(why)),
                Held::Interrupted => return Ok(Trial::Interrupted),
            },
        };
        let line = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        let line = line.strip_prefix("fourtuple: ").unwrap_or(&line).to_owned();
        if stop.load(Ordering::Relaxed) {
            return Ok(Trial::Interrupted);
        }
        match output.status.code() {
            Some(0) => {}
            // The preflight of load is the only one that refuses without a record, and the next would say the same.
            Some(3) if output.stdout.is_empty() && self.load().is_some() => return Ok(Trial::Refused(line)),
            // It has something against itself; what, is looked at below.
            Some(3) if !output.stdout.is_empty() => {}
            Some(2) => return Err(UsageError(line).into()),
            Some(3) => return Ok(Trial::Dropped(line)),
            Some(4) => bail!("{line}"),
            Some(code) => bail!("a trial of {name} ended with code {code}: {line}"),
            None => bail!("a trial of {name} was ended by signal {}", output.status.signal().unwrap_or(0)),
        }
        let text = String::from_utf8(output.stdout).with_context(|| format!("the record of {name}"))?;
        let saved = Saved::parse(&text).with_context(|| format!("the record of {name}"))?;
        let (host, remarks) = metric::envelope(&saved);
        let saturated = match metric::is_saturated(remarks) {
            Ok(saturated) => saturated,
            Err(why) => return Ok(Trial::Dropped(why)),
        };
        let host = Box::new(host.clone());
        match metric::numbers(&saved, metric) {
            Ok(numbers) => {
                let [number] = numbers[..] else {
                    bail!("{} numbers in the record of {name}", numbers.len())
                };
                Ok(Trial::Measured { value: number, host, saturated })
            }
            Err(NoNumber::Usage(why)) => Err(UsageError(format!("{name}: {why}")).into()),
            Err(NoNumber::ThisRun(why)) => Ok(Trial::Dropped(why)),
        }
    }

    /// Runs the command to its end, or until Ctrl-C ends it.
    fn output(&self, stop: &AtomicBool) -> anyhow::Result<Output> {
        let program = env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(&program);
        // Whoever ends compare for good ends the trial too.
        child::end_with_this_thread(&mut command);
        let child = command
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
