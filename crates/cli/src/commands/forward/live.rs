//! The counters of a forwarder while it runs: a table on stderr, and metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use fourtuple_forward::ClientLimit;
use fourtuple_record::{ForwardBfd, ForwardPlane};
use fourtuple_report::exposition::{
    Collector, DescriptorEncoder, Endpoint, Kind, Limits, Number, Registry, Sample, write_family,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Maximum number of planes with a line of their own. With more planes, the table shows the sum.
const LINES: usize = 16;

/// A live table on stderr, if stderr is a terminal.
pub(super) struct Table {
    bar: Option<ProgressBar>,
    last: (Duration, Vec<ForwardPlane>),
}

impl Table {
    pub(super) fn new(quiet: bool) -> Table {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
            bar.set_style(
                ProgressStyle::with_template("{msg}").expect("the template names a field that there is"),
            );
            bar
        });
        Table { bar, last: (Duration::ZERO, Vec::new()) }
    }

    pub(super) fn tell(&mut self, elapsed: Duration, planes: &[ForwardPlane], bfd: &[ForwardBfd]) {
        if let Some(bar) = &self.bar {
            let since = elapsed.saturating_sub(self.last.0);
            bar.set_message(text(elapsed, since, planes, &self.last.1, bfd));
            bar.tick();
        }
        self.last = (elapsed, planes.to_vec());
    }

    pub(super) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints rates since the last update, and drops since the start.
fn text(
    elapsed: Duration,
    since: Duration,
    planes: &[ForwardPlane],
    last: &[ForwardPlane],
    bfd: &[ForwardBfd],
) -> String {
    let seconds = since.as_secs_f64().max(1e-3);
    let none = ForwardPlane::default();
    let mut lines = vec![format!("{:>6.1} s      kpps   Gbit/s  share  dropped", elapsed.as_secs_f64())];
    let rates: Vec<(u64, u64)> = planes
        .iter()
        .enumerate()
        .map(|(number, plane)| {
            let last = last.get(number).unwrap_or(&none);
            (plane.received - last.received, plane.sent_bytes - last.sent_bytes)
        })
        .collect();
    let packets: u64 = rates.iter().map(|(packets, _)| packets).sum();
    let line = |name: &str, (packets, bytes): (u64, u64), share: f64, dropped: String| {
        let (rate, bits) = (packets as f64 / seconds / 1e3, bytes as f64 * 8.0 / seconds / 1e9);
        format!("{name:<9}{rate:>9.1} {bits:>8.3} {:>5.1}%  {dropped}", share * 100.0)
    };
    if planes.len() <= LINES {
        for (number, (plane, rates)) in planes.iter().zip(&rates).enumerate() {
            let share = if packets == 0 { 0.0 } else { rates.0 as f64 / packets as f64 };
            let dropped: Vec<String> =
                plane.dropped.iter().map(|(reason, number)| format!("{reason} {number}")).collect();
            lines.push(line(&format!("plane {number}"), *rates, share, dropped.join(" ")));
        }
    }
    let bytes = rates.iter().map(|(_, bytes)| bytes).sum();
    let dropped: u64 = planes.iter().flat_map(|plane| plane.dropped.values()).sum();
    lines.push(line("all", (packets, bytes), if packets == 0 { 0.0 } else { 1.0 }, dropped.to_string()));
    for session in bfd.iter().take(LINES) {
        let ForwardBfd { peer, state, ups, downs, .. } = session;
        lines.push(format!("bfd {peer} {state}, {ups} times up, {downs} down"));
    }
    lines.join("\n")
}

// Metrics: a snapshot of the counters, which an endpoint serves.

/// The prefix of all metric names.
const PREFIX: &str = "fourtuple_forward";

/// The metrics endpoint and the snapshot that it serves.
pub(super) struct Metrics {
    address: SocketAddr,
    snapshot: Arc<Snapshot>,
    /// The running endpoint; `None` where the address could not be bound.
    _endpoint: Option<Endpoint>,
}

/// The client limit, and the counters as of the last [`Metrics::update`].
#[derive(Debug, Default)]
struct Snapshot {
    /// Maximum number of clients of all planes; `None` without `--return`.
    client_limit: Option<u64>,
    counters: Mutex<(Vec<ForwardPlane>, Vec<ForwardBfd>)>,
}

/// Starts an endpoint that serves until the returned value is dropped.
pub(super) fn serve(address: SocketAddr, limit: Option<ClientLimit>) -> anyhow::Result<Metrics> {
    let client_limit = limit.map(|limit| limit.clients as u64);
    let snapshot = Arc::new(Snapshot { client_limit, ..Snapshot::default() });
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Arc::clone(&snapshot)));
    let endpoint = Endpoint::start(address, Limits::default(), registry).context("--metrics")?;
    Ok(Metrics { address: endpoint.address(), snapshot, _endpoint: Some(endpoint) })
}

impl Metrics {
    /// Returns metrics without an endpoint.
    pub(super) fn nowhere(address: SocketAddr) -> Metrics {
        Metrics { address, snapshot: Arc::default(), _endpoint: None }
    }

    /// Prints the URL on stderr.
    pub(super) fn tell(&self) {
        output::say(&format!("metrics at http://{}/metrics", self.address));
    }

    pub(super) fn update(&self, planes: &[ForwardPlane], bfd: &[ForwardBfd]) {
        let mut counters = self.snapshot.counters.lock().unwrap_or_else(PoisonError::into_inner);
        *counters = (planes.to_vec(), bfd.to_vec());
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (planes, bfd) = self.counters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        write_planes(&mut encoder, &planes)?;
        if let Some(limit) = self.client_limit {
            let sample = [Sample::new([] as [(&str, &str); 0], limit)];
            write_family(&mut encoder, Kind::Gauge, "client_limit", "Most clients of all planes", sample)?;
        }
        if bfd.is_empty() { Ok(()) } else { write_sessions(&mut encoder, &bfd) }
    }
}

fn write_planes(encoder: &mut DescriptorEncoder<'_>, planes: &[ForwardPlane]) -> fmt::Result {
    type OfPlane = fn(&ForwardPlane) -> Number;
    let metrics: [(Kind, &str, &str, OfPlane); 12] = [
        (Kind::Counter, "received_packets", "Packets received from clients", |plane| plane.received.into()),
        (Kind::Counter, "received_bytes", "Bytes of their payloads", |plane| plane.received_bytes.into()),
        // `sent` alone decreases when a packet fails later, which a counter must not.
        (Kind::Counter, "sent_packets", "Packets to next hops that the kernel accepted", |plane| {
            (plane.sent + plane.failed_later).into()
        }),
        (Kind::Counter, "sent_bytes", "Bytes of their payloads", |plane| plane.sent_bytes.into()),
        (Kind::Counter, "failed_later_packets", "Sent packets that an ICMP error reported later", |plane| {
            plane.failed_later.into()
        }),
        (Kind::Counter, "returned_packets", "Replies returned to clients", |plane| plane.returned.into()),
        (Kind::Counter, "unsegmented_messages", "Messages that the kernel refused to segment", |plane| {
            plane.unsegmented.into()
        }),
        (Kind::Counter, "failed_receives", "Receive calls that failed and were repeated", |plane| {
            plane.failed_receives.into()
        }),
        (Kind::Counter, "cpu_seconds", "CPU time of the plane's thread", |plane| {
            (plane.cpu_ns as f64 / 1e9).into()
        }),
        (Kind::Gauge, "clients", "Clients that have a socket", |plane| plane.clients.into()),
        (Kind::Counter, "evicted_clients", "Clients closed in favour of new clients", |plane| {
            plane.evicted.into()
        }),
        (Kind::Counter, "unanswered_clients", "Clients closed after one packet and no reply", |plane| {
            plane.unanswered.into()
        }),
    ];
    for (kind, name, help, get) in metrics {
        let sample = |(number, plane): (usize, &ForwardPlane)| {
            Sample::new([("plane", number.to_string())], get(plane))
        };
        write_family(encoder, kind, name, help, planes.iter().enumerate().map(sample))?;
    }
    type ByReason = fn(&ForwardPlane) -> &BTreeMap<String, u64>;
    let metrics: [(&str, &str, ByReason); 2] = [
        ("dropped_packets", "Packets that were not forwarded, by reason", |plane| &plane.dropped),
        ("dropped_replies", "Replies that were not returned to clients, by reason", |plane| {
            &plane.dropped_replies
        }),
    ];
    for (name, help, get) in metrics {
        let dropped = planes.iter().enumerate().flat_map(|(number, plane)| {
            let sample = move |(reason, packets): (&String, &u64)| {
                Sample::new([("plane", &number.to_string()), ("reason", reason)], *packets)
            };
            get(plane).iter().map(sample)
        });
        write_family(encoder, Kind::Counter, name, help, dropped)?;
    }
    Ok(())
}

fn write_sessions(encoder: &mut DescriptorEncoder<'_>, sessions: &[ForwardBfd]) -> fmt::Result {
    type OfSession = fn(&ForwardBfd) -> Number;
    let metrics: [(Kind, &str, &str, OfSession); 5] = [
        (Kind::Gauge, "bfd_up", "Whether the BFD session is up", |session| {
            u64::from(session.state == "up").into()
        }),
        (Kind::Counter, "bfd_ups", "Transitions of the BFD session to Up", |session| session.ups.into()),
        (Kind::Counter, "bfd_downs", "Transitions of the BFD session from Up to Down", |session| {
            session.downs.into()
        }),
        (Kind::Counter, "bfd_sent_packets", "Control packets sent", |session| session.sent.into()),
        (Kind::Counter, "bfd_received_packets", "Control packets accepted", |session| {
            session.received.into()
        }),
    ];
    // Two links may have in-band sessions with the same peer: the number distinguishes them.
    let labels = |number: usize, session: &ForwardBfd| {
        [("session", number.to_string()), ("peer", session.peer.clone())]
    };
    for (kind, name, help, get) in metrics {
        let sample =
            |(number, session): (usize, &ForwardBfd)| Sample::new(labels(number, session), get(session));
        write_family(encoder, kind, name, help, sessions.iter().enumerate().map(sample))?;
    }
    let discarded = sessions.iter().enumerate().flat_map(|(number, session)| {
        let sample = move |(reason, packets): (&String, &u64)| {
            let reason = [("reason", reason.clone())];
            Sample::new(labels(number, session).into_iter().chain(reason), *packets)
        };
        session.discarded.iter().map(sample)
    });
    let help = "Control packets discarded, dropped or not sent, by reason";
    write_family(encoder, Kind::Counter, "bfd_discarded_packets", help, discarded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_cover_the_time_since_the_last_call() {
        let plane = |received, bytes| ForwardPlane { received, sent_bytes: bytes, ..ForwardPlane::default() };
        let (last, now) = ([plane(1_000, 0), plane(0, 0)], [plane(4_000, 125_000_000), plane(1_000, 0)]);
        let bfd = ForwardBfd {
            peer: "192.0.2.1".into(),
            reception: "port".into(),
            state: "up".into(),
            diagnostic: "none".into(),
            ups: 1,
            downs: 0,
            sent: 9,
            received: 9,
            discarded: std::collections::BTreeMap::new(),
        };
        let text = text(Duration::from_secs(2), Duration::from_secs(1), &now, &last, &[bfd]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "plane 0        3.0    1.000  75.0%  ");
        assert_eq!(lines[3], "all            4.0    1.000 100.0%  0");
        assert_eq!(lines[4], "bfd 192.0.2.1 up, 1 times up, 0 down");
        assert!(lines.iter().all(|line| line.len() < 60));
    }

    #[test]
    fn every_counter_is_in_the_snapshot() {
        let snapshot = Snapshot { client_limit: Some(12), ..Snapshot::default() };
        let plane = ForwardPlane {
            dropped: [("overflow".to_owned(), 7)].into(),
            dropped_replies: [("queue-full".to_owned(), 5)].into(),
            sent: 1,
            failed_later: 199,
            evicted: 3,
            unanswered: 4,
            ..ForwardPlane::default()
        };
        let bfd = ForwardBfd {
            peer: "fe80::1%near".to_owned(),
            reception: "port".to_owned(),
            state: "up".to_owned(),
            diagnostic: "none".to_owned(),
            ups: 1,
            downs: 0,
            sent: 9,
            received: 8,
            discarded: [("at-socket".to_owned(), 6)].into(),
        };
        *snapshot.counters.lock().unwrap() = (vec![plane], vec![bfd]);
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(snapshot));
        let text = fourtuple_report::exposition::text(&registry).unwrap();
        for line in [
            "fourtuple_forward_dropped_packets_total{plane=\"0\",reason=\"overflow\"} 7\n",
            "fourtuple_forward_dropped_replies_total{plane=\"0\",reason=\"queue-full\"} 5\n",
            "fourtuple_forward_sent_packets_total{plane=\"0\"} 200\n",
            "fourtuple_forward_failed_later_packets_total{plane=\"0\"} 199\n",
            "fourtuple_forward_cpu_seconds_total{plane=\"0\"} 0.0\n",
            "fourtuple_forward_clients{plane=\"0\"} 0\n",
            "fourtuple_forward_evicted_clients_total{plane=\"0\"} 3\n",
            "fourtuple_forward_unanswered_clients_total{plane=\"0\"} 4\n",
            "fourtuple_forward_client_limit{} 12\n",
            "fourtuple_forward_bfd_up{session=\"0\",peer=\"fe80::1%near\"} 1\n",
            "fourtuple_forward_bfd_discarded_packets_total{session=\"0\",peer=\"fe80::1%near\",reason=\"at-socket\"} 6\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
