//! `fourtuple compare`: its flags and its output. The engine is the crate `fourtuple-bench`.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fourtuple_bench::compare::{
    CompareError, CpuSplit, Metric, Outcome, SavedTrials, ServerCommand, Servers, Side, SideCommand, Trials,
};
use fourtuple_bench::lab::{LabError, Progress};
use fourtuple_record::{CompareSettings, Saved};
use time::OffsetDateTime;

use crate::commands::report::read_records;
use crate::exit::{self, Exit, NotValid, UsageError};
use crate::line::Bars;
use crate::output::{self, Output, Random};
use crate::{Command, one_line, stop, units};

/// Compare two commands or saved records: is B faster than A?
///
/// A and B are fourtuple commands in quotes, each of which gives one number: load, lab ports with one --strategy, lab
/// time-wait with one --remedy. They run in the order A B B A B A A B, in which a drift of the machine cancels, until the 95%
/// interval of the ratio is narrow enough or --for is over. With --server each trial of a load runs beside its own server
/// in its own network namespace; without --server loads run in the namespace of compare. Without -- the arguments are
/// files of saved records, A B or A B A B, with one record or one record per line. Saved records did not run in turn, so
/// their ratio includes any drift between them.
#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// Files of records, as --json prints them, of A and B in turn
    #[arg(value_name = "RECORD")]
    files: Vec<PathBuf>,
    /// The two commands, after --
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "files")]
    commands: Vec<String>,
    /// Server that each trial starts for its load
    ///
    /// In its own network namespace: 'serve ...', or another program with its arguments that stays in the foreground.
    #[arg(long, value_name = "COMMAND", conflicts_with = "files")]
    server: Option<String>,
    /// Server of B [default: the server of A]
    #[arg(long, value_name = "COMMAND", requires = "server")]
    server_b: Option<String>,
    /// Limit until a server listens [default: 10s]
    ///
    /// On the address of its load.
    #[arg(long, value_name = "TIME", requires = "server", value_parser = units::duration, allow_hyphen_values = true)]
    server_wait: Option<Duration>,
    /// Run client and server on different CPUs
    ///
    /// The client on the first half of the CPUs that this process may use, the server on the second half.
    #[arg(long, requires = "server")]
    pin: bool,
    /// rate, mean, p50, p99, p999 or cpu
    ///
    /// The number to compare.
    #[arg(long, value_name = "NAME", default_value = "rate", value_parser = metric_parser())]
    metric: Metric,
    /// Limit of all trials
    ///
    /// Warm-up included; the trial that runs at its end is finished.
    #[arg(long = "for", value_name = "TIME", default_value = "2m", value_parser = units::duration, allow_hyphen_values = true)]
    time: Duration,
    /// End when the interval is so narrow
    ///
    /// Each way; a smaller difference counts as none.
    #[arg(long, value_name = "PERCENT", default_value = "2%", value_parser = units::percent, allow_hyphen_values = true)]
    narrow: f64,
    /// Maximum number of pairs of trials
    ///
    /// By default as many as --for allows.
    #[arg(long, value_name = "N", value_parser = units::up_to::<1_000_000>, allow_hyphen_values = true)]
    trials: Option<u32>,
    /// First trials of each side, unused
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::from_0_to::<100>, allow_hyphen_values = true)]
    warmup: u32,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

/// The default of `--server-wait`.
const SERVER_WAIT: Duration = Duration::from_secs(10);

fn metric_parser() -> impl TypedValueParser<Value = Metric> {
    let values = Metric::ALL.map(|metric| PossibleValue::new(metric.name()).help(metric.description()));
    PossibleValuesParser::new(values)
        .map(|name| Metric::named(&name).expect("the parser accepts names of metrics"))
}

impl Compare {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match (self.files.as_slice(), self.commands.as_slice()) {
            ([], [a, b]) => self.run_trials(a, b),
            (files, []) if files.len() >= 2 && files.len().is_multiple_of(2) => self.compare_saved(),
            ([], commands) => Err(refuse(commands.len(), "commands", "--")),
            (files, _) => Err(refuse(files.len(), "files", "RECORD")),
        }
    }

    fn run_trials(&self, a: &str, b: &str) -> anyhow::Result<Exit> {
        let sides = [side("A", a)?, side("B", b)?];
        let mut trials = Trials {
            sides,
            servers: None,
            metric: self.metric,
            time: self.time,
            narrow: self.narrow,
            pairs: self.trials,
            warmup: self.warmup,
        };
        trials.check().map_err(with_exit_code)?;
        trials.servers = self.servers(&trials.sides)?;
        if trials.servers.is_some() {
            fourtuple_bench::lab::prepare_process()?;
        }
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let bars = Bars::new(self.output.quiet);
        bars.begin("A B B A, B A A B", self.time.as_secs().max(1));
        let outcome = trials.run(&stop, &|elapsed| bars.at(elapsed.as_secs())).map_err(with_exit_code)?;
        drop(bars);
        self.finish(started, trials.settings(self.random.seed), outcome)
    }

    /// Parses the servers of both sides; `None` without `--server`.
    fn servers(&self, sides: &[Side; 2]) -> anyhow::Result<Option<Servers>> {
        let Some(text) = &self.server else { return Ok(None) };
        let a = server("--server", text)?;
        let b = match &self.server_b {
            Some(text) => server("--server-b", text)?,
            None => a.clone(),
        };
        let address = |side: &Side| side.server_address().map_err(with_exit_code);
        Ok(Some(Servers {
            commands: [a, b],
            addresses: [address(&sides[0])?, address(&sides[1])?],
            wait: self.server_wait.unwrap_or(SERVER_WAIT),
            cpus: self.pin.then(CpuSplit::of_this_process).transpose().map_err(with_exit_code)?,
        }))
    }

    fn compare_saved(&self) -> anyhow::Result<Exit> {
        let started = OffsetDateTime::now_utc();
        let mut saved = SavedTrials::new(self.metric);
        for (number, path) in self.files.iter().enumerate() {
            let file = path.display().to_string();
            let records = read_records(path).map_err(|error| {
                let hint = if file.contains(' ') { " (commands stand after --)" } else { "" };
                UsageError(format!("{error}{hint}"))
            })?;
            saved.add(number % 2, &file, records).map_err(with_exit_code)?;
        }
        let settings = saved.settings(self.narrow, self.random.seed);
        let outcome = saved.compare(self.narrow, self.random.seed).map_err(with_exit_code)?;
        self.finish(started, settings, outcome)
    }

    fn finish(
        &self,
        started: OffsetDateTime,
        settings: CompareSettings,
        outcome: Outcome,
    ) -> anyhow::Result<Exit> {
        let Outcome { host, remarks, results } = outcome;
        let record = output::record("compare", started, host, settings, remarks, results);
        self.output.finish(&Saved::Compare(record))
    }
}

/// Converts an error of the engine to the error that has its exit code.
fn with_exit_code(error: CompareError) -> anyhow::Error {
    match error {
        CompareError::Usage(message) => UsageError(message).into(),
        CompareError::NotValid(message) => NotValid(message).into(),
        CompareError::Interrupted => LabError::Interrupted.into(),
        error => error.into(),
    }
}

fn refuse(number: usize, what: &str, argument: &str) -> anyhow::Error {
    UsageError(format!(
        "'{number}' {what} for '{argument}': two commands are compared (fourtuple compare -- 'lab ports --strategy auto' \
         'lab ports --strategy full-range'), or files of records, as many of A as of B"
    ))
    .into()
}

/// Parses one of the two commands of a comparison.
///
/// # Errors
/// [`UsageError`] if the command is invalid, or does not give exactly one number per trial.
pub(crate) fn side(name: &'static str, text: &str) -> anyhow::Result<Side> {
    let refuse = |why: String| anyhow::Error::from(UsageError(format!("{name}, '{text}': {why}")));
    let mut arguments = split(text).map_err(refuse)?;
    if arguments.first().is_some_and(|word| word == "fourtuple") {
        arguments.remove(0);
    }
    let command = match parse(&arguments, "there is nothing to measure").map_err(refuse)? {
        Command::Lab(lab) => SideCommand::Lab { has_connect_times: lab.comparable().map_err(refuse)? },
        Command::Load(load) => SideCommand::Load(Box::new(load.comparable().map_err(refuse)?)),
        _ => {
            let message = "load, lab ports and lab time-wait are compared, no other command";
            return Err(refuse(message.to_owned()));
        }
    };
    for flag in ["--json", "--quiet"] {
        if !arguments.iter().any(|word| word == flag) {
            arguments.push(flag.to_owned());
        }
    }
    let program = env::current_exe().context("cannot find this program")?;
    Ok(Side { name, text: text.to_owned(), program, arguments, command })
}

/// Parses the command of a server: `serve ...` with or without `fourtuple`, or another program with its arguments.
///
/// # Errors
/// [`UsageError`] if the command is empty, or is a fourtuple command that cannot serve.
pub(super) fn server(flag: &'static str, text: &str) -> anyhow::Result<ServerCommand> {
    let refuse =
        |why: String| anyhow::Error::from(UsageError(format!("invalid value '{text}' for '{flag}': {why}")));
    let mut arguments = split(text).map_err(refuse)?;
    if arguments.first().is_some_and(|word| word == "fourtuple") {
        arguments.remove(0);
        if arguments.first().is_none_or(|word| word != "serve") {
            return Err(refuse("of fourtuple, serve alone is a server".to_owned()));
        }
    }
    let program = match arguments.first().map(String::as_str) {
        None => return Err(refuse("expected serve ..., or a program and its arguments".to_owned())),
        Some("serve") => {
            if let Command::Serve(serve) = parse(&arguments, "there is nothing to serve").map_err(refuse)? {
                serve.check().map_err(|error| refuse(exit::message(&error)))?;
            }
            env::current_exe().context("cannot find this program")?.into_os_string()
        }
        Some(_) => arguments.remove(0).into(),
    };
    Ok(ServerCommand { flag, text: text.to_owned(), program, arguments })
}

/// Parses the arguments of a fourtuple command. `no_run` is the error for `--help` and `--version`.
pub(crate) fn parse(arguments: &[String], no_run: &str) -> Result<Command, String> {
    let line = ["fourtuple".to_owned()].into_iter().chain(arguments.iter().cloned());
    let parsed = crate::parse(line)
        .map_err(|error| if error.use_stderr() { one_line(&error) } else { no_run.to_owned() })?;
    Ok(parsed.command)
}

/// Splits a command line as a shell does: at blanks outside of quotes. Supports '...', "..." and \; inside of "..." a \
/// escapes " \ $ and `. Does not expand variables or patterns.
///
/// # Errors
/// A text for the user if a quote is not closed, or if the text ends with a \.
pub(crate) fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\n' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a ' is not closed")? {
                        '\'' => break,
                        inside => word.push(inside),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a \" is not closed")? {
                        '"' => break,
                        '\\' => match letters.next().ok_or("a \" is not closed")? {
                            escaped @ ('"' | '\\' | '$' | '`') => word.push(escaped),
                            other => word.extend(['\\', other]),
                        },
                        inside => word.push(inside),
                    }
                }
            }
            '\\' => {
                word.get_or_insert_default().push(letters.next().ok_or("nothing stands after the last \\")?)
            }
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::{split, *};

    #[test]
    fn a_server_is_serve_or_another_program() {
        let serve = server("--server", "fourtuple serve crr --listen 127.0.0.1:80").unwrap();
        assert_eq!(serve.program, env::current_exe().unwrap());
        assert_eq!(serve.arguments, ["serve", "crr", "--listen", "127.0.0.1:80"]);
        let program = server("--server", "./server --port '8 0'").unwrap();
        assert_eq!(program.program, "./server");
        assert_eq!(program.arguments, ["--port", "8 0"]);
        for (text, says) in [
            ("", "expected serve"),
            ("fourtuple", "serve alone"),
            ("fourtuple load tcp://127.0.0.1:80", "serve alone"),
            ("serve crr", "--listen"),
            ("serve --help", "nothing to serve"),
            ("serve crr --listen 127.0.0.1:80 --spin", "--service"),
            ("nginx 'x", "not closed"),
        ] {
            let error = server("--server-b", text).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("--server-b"), "{error:?}");
        }
    }

    #[test]
    fn quotes_and_escapes_follow_the_shell() {
        for (text, words) in [
            ("", &[][..]),
            ("  lab   ports\t--range 1-2\n", &["lab", "ports", "--range", "1-2"]),
            ("a 'b c' \"d e\"f", &["a", "b c", "d ef"]),
            (r#"a\ b "c\"d\e" '\'"#, &["a b", r#"c"d\e"#, r"\"]),
            ("'' \"\"", &["", ""]),
        ] {
            assert_eq!(split(text).unwrap(), words, "{text:?}");
        }
        for text in ["'a", "\"a", "a\\", "\"a\\"] {
            assert!(split(text).is_err(), "{text:?}");
        }
    }
}
