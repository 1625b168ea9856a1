//! The file of `--requests`: one JSON object a line.

mod expect;

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use fourtuple::dial::{SourcePool, Strategy};
use fourtuple_bench::load::{
    Arrival, Close, EngineChoice, HostAddresses, HttpRequest, Load, MAX_BODY, MAX_BYTES, MAX_CONNECTIONS,
    MAX_HELD, MAX_RATE, MAX_STREAMS, MAX_THREADS, Measured, Order, Prepared, Ramp, RequestList, RunProgress,
    SYSCTLS, Scheme, Target, TlsOptions, Trust, Workload,
};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{LoadRecord, Saved, Second, format_duration, format_time};
use fourtuple_syscalls::resource;
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Deserialize;
use time::OffsetDateTime;

use self::expect::Expectation;
use crate::exit::{self, Exit, NotValid, UsageError};
use crate::output::{self, Output, Random};
use crate::save::{self, save};
use crate::{input, names, stop, units};

/// Generate connections: their cost, their failures, the ports they need
///
/// Before the first packet, a preflight checks that this host has the resources for the run (ports, descriptors, queues). It
/// refuses a run that would measure a lack of them (exit code 3), except with --anyway. Remarks on the result name limits
/// that the run reached.
#[derive(Debug, Args)]
pub struct LoadFlags {
    /// http[s]://HOST[:PORT][/PATH], tcp|udp://HOST:PORT, unix:FILE[:/PATH]
    target: Target,
    /// Addresses of HOST:PORT, as with curl
    #[arg(long, value_name = "HOST:PORT:ADDR,...")]
    resolve: Option<HostAddresses>,
    /// Connect to all addresses of HOST in turn
    ///
    /// Without it, all connections go to the first address that answers a probe before the run.
    #[arg(long)]
    all_addresses: bool,
    /// How a source port is found [default: auto]
    ///
    /// kernel-default, select-test-repeat, random-window:WIDTH, full-range or auto.
    #[arg(long, value_name = "NAME", value_parser = names::strategy())]
    strategy: Option<Strategy>,
    /// Source addresses [default: the kernel's choice]
    ///
    /// Several with commas, or a network such as 127.0.0.0/28.
    #[arg(long, value_name = "ADDR,...")]
    source: Option<String>,
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Workload::names()),
        help = format!("Operations: {}", in_list(&Workload::names().collect::<Vec<_>>())), long_help = workload_help())]
    workload: Option<String>,
    /// Open at once, over all threads [default: 64]
    ///
    /// With --rate the default is 1024, with --hold alone none.
    #[arg(long, value_name = "N", value_parser = units::up_to::<MAX_CONNECTIONS>, allow_hyphen_values = true)]
    connections: Option<u32>,
    /// Open this many first, and keep them open
    #[arg(long, value_name = "N", value_parser = units::up_to::<MAX_HELD>, allow_hyphen_values = true)]
    hold: Option<u32>,
    /// Side that closes first
    ///
    /// client: FIN, and TIME_WAIT here. rst: the client resets, unlike ordinary applications. server: TIME_WAIT there.
    #[arg(long, default_value = "client", value_parser = names::one_of(&[("client", Close::Client), ("rst", Close::Reset), ("server", Close::Server)]))]
    close: Close,
    /// Requests until a close, or never
    ///
    /// The default is 1; for http and udp never.
    #[arg(long, value_name = "COUNT|never", value_parser = close_every, allow_hyphen_values = true)]
    close_every: Option<u64>,
    /// Send the last ACK of the handshake alone
    ///
    /// Otherwise the request carries it (TCP_QUICKACK off).
    #[arg(long)]
    separate_ack: bool,
    /// Open loop: operations to begin each second
    ///
    /// They begin even if earlier operations are in progress.
    #[arg(long, value_name = "RATE", value_parser = rate, group = "open", allow_hyphen_values = true)]
    rate: Option<f64>,
    /// Rates to try in turn until one is not reached
    ///
    /// An open loop each. LOW..HIGH[:STEPS], such as 1k/s..20k/s: equal ratios between the rates, 10 by default, each for the time of --for. The
    /// result is that of the last rate that was reached, with a row for each.
    #[arg(long, value_name = "LOW..HIGH", value_parser = ramp, group = "open",
        conflicts_with_all = ["pause", "operations", "hold", "hdr", "csv"])]
    ramp: Option<Ramp>,
    /// Process of --rate and --ramp [default: poisson]
    #[arg(long, value_enum, requires = "open")]
    arrival: Option<ArrivalProcess>,
    /// Closed loop: pause between two operations
    #[arg(long, value_name = "TIME", value_parser = units::duration, conflicts_with = "rate", allow_hyphen_values = true)]
    pause: Option<Duration>,
    /// Size of a request for crr, udp [default: 1]
    #[arg(long, value_name = "BYTES", value_parser = units::up_to::<MAX_BYTES>, allow_hyphen_values = true)]
    request: Option<u32>,
    /// Size of a response for crr [default: 1]
    #[arg(long, value_name = "BYTES", value_parser = units::up_to::<MAX_BYTES>, allow_hyphen_values = true)]
    response: Option<u32>,
    /// Method [default: GET, with --body POST]
    #[arg(long, value_name = "NAME", value_parser = token)]
    method: Option<String>,
    /// Header; repeatable
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(String, String)>,
    /// Body, as text or from a file
    #[arg(long, value_name = "TEXT|@FILE", allow_hyphen_values = true)]
    body: Option<String>,
    /// Requests, one JSON object a line
    ///
    /// Keys: method, path, headers (an object), body, body_file. A line without path has that of the target, and --header adds to
    /// all lines that lack it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["method", "body"])]
    requests: Option<PathBuf>,
    /// Order of --requests [default: turn]
    ///
    /// turn: one after another over all connections; random: by --seed.
    #[arg(long, requires = "requests", value_parser = names::one_of(&[("turn", Order::Turn), ("random", Order::Random)]))]
    order: Option<Order>,
    /// HTTP/2, with TLS by ALPN, else by prior knowledge
    #[arg(long)]
    http2: bool,
    /// Concurrent streams of each connection [default: 1]
    ///
    /// Each carries one request at a time. A connection has fewer if the server accepts fewer.
    #[arg(long, value_name = "N", requires = "http2", value_parser = units::up_to::<MAX_STREAMS>, allow_hyphen_values = true)]
    streams: Option<u32>,
    /// Trust these certificates (PEM) too
    ///
    /// Of an authority, or the server's own; without it, the system's authorities alone are trusted.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Accept every certificate
    #[arg(long, conflicts_with = "ca")]
    insecure: bool,
    /// Name of the server in the TLS handshake
    ///
    /// Its certificate is checked against it. Without it, the host of the target.
    #[arg(long, value_name = "NAME", value_parser = server_name)]
    sni: Option<String>,
    /// Certificate of the client (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Private key of --cert (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// Make every TLS handshake a full one
    #[arg(long)]
    no_resumption: bool,
    /// Protocols to offer [default: http/1.1]
    ///
    /// Names of ALPN, or none. load speaks HTTP/1.1: a connection for which the server chooses another fails.
    #[arg(long, value_name = "NAME,...|none", value_parser = alpn)]
    alpn: Option<Alpn>,
    /// Begin operations for this time [default: 10s]
    ///
    /// An operation in progress then has until its --timeout, at most 2s from its start. With --operations alone there is no
    /// limit.
    #[arg(long = "for", value_name = "TIME", value_parser = units::limit, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Time before --for, left out of the result
    ///
    /// Operations that begin in it are counted apart.
    #[arg(long, value_name = "TIME", value_parser = units::limit, allow_hyphen_values = true)]
    warm_up: Option<Duration>,
    /// End after this many operations
    #[arg(long, value_name = "COUNT", value_parser = units::count, allow_hyphen_values = true)]
    operations: Option<u64>,
    /// Limit of an operation
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::limit, allow_hyphen_values = true)]
    timeout: Duration,
    /// How system calls are made
    ///
    /// uring (chains on direct descriptors), epoll, or auto: uring if it passes its test, else epoll. --http2 has an engine of its
    /// own.
    #[arg(long, default_value = "auto", value_parser = names::one_of(&[("auto", EngineChoice::Auto), ("uring", EngineChoice::Uring), ("epoll", EngineChoice::Epoll)]))]
    engine: EngineChoice,
    /// Number of generating threads
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<MAX_THREADS>, allow_hyphen_values = true)]
    threads: u32,
    /// Pin thread i to the i-th allowed CPU
    #[arg(long)]
    pin: bool,
    /// Run even if the preflight refuses
    ///
    /// The result then has a remark.
    #[arg(long)]
    anyway: bool,
    #[command(flatten)]
    random: Random,
    /// List operations that take longer
    #[arg(long, value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    threshold: Option<Duration>,
    /// Write histograms per second (HdrHistogram log)
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    hdr: Option<PathBuf>,
    /// Write a row for each second
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    csv: Option<PathBuf>,
    /// Threshold, such as 'p99<20ms'; repeatable
    ///
    /// NAME<LIMIT, also with <=, > or >=. Names: mean, p50, p75, p90, p95, p99, p99.9 and max (times of an operation), rate, and
    /// errors (a share of the operations, or a count). If one is not met, the exit code is 1. A threshold of errors replaces the
    /// remark on errors.
    #[arg(long, value_name = "THRESHOLD", value_parser = Expectation::parse)]
    expect: Vec<Expectation>,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrivalProcess {
    Even,
    Poisson,
}

fn workload_help() -> String {
    let default = "http, for tcp:// crr or with --hold hold, for udp:// udp";
    format!("Operations: {} [default: {default}]", Workload::descriptions())
}

/// Returns the names of the workloads with this property: `the workloads crr and udp`.
fn workloads(has: impl Fn(&Workload) -> bool) -> String {
    let names = Workload::names_of(has);
    format!("the workload{} {}", if names.len() == 1 { "" } else { "s" }, in_list(&names))
}

/// Returns a list such as `crr, http and udp`.
fn in_list(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.join(", "),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match units::rate(text)? {
        rate if rate > 0.0 && rate <= MAX_RATE => Ok(rate),
        _ => Err(format!(
            "{text:?} is not accepted: expected a rate above 0, up to 1e9/s, such as 2000/s or 20k/s"
        )),
    }
}

/// The names of `--alpn`.
#[derive(Clone, Debug)]
struct Alpn(Vec<String>);

fn alpn(text: &str) -> Result<Alpn, String> {
    if text == "none" {
        return Ok(Alpn(Vec::new()));
    }
    let names: Vec<String> = text.split(',').map(str::to_owned).collect();
    let is_name =
        |name: &String| (1..=255).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    match names.iter().all(is_name) {
        true => Ok(Alpn(names)),
        false => Err(format!(
            "{text:?} is not accepted: expected names of protocols of 1 to 255 bytes, such as http/1.1,http/1.0, or none"
        )),
    }
}

fn server_name(text: &str) -> Result<String, String> {
    let is_name = TlsOptions::is_name(text);
    is_name.then(|| text.to_owned()).ok_or_else(|| {
        format!("{text:?} is not the name of a server: expected a host name, such as example.org")
    })
}

fn ramp(text: &str) -> Result<Ramp, String> {
    let refuse = || {
        format!(
            "{text:?} is not a ramp: expected LOW..HIGH or LOW..HIGH:STEPS, two rates above 0 up to 1e9/s, the higher one last, \
             and 2 to {} steps, such as 1k/s..20k/s:12",
            Ramp::MAX_STEPS
        )
    };
    let (from, rest) = text.split_once("..").ok_or_else(refuse)?;
    let (to, steps) = rest.split_once(':').unwrap_or((rest, "10"));
    let steps =
        steps.parse().ok().filter(|steps| (2..=Ramp::MAX_STEPS).contains(steps)).ok_or_else(refuse)?;
    let [from, to] = [from, to].map(|text| rate(text).map_err(|_| refuse()));
    Some(Ramp { from: from?, to: to?, steps }).filter(|ramp| ramp.from < ramp.to).ok_or_else(refuse)
}

fn close_every(text: &str) -> Result<u64, String> {
    if text == "never" {
        return Ok(0);
    }
    units::count(text)
        .map_err(|_| format!("{text:?} is not accepted: expected a whole number from 1, or never"))
}

/// Parses an HTTP token (RFC 9110, section 5.6.2).
fn token(text: &str) -> Result<String, String> {
    if HttpRequest::is_token(text) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not a name of HTTP: expected letters, digits and !#$%&'*+-.^_`|~"))
    }
}

fn header(text: &str) -> Result<(String, String), String> {
    let refuse = || format!("{text:?} is not a header: expected 'Name: value' on one line");
    let (name, value) = text.split_once(':').ok_or_else(refuse)?;
    let value = value.trim();
    if !HttpRequest::is_value(value) {
        return Err(refuse());
    }
    Ok((token(name).map_err(|_| refuse())?, value.to_owned()))
}

impl LoadFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let load = self.load()?;
        load.check()?;
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let started = OffsetDateTime::now_utc();
        let length = load.length.map(|length| load.warm_up + length);
        let prepared = Prepared::new(load)?;
        self.warn(&prepared)?;
        // Until here there is nothing to keep: a signal ends the process, also while a name server delays the answer.
        let stop = stop::flag()?;
        let line = Line::new(self.output.quiet, length);
        let measured = prepared.run(&stop, None, |progress| line.show(progress))?;
        line.finish();
        let host = output::host(&SYSCTLS, &[]);
        let settings = prepared.settings(self.source.as_deref(), self.anyway);
        let Measured { results, remarks, log, .. } = measured;
        self.finish(output::record("load", started, host, settings, remarks, results), log)
    }

    /// Judges the thresholds, prints a record, and writes the files of the flags.
    pub fn finish(&self, mut record: LoadRecord, log: Option<String>) -> anyhow::Result<Exit> {
        let fails = self.judge(&mut record);
        record.settings.expect =
            self.expect.iter().map(|expectation| expectation.text().to_owned()).collect();
        let rows = self.csv.as_ref().map(|path| (path, rows(&record.results.seconds)));
        let exit = self.output.finish(&Saved::Load(record))?;
        if self.output.json {
            fails.iter().for_each(|line| output::say(&format!("fourtuple: {line}")));
        }
        // The log and the rows are written last, so that a write error does not lose the measurement.
        if let (Some(path), Some(log)) = (&self.hdr, log) {
            save(path, &log)?;
        }
        if let Some((path, rows)) = rows {
            save(path, &rows)?;
        }
        Ok(if exit == Exit::Fine && !fails.is_empty() { Exit::Findings } else { exit })
    }

    /// Judges the thresholds, and returns a line for each that was not met. A threshold of errors replaces the remark on errors.
    fn judge(&self, record: &mut LoadRecord) -> Vec<String> {
        let judged = self.expect.iter().map(|expectation| expectation.judge(&record.results));
        record.results.expectations = judged.collect();
        if self.expect.iter().any(Expectation::is_of_errors) {
            record.validity.retain(|remark| remark.id != "errors");
        }
        record.results.expectations.iter().filter(|judged| !judged.met).map(expect::line).collect()
    }

    /// Refuses flags that `load` alone has, not the command that runs it.
    fn refuse_alone(&self, command: &str) -> Result<(), UsageError> {
        let is_fleet = command == "fleet load";
        let alone = [
            ("expect", !is_fleet && !self.expect.is_empty()),
            ("csv", !is_fleet && self.csv.is_some()),
            ("ramp", self.ramp.is_some()),
            ("cert", is_fleet && self.cert.is_some()),
        ];
        match alone.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(UsageError(format!("'--{flag}' is accepted by load alone, not by {command}")))
            }
            None => Ok(()),
        }
    }

    /// Returns the run that `compare` repeats, or the message of the error.
    pub(crate) fn comparable(&self) -> Result<Load, String> {
        let checked = || {
            self.refuse_alone("compare")?;
            let load = self.load()?;
            load.check()?;
            Ok(load)
        };
        checked().map_err(|error: anyhow::Error| exit::message(&error))
    }

    /// Returns the run that `fleet load` splits over workers. Without `--connections` each worker has the default number.
    pub fn for_workers(&self, workers: u32) -> anyhow::Result<Load> {
        self.refuse_alone("fleet load")?;
        let mut load = self.load()?;
        load.check()?;
        if self.connections.is_none() {
            load.connections = load.connections.saturating_mul(workers);
        }
        Ok(load)
    }

    /// Returns the text of `--source`.
    pub fn sources(&self) -> Option<&str> {
        self.source.as_deref()
    }

    pub fn anyway(&self) -> bool {
        self.anyway
    }

    /// Prints the findings of the preflight, and returns an error if it refuses the run without `--anyway`.
    fn warn(&self, prepared: &Prepared) -> anyhow::Result<()> {
        if let Some(refusal) = prepared.refusal().filter(|_| !self.anyway) {
            return Err(NotValid(format!("{refusal}; --anyway runs it nevertheless")).into());
        }
        if !self.output.quiet {
            for finding in prepared.findings() {
                // The write fails if the reader is gone.
                output::say(&format!("fourtuple: {finding}"));
            }
        }
        Ok(())
    }

    fn load(&self) -> anyhow::Result<Load> {
        let by_scheme = match self.target.scheme() {
            Scheme::Http | Scheme::Https | Scheme::Unix => "http",
            Scheme::Tcp if self.hold.is_some() => Workload::HOLD,
            Scheme::Tcp => "crr",
            Scheme::Udp => "udp",
        };
        let name = self.workload.as_deref().unwrap_or(by_scheme);
        if name == Workload::HOLD && self.hold.is_none() {
            return Err(
                UsageError("'--workload hold' needs '--hold', the connections to keep".to_owned()).into()
            );
        }
        let mut workload = Workload::named(name).expect("a name of the table");
        self.refuse_strangers(&workload)?;
        if let Some(bytes) = self.request {
            workload = workload.with_request(bytes as usize).unwrap_or(workload);
        }
        if let Some(bytes) = self.response {
            workload = workload.with_response(bytes as usize).unwrap_or(workload);
        }
        if let Workload::Http(request) = &mut workload {
            *request = self.http()?;
        }
        let requests = match (&self.requests, &workload) {
            (Some(path), Workload::Http(common)) => Some(Arc::new(RequestList {
                file: path.display().to_string(),
                requests: read_requests(path, common)?,
                order: self.order.unwrap_or(Order::Turn),
            })),
            _ => None,
        };
        let arrival = match (self.rate.or(self.ramp.map(|ramp| ramp.to)), self.arrival) {
            (None, _) => Arrival::Closed,
            (Some(rate), Some(ArrivalProcess::Even)) => Arrival::Even(rate),
            (Some(rate), _) => Arrival::Poisson(rate),
        };
        let connections = self.connections.unwrap_or(match (arrival.rate_per_s(), self.hold) {
            (Some(_), _) => 1024,
            (None, Some(_)) => 0,
            // Measured: more connections gain nothing, and 32 connections lose a tenth of the rate.
            (None, None) => 64,
        });
        let keeps = workload.keeps_connections();
        let sources = match &self.source {
            None => SourcePool::any(),
            Some(text) => text
                .parse()
                .map_err(|error| UsageError(format!("invalid value '{text}' for '--source': {error}")))?,
        };
        Ok(Load {
            target: self.target.clone(),
            resolve: self.resolve.clone(),
            all_addresses: self.all_addresses,
            requests,
            workload,
            streams: self.http2.then(|| self.streams.unwrap_or(1)),
            arrival,
            connections,
            pause: self.pause.unwrap_or_default(),
            close_every: self.close_every.unwrap_or(if keeps { 0 } else { 1 }),
            close: self.close,
            hold: self.hold.unwrap_or(0),
            operations: self.operations,
            length: self.time.or(self.operations.is_none().then_some(Duration::from_secs(10))),
            warm_up: self.warm_up.unwrap_or_default(),
            ramp: self.ramp,
            timeout: self.timeout,
            threshold: self.threshold,
            engine: self.engine,
            threads: self.threads as usize,
            pinned: self.pin,
            strategy: self.strategy.unwrap_or(Strategy::Auto),
            sources,
            trust: match &self.ca {
                _ if self.insecure => Trust::AnyCertificate,
                Some(path) => Trust::Also(path.clone()),
                None => Trust::System,
            },
            tls: TlsOptions {
                name: self.sni.clone(),
                identity: self.cert.clone().zip(self.key.clone()),
                full_handshakes: self.no_resumption,
                protocols: self.alpn.as_ref().map(|Alpn(names)| names.clone()),
            },
            separate_ack: self.separate_ack,
            seed: self.random.seed,
            log: self.hdr.is_some(),
        })
    }

    fn http(&self) -> anyhow::Result<HttpRequest> {
        let body = match self.body.as_deref().map(|body| body.strip_prefix('@').ok_or(body)) {
            None => Vec::new(),
            Some(Err(text)) => text.as_bytes().to_vec(),
            Some(Ok(path)) => read_body(Path::new(path))
                .map_err(|why| UsageError(format!("invalid value '@{path}' for '--body': {why}")))?,
        };
        let default = if self.body.is_some() { "POST" } else { "GET" };
        Ok(HttpRequest {
            method: self.method.clone().unwrap_or_else(|| default.to_owned()),
            path: self.target.path().to_owned(),
            authority: self.target.authority(),
            headers: self.header.clone(),
            body,
            asks_to_close: self.close == Close::Server,
        })
    }

    fn flag_of_tls(&self) -> Option<&'static str> {
        let given = [
            ("sni", self.sni.is_some()),
            ("cert", self.cert.is_some()),
            ("no-resumption", self.no_resumption),
            ("alpn", self.alpn.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// Refuses flags that have no effect with the other flags.
    fn refuse_strangers(&self, workload: &Workload) -> Result<(), UsageError> {
        let stray = |flag: &str, accepted: &str| {
            Err(UsageError(format!("'--{flag}' changes nothing here: it is accepted with {accepted}")))
        };
        let has_requests = |workload: &Workload| workload.with_request(1).is_some();
        let has_responses = |workload: &Workload| workload.with_response(1).is_some();
        let is_http = |workload: &Workload| matches!(workload, Workload::Http(_));
        let sends_something = |workload: &Workload| !workload.sends_nothing();
        let is_tcp = |scheme: &Scheme| !matches!(scheme, Scheme::Udp | Scheme::Unix);
        if self.request.is_some() && !has_requests(workload) {
            stray("request", &workloads(has_requests))
        } else if self.request.is_some_and(|bytes| matches!(workload, Workload::Udp { .. }) && bytes > 65_507)
        {
            Err(UsageError("invalid value for '--request': a datagram has 65507 bytes at most".to_owned()))
        } else if self.response.is_some() && !has_responses(workload) {
            stray("response", &workloads(has_responses))
        } else if (self.method.is_some() || !self.header.is_empty() || self.body.is_some())
            && !is_http(workload)
        {
            stray("method', '--header' or '--body", &workloads(is_http))
        } else if self.requests.is_some() && !is_http(workload) {
            stray("requests", &workloads(is_http))
        } else if (self.insecure || self.ca.is_some()) && self.target.scheme() != Scheme::Https {
            stray("insecure' or '--ca", "https://")
        } else if let (Some(flag), true) = (self.flag_of_tls(), self.target.scheme() != Scheme::Https) {
            stray(flag, "https://")
        } else if self.strategy.is_some() && !is_tcp(&self.target.scheme()) {
            stray("strategy", "tcp://, http:// and https://")
        } else if self.separate_ack && (!is_tcp(&self.target.scheme()) || workload.sends_nothing()) {
            let fits =
                |workload: &Workload| sends_something(workload) && workload.schemes().iter().any(is_tcp);
            stray("separate-ack", &format!("{} over TCP", workloads(fits)))
        } else if self.separate_ack && self.http2 {
            stray("separate-ack", "HTTP/1.1: with HTTP/2 the ACK is separate")
        } else if self.close_every.is_some_and(|every| every != 1) && workload.sends_nothing() {
            let accepted = in_list(&Workload::names_of(sends_something));
            stray("close-every", &format!("{accepted}: nothing is said on these connections"))
        } else {
            Ok(())
        }
    }
}

/// The progress line on stderr, if stderr is a terminal.
struct Line(Option<ProgressBar>);

impl Line {
    fn new(quiet: bool, length: Option<Duration>) -> Self {
        if quiet || !io::stderr().is_terminal() {
            return Line(None);
        }
        let milliseconds = length.map(|length| length.as_millis() as u64);
        let bar = ProgressBar::with_draw_target(milliseconds, ProgressDrawTarget::stderr_with_hz(5));
        let template = if length.is_some() { "{bar:12} {wide_msg}" } else { "{spinner} {wide_msg}" };
        bar.set_style(
            ProgressStyle::with_template(template).expect("the template names fields that there are"),
        );
        Line(Some(bar))
    }

    fn show(&self, progress: &RunProgress) {
        let Some(bar) = &self.0 else { return };
        let mut words = vec![format_time(progress.elapsed)];
        if let Some(last) = progress.last {
            let time = format_duration;
            words.push(format!("{}/s", HumanCount(last.operations)));
            words.push(format!("p50 {} p99 {}", time(last.p50_ns), time(last.p99_ns)));
        }
        words.push(format!("{} done", HumanCount(progress.operations)));
        if progress.errors > 0 {
            words.push(format!("{} failed", HumanCount(progress.errors)));
        }
        if progress.held > 0 {
            words.push(format!("{} held", HumanCount(progress.held)));
        }
        match (progress.ports_left, progress.ports_end) {
            (Some(left), Some(end)) => {
                let rest = format_time(end.saturating_sub(progress.elapsed));
                words.push(format!("{} left, for {rest}", counted(left, "port")));
            }
            (Some(left), None) => words.push(format!("{} left", counted(left, "port"))),
            (None, _) => {}
        }
        bar.set_message(words.join("  "));
        bar.set_position(progress.elapsed.as_millis() as u64);
    }

    fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Returns the seconds of a run as a table for other programs (RFC 4180).
fn rows(seconds: &[Second]) -> String {
    let mut text = "second,operations,connections,errors,p50_ns,p99_ns,max_ns,ports_left\r\n".to_owned();
    for second in seconds {
        let Second { at_ns, operations, connections, errors, p50_ns, p99_ns, max_ns, ports_left } = second;
        let (number, ports) =
            (at_ns / 1_000_000_000, ports_left.map_or(String::new(), |left| left.to_string()));
        text +=
            &format!("{number},{operations},{connections},{errors},{p50_ns},{p99_ns},{max_ns},{ports}\r\n");
    }
    text
}

/// Maximum length of the file in bytes.
const MAX_FILE: u64 = 256 << 20;

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestLine {
    method: Option<String>,
    path: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<String>,
    body_file: Option<PathBuf>,
}

/// Reads a file with a body: a regular one may be longer than what a device without an end may fill.
fn read_body(path: &Path) -> Result<Vec<u8>, String> {
    let is_regular = path.metadata().is_ok_and(|file| file.is_file());
    let most = if is_regular { MAX_BODY } else { MAX_BYTES.into() };
    input::read(path, most).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Reads the requests; `common` has the authority and the headers that all share, and the default path.
fn read_requests(path: &Path, common: &HttpRequest) -> Result<Vec<HttpRequest>, UsageError> {
    let place = path.display();
    let refuse = |why: String| UsageError(format!("invalid value '{place}' for '--requests': {why}"));
    let text = input::read(path, MAX_FILE)
        .and_then(input::utf8)
        .map_err(|error| refuse(format!("cannot read it: {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let requests = lines.map(|(number, line)| {
        parse_request(line, common).map_err(|why| refuse(format!("line {}: {why}", number + 1)))
    });
    let requests = requests.collect::<Result<Vec<_>, _>>()?;
    if requests.is_empty() {
        return Err(refuse("expected one JSON object a line, such as {\"path\": \"/\"}".to_owned()));
    }
    Ok(requests)
}

fn parse_request(line: &str, common: &HttpRequest) -> Result<HttpRequest, String> {
    let RequestLine { method, path, headers, body, body_file } =
        serde_json::from_str(line).map_err(|error| parse_error(&error))?;
    let body = match (body, body_file) {
        (Some(_), Some(_)) => return Err("expected body or body_file, not both".to_owned()),
        (Some(text), None) => Some(text.into_bytes()),
        (None, Some(path)) => Some(read_body(&path)?),
        (None, None) => None,
    };
    let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
    if !HttpRequest::is_token(&method) {
        return Err(format!("invalid method {method:?}: expected a name of HTTP, such as GET"));
    }
    let path = path.unwrap_or_else(|| common.path.clone());
    if !HttpRequest::is_path(&path) {
        return Err(format!("invalid path {path:?}: expected one that begins with / and has no blanks"));
    }
    let is_header =
        |(name, value): &(&String, &String)| HttpRequest::is_token(name) && HttpRequest::is_value(value);
    if let Some((name, value)) = headers.iter().find(|header| !is_header(header)) {
        return Err(format!(
            "invalid header {:?}: expected a name and a value on one line",
            format!("{name}: {value}")
        ));
    }
    let is_own = |name: &str| headers.keys().any(|own| own.eq_ignore_ascii_case(name));
    let mut all: Vec<(String, String)> =
        common.headers.iter().filter(|(name, _)| !is_own(name)).cloned().collect();
    all.extend(headers.clone());
    Ok(HttpRequest { method, path, headers: all, body: body.unwrap_or_default(), ..common.clone() })
}

/// Returns the message of the parser without its position: it parsed one line.
fn parse_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    format!("{text}: expected an object with method, path, headers, body or body_file")
}
