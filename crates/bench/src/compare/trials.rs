use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::measure::{Comparison, Conclusion, FIRST_LOOK};
use fourtuple_record::{CompareResults, CompareSettings, Host, Remark, Saved};
use fourtuple_syscalls::child;

use crate::compare::CompareError;
use crate::compare::metric::{self, Metric, NoNumber};
use crate::compare::server::{ServerAddress, Servers, Testbed, TestbedOutcome};
use crate::load::Load;

/// Trials of one side in a row that may be dropped before the comparison ends.
const MAX_DROPPED: u32 = 3;

/// The settings of a comparison of two commands whose trials run in turn.
#[derive(Debug)]
pub struct Trials {
    /// The commands A and B.
    pub sides: [Side; 2],
    /// The servers of loads; `None` runs trials where the calling thread runs.
    pub servers: Option<Servers>,
    /// The number that each trial gives.
    pub metric: Metric,
    /// Maximum time for all trials, warm-up included. The trial that runs at its end is finished.
    pub time: Duration,
    /// The width of the interval, each way, at which the comparison ends, as a share. Also the largest difference that
    /// counts as none.
    pub narrow: f64,
    /// Maximum number of pairs; `None` for as many as the time allows.
    pub pairs: Option<u32>,
    /// Trials of each side that run first and are not used.
    pub warmup: u32,
}

impl Trials {
    /// Refuses what cannot give a result, before anything runs.
    ///
    /// # Errors
    /// [`CompareError::Usage`] if a side lacks the metric, if one side is a load and the other a lab, or if the loads take
    /// too long for the first interval.
    pub fn check(&self) -> Result<(), CompareError> {
        if let Some(side) = self.sides.iter().find(|side| !side.has(self.metric)) {
            return Err(CompareError::Usage(metric::only_rate(&side.text, self.metric)));
        }
        if self.sides[0].load().is_some() != self.sides[1].load().is_some() {
            let message = "a load and a lab have no number in common: expected two of load, or two of lab";
            return Err(CompareError::Usage(message.to_owned()));
        }
        let pair: Duration = self.sides.iter().filter_map(Side::fixed_length).sum();
        let needed = pair * (FIRST_LOOK as u32 + self.warmup);
        if self.pairs.is_some() || needed <= self.time {
            return Ok(());
        }
        Err(CompareError::Usage(format!(
            "invalid value '{}s' for '--for': a pair of these loads takes {}s, and {FIRST_LOOK} after warming up {}s; give \
             the loads a shorter --for, such as 1s, or --operations, or compare more time",
            self.time.as_secs_f64(),
            pair.as_secs_f64(),
            needed.as_secs_f64()
        )))
    }

    /// Returns the settings as the record shows them.
    pub fn settings(&self, seed: u64) -> CompareSettings {
        let nanoseconds = |time: Duration| time.as_nanos().min(u64::MAX.into()) as u64;
        let server = |side: usize| self.servers.as_ref().map(|servers| servers.commands[side].text.clone());
        let [a, b] = &self.sides;
        CompareSettings {
            a: a.text.clone(),
            b: b.text.clone(),
            metric: self.metric.name().to_owned(),
            for_ns: Some(nanoseconds(self.time)),
            narrow: self.narrow,
            trials: self.pairs.map(u64::from),
            warmup: self.warmup,
            server_a: server(0),
            server_b: server(1),
            server_wait_ns: self.servers.as_ref().map(|servers| nanoseconds(servers.wait)),
            pinned: self.servers.as_ref().is_some_and(|servers| servers.cpus.is_some()),
            // A lab makes a namespace for itself.
            fresh_namespace: Some(self.servers.is_some() || a.load().is_none()),
            seed,
        }
    }

    /// Runs trials until the interval is narrow enough, the time or the pairs are used up, or `stop` is set. Calls
    /// `progress` with the elapsed time after each trial. The pairs that are complete when `stop` is set are used.
    ///
    /// # Errors
    /// Any [`CompareError`]; [`CompareError::Interrupted`] only if no pair is complete.
    pub fn run(&self, stop: &AtomicBool, progress: &dyn Fn(Duration)) -> Result<Outcome, CompareError> {
        let mut session = Session {
            trials: self,
            stop,
            progress,
            begun: Instant::now(),
            comparison: Comparison::new(self.narrow),
            decided: None,
            samples: [Vec::new(), Vec::new()],
            saturated: 0,
            host: None,
            dropped: [0; 2],
            remarks: Vec::new(),
        };
        session.measure()?;
        session.report_dropped();
        session.finish()
    }
}

/// The state of a comparison that runs.
struct Session<'a> {
    trials: &'a Trials,
    stop: &'a AtomicBool,
    progress: &'a dyn Fn(Duration),
    begun: Instant,
    comparison: Comparison,
    decided: Option<Conclusion>,
    samples: [Vec<f64>; 2],
    /// Trials after the warm-up whose client was saturated.
    saturated: u64,
    host: Option<Host>,
    /// Trials of each side that were not valid.
    dropped: [u64; 2],
    remarks: Vec<Remark>,
}

impl Session<'_> {
    /// Runs pairs of trials until there is a reason to end.
    fn measure(&mut self) -> Result<(), CompareError> {
        for _ in 0..self.trials.warmup {
            for side in 0..2 {
                if self.trial(side)?.is_none() {
                    return Ok(());
                }
            }
        }
        self.saturated = 0;
        let most = self.trials.pairs.map_or(usize::MAX, |pairs| pairs as usize);
        while self.decided.is_none() && self.comparison.pairs() < most {
            let mut pair = [0.0; 2];
            for side in order_of_pair(self.comparison.pairs()) {
                let Some(value) = self.trial(side)? else { return Ok(()) };
                pair[side] = value;
                (self.progress)(self.begun.elapsed());
            }
            for (samples, value) in self.samples.iter_mut().zip(pair) {
                samples.push(value);
            }
            let [a, b] = pair.map(|value| self.trials.metric.merit(value));
            self.comparison.push(a, b);
            self.decided = self.comparison.look();
        }
        Ok(())
    }

    /// Returns the metric of one trial; repeats a trial that was not valid. `None` ends the comparison.
    fn trial(&mut self, side: usize) -> Result<Option<f64>, CompareError> {
        let name = self.trials.sides[side].name;
        for _ in 0..MAX_DROPPED {
            if self.begun.elapsed() >= self.trials.time {
                return Ok(None);
            }
            let testbed = self.trials.servers.as_ref().map(|servers| servers.testbed(side));
            match self.trials.sides[side].run(self.trials.metric, testbed.as_ref(), self.stop)? {
                TrialOutcome::Measured { value, host, saturated } => {
                    self.host.get_or_insert(*host);
                    self.saturated += u64::from(saturated);
                    return Ok(Some(value));
                }
                TrialOutcome::Refused(why) => {
                    let message = format!("{name} was not started, and no more trials were made: {why}");
                    self.remarks.push(Remark::new("trial-refused", message));
                    return Ok(None);
                }
                TrialOutcome::Dropped(_) | TrialOutcome::Interrupted if self.stop.load(Ordering::Relaxed) => {
                    let message = "interrupted: the trials made until then are used";
                    self.remarks.push(Remark::new("interrupted", message));
                    return Ok(None);
                }
                TrialOutcome::Interrupted => return Ok(None),
                TrialOutcome::Dropped(why) => {
                    self.dropped[side] += 1;
                    if self.dropped[side] == 1 {
                        let message = format!("a trial of {name} was not valid: {why}");
                        self.remarks.push(Remark::new("trial-not-valid", message));
                    }
                }
            }
        }
        let message = format!("{MAX_DROPPED} trials of {name} in a row were not valid: no more were made");
        self.remarks.push(Remark::new("gave-up", message));
        Ok(None)
    }

    /// Adds a remark with the number of dropped trials of each side.
    fn report_dropped(&mut self) {
        for (side, dropped) in self.trials.sides.iter().zip(self.dropped) {
            if dropped > 0 {
                let message =
                    format!("trials of {} that were not valid and were dropped: {dropped}", side.name);
                self.remarks.push(Remark::new("dropped", message));
            }
        }
    }

    fn finish(self) -> Result<Outcome, CompareError> {
        let Some(conclusion) = self.decided.or_else(|| self.comparison.conclude()) else {
            return Err(self.no_result());
        };
        let pairs = self.comparison.pairs() as u64;
        let verdict = if pairs < FIRST_LOOK as u64 {
            let plural = if pairs == 1 { "" } else { "s" };
            format!("too noisy to say: {pairs} pair{plural}, {FIRST_LOOK} are needed")
        } else {
            conclusion.words(self.trials.narrow)
        };
        let [samples_a, samples_b] = self.samples;
        let results = CompareResults {
            ratio: conclusion.ratio,
            low: conclusion.interval.map(|(low, _)| low),
            high: conclusion.interval.map(|(_, high)| high),
            verdict,
            trials: 2 * pairs,
            pairs,
            // The count may include the first trial of a pair that was not completed.
            client_saturated: self.saturated.min(2 * pairs),
            samples_a,
            samples_b,
        };
        Ok(Outcome { host: self.host.unwrap_or_default(), remarks: self.remarks, results })
    }

    /// Returns the reason why no pair is complete.
    fn no_result(self) -> CompareError {
        if self.stop.load(Ordering::Relaxed) {
            return CompareError::Interrupted;
        }
        if let Some(remark) = self.remarks.into_iter().next() {
            return CompareError::NotValid(remark.message);
        }
        CompareError::Usage(format!(
            "invalid value '{}s' for '--for': it was over before a trial of each side was done; expected more time",
            self.trials.time.as_secs_f64()
        ))
    }
}

/// Returns the sides of a pair in their order: A B, B A, B A, A B. Over each two pairs a linear drift of the machine
/// cancels, and over each four a quadratic drift does.
fn order_of_pair(pair: usize) -> [usize; 2] {
    if matches!(pair % 4, 0 | 3) { [0, 1] } else { [1, 0] }
}

/// The result of a comparison, as its record shows it.
#[derive(Debug)]
pub struct Outcome {
    /// The host of the first trial or record that was used.
    pub host: Host,
    /// Reasons to doubt the result; none if it is valid.
    pub remarks: Vec<Remark>,
    /// The ratio of B to A, its interval, the verdict and the samples.
    pub results: CompareResults,
}

/// Maximum time from Ctrl-C until the trial gets SIGINT.
const STOP_POLL: Duration = Duration::from_millis(20);

pub(crate) enum TrialOutcome {
    /// The trial was valid.
    Measured {
        /// The metric.
        value: f64,
        /// The host, as the trial's record describes it.
        host: Box<Host>,
        /// The client of the load was busy all the time.
        saturated: bool,
    },
    /// The trial ran and was not valid, for this reason; the next trial may be.
    Dropped(String),
    /// The preflight refused the load, for this reason, and would refuse every further trial.
    Refused(String),
    /// The stop flag was set.
    Interrupted,
}

impl Side {
    /// Runs one trial in a child process; with a testbed, beside a server in a network namespace of its own.
    pub(crate) fn run(
        &self,
        metric: Metric,
        testbed: Option<&Testbed<'_>>,
        stop: &AtomicBool,
    ) -> Result<TrialOutcome, CompareError> {
        if stop.load(Ordering::Relaxed) {
            return Ok(TrialOutcome::Interrupted);
        }
        let output = match testbed {
            None => self.output(stop)?,
            Some(testbed) => match testbed.run(self.name, stop, || self.output(stop))? {
                TestbedOutcome::Done(output) => output,
                TestbedOutcome::ServerEnded(why) => return Ok(TrialOutcome::Dropped(why)),
                TestbedOutcome::Interrupted => return Ok(TrialOutcome::Interrupted),
            },
        };
        if stop.load(Ordering::Relaxed) {
            return Ok(TrialOutcome::Interrupted);
        }
        self.judge(output, metric)
    }

    /// Reads the exit code, then the record.
    fn judge(&self, output: Output, metric: Metric) -> Result<TrialOutcome, CompareError> {
        let name = self.name;
        let line = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        let line = line.strip_prefix("fourtuple: ").unwrap_or(&line).to_owned();
        let environment = |message: String| Err(CompareError::Environment(message));
        match output.status.code() {
            Some(0) => {}
            // Only the preflight of load ends with code 3 and no record; it would refuse the next trial too.
            Some(3) if output.stdout.is_empty() && self.load().is_some() => {
                return Ok(TrialOutcome::Refused(line));
            }
            // The record says below why the trial is not valid.
            Some(3) if !output.stdout.is_empty() => {}
            Some(2) => return Err(CompareError::Usage(line)),
            Some(3) => return Ok(TrialOutcome::Dropped(line)),
            Some(4) => return environment(line),
            Some(code) => return environment(format!("a trial of {name} ended with code {code}: {line}")),
            None => {
                let signal = output.status.signal().unwrap_or(0);
                return environment(format!("a trial of {name} was ended by signal {signal}"));
            }
        }
        let saved = String::from_utf8(output.stdout)
            .map_err(|error| error.to_string())
            .and_then(|text| Saved::parse(&text).map_err(|error| error.to_string()));
        let saved = match saved {
            Ok(saved) => saved,
            Err(why) => return environment(format!("the record of {name}: {why}")),
        };
        let (host, remarks) = (saved.common().host, saved.common().validity);
        let saturated = match metric::check_validity(remarks) {
            Ok(saturated) => saturated,
            Err(why) => return Ok(TrialOutcome::Dropped(why)),
        };
        match metric::numbers(&saved, metric).as_deref() {
            Ok(&[value]) => Ok(TrialOutcome::Measured { value, host: Box::new(host.clone()), saturated }),
            Ok(numbers) => environment(format!("{} numbers in the record of {name}", numbers.len())),
            Err(NoNumber::Usage(why)) => Err(CompareError::Usage(format!("{name}: {why}"))),
            Err(NoNumber::ThisRun(why)) => Ok(TrialOutcome::Dropped(why.clone())),
        }
    }

    /// Runs the command to its end; sends it SIGINT once the stop flag is set.
    fn output(&self, stop: &AtomicBool) -> Result<Output, CompareError> {
        let mut command = Command::new(&self.program);
        // The kernel kills the trial when compare is killed (prctl(PR_SET_PDEATHSIG)).
        child::end_with_this_thread(&mut command);
        let child = command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(CompareError::call(format!("cannot start {}", self.program.display())))?;
        let id = child.id();
        let (sender, receiver) = mpsc::channel();
        let waiter = thread::Builder::new()
            .spawn(move || sender.send(child.wait_with_output()))
            .map_err(CompareError::call("cannot start a thread to wait for a trial"))?;
        let mut interrupted = false;
        let output = loop {
            match receiver.recv_timeout(STOP_POLL) {
                Ok(output) => break output,
                Err(RecvTimeoutError::Disconnected) => {
                    let message = format!("the thread that waits for a trial of {} has ended", self.name);
                    return Err(CompareError::Environment(message));
                }
                Err(RecvTimeoutError::Timeout) if !interrupted && stop.load(Ordering::Relaxed) => {
                    interrupted = true;
                    // ESRCH: the trial has ended by itself. A terminal has sent SIGINT to the trial already, and a
                    // second one ends it at once: the numbers of an interrupted trial are not used.
                    let _ = child::interrupt(id);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        let _ = waiter.join();
        output.map_err(CompareError::call(format!("cannot wait for a trial of {}", self.name)))
    }
}

/// One of the two commands of a comparison.
#[derive(Debug)]
pub struct Side {
    /// `A` or `B`.
    pub name: &'static str,
    /// The command as typed.
    pub text: String,
    /// The program that trials run: the running `fourtuple`.
    pub program: PathBuf,
    /// The arguments of the program, with `--json` and `--quiet`.
    pub arguments: Vec<String>,
    pub command: SideCommand,
}

/// The kind of command that a side runs.
#[derive(Debug)]
pub enum SideCommand {
    /// A lab, which makes its own servers and namespaces.
    Lab {
        /// The lab's records hold distributions of the time in connect(), and CPU time per dial.
        has_connect_times: bool,
    },
    /// A load with its settings.
    Load(Box<Load>),
}

impl Side {
    /// Returns whether the records of this command hold the metric.
    pub(crate) fn has(&self, metric: Metric) -> bool {
        match self.command {
            SideCommand::Lab { has_connect_times } => metric == Metric::Rate || has_connect_times,
            SideCommand::Load(_) => true,
        }
    }

    /// Returns the settings of the load; `None` for a lab.
    pub(crate) fn load(&self) -> Option<&Load> {
        match &self.command {
            SideCommand::Lab { .. } => None,
            SideCommand::Load(load) => Some(load),
        }
    }

    /// Returns the length of a load that ends after a time; `None` if a number of operations may end the load earlier.
    fn fixed_length(&self) -> Option<Duration> {
        self.load()
            .filter(|load| load.operations.is_none())
            .and_then(|load| Some(load.warm_up + load.length?))
    }

    /// Returns the address at which a load expects its server.
    ///
    /// # Errors
    /// [`CompareError::Usage`] for a lab, and for a target that no namespace with loopback alone can reach.
    pub fn server_address(&self) -> Result<ServerAddress, CompareError> {
        let Some(load) = self.load() else {
            let message =
                format!("'--server' is for load, and {}, '{}', makes its own", self.name, self.text);
            return Err(CompareError::Usage(message));
        };
        ServerAddress::of(load).map_err(|why| CompareError::Usage(format!("{}, {why}", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use crate::load::{Load, Workload};

    use super::*;
    use crate::compare::metric::tests::load_text;

    #[test]
    fn pairs_run_in_a_balanced_order() {
        let order: Vec<usize> = (0..4).flat_map(order_of_pair).collect();
        assert_eq!(order, [0, 1, 1, 0, 1, 0, 0, 1]);
    }

    /// Returns a command whose trials are this script of the shell.
    fn side(name: &'static str, script: &str) -> Side {
        Side {
            name,
            text: format!("command {name}"),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            command: SideCommand::Lab { has_connect_times: true },
        }
    }

    fn trials(a: &str, b: &str) -> Trials {
        Trials {
            sides: [side("A", a), side("B", b)],
            servers: None,
            metric: Metric::Rate,
            time: Duration::from_secs(3600),
            narrow: 0.01,
            pairs: Some(3),
            warmup: 1,
        }
    }

    /// Returns a script that prints the record of a load whose client was busy all the time.
    fn prints(rate: f64) -> String {
        format!("echo '{}'", load_text(rate, "client-saturated"))
    }

    /// Returns the results and the remarks of trials, with the number of calls for progress.
    fn run(trials: &Trials) -> (Outcome, usize) {
        let calls = std::cell::Cell::new(0);
        let outcome = trials.run(&AtomicBool::new(false), &|_| calls.set(calls.get() + 1)).unwrap();
        (outcome, calls.get())
    }

    #[test]
    fn pairs_end_at_their_number_without_the_warmup() {
        let (outcome, calls) = run(&trials(&prints(100.0), &prints(150.0)));
        let results = outcome.results;
        assert_eq!((results.samples_a, results.samples_b), (vec![100.0; 3], vec![150.0; 3]));
        assert_eq!((results.pairs, results.trials, results.client_saturated, calls), (3, 6, 6, 6));
        assert_eq!(results.verdict, "too noisy to say: 3 pairs, 8 are needed");
        assert!((results.ratio - 1.5).abs() < 1e-9, "{}", results.ratio);
        assert_eq!((outcome.host.cpus, outcome.remarks.len()), (2, 0));
        let one = Trials { pairs: Some(1), warmup: 0, ..trials(&prints(100.0), &prints(150.0)) };
        assert_eq!(run(&one).0.results.verdict, "too noisy to say: 1 pair, 8 are needed");
    }

    #[test]
    fn equal_trials_decide_at_the_first_look() {
        let (outcome, _) = run(&Trials { pairs: None, ..trials(&prints(100.0), &prints(150.0)) });
        let results = outcome.results;
        assert_eq!(results.pairs, FIRST_LOOK as u64);
        assert!(results.verdict.contains("faster") && results.low.is_some(), "{results:?}");
        // A time is better if it is shorter.
        let times = Trials { metric: Metric::P50, pairs: None, ..trials(&prints(100.0), &prints(150.0)) };
        assert_eq!(run(&times).0.results.samples_a, vec![402.0; FIRST_LOOK]);
    }

    #[test]
    fn trials_that_are_not_valid_are_dropped_and_then_end_it() {
        let counter = std::env::temp_dir().join(format!("fourtuple-trials-{}", std::process::id()));
        let path = counter.display();
        let ids = |outcome: &Outcome| -> Vec<String> {
            outcome.remarks.iter().map(|remark| format!("{}: {}", remark.id, remark.message)).collect()
        };
        // The second and third of five trials of A, which include the warm-up, fail.
        let fails = format!(
            "echo >> {path}; case $(wc -l < {path}) in [23]) echo no >&2; exit 3;; esac; {}",
            prints(100.0)
        );
        let (outcome, _) = run(&trials(&fails, &prints(150.0)));
        std::fs::remove_file(&counter).unwrap();
        assert_eq!(outcome.results.pairs, 3);
        let said = [
            "trial-not-valid: a trial of A was not valid: no",
            "dropped: trials of A that were not valid and were dropped: 2",
        ];
        assert_eq!(ids(&outcome), said);
        // One pair, and then three in a row.
        let fails = format!("echo >> {path}; test $(wc -l < {path}) -gt 2 && exit 3; {}", prints(150.0));
        let (outcome, calls) = run(&trials(&prints(100.0), &fails));
        std::fs::remove_file(&counter).unwrap();
        assert_eq!((outcome.results.pairs, outcome.results.trials, calls), (1, 2, 2));
        let gave_up = "gave-up: 3 trials of B in a row were not valid: no more were made";
        let dropped = "dropped: trials of B that were not valid and were dropped: 3";
        assert_eq!(ids(&outcome)[1..], [gave_up, dropped]);
        // The client was saturated in trials of a pair that was not completed too.
        assert_eq!(outcome.results.client_saturated, 2);
    }

    #[test]
    fn a_stop_keeps_the_complete_pairs() {
        let trials = trials(&prints(100.0), &prints(150.0));
        let (stop, calls) = (AtomicBool::new(false), std::cell::Cell::new(0));
        let progress = |_| {
            calls.set(calls.get() + 1);
            stop.store(calls.get() == 3, Ordering::Relaxed);
        };
        let outcome = trials.run(&stop, &progress).unwrap();
        assert_eq!((outcome.results.pairs, outcome.remarks.len()), (1, 1));
        assert_eq!(outcome.remarks[0].id, "interrupted");
    }

    #[test]
    fn without_a_pair_the_error_has_the_reason() {
        let error = |trials: &Trials, stop: bool| trials.run(&AtomicBool::new(stop), &|_| ()).unwrap_err();
        assert!(matches!(error(&trials("exit 3", ""), true), CompareError::Interrupted));
        let why = error(&trials("exit 3", ""), false);
        assert!(matches!(&why, CompareError::NotValid(why) if why.starts_with("a trial of A was")), "{why}");
        let over = Trials { time: Duration::ZERO, ..trials("exit 1", "exit 1") };
        let why = error(&over, false);
        assert!(matches!(&why, CompareError::Usage(why) if why.contains("'0s' for '--for'")), "{why}");
    }

    #[test]
    fn loads_that_take_too_long_are_refused() {
        let load = |name: &'static str, length: Option<u64>| {
            let mut load = Load::new("tcp://127.0.0.1:1".parse().unwrap(), Workload::Connect);
            load.length = length.map(Duration::from_secs);
            Side { command: SideCommand::Load(Box::new(load)), ..side(name, "") }
        };
        // Nine pairs of 10 s.
        let loads = |time, pairs| Trials {
            sides: [load("A", Some(4)), load("B", Some(6))],
            time: Duration::from_secs(time),
            pairs,
            ..trials("", "")
        };
        let too_long = "'89s' for '--for': a pair of these loads takes 10s, and 8 after warming up 90s";
        let endless = Trials { sides: [load("A", None), load("B", None)], ..loads(1, None) };
        let mixed = Trials { sides: [load("A", Some(4)), side("B", "")], ..trials("", "") };
        let times = || Trials { metric: Metric::P99, ..trials("", "") };
        let mut rates = times();
        rates.sides[1].command = SideCommand::Lab { has_connect_times: false };
        for (name, trials, expected) in [
            ("as long as eight pairs", loads(90, None), None),
            ("a second less", loads(89, None), Some(too_long)),
            ("one pair", loads(1, Some(1)), None),
            ("loads without a length of their own", endless, None),
            ("unlike commands", mixed, Some("a load and a lab")),
            ("labs with times", times(), None),
            ("a lab without times", rates, Some("command B has rate")),
        ] {
            let why = trials.check().err().map(|why| why.to_string());
            assert_eq!(why.is_some(), expected.is_some(), "{name}: {why:?}");
            assert!(why.is_none_or(|why| why.contains(expected.unwrap())), "{name}: not {expected:?}");
        }
        // Where a trial runs.
        let fresh = |trials: &Trials| trials.settings(1).fresh_namespace;
        assert_eq!((fresh(&trials("", "")), fresh(&loads(1, None))), (Some(true), Some(false)));
    }
}
