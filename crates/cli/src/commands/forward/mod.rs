mod advice;
mod config;
mod live;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use fourtuple::spread::Selector;
use fourtuple_forward::{
    ClientLimit, Forward, ForwardError, HandoverError, PlaneCounts, PlaneKind, Predecessor, Reception,
    Running, SessionReport, TakenOver, TakeoverOutcome, TakeoverSocket,
};
use fourtuple_record::measure::balance;
use fourtuple_record::{
    ForwardBfd, ForwardLink, ForwardPlane, ForwardResults, ForwardSettings, Remark, Saved, format_time,
};
use fourtuple_syscalls::{option, resource, schedule};
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::{stop, units};
use config::{File, LinkText, ParsedLink};
use live::Metrics;

/// The interval at which the main thread checks for signals and the end of `--for`.
const LOOK: Duration = Duration::from_millis(20);
/// The interval at which the live table and the metrics are updated.
const TELL: Duration = Duration::from_millis(500);

/// Forward UDP on all CPUs, even if every packet has the same 4-tuple
///
/// Data planes share nothing: each has its own socket of a SO_REUSEPORT group, and --spread chooses the plane of each packet.
/// Ctrl-C, SIGTERM and the end of --for forward the packets in the receive queues, then end the process. SIGHUP reloads the routes
/// of --config. When the sockets are open, a line on stderr reports the address, with the real port for port 0.
#[derive(Debug, Args)]
pub(crate) struct ForwardFlags {
    /// Address to listen on
    #[arg(long, value_name = "ADDR:PORT", required_unless_present = "config", allow_hyphen_values = true)]
    listen: Option<String>,
    /// Listen even if another process does
    ///
    /// The kernel then distributes packets over the sockets of both.
    #[arg(long)]
    share: bool,
    /// Size of the receive queue of a socket
    ///
    /// SO_RCVBUF of each listening socket, in which a burst waits [default: net.core.rmem_default]
    #[arg(long, value_name = "BYTES", value_parser = units::up_to::<{ config::MAX_RECEIVE_BUFFER }>, allow_hyphen_values = true)]
    receive_buffer: Option<u32>,
    /// Take over from the process with this path
    ///
    /// Without packet loss; a later process can take over from this one. PATH becomes a unix socket, only for this user and root.
    #[arg(long, value_name = "PATH")]
    takeover: Option<PathBuf>,
    /// Next hop of packets that no --route matches
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "config", allow_hyphen_values = true)]
    to: Option<String>,
    /// Next hop of a prefix or a key; repeatable
    ///
    /// WHAT is a destination prefix or an inner key: 10.0.0.0/8=192.0.2.1:4000, 7=192.0.2.1:4000.
    #[arg(
        long = "route",
        value_name = "WHAT=ADDR:PORT",
        conflicts_with = "config",
        allow_hyphen_values = true
    )]
    routes: Vec<String>,
    /// Position of the key of routes
    ///
    /// In the payload [default: the position of --spread flow]
    #[arg(long, value_name = "OFFSET:WIDTH", conflicts_with = "config", allow_hyphen_values = true)]
    key: Option<String>,
    /// TOML file with [[link]] tables
    ///
    /// Instead of --listen, of the other flags of routes and of BFD, and of --spread, --return, --idle and --clients.
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    config: Option<PathBuf>,
    /// Number of planes [default: one per CPU]
    #[arg(long, value_name = "N|auto", value_parser = planes, allow_hyphen_values = true)]
    planes: Option<Planes>,
    /// Calls that move packets [default: offload]
    #[arg(long, value_name = "HOW", value_parser = kind, allow_hyphen_values = true,
        long_help = format!("System calls that move packets: {} [default: offload]", PlaneKind::descriptions()))]
    plane: Option<PlaneKind>,
    /// What chooses the plane of a packet [default: hash]
    #[arg(long, value_name = "HOW", conflicts_with = "config", allow_hyphen_values = true,
        long_help = format!("Choose the plane of a packet by {} [default: hash]", Selector::help()))]
    spread: Option<String>,
    /// Pin plane i to the i-th allowed CPU
    ///
    /// Starts again at the first if there are more planes than CPUs.
    #[arg(long)]
    pin: bool,
    /// Return replies from next hops to the client
    ///
    /// That sent the packet; uses one socket per client.
    #[arg(long = "return", conflicts_with = "config")]
    replies: bool,
    /// Close a client's socket after this silence
    ///
    /// With --return [default: 60s]
    #[arg(long, value_name = "TIME", conflicts_with = "config", allow_hyphen_values = true)]
    idle: Option<String>,
    /// Maximum of clients of a plane [default: 4096]
    ///
    /// With --return.
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ config::MAX_CLIENTS }>, conflicts_with = "config", allow_hyphen_values = true)]
    clients: Option<u32>,
    /// Maximum of clients of all planes
    ///
    /// With --return; each client takes an ephemeral UDP port of the host [default: 3/4 of these ports or of RLIMIT_NOFILE, the
    /// smaller of both]
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ config::MAX_CLIENTS }>, allow_hyphen_values = true)]
    clients_total: Option<u32>,
    /// Monitor the link to this peer
    ///
    /// RFC 5880 and 5881. Bound to a device (required for link-local addresses) and to a local address if given.
    #[arg(long, value_name = "PEER[%DEV][@LOCAL]", conflicts_with = "config", allow_hyphen_values = true)]
    bfd: Option<String>,
    /// Monitor on the port of the data
    ///
    /// From --listen to this address. A socket filter separates control packets from data, except for --spread hash with more than
    /// one plane.
    #[arg(long, value_name = "ADDR:PORT", conflicts_with_all = ["config", "bfd"], allow_hyphen_values = true)]
    bfd_in_band: Option<String>,
    /// Interval of packets sent [default: 300ms]
    ///
    /// Desired Min TX, and the default of --bfd-receive-interval.
    #[arg(long, value_name = "TIME", conflicts_with = "config", allow_hyphen_values = true)]
    bfd_interval: Option<String>,
    /// Least interval of the peer's packets
    ///
    /// Required Min RX [default: --bfd-interval]
    #[arg(long, value_name = "TIME", conflicts_with = "config", allow_hyphen_values = true)]
    bfd_receive_interval: Option<String>,
    /// Missing packets until down [default: 3]
    ///
    /// Detection multiplier: the peer declares the session down after this many, 1 to 255.
    #[arg(long, value_name = "N", conflicts_with = "config", allow_hyphen_values = true)]
    bfd_multiplier: Option<u32>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Serve counters for Prometheus at this address
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address, allow_hyphen_values = true)]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planes {
    Auto,
    Number(u32),
}

fn planes(text: &str) -> Result<Planes, String> {
    match text {
        "auto" => Ok(Planes::Auto),
        _ => units::up_to::<1024>(text).map(Planes::Number).map_err(|why| format!("{why}, or auto")),
    }
}

/// Checks on a socket that the kernel grants a receive queue of this size: it reduces a larger one without an error.
fn allow_receive_buffer(bytes: u32) -> anyhow::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot open a UDP socket")?;
    let set = option::set_receive_buffer(socket.as_fd(), bytes as i32).context("setsockopt(SO_RCVBUF)")?;
    // The kernel doubles the size for its own overhead.
    let granted = set.unsigned_abs() / 2;
    if granted < bytes {
        let message = format!(
            "invalid value '{bytes}' for '--receive-buffer': the kernel grants {granted} (net.core.rmem_max); sysctl -w net.core.rmem_max={bytes} raises it"
        );
        return Err(UsageError(message).into());
    }
    Ok(())
}

fn kind(text: &str) -> Result<PlaneKind, String> {
    text.parse()
}

impl ForwardFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let file = self.config.as_deref().map(config::read).transpose()?.unwrap_or_default();
        let links = self.links(&file)?;
        let forward = self.forward(&file, &links)?;
        let stop = stop::flag_without_hangup()?;
        let reload = stop::hangup()?;
        // Each client takes a descriptor, so that the soft limit is raised to the hard limit.
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let started = OffsetDateTime::now_utc();
        let (mut running, mut takeover) = start(&forward, self.takeover.as_deref()).map_err(with_remedy)?;
        let begun = Instant::now();
        // After a takeover, the predecessor holds the address until it has ended.
        let metrics = self.metrics.filter(|_| takeover.from().is_none());
        let mut metrics = metrics.map(|address| live::serve(address, running.client_limit())).transpose()?;
        if !self.output.quiet {
            // Printed without a terminal too: scripts wait for this line.
            for line in ready_lines(&running, &forward) {
                output::say(&line);
            }
            if let Some(process) = takeover.from() {
                output::say(&format!("taken over from process {process}"));
            }
            if let Some(metrics) = &metrics {
                metrics.tell();
            }
        }
        let mut sessions_before = None;
        let mut table = live::Table::new(self.output.quiet);
        let mut last_report = begun;
        while !stop.load(Ordering::Relaxed) {
            let left = self.time.map_or(LOOK, |time| time.saturating_sub(begun.elapsed()));
            if left.is_zero() {
                break;
            }
            running.check()?;
            sessions_before = takeover.look(&mut running, self.output.quiet)?;
            if sessions_before.is_some() {
                break;
            }
            if let (None, Some(address), true) = (&metrics, self.metrics, takeover.is_alone()) {
                metrics = Some(self.late_metrics(address, running.client_limit()));
            }
            if reload.swap(false, Ordering::Relaxed) {
                self.reload(&running, &forward, &links);
            }
            if last_report.elapsed() >= TELL {
                last_report = Instant::now();
                let planes = planes_of(&running, links.len());
                let bfd = sessions(running.bfd());
                table.tell(begun.elapsed(), &planes, &bfd);
                if let Some(metrics) = &metrics {
                    metrics.update(&planes, &bfd);
                }
            }
            thread::sleep(left.min(LOOK));
        }
        table.finish();
        let elapsed = begun.elapsed();
        let listen =
            (0..links.len()).filter_map(|link| running.address(link)).map(|address| address.to_string());
        let listen = listen.collect();
        let bfd = sessions(sessions_before.unwrap_or_else(|| running.end_bfd()));
        let (limit, lacks_gro) = (running.client_limit(), running.lacks_gro());
        let planes = sum(&running.drain()?);
        let validity: Vec<Remark> =
            limit.and_then(|limit| advice::crowded(&planes, limit)).into_iter().collect();
        let received: Vec<u64> = planes.iter().map(|plane| plane.received).collect();
        let results = ForwardResults {
            elapsed_ns: elapsed.as_nanos() as u64,
            listen,
            jain: balance::jain(&received),
            client_limit: limit.map(|limit| limit.clients as u64),
            advice: advice::lines(&planes, &bfd, &forward, lacks_gro),
            planes,
            bfd,
        };
        let host =
            output::host(&["net.core.rmem_max", "net.core.rmem_default", "net.core.wmem_default"], &[]);
        let settings = ForwardSettings {
            links: links.into_iter().map(|link| link.record).collect(),
            planes: forward.planes as u32,
            plane: forward.kind.to_string(),
            pin: forward.pin,
            for_ns: self.time.map(units::nanoseconds),
        };
        let record = output::record("forward", started, host, settings, validity, results);
        self.output.finish(&Saved::Forward(record))
    }

    /// Starts the metrics of a process that has taken over. It already forwards packets, so that an address in use is reported but does
    /// not end it.
    fn late_metrics(&self, address: SocketAddr, limit: Option<ClientLimit>) -> Metrics {
        let metrics = live::serve(address, limit);
        if let (Ok(metrics), false) = (&metrics, self.output.quiet) {
            metrics.tell();
        }
        metrics.unwrap_or_else(|error| {
            output::say(&format!("{error:#}; packets are forwarded without it"));
            Metrics::nowhere(address)
        })
    }

    fn links(&self, file: &File) -> Result<Vec<ParsedLink>, UsageError> {
        let Some(listen) = &self.listen else {
            let links = file.links.iter().enumerate();
            return links
                .map(|(number, link)| {
                    config::parse_link(link, &|field| format!("{field} of link {}", number + 1))
                })
                .collect();
        };
        let link = LinkText {
            listen: listen.clone(),
            to: self.to.clone(),
            routes: self.routes.clone(),
            key: self.key.clone(),
            spread: self.spread.clone(),
            replies: self.replies,
            idle: self.idle.clone(),
            clients: self.clients,
            bfd: self.bfd.clone(),
            bfd_in_band: self.bfd_in_band.clone(),
            bfd_interval: self.bfd_interval.clone(),
            bfd_receive_interval: self.bfd_receive_interval.clone(),
            bfd_multiplier: self.bfd_multiplier,
        };
        let of_clients = [
            ("--idle", link.idle.is_some()),
            ("--clients", link.clients.is_some()),
            ("--clients-total", self.clients_total.is_some()),
        ];
        if let (false, Some((flag, _))) = (link.replies, of_clients.iter().find(|(_, is_given)| *is_given)) {
            return Err(UsageError(format!("'{flag}' needs '--return': only then clients have sockets")));
        }
        Ok(vec![config::parse_link(&link, &|field| format!("--{field}"))?])
    }

    fn forward(&self, file: &File, links: &[ParsedLink]) -> anyhow::Result<Forward> {
        let kind = match (self.plane, &file.plane) {
            (Some(kind), _) => kind,
            (None, Some(text)) => kind(text).map_err(|why| {
                UsageError(format!("invalid value '{text}' for 'plane' of --config: {why}"))
            })?,
            (None, None) => PlaneKind::Offload,
        };
        let planes = match (self.planes, file.planes) {
            (Some(Planes::Number(number)), _) | (None, Some(number)) => number as usize,
            _ => schedule::allowed_cpus().context("cannot ask for the processors")?.len().max(1),
        };
        // The parsers of the flags have checked their values.
        let check = |key: &str, value: u64, max: u32| match value {
            value if (1..=u64::from(max)).contains(&value) => Ok(()),
            _ => Err(UsageError(format!(
                "invalid value '{value}' for '{key}' of --config: expected 1 to {max}"
            ))),
        };
        let clients = self.clients_total.or(file.clients_total);
        let receive_buffer = self.receive_buffer.or(file.receive_buffer);
        check("planes", planes as u64, 1024)?;
        clients.map_or(Ok(()), |clients| check("clients-total", clients.into(), config::MAX_CLIENTS))?;
        receive_buffer
            .map_or(Ok(()), |bytes| check("receive-buffer", bytes.into(), config::MAX_RECEIVE_BUFFER))?;
        if let Some(bytes) = receive_buffer {
            allow_receive_buffer(bytes)?;
        }
        Ok(Forward {
            links: links.iter().map(|link| link.link.clone()).collect(),
            planes,
            kind,
            pin: self.pin || file.pin.unwrap_or_default(),
            work: Duration::ZERO,
            clients: clients.map(|clients| clients as usize),
            share: self.share || file.share.unwrap_or_default(),
            receive_buffer: receive_buffer.map(|bytes| bytes as i32),
        })
    }

    /// Reads `--config` again and replaces the routes of all links. Names each other changed setting, which takes effect only after a
    /// restart. An error in the file changes nothing.
    fn reload(&self, running: &Running, forward: &Forward, links: &[ParsedLink]) {
        let tell = |line: String| {
            if !self.output.quiet {
                output::say(&format!("SIGHUP: {line}"));
            }
        };
        let Some(path) = &self.config else { return tell("no --config to read".to_owned()) };
        let read = config::read(path).map_err(anyhow::Error::from).and_then(|file| {
            let new = self.links(&file)?;
            let forward = self.forward(&file, &new)?;
            Ok((new, forward))
        });
        let (new, new_forward) = match read {
            Ok((new, _)) if new.len() != links.len() => {
                return tell("another number of links needs a new start; nothing is changed".to_owned());
            }
            Ok(new) => new,
            Err(error) => return tell(format!("{error}; nothing is changed")),
        };
        let routes = new.iter().map(|new| new.link.routes.clone()).collect();
        if let Err(error) = running.set_all_routes(routes) {
            return tell(format!("{error}; nothing is changed"));
        }
        let changed = of_all(forward, &new_forward);
        if !changed.is_empty() {
            tell(format!("{} not taken over: needs a new start", changed.join(", ")));
        }
        for (number, (new, old)) in new.iter().zip(links).enumerate() {
            let changed = of_link(&old.record, &new.record);
            if !changed.is_empty() {
                tell(format!(
                    "link {}: only its routes are taken over; {} needs a new start",
                    number + 1,
                    changed.join(", ")
                ));
            }
            tell(format!("link {}: routes taken over", number + 1));
        }
    }
}

/// Adds the remedy to the error for an address in use.
fn with_remedy(error: ForwardError) -> anyhow::Error {
    match error {
        ForwardError::Taken { .. } => anyhow::anyhow!(
            "{error}; '--takeover PATH' takes over from a forwarder that was started with it, '--share' shares the address"
        ),
        error => error.into(),
    }
}

/// Returns a line for each link: `forwarding 127.0.0.1:4000 on 2 planes (offload, spread hash)`.
fn ready_lines(running: &Running, forward: &Forward) -> Vec<String> {
    let plural = if forward.planes == 1 { "" } else { "s" };
    let line = |(number, link): (usize, &fourtuple_forward::Link)| {
        let address = running.address(number).unwrap_or(link.listen);
        format!(
            "forwarding {address} on {} plane{plural} ({}, spread {})",
            forward.planes, forward.kind, link.spread
        )
    };
    forward.links.iter().enumerate().map(line).collect()
}

fn planes_of(running: &Running, links: usize) -> Vec<ForwardPlane> {
    let by_link: Vec<_> = (0..links).map(|link| running.counts(link)).collect();
    sum(&by_link)
}

/// Returns the counters of each plane, summed over all links.
fn sum(by_link: &[Vec<PlaneCounts>]) -> Vec<ForwardPlane> {
    let number = by_link.first().map_or(0, Vec::len);
    let mut planes = vec![ForwardPlane::default(); number];
    for counts in by_link {
        for (plane, counts) in planes.iter_mut().zip(counts) {
            plane.received += counts.received;
            plane.received_bytes += counts.received_bytes;
            plane.sent += counts.sent;
            plane.sent_bytes += counts.sent_bytes;
            plane.failed_later += counts.failed_later;
            plane.returned += counts.returned;
            plane.clients += counts.clients;
            plane.evicted += counts.evicted;
            plane.unanswered += counts.unanswered;
            plane.unsegmented += counts.unsegmented;
            plane.failed_receives += counts.failed_receives;
            // Each link reports the CPU time of the same thread.
            plane.cpu_ns = plane.cpu_ns.max(counts.cpu_ns);
            for (reason, number) in &counts.dropped {
                *plane.dropped.entry(reason.name().to_owned()).or_default() += number;
            }
            for (reason, number) in &counts.dropped_replies {
                *plane.dropped_replies.entry(reason.name().to_owned()).or_default() += number;
            }
        }
    }
    let all: u64 = planes.iter().map(|plane| plane.received).sum();
    for plane in &mut planes {
        plane.share = if all == 0 { 0.0 } else { plane.received as f64 / all as f64 };
    }
    planes
}

/// Converts sessions to the fields of a record.
fn sessions(watched: Vec<SessionReport>) -> Vec<ForwardBfd> {
    let session = |watched: SessionReport| {
        let SessionReport { peer, device, port, report, reception, discarded_by_port, overflowed_at_port } =
            watched;
        let mut discarded: BTreeMap<String, u64> = BTreeMap::new();
        let reasons = report.discards.iter().chain(discarded_by_port.iter());
        let reasons = reasons.map(|(why, number)| (why.name(), number));
        let others = [
            ("unsent", report.unsent),
            ("no-room", report.handed_dropped),
            ("at-socket", report.overflowed + overflowed_at_port),
        ];
        for (why, number) in reasons.chain(others).filter(|(_, number)| *number > 0) {
            *discarded.entry(why.to_owned()).or_default() += number;
        }
        ForwardBfd {
            peer: match reception {
                Reception::Port => device.map_or(peer.to_string(), |device| format!("{peer}%{device}")),
                Reception::Filter | Reception::Planes => SocketAddr::new(peer, port).to_string(),
            },
            reception: reception.name().to_owned(),
            state: report.state.name().to_owned(),
            diagnostic: report.last_failure.name().to_owned(),
            ups: report.ups,
            downs: report.downs,
            sent: report.transmitted,
            received: report.received,
            discarded,
        }
    };
    watched.into_iter().map(session).collect()
}

// The settings other than routes that a reloaded file changes, by their names in the file.

/// Returns the changed settings of the forwarder.
pub(super) fn of_all(was: &Forward, is: &Forward) -> Vec<&'static str> {
    // Every field is named, so that the compiler reports a new field. `of_link` compares links; the file has no `work`.
    let Forward { links: _, planes, kind, pin, clients, share, work: _, receive_buffer } = is;
    named([
        ("planes", *planes != was.planes),
        ("plane", *kind != was.kind),
        ("pin", *pin != was.pin),
        ("clients-total", *clients != was.clients),
        ("share", *share != was.share),
        ("receive-buffer", *receive_buffer != was.receive_buffer),
    ])
}

/// Returns the changed settings of a link.
pub(super) fn of_link(was: &ForwardLink, is: &ForwardLink) -> Vec<&'static str> {
    // A reload applies these three.
    let ForwardLink {
        to: _,
        routes: _,
        key: _,
        listen,
        spread,
        replies,
        idle_ns,
        clients,
        bfd,
        bfd_in_band,
        bfd_timers,
    } = is;
    named([
        ("listen", *listen != was.listen),
        ("spread", *spread != was.spread),
        ("return", *replies != was.replies),
        ("idle", *idle_ns != was.idle_ns),
        ("clients", *clients != was.clients),
        ("bfd", *bfd != was.bfd),
        ("bfd-in-band", *bfd_in_band != was.bfd_in_band),
        // A session that begins or ends is named by `bfd`.
        ("bfd-timers", bfd_timers.zip(was.bfd_timers).is_some_and(|(is, was)| is != was)),
    ])
}

fn named<const N: usize>(settings: [(&'static str, bool); N]) -> Vec<&'static str> {
    settings.into_iter().filter_map(|(name, has_changed)| has_changed.then_some(name)).collect()
}

// `--takeover`: this process takes over from the running process, and a later process can take over from this process.

/// The takeover socket of this process, and its predecessor.
pub(super) struct Takeover {
    takeover_socket: Option<TakeoverSocket>,
    process: Option<u32>,
}

/// Takes over from the process that listens at the path, or opens new sockets if there is none.
pub(super) fn start(forward: &Forward, path: Option<&Path>) -> Result<(Running, Takeover), ForwardError> {
    let Some(path) = path else {
        return Ok((forward.start()?, Takeover { takeover_socket: None, process: None }));
    };
    match follow(forward, path) {
        // The predecessor has ended in between, so that there is none.
        Err(ForwardError::Handover(HandoverError::Gone { .. })) => follow(forward, path),
        result => result,
    }
}

fn follow(forward: &Forward, path: &Path) -> Result<(Running, Takeover), ForwardError> {
    if let Some(predecessor) = Predecessor::at(path)? {
        let TakenOver { running, takeover_socket, process } = forward.take_over(predecessor)?;
        return Ok((running, Takeover { takeover_socket: Some(takeover_socket), process: Some(process) }));
    }
    // The path is bound first, so that an invalid path is reported before any socket is open.
    let takeover_socket = TakeoverSocket::open(path)?;
    Ok((forward.start()?, Takeover { takeover_socket: Some(takeover_socket), process: None }))
}

impl Takeover {
    /// Returns the PID of the predecessor.
    pub(super) fn from(&self) -> Option<u32> {
        self.process
    }

    /// Returns whether the predecessor has ended, so that this process can bind addresses that only one process can have.
    pub(super) fn is_alone(&self) -> bool {
        self.takeover_socket
            .as_ref()
            .is_none_or(|takeover_socket| takeover_socket.predecessor_has_ended(Duration::ZERO))
    }

    /// Checks for a process that requests the takeover. Returns the BFD sessions before the takeover if it is done.
    pub(super) fn look(
        &mut self,
        running: &mut Running,
        quiet: bool,
    ) -> Result<Option<Vec<SessionReport>>, ForwardError> {
        let tell = |line: String| {
            if !quiet {
                output::say(&line);
            }
        };
        let Some(takeover_socket) = &mut self.takeover_socket else { return Ok(None) };
        match running.hand_over(takeover_socket)? {
            TakeoverOutcome::Nothing => Ok(None),
            TakeoverOutcome::Failed(error) => {
                tell(format!("not handed over: {error}"));
                Ok(None)
            }
            TakeoverOutcome::Done { process, bfd, pause } => {
                let pause = format_time(pause);
                tell(format!("handed over to process {process}, for which packets waited {pause}"));
                // The successor waits for the end of this process, which closes the connection, before it binds exclusive addresses.
                if let Some(takeover_socket) = self.takeover_socket.take() {
                    Box::leak(Box::new(takeover_socket));
                }
                Ok(Some(bfd))
            }
        }
    }
}
