use std::fs;
use std::path::Path;

use anyhow::Context;
use fourtuple_measure::{Conclusion, compare_saved};
use fourtuple_record::{CompareResults, CompareSettings, Host, Remark, Saved};
use time::OffsetDateTime;

use super::Compare;
use super::metric::{self, Metric, NoNumber};
use crate::exit::{Exit, NotValid, UsageError};
use crate::output;

/// Compares what was saved: files of A and B in turn.
pub(super) fn run(flags: &Compare) -> anyhow::Result<Exit> {
    let started = OffsetDateTime::now_utc();
    let mut pool = Pool::default();
    for (number, path) in flags.files.iter().enumerate() {
        pool.read(path, number % 2, flags.metric)?;
    }
    let names = |side: usize| {
        let names = flags.files.iter().skip(side).step_by(2).map(|path| path.display().to_string());
        names.collect::<Vec<_>>().join(" ")
    };
    let merits = |side: usize| -> Vec<f64> {
        pool.samples[side].iter().map(|value| flags.metric.merit(*value)).collect()
    };
    let mut random = fastrand::Rng::with_seed(flags.output.seed);
    let Some(conclusion) = compare_saved(&merits(0), &merits(1), flags.narrow, &mut random) else {
        let side = if pool.samples[0].is_empty() { "A" } else { "B" };
        return Err(
            NotValid(format!("no record of {side} is valid: {}", names(usize::from(side == "B")))).into()
        );
    };
    let [a, b] = &pool.samples;
    let verdict = verdict(&conclusion, a.len(), b.len(), flags.narrow);
    let settings = CompareSettings {
        a: names(0),
        b: names(1),
        metric: flags.metric.name().to_owned(),
        for_ns: None,
        narrow: flags.narrow,
        trials: None,
        warmup: 0,
        server_a: None,
        server_b: None,
        server_wait_ns: None,
        pinned: false,
        fresh_namespace: None,
        seed: flags.output.seed,
    };
    let [samples_a, samples_b] = pool.samples;
    let results = CompareResults {
        ratio: conclusion.ratio,
        low: conclusion.interval.map(|(low, _)| low),
        high: conclusion.interval.map(|(_, high)| high),
        verdict,
        trials: (samples_a.len() + samples_b.len()) as u64,
        pairs: 0,
        client_saturated: pool.saturated,
        samples_a,
        samples_b,
    };
    let host = pool.host.unwrap_or_default();
    let record = output::record("compare", started, host, settings, pool.remarks, results);
    flags.output.finish(&Saved::Compare(record))
}

fn verdict(conclusion: &Conclusion, a: usize, b: usize, narrow: f64) -> String {
    match (conclusion.interval, a, b) {
        (Some(_), ..) => conclusion.words(narrow),
        (None, 1, 1) => "too noisy to say: one trial each".to_owned(),
        (None, ..) => format!("too noisy to say: {a} of A and {b} of B, 6 of each are needed"),
    }
}

/// What the files gave.
#[derive(Default)]
struct Pool {
    samples: [Vec<f64>; 2],
    host: Option<Host>,
    saturated: u64,
    remarks: Vec<Remark>,
}

impl Pool {
    fn read(&mut self, path: &Path, side: usize, metric: Metric) -> anyhow::Result<()> {
        let place = path.display();
        let text = fs::read_to_string(path).with_context(|| {
            let hint = if place.to_string().contains(' ') { " (commands stand after --)" } else { "" };
            format!("cannot read {place}{hint}")
        })?;
        // One record on many lines, or many records on one line each.
        let records = match Saved::parse(&text) {
            Ok(record) => vec![record],
            Err(whole) => {
                let mut lines = text.lines().filter(|line| !line.trim().is_empty()).peekable();
                if lines.clone().count() < 2 {
                    return Err(whole).with_context(|| place.to_string());
                }
                lines
                    .by_ref()
                    .enumerate()
                    .map(|(at, line)| {
                        Saved::parse(line).with_context(|| format!("{place}, record {}", at + 1))
                    })
                    .collect::<anyhow::Result<_>>()?
            }
        };
        for saved in records {
            match metric::numbers(&saved, metric) {
                Err(NoNumber::Usage(why)) => return Err(UsageError(format!("{place}: {why}")).into()),
                Err(NoNumber::ThisRun(why)) => self.drop(&place.to_string(), &why),
                Ok(numbers) => {
                    let (host, remarks) = metric::envelope(&saved);
                    match metric::is_saturated(remarks) {
                        Err(why) => self.drop(&place.to_string(), &why),
                        Ok(saturated) => {
                            self.saturated += u64::from(saturated);
                            self.samples[side].extend(numbers);
                            self.host.get_or_insert_with(|| host.clone());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn drop(&mut self, place: &str, why: &str) {
        self.remarks.push(Remark::new("dropped", format!("a record of {place} is not used: {why}")));
    }
}
