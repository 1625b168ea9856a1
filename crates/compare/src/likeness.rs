use std::collections::BTreeSet;

use fourtuple_record::{LoadSettings, PortsSettings, Remark, Saved};

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
    pub(crate) fn add(&mut self, saved: &Saved) {
        let host = saved.common().host;
        self.kernels.insert(host.kernel.clone());
        self.hosts.insert(format!("{} CPUs, virtualization {}", host.cpus, host.virtualization));
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
        "{}{method}, {arrival}, {} connections, {} held, closed by {} after {} requests, {} bytes for {}, pause {} ns",
        settings.workload,
        settings.connections,
        settings.hold,
        settings.close,
        settings.close_every,
        settings.request_bytes,
        settings.response_bytes,
        settings.pause_ns,
    )
}

/// Describes the workload of `lab ports`, without the strategy.
fn ports(settings: &PortsSettings) -> String {
    format!(
        "{} over IPv{}, range {}-{}, {} sources, filled to {}",
        settings.protocol, settings.family, settings.low, settings.high, settings.sources, settings.fill
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
