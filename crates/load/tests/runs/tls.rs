//! HTTP over TLS: trusted certificates, and the names of errors.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::run::{ENGINES, answer, attempt, get, load, run, serve, stop};
use fourtuple_load::{EngineChoice, Load, LoadError, Trust, Workload};
use fourtuple_serve::Protocol;
use fourtuple_testing::in_namespace;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::version::{TLS12, TLS13};
use rustls::{ServerConfig, ServerConnection, SupportedProtocolVersion};

/// A server with a self-signed certificate for `localhost` and 127.0.0.1. Like the certificates of `openssl req
/// -x509`, the certificate is marked as an authority.
struct Server {
    address: SocketAddr,
    certificate: String,
    requests: Arc<AtomicU64>,
}

fn server(version: &'static SupportedProtocolVersion) -> Server {
    server_in(version, 1975..=4096)
}

/// Starts a server whose certificate is valid in `years`.
fn server_in(version: &'static SupportedProtocolVersion, years: RangeInclusive<i32>) -> Server {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let signing_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(names).unwrap();
    parameters.not_before = rcgen::date_time_ymd(*years.start(), 1, 1);
    parameters.not_after = rcgen::date_time_ymd(*years.end(), 12, 31);
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let certificate = parameters.self_signed(&signing_key).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let (config, requests) = (Arc::new(config), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let address = answer(move |mut socket| {
        socket.set_nodelay(true)?;
        let mut connection = ServerConnection::new(Arc::clone(&config)).unwrap();
        let mut stream = rustls::Stream::new(&mut connection, &mut socket);
        let mut request = Vec::new();
        let mut room = [0; 2000];
        loop {
            let count = stream.read(&mut room)?;
            if count == 0 {
                return Ok(());
            }
            request.extend_from_slice(&room[..count]);
            if request.ends_with(b"\r\n\r\n") {
                request.clear();
                counted.fetch_add(1, Ordering::Relaxed);
                // The body needs more than one TLS record.
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n")?;
                stream.write_all(&[b'x'; 40_000])?;
            }
        }
    });
    Server { address, certificate: certificate.pem(), requests }
}

fn https(engine: EngineChoice, host: &str, port: u16, trust: Trust) -> Load {
    let target = format!("https://{host}:{port}/");
    let mut load = load(engine, &target, get(&target));
    (load.connections, load.operations) = (3, Some(30));
    load.trust = trust;
    load
}

/// A file that is removed on drop.
struct Saved(PathBuf);

impl Saved {
    fn new(name: &str, text: &str) -> Saved {
        let path = std::env::temp_dir().join(format!("fourtuple-load-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Saved(path)
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn trusted_and_unchecked_certificates_are_accepted() {
    in_namespace(|| {
        for version in [&TLS12, &TLS13] {
            let server = server(version);
            let saved = Saved::new(&format!("{:?}.pem", version.version), &server.certificate);
            for engine in ENGINES {
                for trust in [Trust::AnyCertificate, Trust::Also(saved.0.clone())] {
                    for (every, connections) in [(0, 3..=3), (1, 30..=30), (4, 7..=10)] {
                        let before = server.requests.load(Ordering::Relaxed);
                        let mut load = https(engine, "127.0.0.1", server.address.port(), trust.clone());
                        load.close_every = every;
                        let Some(ran) = run("tls::trusted", &load) else { continue };
                        assert_eq!((ran.results.operations, ran.errors()), (30, vec![]), "{ran:#?}");
                        assert_eq!(server.requests.load(Ordering::Relaxed) - before, 30);
                        assert!(connections.contains(&ran.results.connections), "{ran:#?}");
                        assert_eq!(ran.results.latency_ns.first_byte.samples, 30);
                    }
                }
            }
        }
    });
}

#[test]
fn a_long_body_is_sent_whole() {
    in_namespace(|| {
        let server = server(&TLS13);
        for engine in ENGINES {
            // The first request waits for the handshake in the client, and a later one does not.
            for every in [0, 1] {
                let mut load = https(engine, "127.0.0.1", server.address.port(), Trust::AnyCertificate);
                let Workload::Http(request) = &mut load.workload else { panic!("{:?}", load.workload) };
                request.method = "POST".to_owned();
                // The server takes an empty line at the end of a read for the end of a request.
                request.body = [&vec![b'x'; 200_000][..], b"\r\n\r\n"].concat();
                (load.operations, load.close_every) = (Some(6), every);
                let before = server.requests.load(Ordering::Relaxed);
                let Some(ran) = run("tls::long_body", &load) else { continue };
                assert_eq!((ran.results.operations, ran.errors()), (6, vec![]), "{ran:#?}");
                assert_eq!(server.requests.load(Ordering::Relaxed) - before, 6);
            }
        }
    });
}

#[test]
fn an_untrusted_certificate_fails() {
    in_namespace(|| {
        let (server, other) = (server(&TLS13), server(&TLS13));
        let saved = Saved::new("other.pem", &other.certificate);
        for engine in ENGINES {
            // The trusted certificates do not include the certificate of the server.
            let load = https(engine, "127.0.0.1", server.address.port(), Trust::Also(saved.0.clone()));
            let Some(ran) = run("tls::unknown", &load) else { continue };
            assert_eq!(
                (ran.results.operations, ran.error("tls-certificate"), ran.errors().len()),
                (0, 30, 1),
                "{ran:#?}"
            );
            assert_eq!(ran.results.connections, 30, "they were established");
            assert_eq!(ran.results.latency_ns.handshake.samples, 0, "TLS was not: {ran:#?}");
            assert!(ran.results.advice.iter().any(|line| line.contains("--insecure")), "{ran:#?}");
        }
        assert_eq!(server.requests.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn a_certificate_of_ca_is_trusted_in_its_period_only() {
    in_namespace(|| {
        for (name, years) in [("expired", 1975..=2020), ("not-yet-valid", 4000..=4096)] {
            let server = server_in(&TLS13, years);
            let saved = Saved::new(&format!("{name}.pem"), &server.certificate);
            for engine in ENGINES {
                let load = https(engine, "127.0.0.1", server.address.port(), Trust::Also(saved.0.clone()));
                let Some(ran) = run("tls::period", &load) else { continue };
                assert_eq!(
                    (ran.results.operations, ran.error("tls-certificate")),
                    (0, 30),
                    "{name}: {ran:#?}"
                );
            }
            assert_eq!(server.requests.load(Ordering::Relaxed), 0, "{name}");
        }
    });
}

#[test]
fn a_server_without_tls() {
    in_namespace(|| {
        for engine in ENGINES {
            let running = serve(Protocol::Http { body: 1 }).start().unwrap();
            let load = https(engine, "127.0.0.1", 4000, Trust::AnyCertificate);
            let Some(ran) = run("tls::plain", &load) else { continue };
            assert_eq!(
                (ran.results.operations, ran.error("tls"), ran.errors().len()),
                (0, 30, 1),
                "{ran:#?}"
            );
            stop(running);
        }
    });
}

#[test]
fn a_truncated_handshake_is_an_error() {
    in_namespace(|| {
        let address = answer(|mut stream| stream.read_exact(&mut [0; 5]));
        for engine in ENGINES {
            let load = https(engine, "127.0.0.1", address.port(), Trust::AnyCertificate);
            let Some(ran) = run("tls::cut", &load) else { continue };
            let known = ran.error("closed-early") + ran.error("ECONNRESET");
            assert_eq!((ran.results.operations, known), (0, 30), "{ran:#?}");
        }
    });
}

#[test]
fn a_file_without_certificates_is_refused() {
    let saved = Saved::new("empty.pem", "nothing of the kind\n");
    for path in [saved.0.clone(), PathBuf::from("/nowhere/ca.pem")] {
        let load = https(EngineChoice::Epoll, "127.0.0.1", 4000, Trust::Also(path.clone()));
        match attempt(&load, &AtomicBool::new(false)) {
            Err(LoadError::Setting(line)) => {
                assert!(line.contains("'--ca'") && line.contains(path.to_str().unwrap()), "{line}");
            }
            other => panic!("{other:?}"),
        }
    }
}
