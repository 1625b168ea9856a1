//! `load` against peers that end a TLS connection in every way.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_load::Trust;
use fourtuple_syscalls::option;
use fourtuple_testing::{each_in_namespace, in_namespace};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection};

use crate::run::{ENGINES, answer, get, load, run, until};

const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok";
const REST: &str = "HTTP/1.1 200 OK\r\n\r\ntext";

/// A connection of the peer, whose handshake is over and whose first request is read.
struct Peer {
    connection: ServerConnection,
    socket: TcpStream,
}

impl Peer {
    fn send(&mut self, text: &str) -> io::Result<()> {
        self.connection.writer().write_all(text.as_bytes())?;
        self.flush()
    }

    fn close_notify(&mut self) -> io::Result<()> {
        self.connection.send_close_notify();
        self.flush()
    }

    /// Sends the response and close_notify in one segment.
    fn send_and_close(&mut self, text: &str) -> io::Result<()> {
        self.connection.writer().write_all(text.as_bytes())?;
        self.close_notify()
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut bytes = Vec::new();
        while self.connection.wants_write() {
            self.connection.write_tls(&mut bytes)?;
        }
        self.socket.write_all(&bytes)
    }

    /// Leaves the connection open until the client closes it.
    fn wait_for_client(&mut self) -> io::Result<()> {
        self.socket.read_to_end(&mut Vec::new()).map(drop)
    }

    fn read_head(&mut self) -> io::Result<()> {
        let mut head = Vec::new();
        let mut room = [0; 2000];
        while !head.ends_with(b"\r\n\r\n") {
            match rustls::Stream::new(&mut self.connection, &mut self.socket).read(&mut room)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => head.extend_from_slice(&room[..count]),
            }
        }
        Ok(())
    }
}

/// The course of a connection after its first request, and the outcome of each operation (`None`: success).
type End = (&'static str, fn(&mut Peer) -> io::Result<()>, Option<&'static str>);

const ENDS: &[End] = &[
    ("body ended by close_notify and FIN", |peer| peer.send_and_close(REST), None),
    (
        "body ended by close_notify, FIN never",
        |peer| {
            peer.send(REST)?;
            peer.close_notify()?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "bytes after close_notify",
        |peer| {
            peer.send_and_close(REST)?;
            peer.socket.write_all(&[7; 50_000])?;
            peer.wait_for_client()
        },
        None,
    ),
    ("body ended by FIN alone", |peer| peer.send(REST), Some("closed-early")),
    (
        "close_notify in the middle of a body",
        |peer| {
            peer.send_and_close(HALF)?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
    ("FIN in the middle of a body", |peer| peer.send(HALF), Some("closed-early")),
    (
        "close_notify instead of a response",
        |peer| {
            peer.close_notify()?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
    (
        "whole response with close_notify",
        |peer| {
            peer.send_and_close(WHOLE)?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "close_notify while idle",
        |peer| {
            peer.send(WHOLE)?;
            thread::sleep(Duration::from_millis(5));
            peer.close_notify()?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "no record in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            peer.socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
            peer.wait_for_client()
        },
        Some("tls"),
    ),
    (
        "reset in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            option::set_reset_on_close(peer.socket.as_fd())
        },
        Some("ECONNRESET"),
    ),
    (
        "half-close in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            peer.socket.shutdown(Shutdown::Write)?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
];

/// Starts a server that plays `end` after the first request of each connection; returns its address and the number
/// of requests read.
fn server(end: fn(&mut Peer) -> io::Result<()>) -> (SocketAddr, Arc<AtomicU64>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let (config, requests) = (Arc::new(config), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let address = answer(move |socket| {
        let connection = ServerConnection::new(Arc::clone(&config)).unwrap();
        let mut peer = Peer { connection, socket };
        peer.read_head()?;
        counted.fetch_add(1, Ordering::Relaxed);
        end(&mut peer)
    });
    (address, requests)
}

#[test]
fn tls_connections_end_as_the_peer_ends_them() {
    const OPERATIONS: u64 = 9;
    in_namespace(|| {
        let cases = ENDS.iter().flat_map(|end| ENGINES.into_iter().map(move |engine| (end, engine)));
        each_in_namespace(cases, |(&(name, end, error), engine)| {
            let (address, requests) = server(end);
            let target = format!("https://{address}/");
            let mut load = load(engine, &target, get(&target));
            (load.connections, load.operations, load.trust) = (3, Some(OPERATIONS), Trust::AnyCertificate);
            // The pause makes the connection idle, for the row of the table that needs it, until a peer that waits for a CPU has closed.
            load.pause = Duration::from_millis(if name == "close_notify while idle" { 2500 } else { 50 });
            let Some(ran) = run("hostile::tls", &load) else { return };
            match error {
                None => assert_eq!(
                    (ran.results.operations, ran.errors()),
                    (OPERATIONS, vec![]),
                    "{name}: {ran:#?}"
                ),
                Some(error) => {
                    assert_eq!(
                        (ran.error(error), ran.errors()),
                        (OPERATIONS, vec![error]),
                        "{name}: {ran:#?}"
                    );
                }
            }
            assert_eq!(ran.results.connections, OPERATIONS, "{name}: no connection is used again: {ran:#?}");
            let answered = ran.results.latency_ns.first_byte.samples;
            if error.is_none() {
                assert_eq!(answered, OPERATIONS, "{name}: {ran:#?}");
            } else if name == "close_notify instead of a response" {
                assert_eq!(answered, 0, "session tickets and alerts are no response: {ran:#?}");
            }
            until(|| requests.load(Ordering::Relaxed) >= OPERATIONS);
            assert_eq!(requests.load(Ordering::Relaxed), OPERATIONS, "{name}: {ran:#?}");
        });
    });
}
