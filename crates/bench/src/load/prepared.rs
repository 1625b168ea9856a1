use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fourtuple::dial::{DialError, Dialer};
use fourtuple_record::{LoadResults, LoadSettings, Remark};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, errno_name, option};

use crate::load::LoadError;
use crate::load::preflight::{Finding, Need, Preflight, Remedy, Severity, Snapshot, judge};
use crate::load::run::RunProgress;
use crate::load::settings::Load;
use crate::load::tally::Coordination;

/// The sysctls that a record of a load contains.
pub const SYSCTLS: [&str; 4] = [
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_max_tw_buckets",
    "net.core.somaxconn",
];

/// A run whose target is resolved and whose preflight is done.
pub struct Prepared {
    load: Load,
    endpoints: Vec<Endpoint>,
    need: Need,
    preflight: Preflight,
}

/// The results of a prepared run.
pub struct Measured {
    pub results: LoadResults,
    /// The remarks that limit the results.
    pub remarks: Vec<Remark>,
    /// The log of histograms, if it was requested.
    pub log: Option<String>,
    /// Delay behind the start that a coordinator set.
    pub start_error: Duration,
}

impl Prepared {
    /// Checks the settings, resolves the target and makes the preflight in this network namespace.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Resolve`], [`LoadError::Tls`], [`LoadError::Preflight`]
    pub fn new(load: Load) -> Result<Prepared, LoadError> {
        let candidates = load.resolve()?;
        Prepared::at(load, candidates)
    }

    /// Prepares a run to addresses that [`Load::resolve`] has returned: all of them, or the first that answers a probe.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Tls`], [`LoadError::Preflight`]
    pub fn at(load: Load, candidates: Vec<Endpoint>) -> Result<Prepared, LoadError> {
        load.check()?;
        load.check_here()?;
        let (endpoints, passed_over) = choose(&load, candidates);
        let need = load.need();
        let mut preflight = judge(&snapshot(&load, &endpoints)?, &need);
        preflight.findings.extend(passed_over);
        Ok(Prepared { load, endpoints, need, preflight })
    }

    /// Returns the findings of the preflight.
    pub fn findings(&self) -> &[Finding] {
        &self.preflight.findings
    }

    /// Returns the findings that refuse the run, as one line; `None` if there are none.
    pub fn refusal(&self) -> Option<String> {
        let refusing = self.preflight.findings.iter().filter(|finding| finding.severity == Severity::Refuse);
        let lines: Vec<String> = refusing.map(ToString::to_string).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }

    /// Returns the settings for the record. `sources` is the text as typed.
    pub fn settings(&self, sources: Option<&str>, anyway: bool) -> LoadSettings {
        self.load.settings(&self.endpoints, sources, anyway)
    }

    /// Executes the run and judges its results. Findings of the preflight become remarks and advice.
    ///
    /// # Errors
    ///
    /// The errors of [`Load::run`].
    pub fn run(
        &self,
        stop: &AtomicBool,
        coordination: Option<Coordination>,
        mut progress: impl FnMut(&RunProgress),
    ) -> Result<Measured, LoadError> {
        let mut measured = match &self.load.ramp {
            Some(ramp) => self.climb(ramp, stop, &mut progress)?,
            None => self.run_once(stop, coordination, &mut progress)?,
        };
        self.add_findings(&mut measured.results, &mut measured.remarks);
        Ok(measured)
    }

    /// Executes the run, or a step of a ramp.
    pub(super) fn run_once(
        &self,
        stop: &AtomicBool,
        coordination: Option<Coordination>,
        progress: &mut dyn FnMut(&RunProgress),
    ) -> Result<Measured, LoadError> {
        let Prepared { load, endpoints, need, preflight } = self;
        let mut outcome = load.run_coordinated(endpoints, preflight, stop, coordination, progress)?;
        let (log, start_error) = (outcome.log.take(), outcome.start_error);
        // The TIME_WAIT sockets now come from this run. The number is informational, so a failure to read it is ignored.
        let time_wait = snapshot(load, endpoints).ok().map(|snapshot| snapshot.taken.time_wait);
        let (results, remarks) = outcome.results(load, need, preflight, time_wait);
        Ok(Measured { results, remarks, log, start_error })
    }

    pub(super) fn load(&self) -> &Load {
        &self.load
    }

    pub(super) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    pub(super) fn without_findings(mut self) -> Prepared {
        self.preflight.findings.clear();
        self
    }

    /// Adds the findings of the preflight to the remarks and the advice.
    fn add_findings(&self, results: &mut LoadResults, remarks: &mut Vec<Remark>) {
        let preflight = &self.preflight;
        for finding in &preflight.findings {
            match finding.severity {
                Severity::Refuse => remarks
                    .insert(0, Remark::new("anyway", format!("the run was wanted anyway, though {finding}"))),
                Severity::Warn => results.advice.insert(0, format!("Before the run: {finding}.")),
            }
        }
    }
}

fn snapshot(load: &Load, endpoints: &[Endpoint]) -> Result<Snapshot, LoadError> {
    let proc = Path::new("/proc");
    let read = |endpoint: &Endpoint| match endpoint {
        Endpoint::Inet(destination) => {
            Snapshot::read(proc, load.transport(), *destination, load.sources.addresses())
        }
        Endpoint::Unix(path) => Snapshot::read_unix(proc, path),
    };
    let (first, others) = endpoints.split_first().expect("a target has an address");
    let mut all = read(first)?;
    for endpoint in others {
        all.add(read(endpoint)?);
    }
    Ok(all)
}

/// Maximum time for which an address may leave the probe unanswered. The kernel repeats a SYN after 1 s.
const PROBE: Duration = Duration::from_secs(1);

/// Returns the addresses that the run loads, and a finding if an address of the name was passed over. One address needs no probe.
pub(crate) fn choose(load: &Load, mut candidates: Vec<Endpoint>) -> (Vec<Endpoint>, Option<Finding>) {
    if candidates.len() < 2 || load.all_addresses {
        return (candidates, None);
    }
    let mut failed = Vec::new();
    let mut chosen = None;
    for (number, address) in candidates.iter().filter_map(Endpoint::inet).enumerate() {
        match answer(load, address) {
            Ok(()) => {
                chosen = Some(number);
                break;
            }
            Err(why) => failed.push(format!("{address} ({why})")),
        }
    }
    let address = candidates.swap_remove(chosen.unwrap_or(0));
    let (name, failed) = (load.target.host(), failed.join(", "));
    let message = match chosen {
        Some(0) => None,
        Some(_) => Some(format!("{name}: {address} is loaded, not {failed}")),
        None => Some(format!("no address of {name} answers: {failed}; {address} is loaded")),
    };
    let finding = |message| Finding {
        id: "address",
        severity: Severity::Warn,
        message,
        remedies: match chosen {
            Some(_) => Vec::new(),
            None => vec![Remedy::Other("start the server".to_owned())],
        },
    };
    (vec![address], message.map(finding))
}

/// Probes an address. Returns the reason why it is passed over, if it fails.
fn answer(load: &Load, address: SocketAddr) -> Result<(), String> {
    let timeout = PROBE.min(load.timeout);
    match load.transport() {
        Transport::Tcp => match connect(load, address, timeout) {
            Ok(()) => Ok(()),
            // A lack of ports says nothing about the address.
            Err(error) if error.is_exhausted() => Ok(()),
            Err(error) => {
                let errno = error.raw_os_error().map(io::Error::from_raw_os_error);
                Err(errno.map_or(error.to_string(), |errno| errno_name(&errno).to_string()))
            }
        },
        Transport::Udp => exchange(load, address, timeout).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => "no answer".to_owned(),
            _ => errno_name(&error).to_string(),
        }),
    }
}

fn connect(load: &Load, address: SocketAddr, timeout: Duration) -> Result<(), DialError> {
    let dialer = Dialer::builder(address).sources(load.sources.clone()).timeout(timeout).without_census();
    // What the probe cannot prepare, the run reports.
    let Ok(dialer) = dialer.build() else { return Ok(()) };
    let (stream, _) = dialer.dial()?;
    // RST: the probe leaves no TIME_WAIT socket. Without the option it leaves one.
    let _ = option::set_reset_on_close(stream.as_fd());
    Ok(())
}

/// Sends a request and waits for a datagram in return. An address without a server often answers with ICMP: ECONNREFUSED.
fn exchange(load: &Load, address: SocketAddr, timeout: Duration) -> io::Result<()> {
    let any = match address {
        SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((load.sources.addresses().first().copied().unwrap_or(any), 0))?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(timeout))?;
    let mut protocol = load.workload.protocol(&load.encoded());
    protocol.begin(true);
    socket.send(protocol.outgoing())?;
    socket.recv(&mut [0; 1]).map(drop)
}
