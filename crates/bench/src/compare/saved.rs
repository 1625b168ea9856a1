use std::collections::BTreeSet;

use fourtuple_record::measure::words::counted;
use fourtuple_record::measure::{Conclusion, compare_saved};
use fourtuple_record::{CompareResults, CompareSettings, Host, LoadSettings, PortsSettings, Remark, Saved};

use crate::compare::CompareError;
use crate::compare::metric::{self, Metric, NoNumber};
use crate::compare::trials::Outcome;

/// The numbers of saved records, from files of A and files of B.
#[derive(Debug)]
pub struct SavedTrials {
    metric: Metric,
    files: [Vec<String>; 2],
    samples: [Vec<f64>; 2],
    host: Option<Host>,
    saturated: u64,
    remarks: Vec<Remark>,
    likeness: Likeness,
    /// The command of the first record, and the file of that record.
    first: Option<(String, String)>,
}

impl SavedTrials {
    /// Makes a comparison without records.
    pub fn new(metric: Metric) -> SavedTrials {
        SavedTrials {
            metric,
            files: Default::default(),
            samples: Default::default(),
            host: None,
            saturated: 0,
            remarks: Vec::new(),
            likeness: Likeness::default(),
            first: None,
        }
    }

    /// Adds the records of one file to side 0 (A) or 1 (B). Records that are not valid become remarks.
    ///
    /// # Errors
    /// [`CompareError::Usage`] if a record is of another command than the first one, or cannot have the metric.
    pub fn add(&mut self, side: usize, file: &str, records: Vec<Saved>) -> Result<(), CompareError> {
        self.files[side].push(file.to_owned());
        for saved in records {
            let numbers = metric::numbers(&saved, self.metric);
            if let Err(NoNumber::Usage(why)) = &numbers {
                return Err(CompareError::Usage(format!("{file}: {why}")));
            }
            self.refuse_other_command(&saved, file)?;
            let numbers = match numbers {
                Ok(numbers) => numbers,
                Err(NoNumber::Usage(why) | NoNumber::ThisRun(why)) => {
                    self.drop_record(file, &why);
                    continue;
                }
            };
            match metric::check_validity(saved.common().validity) {
                Err(why) => self.drop_record(file, &why),
                Ok(saturated) => {
                    self.saturated += u64::from(saturated);
                    self.samples[side].extend(numbers);
                    self.likeness.add(&saved);
                    self.host.get_or_insert_with(|| saved.common().host.clone());
                }
            }
        }
        Ok(())
    }

    /// Refuses numbers of different commands: they measure different things.
    fn refuse_other_command(&mut self, saved: &Saved, file: &str) -> Result<(), CompareError> {
        let command = saved.common().command;
        let (first, first_file) = self.first.get_or_insert_with(|| (command.to_owned(), file.to_owned()));
        if *first == command {
            return Ok(());
        }
        Err(CompareError::Usage(format!(
            "{file}: a record of {command}, and {first_file} has one of {first}: their numbers measure different things; \
             expected records of one command"
        )))
    }

    fn drop_record(&mut self, file: &str, why: &str) {
        self.remarks.push(Remark::new("dropped", format!("a record of {file} is not used: {why}")));
    }

    /// Returns the settings as the record shows them.
    pub fn settings(&self, narrow: f64, seed: u64) -> CompareSettings {
        let [a, b] = self.files.each_ref().map(|files| files.join(" "));
        CompareSettings {
            a,
            b,
            metric: self.metric.name().to_owned(),
            for_ns: None,
            narrow,
            trials: None,
            warmup: 0,
            server_a: None,
            server_b: None,
            server_wait_ns: None,
            pinned: false,
            fresh_namespace: None,
            seed,
        }
    }

    /// Compares the medians of the two sides, with a bootstrap interval whose random numbers follow from `seed`. `narrow` is
    /// the largest difference that counts as none, as a share.
    ///
    /// # Errors
    /// [`CompareError::NotValid`] if a side has no valid record.
    pub fn compare(self, narrow: f64, seed: u64) -> Result<Outcome, CompareError> {
        let merits = |side: usize| -> Vec<f64> {
            self.samples[side].iter().map(|value| self.metric.merit(*value)).collect()
        };
        let mut random = fastrand::Rng::with_seed(seed);
        let Some(conclusion) = compare_saved(&merits(0), &merits(1), narrow, &mut random) else {
            let (name, side) = if self.samples[0].is_empty() { ("A", 0) } else { ("B", 1) };
            let files = self.files[side].join(" ");
            return Err(CompareError::NotValid(format!("no record of {name} is valid: {files}")));
        };
        let [samples_a, samples_b] = self.samples;
        let results = CompareResults {
            ratio: conclusion.ratio,
            low: conclusion.interval.map(|(low, _)| low),
            high: conclusion.interval.map(|(_, high)| high),
            verdict: verdict(&conclusion, samples_a.len(), samples_b.len(), narrow),
            trials: (samples_a.len() + samples_b.len()) as u64,
            pairs: 0,
            client_saturated: self.saturated,
            samples_a,
            samples_b,
        };
        let mut remarks = self.remarks;
        remarks.extend(self.likeness.remarks());
        Ok(Outcome { host: self.host.unwrap_or_default(), remarks, results })
    }
}

fn verdict(conclusion: &Conclusion, a: usize, b: usize, narrow: f64) -> String {
    match (conclusion.interval, a, b) {
        (Some(_), ..) => conclusion.words(narrow),
        (None, 1, 1) => "too noisy to say: one trial each".to_owned(),
        (None, ..) => format!("too noisy to say: {a} of A and {b} of B, 6 of each are needed"),
    }
}

/// The values of the properties that all compared records should share. A difference between hosts or workloads changes
/// the ratio of B to A.
#[derive(Debug, Default)]
pub(crate) struct Likeness {
    kernels: BTreeSet<String>,
    hosts: BTreeSet<String>,
    targets: BTreeSet<String>,
    workloads: BTreeSet<String>,
}

impl Likeness {
    /// Adds the properties of one record.
    fn add(&mut self, saved: &Saved) {
        let host = saved.common().host;
        self.kernels.insert(host.kernel.clone());
        self.hosts.insert(format!(
            "{}, virtualization {}",
            counted(host.cpus.into(), "CPU"),
            host.virtualization
        ));
        match saved {
            Saved::Load(record) => {
                self.targets.insert(record.settings.target.clone());
                self.workloads.insert(load(&record.settings));
            }
            Saved::Ports(record) => drop(self.workloads.insert(ports(&record.settings))),
            Saved::TimeWait(record) => {
                let settings = &record.settings;
                self.workloads.insert(format!("range {}-{}", settings.low, settings.high));
            }
            _ => {}
        }
    }

    /// Returns one remark for each property that has several values.
    pub(crate) fn remarks(&self) -> Vec<Remark> {
        let properties = [
            ("unlike-kernels", "kernels", &self.kernels),
            ("unlike-hosts", "hosts", &self.hosts),
            ("unlike-targets", "targets", &self.targets),
            ("unlike-workloads", "workloads", &self.workloads),
        ];
        let unlike = properties.into_iter().filter(|(_, _, values)| values.len() > 1);
        let remark = |(id, what, values): (&str, &str, &BTreeSet<String>)| {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            let message =
                format!("the records are of different {what}, which is in the ratio: {}", values.join("; "));
            Remark::new(id, message)
        };
        unlike.map(remark).collect()
    }
}

/// Describes the workload of a load, without engine, threads, strategy and sources: A and B may differ in these.
fn load(settings: &LoadSettings) -> String {
    let arrival = match settings.rate_per_s {
        Some(rate) => format!("{} {rate}/s", settings.arrival),
        None => settings.arrival.clone(),
    };
    let method = if settings.method.is_empty() { String::new() } else { format!(" {}", settings.method) };
    format!(
        "{}{method}, {arrival}, {}, {} held, closed by {} after {}, {} for {}, pause {} ns",
        settings.workload,
        counted(settings.connections, "connection"),
        settings.hold,
        settings.close,
        counted(settings.close_every, "request"),
        counted(settings.request_bytes, "byte"),
        settings.response_bytes,
        settings.pause_ns,
    )
}

/// Describes the workload of `lab ports`, without the strategy.
fn ports(settings: &PortsSettings) -> String {
    format!(
        "{} over IPv{}, range {}-{}, {}, filled to {}",
        settings.protocol,
        settings.family,
        settings.low,
        settings.high,
        counted(settings.sources.into(), "source"),
        settings.fill
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_name_properties_with_several_values() {
        let values = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let likeness = Likeness {
            kernels: values(&["6.1.0", "6.18.5"]),
            hosts: values(&["2 CPUs, virtualization kvm"]),
            targets: values(&["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]),
            workloads: values(&[]),
        };
        let remarks = likeness.remarks();
        let ids: Vec<&str> = remarks.iter().map(|remark| remark.id.as_str()).collect();
        assert_eq!(ids, ["unlike-kernels", "unlike-targets"]);
        assert!(remarks[0].message.ends_with("kernels, which is in the ratio: 6.1.0; 6.18.5"), "{remarks:?}");
    }
}
