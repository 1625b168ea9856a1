//! A finding as a rule writes it, before its remedies are checked.

use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

/// The effect of a remedy on a snapshot.
pub(crate) type Change = Box<dyn Fn(&mut Snapshot)>;

/// A finding whose remedies are not checked yet.
pub(crate) struct Draft {
    pub(crate) severity: Severity,
    /// The subject of the finding; different for each finding of a rule.
    pub(crate) subject: String,
    /// The fault in one line, with its figures.
    pub(crate) verdict: String,
    pub(crate) evidence: Vec<String>,
    /// Remedies that act at once.
    pub(crate) now: Vec<Remedy>,
    /// Remedies that last.
    pub(crate) proper: Vec<Remedy>,
    /// Symptoms that the fault explains, and how much of them.
    pub(crate) explained: Vec<(What, u64)>,
}

impl Draft {
    /// Creates a finding without remedies.
    pub(crate) fn new(severity: Severity, subject: impl Into<String>, verdict: impl Into<String>) -> Draft {
        Draft {
            severity,
            subject: subject.into(),
            verdict: verdict.into(),
            evidence: Vec::new(),
            now: Vec::new(),
            proper: Vec::new(),
            explained: Vec::new(),
        }
    }

    /// Declares that the fault explains a symptom entirely, so that X01 does not report it.
    pub(crate) fn explains(self, what: What) -> Draft {
        self.explains_up_to(what, u64::MAX)
    }

    /// Declares that the fault explains at most this many events of a symptom.
    pub(crate) fn explains_up_to(mut self, what: What, amount: u64) -> Draft {
        self.explained.push((what, amount));
        self
    }

    /// Adds a fact.
    pub(crate) fn because(mut self, fact: impl Into<String>) -> Draft {
        self.evidence.push(fact.into());
        self
    }

    /// Adds a fact if it is known.
    pub(crate) fn because_if(self, fact: Option<String>) -> Draft {
        match fact {
            Some(fact) => self.because(fact),
            None => self,
        }
    }

    /// Adds what helps at once.
    pub(crate) fn now(mut self, remedy: Remedy) -> Draft {
        self.now.push(remedy);
        self
    }

    /// Adds what lasts.
    pub(crate) fn proper(mut self, remedy: Remedy) -> Draft {
        self.proper.push(remedy);
        self
    }
}

/// A symptom, as a rule names it in `Draft::explains`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A counter of failures (`causes::COUNTERS`), such as `TcpExt.ListenOverflows` or `conntrack.drop`.
    Counter(&'static str),
    /// Failed calls; `None` stands for every process, or every address.
    Calls { call: &'static str, errno: &'static str, process: Option<u32>, address: Option<String> },
    /// sk_drops of a listener or a UDP socket, by cookie.
    Drops(u64),
    /// Connections that wait for accept() and were there at the first reading, by cookie of the listener.
    Queue(u64),
    /// Ports that a tuple takes, as it is displayed.
    Growth(String),
}

impl What {
    /// Failed calls of every process and every address.
    pub(crate) fn calls(call: &'static str, errno: &'static str) -> What {
        What::Calls { call, errno, process: None, address: None }
    }
}

/// A command or a change.
pub(crate) struct Remedy {
    pub(crate) action: String,
    pub(crate) is_command: bool,
    pub(crate) effect: String,
    /// The effect on the snapshot; `None`: the effect cannot be computed.
    pub(crate) change: Option<Change>,
}

impl Remedy {
    /// A command whose effect on the snapshot is known. The remedy is shown only if the finding then disappears or is less severe.
    pub(crate) fn command(
        action: impl Into<String>,
        effect: impl Into<String>,
        change: impl Fn(&mut Snapshot) + 'static,
    ) -> Remedy {
        Remedy {
            action: action.into(),
            is_command: true,
            effect: effect.into(),
            change: Some(Box::new(change)),
        }
    }

    /// A command whose effect cannot be computed from a snapshot.
    pub(crate) fn unproven(action: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy { action: action.into(), is_command: true, effect: effect.into(), change: None }
    }

    /// A change that is no command: of a program, or of another host.
    pub(crate) fn advice(action: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy { action: action.into(), is_command: false, effect: effect.into(), change: None }
    }

    /// Sets a sysctl, both in the snapshot and on the host.
    pub(crate) fn sysctl(name: &'static str, value: impl Into<String>, effect: impl Into<String>) -> Remedy {
        let value = value.into();
        let quoted = if value.contains(' ') { format!("\"{value}\"") } else { value.clone() };
        Remedy::command(format!("sysctl -w {name}={quoted}"), effect, move |snapshot| {
            set_sysctl(snapshot, name, &value);
        })
    }
}

/// Sets a sysctl in a snapshot, with the parts of the snapshot that depend on it.
pub(crate) fn set_sysctl(snapshot: &mut Snapshot, name: &str, value: &str) {
    use fourtuple_record::snapshot::Part;
    snapshot.sysctls.insert(name.to_owned(), value.to_owned());
    let Part::Seen(ports) = &mut snapshot.ports else { return };
    match name {
        "net.ipv4.ip_local_port_range" => {
            let mut bounds = value.split_whitespace().filter_map(|bound| bound.parse().ok());
            if let (Some(low), Some(high)) = (bounds.next(), bounds.next()) {
                (ports.low, ports.high) = (low, high);
            }
        }
        "net.ipv4.ip_local_reserved_ports" => {
            let block = |text: &str| {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
            };
            ports.reserved = value.split(',').filter_map(block).collect();
        }
        _ => {}
    }
}
