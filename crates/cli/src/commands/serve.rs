use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::serve::{Close, Protocol, Running, Serve, Service, Stall, validity};
use fourtuple_record::{Saved, ServeSettings};
use fourtuple_syscalls::{Endpoint, resource};
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output, Random};
use crate::units::{self, nanoseconds};
use crate::{names, stop};

/// The interval at which the command checks for a signal and for the end of --for.
const LOOK: Duration = Duration::from_millis(20);

/// The maximum length of a request, a response and a body, which are kept in memory ready to send.
const MAX_BYTES: u32 = 64 << 20;

/// Run a small server for tests and measurements
///
/// Ends with Ctrl-C, SIGTERM or --for, and prints the counts of each worker. When the server is ready, a line on stderr reports its
/// address, with the real port for port 0.
#[derive(Debug, Args)]
pub struct ServeFlags {
    #[arg(value_parser = protocol(), help = protocols(Protocol::name), long_help = protocols(described))]
    protocol: Protocol,
    /// Address, or unix:PATH; port 0 selects a free port
    #[arg(long, value_name = "ADDR:PORT", allow_hyphen_values = true)]
    listen: Endpoint,
    /// Length of each accept queue
    ///
    /// The kernel cuts it to net.core.somaxconn.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = units::up_to::<1_000_000>, allow_hyphen_values = true)]
    backlog: u32,
    /// Threads that serve [default: number of CPUs]
    ///
    /// Each serves one request at a time.
    #[arg(long, value_name = "N", value_parser = units::up_to::<4096>, allow_hyphen_values = true)]
    workers: Option<u32>,
    /// Accept policy of the workers
    #[arg(long, value_name = "POLICY", value_parser = names::policy(), allow_hyphen_values = true, long_help = policy_help())]
    policy: Option<AcceptPolicy>,
    /// Service time of a request
    ///
    /// 50us, exp:1ms (mean), pareto:1ms:1.5 (mean, shape), 10%:100ms, or several parts with commas.
    #[arg(long, value_name = "DISTRIBUTION", default_value = "0s", value_parser = service, allow_hyphen_values = true)]
    service: Service,
    /// Compute for the service time, do not sleep
    #[arg(long)]
    spin: bool,
    /// Stall all workers once: 2s:200ms
    ///
    /// AT after the start, for LENGTH.
    #[arg(long, value_name = "AT:LENGTH", value_parser = stall, allow_hyphen_values = true)]
    stall: Option<Stall>,
    /// Pin worker i to the i-th CPU
    ///
    /// Modulo the number of CPUs.
    #[arg(long)]
    pin: bool,
    /// Size of a request for crr, udp [default: 1]
    #[arg(long, value_name = "BYTES", value_parser = units::up_to::<MAX_BYTES>, allow_hyphen_values = true)]
    request: Option<u32>,
    /// Size of a response for crr [default: 1]
    #[arg(long, value_name = "BYTES", value_parser = units::up_to::<MAX_BYTES>, allow_hyphen_values = true)]
    response: Option<u32>,
    /// Size of a body for http [default: 2]
    #[arg(long, value_name = "BYTES", value_parser = units::from_0_to::<MAX_BYTES>, allow_hyphen_values = true)]
    body: Option<u32>,
    /// Side that closes
    ///
    /// The server with FIN, or with RST, unlike ordinary applications.
    #[arg(long, value_enum, default_value_t = ClosedBy::Client)]
    close: ClosedBy,
    /// Responses before a close [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = units::count, allow_hyphen_values = true)]
    close_every: Option<u64>,
    /// Close after this silence [default: 60s]
    ///
    /// For crr, http and sink: a connection on which nothing was received or sent for so long is closed.
    #[arg(long, value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    idle: Option<Duration>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ClosedBy {
    Client,
    Server,
    Rst,
}

fn protocol() -> impl TypedValueParser<Value = Protocol> {
    PossibleValuesParser::new(Protocol::all().map(Protocol::name)).try_map(|name| name.parse())
}

fn protocols<T: ToString>(word: fn(Protocol) -> T) -> String {
    Protocol::all().map(|protocol| word(protocol).to_string()).collect::<Vec<_>>().join(", ")
}

fn described(protocol: Protocol) -> String {
    format!("{} ({})", protocol.name(), protocol.description())
}

fn policy_help() -> String {
    let default = "an event loop per worker, reuseport over TCP, exclusive over unix";
    format!("Accept policy of the workers: {} [default: {default}]", AcceptPolicy::names())
}

fn service(text: &str) -> Result<Service, String> {
    Service::parse(text, units::duration)
}

fn stall(text: &str) -> Result<Stall, String> {
    let read = || {
        let (at, length) = text.split_once(':')?;
        Some(Stall { at: units::duration(at).ok()?, length: units::duration(length).ok()? })
    };
    read().ok_or_else(|| format!("{text:?} is not a stall: expected AT:LENGTH, such as 2s:200ms"))
}

fn refusal(flag: &str, value: impl Display, reason: &str) -> UsageError {
    UsageError(format!("invalid value '{value}' for '--{flag}': {reason}"))
}

impl ServeFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let serve = self.serve()?;
        serve.check()?;
        let stop = stop::flag()?;
        // Each connection needs a descriptor; the hard limit is the choice of the administrator.
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let started = OffsetDateTime::now_utc();
        let running = serve.start()?;
        if !self.output.quiet {
            // Written even if stderr is not a terminal: a script waits for this line. The write fails if the reader is gone.
            output::say(&ready_line(&running, serve.workers));
        }
        wait(&running, &stop, self.time);
        let backlog_remark = running.backlog_remark();
        let results = running.stop();
        let host = output::host(
            &["net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog", "net.ipv4.tcp_abort_on_overflow"],
            &[],
        );
        let mut validity = validity(&results);
        validity.extend(backlog_remark);
        let record = output::record("serve", started, host, self.settings(&serve), validity, results);
        self.output.finish(&Saved::Serve(record))
    }

    /// Checks the flags without starting anything.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        Ok(self.serve()?.check()?)
    }

    /// Returns the settings of the server that `fleet serve` starts on each host.
    pub fn for_hosts(&self) -> anyhow::Result<ServeSettings> {
        let serve = self.serve()?;
        serve.check()?;
        if matches!(self.listen, Endpoint::Unix(_)) {
            return Err(refusal(
                "listen",
                serve.listen(),
                "a server on other hosts has an address and a port",
            )
            .into());
        }
        if self.time.is_none() {
            return Err(UsageError(
                "'--for' is required: a server on other hosts ends at its deadline".to_owned(),
            )
            .into());
        }
        Ok(self.settings(&serve))
    }

    fn serve(&self) -> anyhow::Result<Serve> {
        let protocol = self.protocol_with_sizes()?;
        self.refuse_strangers()?;
        let mut serve = Serve::new(protocol, self.listen.clone());
        if let Some(workers) = self.workers {
            serve.workers = workers as usize;
        }
        let every = self.close_every.unwrap_or(1);
        serve.close = match self.close {
            ClosedBy::Client => Close::Client,
            ClosedBy::Server => Close::Server { every },
            ClosedBy::Rst => Close::Reset { every },
        };
        serve.idle = self.idle.unwrap_or(serve.idle);
        serve.policy = self.policy;
        serve.service = self.service.clone();
        serve.spin = self.spin;
        serve.stall = self.stall;
        serve.backlog = self.backlog;
        serve.pin = self.pin;
        serve.seed = self.random.seed;
        Ok(serve)
    }

    /// Returns the protocol with the sizes of the flags.
    fn protocol_with_sizes(&self) -> Result<Protocol, UsageError> {
        type Resize = fn(Protocol, u32) -> Option<Protocol>;
        let mut protocol = self.protocol;
        for (flag, bytes, resize, else_words) in [
            ("request", self.request, Protocol::with_request as Resize, ""),
            ("response", self.response, Protocol::with_response, "; udp sends back what it got"),
            ("body", self.body, Protocol::with_body, "; crr has --response"),
        ] {
            let Some(bytes) = bytes else { continue };
            protocol = resize(protocol, bytes).ok_or_else(|| {
                let fits = Protocol::all().filter(|protocol| resize(*protocol, bytes).is_some());
                let names: Vec<_> = fits.map(Protocol::name).collect();
                refusal(flag, bytes, &format!("accepted with {}{else_words}", names.join(" and ")))
            })?;
        }
        match protocol {
            Protocol::Udp { request } if request > 65_507 => {
                Err(refusal("request", request, "a datagram has 65507 bytes at most"))
            }
            _ => Ok(protocol),
        }
    }

    /// Refuses flags that have no effect with the other flags.
    fn refuse_strangers(&self) -> Result<(), UsageError> {
        if self.idle.is_some() && !self.protocol.has_connections() {
            let name = self.protocol.name();
            return Err(UsageError(format!(
                "'--idle' is not accepted with {name}, which has no connections"
            )));
        }
        match (self.close, self.close_every) {
            (ClosedBy::Client, Some(every)) => {
                Err(refusal("close-every", every, "accepted with --close server or --close rst"))
            }
            _ if self.spin && self.service.is_none() => Err(UsageError(
                "'--spin' needs a time to spin for: give '--service', such as --service 50us".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    fn settings(&self, serve: &Serve) -> ServeSettings {
        let (request_bytes, response_bytes) = serve.protocol.sizes();
        ServeSettings {
            listen: serve.listen(),
            protocol: serve.protocol.name().to_owned(),
            policy: self.policy.map(|policy| policy.to_string()),
            workers: serve.workers as u32,
            request_bytes,
            response_bytes,
            close: serve.close.name().to_owned(),
            close_every: serve.close.every(),
            service: serve.service.to_string(),
            spin: serve.spin,
            idle_ns: (!matches!(serve.protocol, Protocol::Udp { .. })).then(|| nanoseconds(serve.idle)),
            stall_at_ns: serve.stall.map(|stall| nanoseconds(stall.at)),
            stall_length_ns: serve.stall.map(|stall| nanoseconds(stall.length)),
            backlog: serve.backlog,
            defer_accept: serve.defers_accept(),
            pin: serve.pin,
            for_ns: self.time.map(nanoseconds),
            seed: serve.seed,
        }
    }
}

/// Returns the ready line: `listening on 127.0.0.1:8080, 2 workers (SO_REUSEPORT)`.
fn ready_line(running: &Running, workers: usize) -> String {
    let plural = if workers == 1 { "" } else { "s" };
    format!("listening on {}, {workers} worker{plural} ({})", running.listen(), running.policy().mechanism())
}

/// Waits until `stop` is set, the time is over, or a worker has failed.
fn wait(running: &Running, stop: &AtomicBool, time: Option<Duration>) {
    let begun = Instant::now();
    while !stop.load(Ordering::Relaxed) && !running.has_failed() {
        let left = time.map_or(LOOK, |time| time.saturating_sub(begun.elapsed()));
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(LOOK));
    }
}
