//! `fourtuple compare`: trials of two commands in turn, or two sides of saved records.

pub(crate) mod metric;
mod saved;
mod server;
mod trial;
mod words;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use fourtuple_lab::{LabError, Progress};
use fourtuple_measure::{Comparison, Conclusion, FIRST_LOOK};
use fourtuple_record::{CompareResults, CompareSettings, Host, Remark, Saved};
use time::OffsetDateTime;

use crate::exit::{Exit, NotValid, UsageError};
use crate::output::{self, Output};
use crate::progress::Bars;
use crate::{stop, units};

use self::metric::Metric;
use self::server::{Arena, Halves, Place, Server};
use self::trial::{Side, Trial};

/// Is B faster than A? Runs two commands in turn, until that can be said
///
/// A and B are fourtuple commands as typed, one in quotes each, of which one number comes out: load, lab ports with one
/// --strategy, lab time-wait with one --remedy. They run A B B A B A A B, so that a drift of the machine cancels, until
/// the 95% interval of the ratio is narrow enough or time is over. With --server each trial of a load has a network
/// namespace of its own, and its server in there; without, loads run where compare does. Without -- the arguments are
/// files of saved records, A B or A B A B: one record or one a line. Those did not run in turn, and a drift between them
/// is in the ratio.
#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// Files of records that --json printed, of A and B in turn
    #[arg(value_name = "RECORD")]
    files: Vec<PathBuf>,
    /// The two commands, after --
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "files")]
    commands: Vec<String>,
    /// What is compared: the rate, the mean, median, 99th or 99.9th percentile of connect() (of load: of an operation), or CPU time
    #[arg(long, value_enum, default_value_t = Metric::Rate)]
    metric: Metric,
    /// Longest time to go on, warming up included; the trial that runs then is finished
    #[arg(long = "for", value_name = "TIME", default_value = "2m", value_parser = units::duration, allow_hyphen_values = true)]
    time: Duration,
    /// End when the interval reaches no further than this each way; also what "no difference" means
    #[arg(long, value_name = "PERCENT", default_value = "2%", value_parser = units::percent, allow_hyphen_values = true)]
    narrow: f64,
    /// Most pairs of trials [default: as many as there is time for]
    #[arg(long, value_name = "N", value_parser = units::up_to::<1_000_000>, allow_hyphen_values = true)]
    trials: Option<u32>,
    /// Trials of each side that are run first and not used
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::from_0_to::<100>, allow_hyphen_values = true)]
    warmup: u32,
    /// Server of the loads, started for each trial in a network namespace of its own: 'serve ...', or any other program with
    /// its arguments, which stays in the foreground
    #[arg(long, value_name = "COMMAND", conflicts_with = "files")]
    server: Option<String>,
    /// Server of B, where it is another than that of A
    #[arg(long, value_name = "COMMAND", requires = "server")]
    server_b: Option<String>,
    /// Longest time until a server listens where its load connects to [default: 10s]
    #[arg(long, value_name = "TIME", requires = "server", value_parser = units::duration, allow_hyphen_values = true)]
    server_wait: Option<Duration>,
    /// Keep client and server apart: the client to the first half of the CPUs that may be used, the server to the others
    #[arg(long, requires = "server")]
    pin: bool,
    #[command(flatten)]
    output: Output,
}

/// How long a server has until it listens.
const SERVER_WAIT: Duration = Duration::from_secs(10);

/// Trials in a row, of one side, that may be dropped before the comparison gives up.
const DROPS: u32 = 3;

impl Compare {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match (self.files.as_slice(), self.commands.as_slice()) {
            ([], [a, b]) => self.run_trials(a, b),
            (files, []) if files.len() >= 2 && files.len().is_multiple_of(2) => saved::run(&self),
            ([], commands) => Err(refuse(commands.len(), "commands", "--")),
            (files, _) => Err(refuse(files.len(), "files", "RECORD")),
        }
    }

    fn run_trials(&self, a: &str, b: &str) -> anyhow::Result<Exit> {
        let sides = [Side::read("A", a)?, Side::read("B", b)?];
        if let Some(side) = sides.iter().find(|side| !side.has(self.metric)) {
            let message = metric::only_rate(&side.text, self.metric);
            return Err(UsageError(message).into());
        }
        if sides[0].load().is_some() != sides[1].load().is_some() {
            let message = "a load and a lab have no number in common: expected two of load, or two of lab";
            return Err(UsageError(message.to_owned()).into());
        }
        self.refuse_too_little_time(&sides)?;
        let servers = self.servers(&sides)?;
        let wait = self.server_wait.unwrap_or(SERVER_WAIT);
        let cpus = if self.pin { Some(Halves::of_this_process()?) } else { None };
        let arena = |side: usize| {
            let (server, place) = &servers.as_ref()?[side];
            Some(Arena { server, place, patience: wait, cpus: cpus.as_ref() })
        };
        if servers.is_some() {
            fourtuple_lab::prepare_process()?;
        }
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let fresh = servers.is_some() || sides[0].load().is_none();
        let mut session = Session {
            sides,
            arenas: [arena(0), arena(1)],
            saturated: 0,
            metric: self.metric,
            stop: &stop,
            begun: Instant::now(),
            time: self.time,
            host: None,
            dropped: [0; 2],
            remarks: Vec::new(),
        };
        let bars = Bars::new(self.output.quiet);
        bars.begin("A B B A, B A A B", self.time.as_secs().max(1));
        let measured = session.measure(self, &bars)?;
        drop(bars);
        let Some(conclusion) = measured.decided.or_else(|| measured.comparison.conclude()) else {
            return Err(session.nothing());
        };
        let Session { host, remarks, saturated, .. } = session;
        let [samples_a, samples_b] = measured.samples;
        let pairs = measured.comparison.pairs() as u64;
        let short = pairs < FIRST_LOOK as u64;
        let results = CompareResults {
            ratio: conclusion.ratio,
            low: conclusion.interval.map(|(low, _)| low),
            high: conclusion.interval.map(|(_, high)| high),
            verdict: if short {
                let plural = if pairs == 1 { "" } else { "s" };
                format!("too noisy to say: {pairs} pair{plural}, {FIRST_LOOK} are needed")
            } else {
                conclusion.words(self.narrow)
            },
            trials: 2 * pairs,
            pairs,
            // The half of a pair that is not used may be among them.
            client_saturated: saturated.min(2 * pairs),
            samples_a,
            samples_b,
        };
        let server = |side: usize| servers.as_ref().map(|servers| servers[side].0.text.clone());
        let settings = CompareSettings {
            a: a.to_owned(),
            b: b.to_owned(),
            metric: self.metric.name().to_owned(),
            for_ns: Some(self.time.as_nanos().min(u64::MAX.into()) as u64),
            narrow: self.narrow,
            trials: self.trials.map(u64::from),
            warmup: self.warmup,
            server_a: server(0),
            server_b: server(1),
            server_wait_ns: servers.is_some().then(|| wait.as_nanos().min(u64::MAX.into()) as u64),
            pinned: self.pin,
            fresh_namespace: Some(fresh),
            seed: self.output.seed,
        };
        let host = host.unwrap_or_default();
        let record = output::record("compare", started, host, settings, remarks, results);
        self.output.finish(&Saved::Compare(record))
    }
}

impl Compare {
    /// The server of each side, and where it is to listen.
    fn servers(&self, sides: &[Side; 2]) -> anyhow::Result<Option<[(Server, Place); 2]>> {
        let Some(text) = &self.server else { return Ok(None) };
        let a = Server::read("--server", text)?;
        let b = self.server_b.as_ref().map(|text| Server::read("--server-b", text)).transpose()?;
        let b = b.unwrap_or_else(|| a.clone());
        Ok(Some([(a, sides[0].place()?), (b, sides[1].place()?)]))
    }

    /// A load that says how long it takes may take too long for any interval.
    fn refuse_too_little_time(&self, sides: &[Side; 2]) -> Result<(), UsageError> {
        let length = |side: &Side| {
            // Whichever of the two comes first.
            side.load().filter(|load| load.operations.is_none()).and_then(|load| load.length)
        };
        let pair: Duration = sides.iter().filter_map(length).sum();
        let needed = pair * (FIRST_LOOK as u32 + self.warmup);
        if self.trials.is_some() || needed <= self.time {
            return Ok(());
        }
        Err(UsageError(format!(
            "invalid value '{}s' for '--for': a pair of these loads takes {}s, and {FIRST_LOOK} after warming up {}s; give              the loads a shorter --for, such as 1s, or --operations, or compare more time",
            self.time.as_secs_f64(),
            pair.as_secs_f64(),
            needed.as_secs_f64()
        )))
    }
}

fn refuse(number: usize, what: &str, place: &str) -> anyhow::Error {
    UsageError(format!(
        "'{number}' {what} for '{place}': two commands are compared (fourtuple compare -- 'lab ports --strategy auto' \
         'lab ports --strategy full-range'), or files of records, as many of A as of B"
    ))
    .into()
}

/// What the trials gave.
struct Measured {
    comparison: Comparison,
    decided: Option<Conclusion>,
    samples: [Vec<f64>; 2],
}

/// A comparison in the middle.
struct Session<'a> {
    sides: [Side; 2],
    arenas: [Option<Arena<'a>>; 2],
    /// Trials with a busy client, of those used.
    saturated: u64,
    metric: Metric,
    stop: &'a AtomicBool,
    begun: Instant,
    time: Duration,
    host: Option<Host>,
    dropped: [u64; 2],
    remarks: Vec<Remark>,
}

impl Session<'_> {
    fn measure(&mut self, flags: &Compare, bars: &Bars) -> anyhow::Result<Measured> {
        let mut measured = Measured {
            comparison: Comparison::new(flags.narrow),
            decided: None,
            samples: [Vec::new(), Vec::new()],
        };
        let most = flags.trials.map_or(usize::MAX, |pairs| pairs as usize);
        let mut warm = true;
        for _ in 0..flags.warmup {
            for side in 0..2 {
                warm = warm && self.trial(side)?.is_some();
            }
        }
        self.saturated = 0;
        while warm && measured.decided.is_none() && measured.comparison.pairs() < most {
            // A B B A, B A A B: in each four a drift cancels, and so does one over eight.
            let a_first = matches!(measured.comparison.pairs() % 4, 0 | 3);
            let order = if a_first { [0, 1] } else { [1, 0] };
            let mut pair = [0.0; 2];
            for side in order {
                let Some(value) = self.trial(side)? else {
                    self.report_dropped();
                    return Ok(measured);
                };
                pair[side] = value;
                bars.at(self.begun.elapsed().as_secs());
            }
            for (samples, value) in measured.samples.iter_mut().zip(pair) {
                samples.push(value);
            }
            measured.comparison.push(self.metric.merit(pair[0]), self.metric.merit(pair[1]));
            measured.decided = measured.comparison.look();
        }
        self.report_dropped();
        Ok(measured)
    }

    /// The metric of one trial, tried again when it was dropped; `None` when the comparison is to end.
    fn trial(&mut self, side: usize) -> anyhow::Result<Option<f64>> {
        for _ in 0..DROPS {
            if self.begun.elapsed() >= self.time {
                return Ok(None);
            }
            match self.sides[side].run(self.metric, self.arenas[side].as_ref(), self.stop)? {
                Trial::Measured { value, host, saturated } => {
                    self.host.get_or_insert(*host);
                    self.saturated += u64::from(saturated);
                    return Ok(Some(value));
                }
                Trial::Refused(why) => {
                    let name = self.sides[side].name;
                    self.remarks.push(Remark::new(
                        "trial-refused",
                        format!("{name} was not started, and no more trials were made: {why}"),
                    ));
                    return Ok(None);
                }
                Trial::Dropped(_) | Trial::Interrupted if self.stop.load(Ordering::Relaxed) => {
                    self.remarks
                        .push(Remark::new("interrupted", "interrupted: the trials made until then are used"));
                    return Ok(None);
                }
                Trial::Interrupted => return Ok(None),
                Trial::Dropped(why) => {
                    self.dropped[side] += 1;
                    if self.dropped[side] == 1 {
                        let name = self.sides[side].name;
                        self.remarks.push(Remark::new(
                            "trial-not-valid",
                            format!("a trial of {name} was not valid: {why}"),
                        ));
                    }
                }
            }
        }
        let name = self.sides[side].name;
        let message = format!("{DROPS} trials of {name} in a row were not valid: no more were made");
        self.remarks.push(Remark::new("gave-up", message));
        Ok(None)
    }

    /// How many trials are not in the result.
    fn report_dropped(&mut self) {
        for (side, dropped) in self.sides.iter().zip(self.dropped) {
            if dropped > 0 {
                let message =
                    format!("trials of {} that were not valid and were dropped: {dropped}", side.name);
                self.remarks.push(Remark::new("dropped", message));
            }
        }
    }

    /// Why there is no result.
    fn nothing(self) -> anyhow::Error {
        if self.stop.load(Ordering::Relaxed) {
            return LabError::Interrupted.into();
        }
        if let Some(remark) = self.remarks.into_iter().next() {
            return NotValid(remark.message).into();
        }
        UsageError(format!(
            "invalid value '{}s' for '--for': it was over before a trial of each side was done; expected more time",
            self.time.as_secs_f64()
        ))
        .into()
    }
}
