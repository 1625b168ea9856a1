//! A BFD session during data overload of the planes: the source of the table in docs/bfd.md.
//!
//! `cargo run --release -p fourtuple-forward --example bfd_overload -- [SECONDS] [PLANES] [WORK-US]`, in two network namespaces
//! with a wire (veth) between them. A peer at the far end has a BFD session with a forwarder, 50 ms x 3, and sends it data from
//! one address and port as fast as it can; each packet costs a plane WORK-US microseconds. The example runs three times: with
//! control packets at port 3784, and with control packets among the data without and with a filter. The selector is random, so
//! that without a filter control packets reach all planes.
#![forbid(unsafe_code)]

#[path = "../tests/forwarder/flood/mod.rs"]
mod flood;

use std::error::Error;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flood::Flood;
use fourtuple::spread::Selector;
use fourtuple_forward::bfd::{self, LinkReport, LinkSettings, Receive, State, Timers};
use fourtuple_forward::{Forward, InBand, Link, Peer, PlaneCounts};
use fourtuple_syscalls::netns;
use fourtuple_testing::wire::{FAR_V4, NEAR_V4, Wire};

/// The port of data and of in-band control packets.
const PORT: u16 = 4000;
/// The port of the forwarder's next hop: a socket that is never read.
const SINK: u16 = 5000;
const INTERVAL: Duration = Duration::from_millis(50);
const DETECT_MULT: u8 = 3;
/// The time limit for a session to come up.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
enum Way {
    Port,
    InBand { filter: bool },
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Port => "port 3784",
            Way::InBand { filter: false } => "in-band, no filter",
            Way::InBand { filter: true } => "in-band, filter",
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments.next().as_deref().unwrap_or("10").parse()?;
    let planes: usize = arguments.next().as_deref().unwrap_or("2").parse()?;
    let work: u64 = arguments.next().as_deref().unwrap_or("20").parse()?;
    if netns::try_new().is_err() {
        netns::become_root_of_new_user_namespace()?;
    }
    println!("{seconds} s each, {planes} planes, {work} us a packet, 50 ms x 3; load before: {}", load());
    println!(
        "| control | downs here, there | to the forwarder: sent, lost, % | from it: sent, lost, % | data offered | forwarded | dropped |"
    );
    println!("|---|---|---|---|---|---|---|");
    for way in [Way::Port, Way::InBand { filter: false }, Way::InBand { filter: true }] {
        // Each run has its own namespaces.
        let inside = thread::spawn(move || -> Result<String, String> {
            netns::enter_new().map_err(|error| error.to_string())?;
            let row = run(way, Duration::from_secs(seconds), planes, Duration::from_micros(work));
            row.map_err(|error| error.to_string())
        });
        let row = inside.join().map_err(|_| "it panicked")?;
        println!("| {} | {} |", way.name(), row?);
    }
    println!("load after: {}", load());
    Ok(())
}

/// Returns the load average of the last minute.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}

fn run(way: Way, time: Duration, planes: usize, work: Duration) -> Result<String, Box<dyn Error>> {
    let wire = Wire::open("the example").ok_or("there is no veth")?;
    let (near, far) = (SocketAddr::new(NEAR_V4, PORT), SocketAddr::new(FAR_V4, PORT));
    let timers = Timers::new(INTERVAL, INTERVAL, DETECT_MULT)?;
    let peer = match way {
        Way::Port => Peer { timers, local: Some(NEAR_V4), ..Peer::new(FAR_V4) },
        Way::InBand { filter } => {
            Peer { timers, in_band: Some(InBand { port: PORT, filter }), ..Peer::in_band(far) }
        }
    };
    let link =
        Link { bfd: Some(peer), spread: Selector::Random, ..Link::new(near, SocketAddr::new(FAR_V4, SINK)) };
    let running = Forward { work, ..Forward::new(link, planes) }.start()?;
    let _sink = wire.far_away(|| UdpSocket::bind((FAR_V4, SINK)))?;
    let data: OwnedFd = wire.far_away(|| UdpSocket::bind(far))?.into();
    let receive = match way {
        Way::Port => Receive::Own,
        // Only control packets reach the socket at the far end.
        Way::InBand { .. } => Receive::InBand { socket: Arc::new(data.try_clone()?), is_steered: true },
    };
    let mut settings = LinkSettings { timers, receive, ..LinkSettings::new(FAR_V4, NEAR_V4) };
    if let Way::InBand { .. } = way {
        (settings.local, settings.peer) = (far, near);
    }
    let there = wire.far_away(|| bfd::Link::start(&settings))?;

    let report_here = || running.bfd().first().map(|session| session.report.clone()).ok_or("no session");
    let begun = Instant::now();
    // The result excludes the slow packets before Up: wait for a few packets at the short interval.
    while report_here()?.state != State::Up || !there.state().is_up() || report_here()?.received < 20 {
        if begun.elapsed() > PATIENCE {
            return Err("the session does not come up".into());
        }
        thread::sleep(INTERVAL);
    }
    let before = (report_here()?, there.state().report());
    let flood = Flood::start(data, near);
    thread::sleep(time);
    let after = (report_here()?, there.state().report());
    let offered = flood.end();
    // Planes read the kernel's drop counter once a second, and forward the packets in their queues.
    thread::sleep(Duration::from_millis(1500));
    let counts = running.counts(0);
    drop(there);
    Ok(row(&before, &after, offered, &counts))
}

fn row(
    before: &(LinkReport, LinkReport),
    after: &(LinkReport, LinkReport),
    offered: u64,
    counts: &[PlaneCounts],
) -> String {
    let lost = |from: (&LinkReport, &LinkReport), to: (&LinkReport, &LinkReport)| {
        let sent = from.1.transmitted - from.0.transmitted;
        let arrived = |report: &LinkReport| report.received + report.discards.total();
        let lost = sent.saturating_sub(arrived(to.1) - arrived(to.0));
        format!("{sent}, {lost}, {:.1}", lost as f64 * 100.0 / sent.max(1) as f64)
    };
    let (here, there) = ((&before.0, &after.0), (&before.1, &after.1));
    let sum = |what: fn(&PlaneCounts) -> u64| counts.iter().map(what).sum::<u64>();
    format!(
        "{}, {} | {} | {} | {offered} | {} | {}",
        after.0.downs - before.0.downs,
        after.1.downs - before.1.downs,
        lost(there, here),
        lost(here, there),
        sum(|plane| plane.sent),
        sum(PlaneCounts::dropped_in_all),
    )
}
