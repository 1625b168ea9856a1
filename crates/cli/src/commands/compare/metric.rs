use clap::ValueEnum;
use fourtuple_record::{Host, Remark, Saved, Spread, StrategyResult};

/// The one number of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Metric {
    /// Connections, or transactions, per second
    Rate,
    /// Mean time in connect()
    Mean,
    /// Median time in connect()
    P50,
    /// 99th percentile of the time in connect()
    P99,
    /// CPU time per dial
    Cpu,
}

impl Metric {
    /// As it is typed and as records have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Metric::Rate => "rate",
            Metric::Mean => "mean",
            Metric::P50 => "p50",
            Metric::P99 => "p99",
            Metric::Cpu => "cpu",
        }
    }

    /// The value turned so that more is better.
    pub(super) fn merit(self, value: f64) -> f64 {
        if self == Metric::Rate { value } else { 1.0 / value }
    }
}

/// Why a record gives no number.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoNumber {
    /// It never will: other flags are needed.
    Usage(String),
    /// This run has none.
    ThisRun(String),
}

/// The metric of every run in a record, in their order: one, or one per repeat. All of one strategy or one remedy.
pub(super) fn numbers(saved: &Saved, metric: Metric) -> Result<Vec<f64>, NoNumber> {
    let numbers: Vec<Option<f64>> = match saved {
        Saved::Ports(record) => {
            let runs = &record.results.strategies;
            let first = runs.first().map(|run| &run.strategy);
            if runs.iter().any(|run| Some(&run.strategy) != first) {
                return Err(NoNumber::Usage(several("lab ports", "--strategy")));
            }
            let spread = |run: &StrategyResult, field: fn(Spread) -> u64| {
                run.connect_ns.all.map(|all| field(all) as f64)
            };
            let number = |run: &StrategyResult| match metric {
                Metric::Rate => Some(run.rate_per_s),
                Metric::Mean => spread(run, |all| all.mean),
                Metric::P50 => spread(run, |all| all.p50),
                Metric::P99 => spread(run, |all| all.p99),
                Metric::Cpu => Some(run.cpu_ns_per_dial as f64),
            };
            runs.iter().map(number).collect()
        }
        Saved::TimeWait(record) => {
            let [run] = record.results.runs.as_slice() else {
                return Err(NoNumber::Usage(several("lab time-wait", "--remedy")));
            };
            if metric != Metric::Rate {
                return Err(NoNumber::Usage(only_rate("lab time-wait", metric)));
            }
            // The stall included: it is what the remedies differ in.
            vec![Some(run.completed as f64 / run.elapsed_ns as f64 * 1e9)]
        }
        Saved::Lab(_) | Saved::Plan(_) | Saved::Compare(_) | Saved::Serve(_) => {
            let message = "records of lab ports or lab time-wait are compared, no others";
            return Err(NoNumber::Usage(message.to_owned()));
        }
    };
    let usable = |number: &Option<f64>| number.is_some_and(|number| number > 0.0 && number.is_finite());
    if numbers.is_empty() || !numbers.iter().all(usable) {
        return Err(NoNumber::ThisRun(format!("it has no {} above zero", metric.name())));
    }
    Ok(numbers.into_iter().flatten().collect())
}

/// Which flag makes one of several.
pub(crate) fn several(command: &str, flag: &str) -> String {
    format!("{command} is compared with '{flag}' of one name, so that one number comes out of a trial")
}

/// What a command without connect() times has.
pub(super) fn only_rate(command: &str, metric: Metric) -> String {
    format!("invalid value '{}' for '--metric': {command} has rate, no other", metric.name())
}

/// Host and remarks of a record that can be compared.
pub(super) fn envelope(saved: Saved) -> (Host, Vec<Remark>) {
    match saved {
        Saved::Lab(record) => (record.host, record.validity),
        Saved::Ports(record) => (record.host, record.validity),
        Saved::TimeWait(record) => (record.host, record.validity),
        Saved::Plan(record) => (record.host, record.validity),
        Saved::Compare(record) => (record.host, record.validity),
        Saved::Serve(record) => (record.host, record.validity),
    }
}
