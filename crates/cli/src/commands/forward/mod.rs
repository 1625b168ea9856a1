mod config;
mod live;
mod metrics;
mod takeover;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use fourtuple_forward::{Forward, PlaneCounts, PlaneKind, Reception, Running, Watched};
use fourtuple_measure::balance;
use fourtuple_record::{ForwardBfd, ForwardPlane, ForwardResults, ForwardSettings, Saved};
use fourtuple_syscalls::{resource, schedule};
use signal_hook::consts::SIGHUP;
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::{stop, units};
use config::{File, LinkText, Understood};
use metrics::Metrics;

/// How long a signal, or the end of --for, may go unnoticed.
const LOOK: Duration = Duration::from_millis(20);
/// How often the table on the terminal changes.
const TELL: Duration = Duration::from_millis(500);

/// Forward UDP on all cores, also when every packet has the same 4-tuple
///
/// Data planes share nothing: each has a socket of a SO_REUSEPORT group, and --spread says which of them gets a packet. It
/// ends with Ctrl-C, SIGTERM or --for when nothing waits any more; SIGHUP reads the routes of --config anew. When it is ready
/// it says on stderr where it listens, so that port 0 can be asked for.
#[derive(Debug, Args)]
pub(crate) struct ForwardFlags {
    /// Where packets come to: 0.0.0.0:4000 or [::]:4000
    #[arg(long, value_name = "ADDR", required_unless_present = "config", allow_hyphen_values = true)]
    listen: Option<String>,
    /// Where they go, but for those that a --route is for
    #[arg(long, value_name = "ADDR", conflicts_with = "config", allow_hyphen_values = true)]
    to: Option<String>,
    /// Where packets to these addresses go, or those with this inner key: 10.0.0.0/8=192.0.2.1:4000, 7=192.0.2.1:4000; may be
    /// given again
    #[arg(long = "route", value_name = "WHAT=ADDR", conflicts_with = "config", allow_hyphen_values = true)]
    routes: Vec<String>,
    /// Where the inner key of routes is in the payload [default: that of --spread flow]
    #[arg(long, value_name = "OFFSET:WIDTH", conflicts_with = "config", allow_hyphen_values = true)]
    key: Option<String>,
    /// Which plane gets a packet: hash (of the 4-tuple), random, flow:OFFSET:WIDTH (a number in the payload), cpu; with BPF
    /// map:RULE, xdp:PORTS@DEVICE, cpumap:CPUS@DEVICE [default: hash]
    #[arg(long, value_name = "HOW", conflicts_with = "config", allow_hyphen_values = true)]
    spread: Option<String>,
    /// What next hops answer goes back to whom it is for, by a socket for each client
    #[arg(long = "return", conflicts_with = "config")]
    replies: bool,
    /// With --return: after how long without a packet a client is forgotten [default: 60s]
    #[arg(long, value_name = "TIME", conflicts_with = "config", allow_hyphen_values = true)]
    idle: Option<String>,
    /// With --return: the most clients of a plane [default: 4096]
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ config::MOST_CLIENTS }>, conflicts_with = "config", allow_hyphen_values = true)]
    clients: Option<u32>,
    /// Watch the link to this address with BFD (RFC 5880, 5881), from an address of this host if one is named
    #[arg(long, value_name = "PEER[@LOCAL]", conflicts_with = "config", allow_hyphen_values = true)]
    bfd: Option<String>,
    /// The same among the data: control packets go from --listen to the port of the peer's data, and come to --listen. A filter
    /// gives them a socket of their own, with every --spread but hash of more planes than one
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["config", "bfd"], allow_hyphen_values = true)]
    bfd_in_band: Option<String>,
    /// A TOML file with [[link]]s, instead of the flags above
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    config: Option<PathBuf>,
    /// How many planes: a number, or auto for one per CPU [default: auto]
    #[arg(long, value_name = "N", value_parser = planes, allow_hyphen_values = true)]
    planes: Option<Planes>,
    /// How planes move packets: one-by-one, batched, offload (UDP_GRO and UDP_SEGMENT), uring (the same, received by io_uring)
    /// [default: offload]
    #[arg(long, value_name = "HOW", value_parser = kind, allow_hyphen_values = true)]
    plane: Option<PlaneKind>,
    /// Plane i stays on CPU i, from the first again when there are more planes
    #[arg(long)]
    pin: bool,
    /// Give counters to Prometheus, by HTTP at this address
    #[arg(long, value_name = "ADDR", allow_hyphen_values = true)]
    metrics: Option<SocketAddr>,
    /// Take over from the process that was started with the same path, without the loss of a packet, and let another one take
    /// over from this one: a unix socket that is made there, for this user and root alone
    #[arg(long, value_name = "PATH")]
    takeover: Option<PathBuf>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
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

fn kind(text: &str) -> Result<PlaneKind, String> {
    text.parse()
}

impl ForwardFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let file = self.config.as_deref().map(config::read).transpose()?.unwrap_or_default();
        let links = self.links(&file)?;
        let forward = self.forward(&file, &links)?;
        let stop = stop::flag()?;
        let reload = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGHUP, Arc::clone(&reload)).context("cannot handle signals")?;
        // A client is a descriptor; what the hard limit allows is enough for whoever set it.
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let started = OffsetDateTime::now_utc();
        let (mut running, mut takeover) = takeover::start(&forward, self.takeover.as_deref())?;
        let begun = Instant::now();
        // The one before may have the address until it has ended.
        let metrics = self.metrics.filter(|_| takeover.from().is_none());
        let mut metrics = metrics.map(metrics::serve).transpose()?;
        if !self.output.quiet {
            // Not for a terminal alone: whoever starts it from a script waits for this line.
            for line in ready_lines(&running, &forward) {
                let _ = writeln!(io::stderr(), "{line}");
            }
            if let Some(process) = takeover.from() {
                let _ = writeln!(io::stderr(), "taken over from process {process}");
            }
            if let Some(metrics) = &metrics {
                metrics.tell();
            }
        }
        let mut handed = None;
        let mut table = live::Table::new(self.output.quiet);
        let mut told = begun;
        while !stop.load(Ordering::Relaxed) {
            let left = self.time.map_or(LOOK, |time| time.saturating_sub(begun.elapsed()));
            if left.is_zero() {
                break;
            }
            running.check()?;
            handed = takeover.look(&mut running, self.output.quiet)?;
            if handed.is_some() {
                break;
            }
            if let (None, Some(address), true) = (&metrics, self.metrics, takeover.is_alone()) {
                metrics = Some(self.late_metrics(address));
            }
            if reload.swap(false, Ordering::Relaxed) {
                self.reload(&running, &links);
            }
            if told.elapsed() >= TELL {
                told = Instant::now();
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
        let bfd = sessions(handed.unwrap_or_else(|| running.end_bfd()));
        let planes = sum(&running.drain()?);
        let results = results(elapsed, listen, &planes, bfd);
        let host =
            output::host(&["net.core.rmem_max", "net.core.rmem_default", "net.core.wmem_default"], &[]);
        let settings = ForwardSettings {
            links: links.into_iter().map(|link| link.record).collect(),
            planes: forward.planes as u32,
            plane: forward.kind.to_string(),
            pin: forward.pin,
            for_ns: self.time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        };
        let record = output::record("forward", started, host, settings, Vec::new(), results);
        self.output.finish(&Saved::Forward(record))
    }

    /// Those of a process that has taken over. It is at work, and an address that somebody else has by now is no reason to end.
    fn late_metrics(&self, address: SocketAddr) -> Metrics {
        let metrics = metrics::serve(address);
        if let (Ok(metrics), false) = (&metrics, self.output.quiet) {
            metrics.tell();
        }
        metrics.unwrap_or_else(|error| {
            let _ = writeln!(io::stderr(), "{error:#}; packets are forwarded without it");
            Metrics::nowhere(address)
        })
    }

    fn links(&self, file: &File) -> Result<Vec<Understood>, UsageError> {
        let Some(listen) = &self.listen else {
            let links = file.links.iter().enumerate();
            return links
                .map(|(number, link)| {
                    config::understand(link, &|field| format!("{field} of link {}", number + 1))
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
        };
        if !link.replies && (link.idle.is_some() || link.clients.is_some()) {
            let flag = if link.idle.is_some() { "--idle" } else { "--clients" };
            return Err(UsageError(format!("'{flag}' is about clients, whom only '--return' knows")));
        }
        Ok(vec![config::understand(&link, &|field| format!("--{field}"))?])
    }

    fn forward(&self, file: &File, links: &[Understood]) -> anyhow::Result<Forward> {
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
        if !(1..=1024).contains(&planes) {
            let message = format!("invalid value '{planes}' for 'planes' of --config: expected 1 to 1024");
            return Err(UsageError(message).into());
        }
        Ok(Forward {
            links: links.iter().map(|link| link.link.clone()).collect(),
            planes,
            kind,
            pin: self.pin || file.pin.unwrap_or_default(),
            work: Duration::ZERO,
            receive_buffer: None,
        })
    }

    /// Takes over the routes of the file; whatever else has changed there needs a new start, and is named. A file that is
    /// wrong changes nothing.
    fn reload(&self, running: &Running, links: &[Understood]) {
        let tell = |line: String| {
            if !self.output.quiet {
                let _ = writeln!(io::stderr(), "{line}");
            }
        };
        let Some(path) = &self.config else { return tell("SIGHUP: no --config to read".to_owned()) };
        let read = config::read(path).and_then(|file| self.links(&file));
        let new = match read {
            Ok(new) if new.len() == links.len() => new,
            Ok(_) => return tell("SIGHUP: another number of links needs a new start".to_owned()),
            Err(UsageError(message)) => return tell(format!("SIGHUP: {message}; nothing is changed")),
        };
        let routes = new.iter().map(|new| new.link.routes.clone()).collect();
        if let Err(error) = running.set_all_routes(routes) {
            return tell(format!("SIGHUP: {error}; nothing is changed"));
        }
        for (number, (new, old)) in new.iter().zip(links).enumerate() {
            let (is, was) = (&new.record, &old.record);
            let changed: Vec<&str> = [
                ("listen", is.listen != was.listen),
                ("spread", is.spread != was.spread),
                ("return", is.replies != was.replies),
                ("idle", is.idle_ns != was.idle_ns),
                ("clients", is.clients != was.clients),
                ("bfd", is.bfd != was.bfd),
                ("bfd-in-band", is.bfd_in_band != was.bfd_in_band),
            ]
            .into_iter()
            .filter_map(|(name, has_changed)| has_changed.then_some(name))
            .collect();
            if !changed.is_empty() {
                tell(format!(
                    "SIGHUP: link {}: only its routes are taken over; {} needs a new start",
                    number + 1,
                    changed.join(", ")
                ));
            }
            tell(format!("SIGHUP: link {}: routes taken over", number + 1));
        }
    }
}

/// `forwarding 127.0.0.1:4000 on 2 planes (offload, spread hash)`
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

/// Each plane over all links.
fn sum(by_link: &[Vec<PlaneCounts>]) -> Vec<ForwardPlane> {
    let number = by_link.first().map_or(0, Vec::len);
    let mut planes = vec![ForwardPlane::default(); number];
    for counts in by_link {
        for (plane, counts) in planes.iter_mut().zip(counts) {
            plane.received += counts.received;
            plane.received_bytes += counts.received_bytes;
            plane.sent += counts.sent;
            plane.sent_bytes += counts.sent_bytes;
            plane.returned += counts.returned;
            plane.clients += counts.clients;
            plane.unsegmented += counts.unsegmented;
            // The thread's, whichever link it was for.
            plane.cpu_ns = plane.cpu_ns.max(counts.cpu_ns);
            for (reason, number) in &counts.dropped {
                *plane.dropped.entry(reason.name().to_owned()).or_default() += number;
            }
        }
    }
    let all: u64 = planes.iter().map(|plane| plane.received).sum();
    for plane in &mut planes {
        plane.share = if all == 0 { 0.0 } else { plane.received as f64 / all as f64 };
    }
    planes
}

/// Sessions as records have them.
fn sessions(watched: Vec<Watched>) -> Vec<ForwardBfd> {
    let session = |watched: Watched| {
        let Watched { peer, port, report, reception, discarded_by_port } = watched;
        let mut discarded: BTreeMap<String, u64> = BTreeMap::new();
        let reasons = report.discards.iter().chain(discarded_by_port.iter());
        let reasons = reasons.map(|(why, number)| (why.name(), number));
        let no_room = report.handed_dropped + report.overflowed;
        let full = [("unsent", report.unsent), ("no-room", no_room)];
        for (why, number) in reasons.chain(full).filter(|(_, number)| *number > 0) {
            *discarded.entry(why.to_owned()).or_default() += number;
        }
        ForwardBfd {
            peer: match reception {
                Reception::Port => peer.to_string(),
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

fn results(
    elapsed: Duration,
    listen: Vec<String>,
    planes: &[ForwardPlane],
    bfd: Vec<ForwardBfd>,
) -> ForwardResults {
    let received: Vec<u64> = planes.iter().map(|plane| plane.received).collect();
    ForwardResults {
        elapsed_ns: elapsed.as_nanos() as u64,
        listen,
        planes: planes.to_vec(),
        jain: balance::jain(&received),
        advice: advice(planes, &bfd),
        bfd,
    }
}

/// What the counts say to do.
fn advice(planes: &[ForwardPlane], bfd: &[ForwardBfd]) -> Vec<String> {
    let mut lines = Vec::new();
    let received: u64 = planes.iter().map(|plane| plane.received).sum();
    let busy = planes.iter().filter(|plane| plane.received > 0).count();
    if received > 0 && busy < planes.len() {
        lines.push(format!(
            "{busy} of {} planes got packets: the 4-tuples are too few for the hash. Where packets have a flow of their own \
             in the payload, --spread flow:OFFSET:WIDTH uses all planes and keeps flows in order; --spread random does not \
             keep them.",
            planes.len(),
        ));
    }
    let overflow: u64 = planes.iter().filter_map(|plane| plane.dropped.get("overflow")).sum();
    if overflow > 0 {
        lines.push(format!(
            "{overflow} packets met a full receive queue: planes are too slow or too few, or bursts are longer than \
             net.core.rmem_default."
        ));
    }
    let uncut: u64 = planes.iter().map(|plane| plane.unsegmented).sum();
    if uncut > 0 {
        lines.push(format!(
            "{uncut} messages could not be cut by the kernel (UDP_SEGMENT) and went one by one: packets longer than the \
             path's MTU, or a device without checksums."
        ));
    }
    for session in bfd.iter().filter(|session| session.reception == Reception::Planes.name()) {
        lines.push(format!(
            "Control packets of BFD with {} wait behind data, and are lost with them: no filter goes with --spread hash on more \
             planes than one. --spread map:hash is the same hash with one; flow:OFFSET:WIDTH and random have one too.",
            session.peer,
        ));
    }
    for session in bfd.iter().filter(|session| session.ups == 0) {
        lines.push(format!(
            "BFD with {} never came up: {}.",
            session.peer,
            if session.received == 0 { "nothing was heard of it" } else { "it does not hear what is sent" },
        ));
    }
    lines
}
