//! What guard may do: a TOML file.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fourtuple_fix::guard::{Limits, Scope, ScopeError};
use fourtuple_fix::{DestinationFilter, parse_destination};
use fourtuple_observe::doctor::named;
use ipnet::IpNet;
use serde::Deserialize;

use crate::exit::UsageError;
use crate::{input, units};

/// Share of the ports at which a fix begins.
const PAST: f64 = 0.5;
/// Connections in the queue of a worker that is stuck, as the threshold of B03.
const QUEUE: u32 = 8;
const MAX: u32 = 20;
/// Highest accepted number of fixes at once.
const MAX_FIXES: u32 = 1_000;
const EVERY: Duration = Duration::from_secs(5);
const QUIET: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Policy {
    pub(super) every: Duration,
    pub(super) quiet: Duration,
    pub(super) ports: Option<PortsPolicy>,
    pub(super) accept: Option<AcceptPolicy>,
    /// Rules of doctor whose findings are reported; `None`: all critical findings.
    pub(super) notify: Option<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct PortsPolicy {
    pub(super) scope: Scope,
    /// Empty: all.
    pub(super) destinations: Vec<(String, DestinationFilter)>,
    pub(super) source: Option<IpNet>,
    pub(super) past: f64,
    pub(super) max: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct AcceptPolicy {
    pub(super) scope: Scope,
    /// Empty: all.
    pub(super) listeners: Vec<SocketAddr>,
    pub(super) queue: u32,
    pub(super) max: u32,
}

impl Policy {
    /// Returns the policy of a guard without a file, which only reports: all programs, with the default thresholds.
    pub(super) fn of_all() -> Policy {
        let mut scope = Scope::default();
        scope.add_cgroup("/**").expect("a valid path");
        Policy {
            every: EVERY,
            quiet: QUIET,
            ports: Some(PortsPolicy {
                scope: scope.clone(),
                destinations: Vec::new(),
                source: None,
                past: PAST,
                max: MAX,
            }),
            accept: Some(AcceptPolicy { scope, listeners: Vec::new(), queue: QUEUE, max: MAX }),
            notify: None,
        }
    }
}

impl PortsPolicy {
    pub(super) fn limits(&self, quiet: Duration) -> Limits {
        Limits { max: self.max as usize, quiet }
    }

    pub(super) fn includes(&self, destination: SocketAddr) -> bool {
        self.destinations.is_empty() || self.index_of(destination).is_some()
    }

    /// Returns the place of the first filter that includes a destination.
    pub(super) fn index_of(&self, destination: SocketAddr) -> Option<usize> {
        self.destinations.iter().position(|(_, filter)| filter.includes(destination))
    }
}

impl AcceptPolicy {
    pub(super) fn limits(&self, quiet: Duration) -> Limits {
        Limits { max: self.max as usize, quiet }
    }

    pub(super) fn includes(&self, address: SocketAddr) -> bool {
        self.listeners.is_empty() || self.listeners.contains(&address)
    }
}

/// The file as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    every: Option<String>,
    quiet: Option<String>,
    fix_ports: Option<PortsTable>,
    fix_accept: Option<AcceptTable>,
    notify: Option<NotifyTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PortsTable {
    units: Option<Vec<String>>,
    cgroups: Option<Vec<String>>,
    containers: Option<Vec<String>>,
    destinations: Option<Vec<String>>,
    source: Option<String>,
    past: Option<String>,
    max: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct AcceptTable {
    units: Option<Vec<String>>,
    cgroups: Option<Vec<String>>,
    containers: Option<Vec<String>>,
    listeners: Option<Vec<String>>,
    queue: Option<u32>,
    max: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct NotifyTable {
    rules: Option<Vec<String>>,
}

pub(super) fn read(path: &Path) -> Result<Policy, UsageError> {
    let refuse =
        |why: String| UsageError(format!("invalid value '{}' for '--config': {why}", path.display()));
    let text = input::settings(path).map_err(|error| refuse(error.to_string()))?;
    parse(&text).map_err(refuse)
}

fn parse(text: &str) -> Result<Policy, String> {
    let file: File = toml::from_str(text).map_err(|error| input::toml_error(text, &error))?;
    let every = file.every.as_deref().map(|text| units::interval(text).map_err(at("every"))).transpose()?;
    let quiet = file.quiet.as_deref().map(|text| units::duration(text).map_err(at("quiet"))).transpose()?;
    let policy = Policy {
        every: every.unwrap_or(EVERY),
        quiet: quiet.unwrap_or(QUIET),
        ports: file.fix_ports.map(PortsTable::check).transpose()?,
        accept: file.fix_accept.map(AcceptTable::check).transpose()?,
        notify: file.notify.and_then(|table| table.rules).map(rules).transpose()?,
    };
    Ok(policy)
}

/// Returns the error of a key.
fn at(key: &str) -> impl Fn(String) -> String {
    let key = key.to_owned();
    move |why| format!("{key}: {}", why.replace(char::is_control, " "))
}

impl PortsTable {
    fn check(self) -> Result<PortsPolicy, String> {
        let parse = |text: String| match parse_destination(&text) {
            Ok(filter) => Ok((text, filter)),
            Err(error) => Err(at("fix-ports.destinations")(error.to_string())),
        };
        let destinations = self.destinations.unwrap_or_default().into_iter().map(parse);
        let source = self.source.as_deref().map(crate::commands::fix::source);
        let past = self.past.as_deref().map(units::percent);
        Ok(PortsPolicy {
            scope: scope("fix-ports", self.units, self.cgroups, self.containers)?,
            destinations: destinations.collect::<Result<_, _>>()?,
            source: source.transpose().map_err(at("fix-ports.source"))?,
            past: past.transpose().map_err(at("fix-ports.past"))?.unwrap_or(PAST),
            max: number("fix-ports.max", self.max, MAX, MAX_FIXES)?,
        })
    }
}

impl AcceptTable {
    fn check(self) -> Result<AcceptPolicy, String> {
        let parse = |text: &String| units::socket_address(text).map_err(at("fix-accept.listeners"));
        let listeners = self.listeners.unwrap_or_default();
        Ok(AcceptPolicy {
            scope: scope("fix-accept", self.units, self.cgroups, self.containers)?,
            listeners: listeners.iter().map(parse).collect::<Result<_, _>>()?,
            queue: number("fix-accept.queue", self.queue, QUEUE, u32::MAX)?,
            max: number("fix-accept.max", self.max, MAX, MAX_FIXES)?,
        })
    }
}

/// Returns the programs of a table, which names some.
fn scope(
    table: &str,
    units: Option<Vec<String>>,
    cgroups: Option<Vec<String>>,
    containers: Option<Vec<String>>,
) -> Result<Scope, String> {
    let mut scope = Scope::default();
    let mut add =
        |key: &str, values: Option<Vec<String>>, add: fn(&mut Scope, &str) -> Result<(), ScopeError>| {
            for value in values.unwrap_or_default() {
                add(&mut scope, &value)
                    .map_err(|why| at(&format!("{table}.{key}"))(format!("{value:?}: {why}")))?;
            }
            Ok::<(), String>(())
        };
    add("units", units, Scope::add_unit)?;
    add("cgroups", cgroups, Scope::add_cgroup)?;
    add("containers", containers, Scope::add_container)?;
    if scope.is_empty() {
        return Err(format!("{table} names no program: expected units, cgroups or containers"));
    }
    Ok(scope)
}

fn number(key: &str, value: Option<u32>, default: u32, max: u32) -> Result<u32, String> {
    match value {
        None => Ok(default),
        Some(value) if (1..=max).contains(&value) => Ok(value),
        Some(value) => {
            Err(format!("{key}: {value} is not accepted: expected a whole number from 1 to {max}"))
        }
    }
}

fn rules(ids: Vec<String>) -> Result<Vec<String>, String> {
    let known = |id: String| match named(&id) {
        Some(rule) => Ok(rule.id.to_owned()),
        None => {
            Err(at("notify.rules")(format!("{id:?} is not a rule of doctor; `fourtuple explain` lists them")))
        }
    };
    ids.into_iter().map(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read() {
        let policy = parse(
            r#"
            every = "2s"
            quiet = "90s"
            [fix-ports]
            units = ["nginx", "worker-*.service"]
            cgroups = ["/kubepods.slice/**"]
            containers = ["*"]
            destinations = ["10.0.0.0/8:443", "[2001:db8::/32]:443"]
            source = "192.0.2.0/28"
            past = "70%"
            max = 3
            [fix-accept]
            units = ["haproxy.service"]
            listeners = ["0.0.0.0:80"]
            queue = 20
            max = 4
            [notify]
            rules = ["p01", "A01"]
            "#,
        )
        .unwrap();
        assert_eq!((policy.every.as_secs(), policy.quiet.as_secs()), (2, 90));
        let ports = policy.ports.unwrap();
        assert!(ports.includes("10.1.2.3:443".parse().unwrap()));
        assert!(!ports.includes("10.1.2.3:80".parse().unwrap()));
        assert!(!ports.includes("192.0.2.1:443".parse().unwrap()));
        assert_eq!((ports.past, ports.max), (0.7, 3));
        assert_eq!(ports.source, Some("192.0.2.0/28".parse().unwrap()));
        assert_eq!(
            ports.scope.find("/system.slice/worker-7.service/a"),
            Some("/system.slice/worker-7.service")
        );
        let accept = policy.accept.unwrap();
        assert!(accept.includes("0.0.0.0:80".parse().unwrap()));
        assert!(!accept.includes("0.0.0.0:81".parse().unwrap()));
        assert_eq!((accept.queue, accept.max), (20, 4));
        assert_eq!(policy.notify.unwrap(), ["P01", "A01"]);
    }

    #[test]
    fn a_table_alone_has_the_defaults() {
        let policy = parse("[fix-ports]\nunits = [\"a\"]").unwrap();
        let all = Policy::of_all();
        let ports = policy.ports.unwrap();
        assert_eq!((ports.past, ports.max), (all.ports.unwrap().past, MAX));
        assert!(ports.includes("10.1.2.3:443".parse().unwrap()));
        assert_eq!((policy.every, policy.quiet), (all.every, all.quiet));
        assert_eq!((policy.accept, policy.notify), (None, None));
        assert_eq!(parse("").unwrap().ports, None, "an empty file permits nothing");
    }

    #[test]
    fn the_policy_of_the_package_only_reports() {
        let text = include_str!("../../../../../contrib/guard.toml");
        let policy = parse(text).unwrap();
        assert_eq!((policy.ports, policy.accept, policy.notify), (None, None, None));
        let key = |line: &'static str| line.strip_prefix('#').filter(|line| !line.starts_with(' '));
        let with_keys: Vec<&str> = text.lines().map(|line| key(line).unwrap_or(line)).collect();
        let policy = parse(&with_keys.join("\n")).unwrap();
        assert!(policy.ports.is_some() && policy.accept.is_some() && policy.notify.is_some());
    }

    #[test]
    fn each_mistake_is_one_line_with_its_place() {
        let ports = |line: &str| format!("[fix-ports]\nunits = [\"a\"]\n{line}\n");
        let accept = |line: &str| format!("[fix-accept]\nunits = [\"a\"]\n{line}\n");
        for (text, place) in [
            ("every = 5".to_owned(), "line 1"),
            ("every = \"5\"".to_owned(), "every"),
            ("every = \"1ms\"".to_owned(), "every"),
            ("quiet = \"soon\"".to_owned(), "quiet"),
            ("quite = \"1m\"".to_owned(), "line 1"),
            ("[fix-port]".to_owned(), "line 1"),
            ("[fix-ports".to_owned(), "line 1"),
            ("[fix-ports]".to_owned(), "fix-ports names no program"),
            ("[fix-ports]\nunits = []".to_owned(), "fix-ports names no program"),
            ("[fix-ports]\nunits = \"a\"".to_owned(), "line 2"),
            ("[fix-ports]\nunits = [\"\"]".to_owned(), "fix-ports.units"),
            ("[fix-ports]\nunits = [\"a/b\"]".to_owned(), "fix-ports.units"),
            ("[fix-ports]\nunits = [\"a\\nb\"]".to_owned(), "fix-ports.units"),
            ("[fix-ports]\ncgroups = [\"a\"]".to_owned(), "fix-ports.cgroups"),
            ("[fix-ports]\ncgroups = [\"/\"]".to_owned(), "fix-ports.cgroups"),
            ("[fix-ports]\ncgroups = [\"/a/../b\"]".to_owned(), "fix-ports.cgroups"),
            ("[fix-ports]\ncontainers = [\"web\"]".to_owned(), "fix-ports.containers"),
            (ports("unit = []"), "line 3"),
            (ports("units = []"), "line 3"),
            (ports("destinations = [\"10.0.0.0\"]"), "fix-ports.destinations"),
            (ports("source = \"here\""), "fix-ports.source"),
            (ports("past = 50"), "line 3"),
            (ports("past = \"50\""), "fix-ports.past"),
            (ports("past = \"0%\""), "fix-ports.past"),
            (ports("past = \"101%\""), "fix-ports.past"),
            (ports("max = 0"), "fix-ports.max"),
            (ports("max = 1001"), "fix-ports.max"),
            (ports("max = -1"), "line 3"),
            (ports("queue = 1"), "line 3"),
            (accept("listeners = [\"80\"]"), "fix-accept.listeners"),
            (accept("queue = 0"), "fix-accept.queue"),
            (accept("past = \"50%\""), "line 3"),
            ("[fix-accept]".to_owned(), "fix-accept names no program"),
            ("[notify]\nrules = [\"Z99\"]".to_owned(), "notify.rules"),
            ("[notify]\nrule = [\"P01\"]".to_owned(), "line 2"),
        ] {
            let why = parse(&text).unwrap_err();
            assert!(why.contains(place) && !why.contains('\n'), "{text}: {why}");
        }
    }
}
