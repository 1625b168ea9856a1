//! A finding as a rule writes it, before its remedies are checked.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Owner, Snapshot, Tuple};

use crate::doctor::command::{Cure, Scope, Setting, Step};

/// The effect of a remedy on a snapshot.
pub(crate) type Change = Box<dyn Fn(&mut Snapshot)>;

/// What a finding is about; different for each finding of a rule. Findings are joined by it, and its text is for readers only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Connections from a source address to a destination.
    Tuple(IpAddr, SocketAddr),
    /// A listener, by its address and cookie.
    Listener(SocketAddr, u64),
    /// A listener of a unix socket, by its path.
    Unix(String),
    /// A process, by its number and name.
    Process(u32, String),
    /// Calls of connect() of a process to a destination.
    Connects(u32, String, SocketAddr),
    /// A sysctl, a table, or another thing of the host.
    Host(String),
}

impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let process = |pid: u32, name: &str| Owner { pid, name: name.to_owned(), sockets: 0 };
        match self {
            Subject::Tuple(source, destination) => write!(formatter, "{source} → {destination}"),
            Subject::Listener(address, cookie) => write!(formatter, "{address} (socket {cookie:#x})"),
            Subject::Unix(text) | Subject::Host(text) => formatter.write_str(text),
            Subject::Process(pid, name) => process(*pid, name).fmt(formatter),
            Subject::Connects(pid, name, destination) => {
                write!(formatter, "{} → {destination}", process(*pid, name))
            }
        }
    }
}

impl From<&Tuple> for Subject {
    fn from(tuple: &Tuple) -> Subject {
        Subject::Tuple(tuple.source, tuple.destination)
    }
}

impl From<&Listener> for Subject {
    fn from(listener: &Listener) -> Subject {
        Subject::Listener(listener.address, listener.cookie)
    }
}

impl From<&str> for Subject {
    fn from(text: &str) -> Subject {
        Subject::Host(text.to_owned())
    }
}

impl From<String> for Subject {
    fn from(text: String) -> Subject {
        Subject::Host(text)
    }
}

/// A finding whose remedies are not checked yet.
pub(crate) struct Draft {
    pub(crate) severity: Severity,
    pub(crate) subject: Subject,
    /// The fault in one line, with its figures.
    pub(crate) verdict: String,
    pub(crate) evidence: Vec<String>,
    /// Remedies that act at once.
    pub(crate) now: Vec<Remedy>,
    pub(crate) proper: Vec<Remedy>,
    /// Symptoms that the fault explains, and how much of them.
    pub(crate) explained: Vec<(What, u64)>,
}

impl Draft {
    /// Creates a finding without remedies.
    pub(crate) fn new(severity: Severity, subject: impl Into<Subject>, verdict: impl Into<String>) -> Draft {
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

    pub(crate) fn because(mut self, fact: impl Into<String>) -> Draft {
        self.evidence.push(fact.into());
        self
    }

    /// Adds the fact that is read first.
    pub(crate) fn because_first(mut self, fact: impl Into<String>) -> Draft {
        self.evidence.insert(0, fact.into());
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
    /// A counter of failures (`counters::COUNTERS`), such as `TcpExt.ListenOverflows` or `conntrack.drop`.
    Counter(&'static str),
    /// Failed calls; `None` stands for every process, or every address.
    Calls { call: &'static str, errno: &'static str, process: Option<u32>, address: Option<String> },
    /// sk_drops of a listener or a UDP socket, by cookie.
    Drops(u64),
    /// Connections that wait for accept() and were there at the first reading, by cookie of the listener.
    Queue(u64),
    /// Ports that a tuple takes.
    Growth(Subject),
    /// SYNs that are not answered, to a listener of this host; `None`: to every destination, and DNS queries.
    Unanswered(Option<SocketAddr>),
    /// SYNs and data that a destination does not answer.
    Silent(SocketAddr),
}

impl What {
    /// Failed calls of every process and every address.
    pub(crate) fn calls(call: &'static str, errno: &'static str) -> What {
        What::Calls { call, errno, process: None, address: None }
    }
}

/// The condition of a remedy that completes the one in front of it. The first screen shows both.
pub(crate) const THEN: &str = "after the command above";

/// A command or a change.
pub(crate) struct Remedy {
    pub(crate) action: Action,
    pub(crate) effect: String,
    /// A condition or a step before, in words.
    pub(crate) condition: Option<String>,
    /// The effect on the snapshot; `None`: the effect cannot be computed. With a change the remedy is shown only if the finding then
    /// disappears or is less severe.
    pub(crate) change: Option<Change>,
    /// Whether a probe has tried the effect on this kernel.
    pub(crate) is_tested: bool,
    /// What can be tried on this kernel before the remedy is shown.
    pub(crate) cure: Option<Cure>,
    /// The command that undoes it; that of sysctls is computed from their values.
    pub(crate) undo: Option<Step>,
}

/// The action of a remedy.
pub(crate) enum Action {
    /// A change of a program, or of another host.
    Words(String),
    /// A command, step by step.
    Steps(Vec<Step>),
}

impl Remedy {
    fn new(action: Action, effect: impl Into<String>) -> Remedy {
        let effect = effect.into();
        Remedy { action, effect, condition: None, change: None, is_tested: false, cure: None, undo: None }
    }

    /// A change that is not a command: of a program, or of another host.
    pub(crate) fn advice(action: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy::new(Action::Words(action.into()), effect)
    }

    /// A command of several steps.
    pub(crate) fn steps(steps: Vec<Step>, effect: impl Into<String>) -> Remedy {
        Remedy::new(Action::Steps(steps), effect)
    }

    /// This program with these arguments.
    pub(crate) fn own(arguments: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy::steps(vec![Step::Own(arguments.into())], effect)
    }

    /// Another program, for root.
    pub(crate) fn privileged(scope: Scope, line: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy::steps(vec![Step::Other { line: line.into(), scope, needs_root: true }], effect)
    }

    /// Another program, for any user.
    pub(crate) fn other(scope: Scope, line: impl Into<String>, effect: impl Into<String>) -> Remedy {
        Remedy::steps(vec![Step::Other { line: line.into(), scope, needs_root: false }], effect)
    }

    /// Sets a sysctl, both in the snapshot and on the host.
    pub(crate) fn sysctl(
        name: impl Into<Cow<'static, str>>,
        value: impl Into<String>,
        effect: impl Into<String>,
    ) -> Remedy {
        Remedy::sysctls(vec![Setting::new(name, value)], effect)
    }

    /// Sets sysctls, both in the snapshot and on the host.
    pub(crate) fn sysctls(settings: Vec<Setting>, effect: impl Into<String>) -> Remedy {
        Remedy::steps(vec![Step::Set(settings.clone())], effect).with(move |snapshot| {
            settings.iter().for_each(|Setting { name, value, .. }| set_sysctl(snapshot, name, value));
        })
    }

    /// Returns whether the command sets a sysctl.
    pub(crate) fn sets(&self, name: &str) -> bool {
        let Action::Steps(steps) = &self.action else { return false };
        steps
            .iter()
            .any(|step| matches!(step, Step::Set(settings) if settings.iter().any(|own| own.name == name)))
    }

    /// The effect on a snapshot.
    pub(crate) fn with(self, change: impl Fn(&mut Snapshot) + 'static) -> Remedy {
        Remedy { change: Some(Box::new(change)), ..self }
    }

    /// The effect is not in a snapshot.
    pub(crate) fn unproven(self) -> Remedy {
        Remedy { change: None, ..self }
    }

    /// A condition, if there is one.
    pub(crate) fn provided(self, condition: Option<String>) -> Remedy {
        Remedy { condition, ..self }
    }

    /// A probe has tried the effect on this kernel, if so.
    pub(crate) fn tested(self, is_tested: bool) -> Remedy {
        Remedy { is_tested, ..self }
    }

    /// The command that undoes it, of the same kind.
    pub(crate) fn undone_by(self, scope: Scope, line: impl Into<String>) -> Remedy {
        Remedy { undo: Some(Step::Other { line: line.into(), scope, needs_root: true }), ..self }
    }

    /// The effect can be tried on this kernel. A remedy that then has none is not shown.
    pub(crate) fn tried(self, cure: Cure) -> Remedy {
        Remedy { cure: Some(cure), ..self }
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
