use fourtuple_record::{Distribution, Remark, Saved, StrategyResult};

/// The number of a trial that a comparison uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Connections, transactions or operations per second.
    Rate,
    /// Mean time in connect(); of `load`, mean time of an operation.
    Mean,
    /// Median of the same time.
    P50,
    /// 99th percentile of the same time.
    P99,
    /// 99.9th percentile of the same time.
    P999,
    /// CPU time per dial; of `load`, per operation.
    Cpu,
}

impl Metric {
    pub const ALL: [Metric; 6] =
        [Metric::Rate, Metric::Mean, Metric::P50, Metric::P99, Metric::P999, Metric::Cpu];

    /// Returns the name that flags and records use: `p99`.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Rate => "rate",
            Metric::Mean => "mean",
            Metric::P50 => "p50",
            Metric::P99 => "p99",
            Metric::P999 => "p999",
            Metric::Cpu => "cpu",
        }
    }

    pub fn named(name: &str) -> Option<Metric> {
        Metric::ALL.into_iter().find(|metric| metric.name() == name)
    }

    /// Returns a description for help texts.
    pub fn description(self) -> &'static str {
        match self {
            Metric::Rate => "Connections, transactions or operations per second",
            Metric::Mean => "Mean time in connect(); of load, mean time of an operation",
            Metric::P50 => "Median of the same time",
            Metric::P99 => "99th percentile of the same time",
            Metric::P999 => "99.9th percentile of the same time",
            Metric::Cpu => "CPU time per dial; of load, per operation",
        }
    }

    /// Converts a value so that a larger number is better: the reciprocal of times.
    pub(crate) fn merit(self, value: f64) -> f64 {
        if self == Metric::Rate { value } else { 1.0 / value }
    }
}

/// The reason why a record gives no number.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoNumber {
    /// No record of this command with these flags has the number.
    Usage(String),
    /// This run has no number; another run of the same command may have one.
    ThisRun(String),
}

/// Returns the metric of every run in a record, in the record's order: one number, or one per repeat.
///
/// # Errors
/// [`NoNumber::Usage`] if the record holds several strategies or remedies, or if its command lacks the metric;
/// [`NoNumber::ThisRun`] if a number is missing or not above zero.
pub(crate) fn numbers(saved: &Saved, metric: Metric) -> Result<Vec<f64>, NoNumber> {
    let numbers: Vec<Option<f64>> = match saved {
        Saved::Ports(record) => {
            let runs = &record.results.strategies;
            let first = runs.first().map(|run| &run.strategy);
            if runs.iter().any(|run| Some(&run.strategy) != first) {
                return Err(NoNumber::Usage(needs_one_name("lab ports", "--strategy")));
            }
            let connect_time = |run: &StrategyResult, field: fn(Distribution) -> u64| {
                run.connect_ns.all.map(|all| field(all) as f64)
            };
            let number = |run: &StrategyResult| match metric {
                Metric::Rate => Some(run.rate_per_s),
                Metric::Mean => connect_time(run, |all| all.mean),
                Metric::P50 => connect_time(run, |all| all.p50),
                Metric::P99 => connect_time(run, |all| all.p99),
                Metric::P999 => connect_time(run, |all| all.p999),
                Metric::Cpu => Some(run.cpu_ns_per_dial as f64),
            };
            runs.iter().map(number).collect()
        }
        Saved::TimeWait(record) => {
            let [run] = record.results.runs.as_slice() else {
                return Err(NoNumber::Usage(needs_one_name("lab time-wait", "--remedy")));
            };
            if metric != Metric::Rate {
                return Err(NoNumber::Usage(only_rate("lab time-wait", metric)));
            }
            // The time includes the stall, in which the remedies differ.
            vec![Some(run.completed as f64 / run.elapsed_ns as f64 * 1e9)]
        }
        Saved::Load(record) => {
            let results = &record.results;
            let total = &results.latency_ns.total;
            vec![Some(match metric {
                Metric::Rate => results.rate_per_s,
                Metric::Mean => total.mean as f64,
                Metric::P50 => total.p50 as f64,
                Metric::P99 => total.p99 as f64,
                Metric::P999 => total.p999 as f64,
                Metric::Cpu => results.client_cpu_ns_per_operation as f64,
            })]
        }
        _ => {
            let message = "records of load, lab ports or lab time-wait are compared, no others";
            return Err(NoNumber::Usage(message.to_owned()));
        }
    };
    let usable = |number: &Option<f64>| number.is_some_and(|number| number > 0.0 && number.is_finite());
    if numbers.is_empty() || !numbers.iter().all(usable) {
        return Err(NoNumber::ThisRun(format!("it has no {} above zero", metric.name())));
    }
    Ok(numbers.into_iter().flatten().collect())
}

/// Returns the error for a command whose flag must have exactly one name.
pub fn needs_one_name(command: &str, flag: &str) -> String {
    format!("{command} is compared with '{flag}' of one name, so that one number comes out of a trial")
}

/// Returns the error for a command whose records have no metric but the rate.
pub fn only_rate(command: &str, metric: Metric) -> String {
    format!("invalid value '{}' for '--metric': {command} has rate, no other", metric.name())
}

/// The id of the remark that the client of a load was busy all the time.
const SATURATED: &str = "client-saturated";

/// Checks the remarks of a run. A saturated client does not make the run invalid: comparisons of clients saturate them.
/// Returns whether the client was saturated.
///
/// # Errors
/// The messages of all other remarks: the run is not valid.
pub(crate) fn check_validity(remarks: &[Remark]) -> Result<bool, String> {
    let reasons = remarks.iter().filter(|remark| remark.id != SATURATED);
    let messages: Vec<&str> = reasons.map(|remark| remark.message.as_str()).collect();
    if messages.is_empty() { Ok(!remarks.is_empty()) } else { Err(messages.join("; ")) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a saved run of load in which every latency is a different number.
    fn load(rate_per_s: f64) -> Saved {
        Saved::parse(&load_text(rate_per_s, "interrupted")).unwrap()
    }

    /// Returns the text of a saved run of load with one remark.
    pub(crate) fn load_text(rate_per_s: f64, remark: &str) -> String {
        let part = |ns: u64| {
            format!(r#"{{"samples":9,"mean":{ns}1,"p50":{ns}2,"p99":{ns}3,"p999":{ns}4,"max":{ns}5}}"#)
        };
        let (search, handshake, first_byte, total) = (part(10), part(20), part(30), part(40));
        format!(
            r#"{{"schema":"fourtuple/1","command":"load","started":"2026-03-01T12:00:00Z",
            "host":{{"kernel":"6.18.5","cpus":2,"virtualization":"kvm","sysctls":{{}},"capabilities":{{}}}},
            "settings":{{"target":"tcp://127.0.0.1:1","address":"127.0.0.1:1","workload":"crr","arrival":"closed",
            "rate_per_s":null,"connections":1,"pause_ns":0,"close_every":1,"hold":0,"operations":9,"for_ns":null,
            "timeout_ns":1,"threshold_ns":null,"engine":"auto","threads":1,"pinned":false,"strategy":"auto",
            "sources":null,"close":"client","request_bytes":1,"response_bytes":1,"method":"","separate_ack":false,"anyway":false,"seed":1}},
            "validity":[{{"id":"{remark}","message":"{remark}"}}],
            "results":{{"operations":9,"connections":9,"errors":{{}},"elapsed_ns":1,"rate_per_s":{rate_per_s:?},
            "offered_per_s":9.0,"client_cpu_ns_per_operation":77,"syscalls_per_connection":1.0,"engine":"epoll",
            "engine_reason":null,"close":"client","strategy":null,"latency_ns":{{"search":{search},
            "handshake":{handshake},"first_byte":{first_byte},"total":{total}}},"late_ns":{total},"slow":[],
            "slow_count":0,"seconds":[],"distribution":[],"ports":null,"hold":null,"advice":[]}}}}"#
        )
    }

    #[test]
    fn load_metrics_come_from_whole_operations() {
        let saved = load(49_000.5);
        for (metric, number) in [
            (Metric::Rate, 49_000.5),
            (Metric::Mean, 401.0),
            (Metric::P50, 402.0),
            (Metric::P99, 403.0),
            (Metric::P999, 404.0),
            (Metric::Cpu, 77.0),
        ] {
            assert_eq!(numbers(&saved, metric), Ok(vec![number]), "{metric:?}");
        }
        let (host, remarks) = (saved.common().host, saved.common().validity);
        assert_eq!((host.cpus, remarks[0].id.as_str()), (2, "interrupted"));
    }

    #[test]
    fn a_saturated_client_leaves_a_run_valid() {
        let remark = |id: &str| Remark::new(id, id);
        assert_eq!(check_validity(&[]), Ok(false));
        assert_eq!(check_validity(&[remark("client-saturated")]), Ok(true));
        let also = [remark("client-saturated"), remark("anyway"), remark("interrupted")];
        assert_eq!(check_validity(&also), Err("anyway; interrupted".to_owned()));
    }

    #[test]
    fn a_rate_of_zero_is_not_usable() {
        assert!(matches!(numbers(&load(0.0), Metric::Rate), Err(NoNumber::ThisRun(_))));
    }
}
