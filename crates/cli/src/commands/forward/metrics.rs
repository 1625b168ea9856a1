//! Counters for Prometheus: one page, the same for whoever asks.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use fourtuple_record::{ForwardBfd, ForwardPlane};

/// Whoever asks more slowly is not answered.
const PATIENCE: Duration = Duration::from_secs(2);
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
    type Get = fn(&ForwardPlane) -> f64;
    let counters: [(&str, &str, Get); 7] = [
        ("received_packets", "Packets that came to be sent on", |plane| plane.received as f64),
        ("received_bytes", "Bytes of their payloads", |plane| plane.received_bytes as f64),
        ("sent_packets", "Packets sent on", |plane| plane.sent as f64),
        ("sent_bytes", "Bytes of their payloads", |plane| plane.sent_bytes as f64),
        ("returned_packets", "Packets sent back to clients", |plane| plane.returned as f64),
        ("unsegmented_messages", "Messages that UDP_SEGMENT would not take", |plane| {
            plane.unsegmented as f64
        }),
        ("cpu_seconds", "Processor time of the plane's thread", |plane| plane.cpu_ns as f64 / 1e9),
    ];
    let mut text = String::new();
    for (name, help, get) in counters {
        head(&mut text, name, help, "counter", "_total");
        for (number, plane) in planes.iter().enumerate() {
            let _ = writeln!(text, "fourtuple_forward_{name}_total{{plane=\"{number}\"}} {}", get(plane));
        }
    }
    head(&mut text, "dropped_packets", "Packets that were not sent on, by reason", "counter", "_total");
    for (number, plane) in planes.iter().enumerate() {
        for (reason, packets) in &plane.dropped {
            let _ = writeln!(
                text,
                "fourtuple_forward_dropped_packets_total{{plane=\"{number}\",reason=\"{reason}\"}} {packets}"
            );
        }
    }
    head(&mut text, "clients", "Clients that have a socket", "gauge", "");
    for (number, plane) in planes.iter().enumerate() {
        let _ = writeln!(text, "fourtuple_forward_clients{{plane=\"{number}\"}} {}", plane.clients);
    }
    if bfd.is_empty() {
        return text;
    }
    head(&mut text, "bfd_up", "Whether the BFD session is up", "gauge", "");
    for session in bfd {
        let up = u8::from(session.state == "up");
        let _ = writeln!(text, "fourtuple_forward_bfd_up{{peer=\"{}\"}} {up}", session.peer);
    }
    type Number = fn(&ForwardBfd) -> u64;
    let counters: [(&str, &str, Number); 4] = [
        ("bfd_ups", "How often the BFD session went up", |session| session.ups),
        ("bfd_downs", "How often it went down from up", |session| session.downs),
        ("bfd_sent_packets", "Control packets sent", |session| session.sent),
        ("bfd_received_packets", "Control packets taken", |session| session.received),
    ];
    for (name, help, get) in counters {
        head(&mut text, name, help, "counter", "_total");
        for session in bfd {
            let peer = &session.peer;
            let _ = writeln!(text, "fourtuple_forward_{name}_total{{peer=\"{peer}\"}} {}", get(session));
        }
    }
    text
}

fn head(text: &mut String, name: &str, help: &str, kind: &str, ending: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(text, "# HELP fourtuple_forward_{name}{ending} {help}");
    let _ = writeln!(text, "# TYPE fourtuple_forward_{name}{ending} {kind}");
}
