use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use fourtuple::spread::{ControlFilter, FlowKey, Selector};
use fourtuple_fix::{Accept, AcceptProgress, AcceptRule, AcceptTarget, Chooser, Control, Selection};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{FixAcceptSettings, Saved};
use fourtuple_report::duration;
use indicatif::HumanCount;
use time::OffsetDateTime;

use crate::commands::fix::announce;
use crate::exit::{Exit, UsageError};
use crate::line::Line;
use crate::output::{self, Output};
use crate::stop;
use crate::units::{self, nanoseconds};

/// Choose the worker of each connection for a server with SO_REUSEPORT
///
/// Instead of the kernel's hash, while the server runs. Attaches a selector (eBPF) to each SO_REUSEPORT group of the server: nginx `reuseport`, Envoy, HAProxy, Go, Node.js, Python, and DNS
/// servers over UDP. Listeners that join or leave are followed. With --select rotate, workers that share one listener take turns instead, and
/// nothing is attached to the server. Needs root (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_PTRACE),
/// a kernel with BTF and Linux 5.14. Ends with Ctrl-C, SIGTERM or --for; then, and within a second after SIGKILL, the kernel's hash
/// chooses again.
#[derive(Debug, Args)]
pub(super) struct AcceptFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Who gets a connection
    ///
    /// least-busy (shortest queue, then fewest open connections), cpu, random, or for UDP flow:OFFSET:WIDTH. For workers that share one
    /// listener, TCP or unix, such as those of nginx without `reuseport`: rotate, the one that has not accepted for the longest time.
    #[arg(long, value_name = "RULE", default_value = "least-busy")]
    select: Rule,
    /// UDP: packets that one socket of a group gets
    ///
    /// bytes:OFFSET:WIDTH=VALUE, neighbour:OFFSET:WIDTH=VALUE, ttl=HOPS or port=PORT.
    #[arg(long, value_name = "FILTER", value_parser = control)]
    control: Option<ControlFilter>,
    /// End after this time [default: at Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Change nothing, count the kernel's choices
    ///
    /// The TCP connections that it gives to each listener.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
}

/// The server.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct TargetFlags {
    /// Sockets at this address, such as 0.0.0.0:80
    ///
    /// Of all processes in this network namespace. With --select rotate also unix:PATH.
    #[arg(long, value_name = "ADDR:PORT", value_parser = place)]
    listen: Option<Place>,
    /// Sockets of this process and its descendants
    ///
    /// In its network namespace.
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
}

/// Where a server listens.
#[derive(Clone, Debug)]
enum Place {
    Address(SocketAddr),
    /// The path of a unix socket, or `@` and an abstract name.
    Unix(String),
}

fn place(text: &str) -> Result<Place, String> {
    match text.strip_prefix("unix:") {
        Some("") => Err("expected a path after unix:".to_owned()),
        Some(path) => Ok(Place::Unix(path.to_owned())),
        None => units::socket_address(text).map(Place::Address),
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Address(address) => address.fmt(formatter),
            Place::Unix(path) => write!(formatter, "unix:{path}"),
        }
    }
}

/// A rule of the selector.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    Rotate,
    LeastBusy,
    Cpu,
    Random,
    Flow(FlowKey),
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Rule, String> {
        // The texts of the library's selectors.
        match (text, text.parse()) {
            ("least-busy", _) => Ok(Rule::LeastBusy),
            ("rotate", _) => Ok(Rule::Rotate),
            (_, Ok(Selector::Cpu)) => Ok(Rule::Cpu),
            (_, Ok(Selector::Random)) => Ok(Rule::Random),
            (_, Ok(Selector::Key(key))) => Ok(Rule::Flow(key)),
            _ => Err("expected least-busy, cpu, random, flow:OFFSET:WIDTH, flow:OFFSET:WIDTH:MASK (WIDTH 1, 2 or 4 bytes) or rotate"
                .to_owned()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::LeastBusy => formatter.pad("least-busy"),
            Rule::Rotate => formatter.pad("rotate"),
            Rule::Cpu => Selector::Cpu.fmt(formatter),
            Rule::Random => Selector::Random.fmt(formatter),
            Rule::Flow(key) => Selector::Key(*key).fmt(formatter),
        }
    }
}

impl Rule {
    fn fixed(self) -> AcceptRule {
        AcceptRule::Select(match self {
            Rule::Rotate => return AcceptRule::Rotate,
            Rule::LeastBusy => Selection::LeastBusy,
            Rule::Cpu => Selection::Place(Chooser::Processor),
            Rule::Random => Selection::Place(Chooser::Random),
            Rule::Flow(FlowKey { offset, width, mask }) => {
                Selection::Place(Chooser::Key { offset, width, mask })
            }
        })
    }
}

fn control(text: &str) -> Result<ControlFilter, String> {
    text.parse().map_err(|_| format!("expected {}", ControlFilter::EXPECTED))
}

fn program_control(filter: ControlFilter) -> anyhow::Result<Control> {
    Ok(match filter {
        ControlFilter::Bytes { key: FlowKey { offset, width, mask }, value } => {
            Control::Bytes { offset, width, mask, value }
        }
        ControlFilter::Neighbour { key: FlowKey { offset, width, mask }, value } => {
            Control::Neighbour { offset, width, mask, value }
        }
        ControlFilter::Hops(hops) => Control::Hops(hops),
        ControlFilter::SourcePort(port) => Control::SourcePort(port),
        other => anyhow::bail!("--control {other}: fix accept has no program for this filter"),
    })
}

impl AcceptFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        if self.select == Rule::Rotate && self.control.is_some() {
            let why = "--control is for UDP groups; --select rotate has none";
            return Err(UsageError(why.to_owned()).into());
        }
        let target = match (&self.target.listen, self.target.pid) {
            (Some(Place::Address(address)), _) => AcceptTarget::Address(*address),
            (Some(Place::Unix(_)), _) if self.select != Rule::Rotate => {
                let rule = self.select;
                let why = format!(
                    "--listen unix:PATH needs --select rotate, not {rule}: unix sockets have no SO_REUSEPORT"
                );
                return Err(UsageError(why).into());
            }
            (Some(Place::Unix(path)), _) => AcceptTarget::Unix(path.clone()),
            // clap requires one of the two.
            (None, process) => AcceptTarget::Process(process.unwrap_or_default()),
        };
        let accept = Accept {
            target,
            rule: self.select.fixed(),
            control: self.control.map(program_control).transpose()?,
            time: self.time,
            dry_run: self.dry_run,
        };
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        let attached = |addresses: &[String]| {
            announce(&self.output, self.dry_run, format_args!("accept of {}", addresses.join(", ")));
        };
        let outcome = accept.run(&stop, attached, |progress| {
            if line.is_visible() {
                line.set(&words(progress, self.select));
            }
        })?;
        line.finish();
        let host = output::host(&["net.core.somaxconn", "net.ipv4.tcp_migrate_req"], &[]);
        let settings = FixAcceptSettings {
            listen: self.target.listen.map(|place| place.to_string()),
            pid: self.target.pid,
            select: self.select.to_string(),
            control: self.control.map(|filter| filter.to_string()),
            for_ns: self.time.map(nanoseconds),
            dry_run: self.dry_run,
        };
        let record = output::record("fix accept", started, host, settings, outcome.validity, outcome.results);
        self.output.finish(&Saved::FixAccept(record))
    }
}

/// Returns the parts of the live line.
fn words(progress: &AcceptProgress, rule: Rule) -> Vec<String> {
    if rule == Rule::Rotate {
        return vec![
            duration(nanoseconds(progress.elapsed)),
            format!("{:.0} moves/s", progress.chosen_per_s),
            format!("{} moved", HumanCount(progress.chosen)),
            format!(
                "{} of {}",
                counted(progress.listeners as u64, "worker"),
                counted(progress.groups as u64, "listener")
            ),
        ];
    }
    let mut words = vec![
        duration(nanoseconds(progress.elapsed)),
        format!("{:.0} choices/s", progress.chosen_per_s),
        format!("{} chosen", HumanCount(progress.chosen)),
        format!(
            "{} in {}",
            counted(progress.listeners as u64, "listener"),
            counted(progress.groups as u64, "group")
        ),
        format!("{} open", HumanCount(progress.open)),
        format!("longest queue {}", HumanCount(progress.longest_queue.into())),
    ];
    if progress.left > 0 {
        words.push(format!("{} left to the hash", HumanCount(progress.left)));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_survive_writing_and_parsing() {
        for text in ["least-busy", "cpu", "random", "flow:4:2", "flow:0:4:0xff", "rotate"] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        for text in ["", "hash", "map:random", "flow:4", "flow:0:3", "xdp:64"] {
            assert!(text.parse::<Rule>().unwrap_err().contains("least-busy"), "{text}");
        }
    }
}
