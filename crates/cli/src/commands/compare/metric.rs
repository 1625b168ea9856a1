use clap::ValueEnum;
use fourtuple_record::{Host, Remark, Saved, Spread, StrategyResult};

/// The one number of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Metric {
    /// Connections, transactions or operations per second
    Rate,
    /// Mean time in connect(), of load of a whole operation
    Mean,
    /// Median of the same time
    P50,
    /// 99th percentile of the same time
    P99,
    /// 99.9th percentile of the same time
    P999,
    /// CPU time per dial, of load per operation
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
            Metric::P999 => "p999",
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
                Metric::P999 => spread(run, |all| all.p999),
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
        Saved::Lab(_)
        | Saved::LabAccept(_)
        | Saved::LabKeepalive(_)
        | Saved::LabLocks(_)
        | Saved::LabPlanes(_)
        | Saved::Plan(_)
        | Saved::Compare(_)
        | Saved::Serve(_)
        | Saved::Forward(_)
        | Saved::TraceConnect(_)
        | Saved::TraceAccept(_)
        | Saved::TraceLocks(_) => {
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

/// Which flag makes one of several.
pub(crate) fn several(command: &str, flag: &str) -> String {
    format!("{command} is compared with '{flag}' of one name, so that one number comes out of a trial")
}

/// What a command without connect() times has.
pub(super) fn only_rate(command: &str, metric: Metric) -> String {
    format!("invalid value '{}' for '--metric': {command} has rate, no other", metric.name())
}

/// Host and remarks of a record that can be compared.
pub(super) fn envelope(saved: &Saved) -> (&Host, &[Remark]) {
    match saved {
        Saved::Lab(record) => (&record.host, &record.validity),
        Saved::Ports(record) => (&record.host, &record.validity),
        Saved::TimeWait(record) => (&record.host, &record.validity),
        Saved::LabAccept(record) | Saved::LabKeepalive(record) => (&record.host, &record.validity),
        Saved::LabLocks(record) => (&record.host, &record.validity),
        Saved::LabPlanes(record) => (&record.host, &record.validity),
        Saved::Plan(record) => (&record.host, &record.validity),
        Saved::Compare(record) => (&record.host, &record.validity),
        Saved::Serve(record) => (&record.host, &record.validity),
        Saved::Forward(record) => (&record.host, &record.validity),
        Saved::TraceConnect(record) => (&record.host, &record.validity),
        Saved::TraceAccept(record) => (&record.host, &record.validity),
        Saved::TraceLocks(record) => (&record.host, &record.validity),
        Saved::Load(record) => (&record.host, &record.validity),
    }
}

/// The remark of a load whose client was busy all the time.
const SATURATED: &str = "client-saturated";

/// Whether a run may be used: whoever compares clients makes them as busy as they get, so that this is no objection.
/// Says whether it was so.
///
/// # Errors
/// What else the record has against itself.
pub(super) fn is_saturated(remarks: &[Remark]) -> Result<bool, String> {
    let others = remarks.iter().filter(|remark| remark.id != SATURATED);
    let messages: Vec<&str> = others.map(|remark| remark.message.as_str()).collect();
    if messages.is_empty() { Ok(!remarks.is_empty()) } else { Err(messages.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A saved run of load; `total` and the rest are told apart by their numbers.
    fn load(rate_per_s: f64) -> Saved {
        let part = |ns: u64| {
            format!(r#"{{"samples":9,"mean":{ns}1,"p50":{ns}2,"p99":{ns}3,"p999":{ns}4,"max":{ns}5}}"#)
        };
        let (search, handshake, first_byte, total) = (part(10), part(20), part(30), part(40));
        let text = format!(
            r#"{{"schema":"fourtuple/1","command":"load","started":"2026-03-01T12:00:00Z",
            "host":{{"kernel":"6.18.5","cpus":2,"virtualization":"kvm","sysctls":{{}},"capabilities":{{}}}},
            "settings":{{"target":"tcp://127.0.0.1:1","address":"127.0.0.1:1","workload":"crr","arrival":"closed",
            "rate_per_s":null,"connections":1,"pause_ns":0,"close_every":1,"hold":0,"operations":9,"for_ns":null,
            "timeout_ns":1,"threshold_ns":null,"engine":"auto","threads":1,"pinned":false,"strategy":"auto",
            "sources":null,"close":"client","request_bytes":1,"response_bytes":1,"method":"","separate_ack":false,"anyway":false,"seed":1}},
            "validity":[{{"id":"interrupted","message":"stopped"}}],
            "results":{{"operations":9,"connections":9,"errors":{{}},"elapsed_ns":1,"rate_per_s":{rate_per_s:?},
            "offered_per_s":9.0,"client_cpu_ns_per_operation":77,"syscalls_per_connection":1.0,"engine":"epoll",
            "engine_reason":null,"close":"client","strategy":null,"latency_ns":{{"search":{search},
            "handshake":{handshake},"first_byte":{first_byte},"total":{total}}},"late_ns":{total},"slow":[],
            "slow_count":0,"seconds":[],"distribution":[],"ports":null,"hold":null,"advice":[]}}}}"#
        );
        Saved::parse(&text).unwrap()
    }

    #[test]
    fn a_load_gives_each_number_of_its_whole_operations() {
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
        let (host, remarks) = envelope(&saved);
        assert_eq!((host.cpus, remarks[0].id.as_str()), (2, "interrupted"));
    }

    #[test]
    fn a_busy_client_is_no_objection() {
        let remark = |id: &str| Remark::new(id, id);
        assert_eq!(is_saturated(&[]), Ok(false));
        assert_eq!(is_saturated(&[remark("client-saturated")]), Ok(true));
        let also = [remark("client-saturated"), remark("anyway"), remark("interrupted")];
        assert_eq!(is_saturated(&also), Err("anyway; interrupted".to_owned()));
    }

    #[test]
    fn a_load_without_an_operation_has_no_rate_but_others_may_have() {
        assert!(matches!(numbers(&load(0.0), Metric::Rate), Err(NoNumber::ThisRun(_))));
    }
}
