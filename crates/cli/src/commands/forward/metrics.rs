//! Counters for Prometheus: one page, the same for whoever asks.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use fourtuple_record::{ForwardBfd, ForwardPlane};

/// Whoever asks more slowly is not answered.
const PATIENCE: Duration = Duration::from_secs(2);
/// What the names of all metrics begin with.
const PREFIX: &str = "fourtuple_forward_";
/// No request for metrics is longer.
const LONGEST_REQUEST: u64 = 8 * 1024;

/// Where counters are to be had.
pub(super) struct Metrics {
    address: SocketAddr,
    page: Arc<Mutex<String>>,
}

/// Begins to answer; until the process ends.
pub(super) fn serve(address: SocketAddr) -> anyhow::Result<Metrics> {
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot listen at {address} for --metrics"))?;
    let address =
        listener.local_addr().with_context(|| format!("cannot listen at {address} for --metrics"))?;
    let page = Arc::new(Mutex::new(page(&[], &[])));
    let shown = Arc::clone(&page);
    thread::Builder::new()
        .name("metrics".to_owned())
        .spawn(move || {
            // One after the other: whoever scrapes has time.
            for connection in listener.incoming().flatten() {
                // One who goes away does not want an answer.
                let _ = answer(&connection, &shown);
            }
        })
        .context("cannot start a thread")?;
    Ok(Metrics { address, page })
}

impl Metrics {
    /// That nobody can ask for.
    pub(super) fn nowhere(address: SocketAddr) -> Metrics {
        Metrics { address, page: Arc::default() }
    }

    /// Says on stderr where they are.
    pub(super) fn tell(&self) {
        let _ = writeln!(io::stderr(), "metrics at http://{}/metrics", self.address);
    }

    pub(super) fn update(&self, planes: &[ForwardPlane], bfd: &[ForwardBfd]) {
        *self.page.lock().unwrap_or_else(PoisonError::into_inner) = page(planes, bfd);
    }
}

fn answer(mut connection: &TcpStream, page: &Mutex<String>) -> std::io::Result<()> {
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_write_timeout(Some(PATIENCE))?;
    let mut request = BufReader::new(connection.take(LONGEST_REQUEST));
    let mut first = String::new();
    request.read_line(&mut first)?;
    let mut line = String::new();
    // To its end: closing with unread bytes would take the answer away (RST).
    while request.read_line(&mut line)? > 2 {
        line.clear();
    }
    let (status, body) = match first.split(' ').take(2).collect::<Vec<_>>()[..] {
        ["GET", "/metrics" | "/"] => ("200 OK", page.lock().unwrap_or_else(PoisonError::into_inner).clone()),
        _ => ("404 Not Found", "see /metrics\n".to_owned()),
    };
    write!(
        connection,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// The text format: names end in their unit, counters in `_total`.
fn page(planes: &[ForwardPlane], bfd: &[ForwardBfd]) -> String {
    type OfPlane = fn(&ForwardPlane) -> f64;
    let counters: [(&str, &str, OfPlane); 7] = [
        ("received_packets_total", "Packets that came to be sent on", |plane| plane.received as f64),
        ("received_bytes_total", "Bytes of their payloads", |plane| plane.received_bytes as f64),
        ("sent_packets_total", "Packets sent on", |plane| plane.sent as f64),
        ("sent_bytes_total", "Bytes of their payloads", |plane| plane.sent_bytes as f64),
        ("returned_packets_total", "Packets sent back to clients", |plane| plane.returned as f64),
        ("unsegmented_messages_total", "Messages that UDP_SEGMENT would not take", |plane| {
            plane.unsegmented as f64
        }),
        ("cpu_seconds_total", "Processor time of the plane's thread", |plane| plane.cpu_ns as f64 / 1e9),
    ];
    let mut text = String::new();
    let numbered = || planes.iter().enumerate();
    for (name, help, get) in counters {
        let samples = numbered().map(|(number, plane)| (format!("plane=\"{number}\""), get(plane)));
        metric(&mut text, name, "counter", help, samples);
    }
    let dropped = numbered().flat_map(|(number, plane)| {
        let sample = move |(reason, packets): (&String, &u64)| {
            (format!("plane=\"{number}\",reason=\"{reason}\""), *packets as f64)
        };
        plane.dropped.iter().map(sample)
    });
    metric(
        &mut text,
        "dropped_packets_total",
        "counter",
        "Packets that were not sent on, by reason",
        dropped,
    );
    let clients = numbered().map(|(number, plane)| (format!("plane=\"{number}\""), plane.clients as f64));
    metric(&mut text, "clients", "gauge", "Clients that have a socket", clients);
    if bfd.is_empty() {
        return text;
    }
    type OfSession = fn(&ForwardBfd) -> f64;
    let sessions: [(&str, &str, &str, OfSession); 5] = [
        ("bfd_up", "gauge", "Whether the BFD session is up", |session| f64::from(session.state == "up")),
        ("bfd_ups_total", "counter", "How often the BFD session went up", |session| session.ups as f64),
        ("bfd_downs_total", "counter", "How often it went down from up", |session| session.downs as f64),
        ("bfd_sent_packets_total", "counter", "Control packets sent", |session| session.sent as f64),
        ("bfd_received_packets_total", "counter", "Control packets taken", |session| session.received as f64),
    ];
    for (name, kind, help, get) in sessions {
        // Two links may have a session with one peer each, in-band.
        let label = |number, peer| format!("session=\"{number}\",peer=\"{peer}\"");
        let samples = bfd.iter().enumerate();
        let samples = samples.map(|(number, session)| (label(number, &session.peer), get(session)));
        metric(&mut text, name, kind, help, samples);
    }
    text
}

/// One metric with its samples: their labels and values.
fn metric(
    text: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    samples: impl Iterator<Item = (String, f64)>,
) {
    text.push_str(&format!("# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}\n"));
    text.extend(samples.map(|(labels, value)| format!("{PREFIX}{name}{{{labels}}} {value}\n")));
}
