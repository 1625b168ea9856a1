//! HTTP over TLS: trusted certificates, and the names of errors.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{ENGINES, answer, attempt, get, load, run, serve, stop, with_each_engine};
use fourtuple_bench::load::{EngineChoice, Load, LoadError, Trust, Workload};
use fourtuple_bench::serve::Protocol;
use fourtuple_testing::in_namespace;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::{TLS12, TLS13};
use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, ServerConnection, SignatureScheme,
    SupportedProtocolVersion,
};

/// A server with a self-signed certificate for `localhost` and 127.0.0.1. Like the certificates of `openssl req
/// -x509`, the certificate is marked as an authority.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) certificate: String,
    requests: Arc<AtomicU64>,
}

fn server(version: &'static SupportedProtocolVersion) -> Server {
    server_in(version, 1975..=4096)
}

/// Demands a certificate of the client, and accepts at most this one.
#[derive(Debug)]
struct Demanding(Option<CertificateDer<'static>>);

impl ClientCertVerifier for Demanding {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        given: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        if self.0.as_ref() == Some(given) {
            return Ok(ClientCertVerified::assertion());
        }
        Err(rustls::Error::General("another certificate is accepted, or none".into()))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let provider = rustls::crypto::ring::default_provider();
        provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Starts a server that chooses one of these protocols (ALPN).
pub(crate) fn https_server(protocols: &[&[u8]]) -> Server {
    server_with(&TLS13, 1975..=4096, true, WebPkiClientVerifier::no_client_auth(), protocols)
}

/// Starts a server whose certificate is valid in `years`.
fn server_in(version: &'static SupportedProtocolVersion, years: RangeInclusive<i32>) -> Server {
    server_with(version, years, true, WebPkiClientVerifier::no_client_auth(), &[])
}

fn server_with(
    version: &'static SupportedProtocolVersion,
    years: RangeInclusive<i32>,
    is_authority: bool,
    verifier: Arc<dyn ClientCertVerifier>,
    protocols: &[&[u8]],
) -> Server {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let signing_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(names).unwrap();
    parameters.not_before = rcgen::date_time_ymd(*years.start(), 1, 1);
    parameters.not_after = rcgen::date_time_ymd(*years.end(), 12, 31);
    if is_authority {
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    }
    let certificate = parameters.self_signed(&signing_key).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    let (config, requests) = (Arc::new(config), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let address = answer(move |mut socket| {
        socket.set_nodelay(true)?;
        let mut connection = ServerConnection::new(Arc::clone(&config)).unwrap();
        let mut stream = rustls::Stream::new(&mut connection, &mut socket);
        let mut request = Vec::new();
        let mut buffer = [0; 2000];
        loop {
            let count = stream.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            request.extend_from_slice(&buffer[..count]);
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
pub(crate) struct Saved(pub(crate) PathBuf);

impl Saved {
    pub(crate) fn new(name: &str, text: &str) -> Saved {
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
                        assert_eq!(ran.results.latency_ns.tls.samples, ran.results.connections);
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
        let other = server(&TLS13);
        let saved = Saved::new("other.pem", &other.certificate);
        let none = WebPkiClientVerifier::no_client_auth;
        // webpki looks at the purpose of a certificate before it looks for its issuer.
        for (engine, (is_authority, error)) in ENGINES
            .into_iter()
            .flat_map(|engine| [(engine, (false, "tls-unknown-issuer")), (engine, (true, "tls-certificate"))])
        {
            let server = server_with(&TLS13, 1975..=4096, is_authority, none(), &[]);
            // The trusted certificates do not include the certificate of the server.
            let load = https(engine, "127.0.0.1", server.address.port(), Trust::Also(saved.0.clone()));
            let Some(ran) = run("tls::unknown", &load) else { continue };
            assert_eq!(
                (ran.results.operations, ran.error(error), ran.errors().len()),
                (0, 30, 1),
                "{ran:#?}"
            );
            assert_eq!(ran.results.connections, 30, "they were established");
            assert_eq!(ran.results.latency_ns.tls.samples, 0, "TLS was not: {ran:#?}");
            let advises = |line: &String| line.contains("--insecure") && line.contains("--ca");
            assert!(ran.results.advice.iter().any(advises), "{ran:#?}");
            assert_eq!(server.requests.load(Ordering::Relaxed), 0);
        }
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
                let error = format!("tls-{name}");
                assert_eq!((ran.results.operations, ran.error(&error)), (0, 30), "{ran:#?}");
                assert!(ran.results.error_details[&error].contains("certificate"), "{ran:#?}");
            }
            assert_eq!(server.requests.load(Ordering::Relaxed), 0, "{name}");
        }
    });
}

#[test]
fn the_reason_of_a_failed_handshake_is_named() {
    in_namespace(|| {
        let none = WebPkiClientVerifier::no_client_auth;
        let demanding = || -> Arc<dyn ClientCertVerifier> { Arc::new(Demanding(None)) };
        let (h2, any): (&[&[u8]], &[&[u8]]) = (&[b"h2"], &[]);
        for (version, verifier, protocols, host, error, part) in [
            (&TLS13, none(), h2, "127.0.0.1", "tls-alpn", "NoApplicationProtocol"),
            (&TLS13, demanding(), any, "127.0.0.1", "tls-client-certificate", "CertificateRequired"),
            (&TLS12, demanding(), any, "127.0.0.1", "tls-client-certificate", "alert"),
            (&TLS13, none(), any, "other.test", "tls-wrong-name", "localhost"),
        ] {
            let server = server_with(version, 1975..=4096, true, verifier, protocols);
            let saved = Saved::new(&format!("{error}.pem"), &server.certificate);
            for engine in ENGINES {
                let mut load = https(engine, host, server.address.port(), Trust::Also(saved.0.clone()));
                load.resolve = Some(format!("{host}:{}:127.0.0.1", server.address.port()).parse().unwrap());
                let Some(ran) = run("tls::reason", &load) else { continue };
                // The server closes with unread data: a reset may overtake its alert.
                let failed = ran.error(error) + ran.error("ECONNRESET") + ran.error("EPIPE");
                assert_eq!((ran.results.operations, failed), (0, 30), "{error}: {ran:#?}");
                assert!(ran.error(error) > 0, "{error}: {ran:#?}");
                assert!(ran.results.error_details[error].contains(part), "{error}: {ran:#?}");
            }
            assert_eq!(server.requests.load(Ordering::Relaxed), 0, "{error}");
        }
    });
}

/// Returns the number of connections of a run by version and kind of handshake.
fn negotiated(ran: &crate::RunOutcome) -> Vec<(&str, bool, u64)> {
    let all = ran.results.tls.iter();
    all.map(|tls| (tls.version.as_str(), tls.resumed, tls.connections)).collect()
}

#[test]
fn sessions_are_resumed_unless_refused() {
    in_namespace(|| {
        for (version, name) in [(&TLS12, "TLS 1.2"), (&TLS13, "TLS 1.3")] {
            let server = server_with(
                version,
                1975..=4096,
                true,
                WebPkiClientVerifier::no_client_auth(),
                &[b"http/1.1"],
            );
            for engine in ENGINES {
                let mut load = https(engine, "127.0.0.1", server.address.port(), Trust::AnyCertificate);
                (load.connections, load.close_every) = (1, 1);
                let Some(ran) = run("tls::resumed", &load) else { continue };
                assert_eq!(negotiated(&ran), [(name, false, 1), (name, true, 29)], "{ran:#?}");
                let tls = &ran.results.tls[0];
                assert!(tls.cipher.starts_with("TLS_") && tls.cipher.contains("_AES_"), "{tls:?}");
                assert_eq!(tls.protocol.as_deref(), Some("http/1.1"));
                load.tls.full_handshakes = true;
                load.tls.protocols = Some(Vec::new());
                let Some(ran) = run("tls::full", &load) else { continue };
                assert_eq!(negotiated(&ran), [(name, false, 30)], "{ran:#?}");
                assert_eq!(ran.results.tls[0].protocol, None, "none was offered");
            }
        }
    });
}

#[test]
fn a_protocol_that_load_does_not_speak_fails() {
    in_namespace(|| {
        let none = WebPkiClientVerifier::no_client_auth();
        let server = server_with(&TLS13, 1975..=4096, true, none, &[b"h2", b"http/1.1"]);
        for engine in ENGINES {
            let mut load = https(engine, "127.0.0.1", server.address.port(), Trust::AnyCertificate);
            load.tls.protocols = Some(vec!["http/1.1".into(), "h2".into()]);
            let Some(ran) = run("tls::alpn", &load) else { continue };
            assert_eq!((ran.results.operations, ran.error("tls-alpn")), (0, 30), "{ran:#?}");
            assert!(ran.results.error_details["tls-alpn"].contains("h2"), "{ran:#?}");
        }
        assert_eq!(server.requests.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn the_certificate_of_the_client_is_sent() {
    in_namespace(|| {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["client.test".to_owned()]).unwrap();
        let certificate = certificate.self_signed(&key).unwrap();
        let saved = [
            Saved::new("client.pem", &certificate.pem()),
            Saved::new("client.key", &key.serialize_pem()),
            Saved::new("other.key", &rcgen::KeyPair::generate().unwrap().serialize_pem()),
        ];
        for version in [&TLS12, &TLS13] {
            let verifier = Arc::new(Demanding(Some(certificate.der().clone())));
            let server = server_with(version, 1975..=4096, true, verifier, &[]);
            for engine in ENGINES {
                let before = server.requests.load(Ordering::Relaxed);
                let mut load = https(engine, "127.0.0.1", server.address.port(), Trust::AnyCertificate);
                load.tls.identity = Some((saved[0].0.clone(), saved[1].0.clone()));
                let Some(ran) = run("tls::client", &load) else { continue };
                assert_eq!((ran.results.operations, ran.errors()), (30, vec![]), "{ran:#?}");
                assert_eq!(server.requests.load(Ordering::Relaxed) - before, 30);
                load.tls.identity = Some((saved[0].0.clone(), saved[2].0.clone()));
                let error = attempt(&load, &AtomicBool::new(false)).unwrap_err();
                assert!(matches!(&error, LoadError::Setting(line) if line.contains("'--key'")), "{error}");
            }
        }
    });
}

#[test]
fn another_name_is_sent_and_checked() {
    in_namespace(|| {
        let server = server(&TLS13);
        let saved = Saved::new("named.pem", &server.certificate);
        for engine in ENGINES {
            for (name, done, errors) in [("localhost", 30, vec![]), ("other.test", 0, vec!["tls-wrong-name"])]
            {
                let mut load =
                    https(engine, "other.test", server.address.port(), Trust::Also(saved.0.clone()));
                load.resolve =
                    Some(format!("other.test:{}:127.0.0.1", server.address.port()).parse().unwrap());
                load.tls.name = Some(name.to_owned());
                let Some(ran) = run("tls::name", &load) else { continue };
                assert_eq!((ran.results.operations, ran.errors()), (done, errors), "{ran:#?}");
            }
        }
    });
}

#[test]
fn a_server_without_tls() {
    with_each_engine(|engine| {
        let running = serve(Protocol::Http { body: 1 }).start().unwrap();
        let load = https(engine, "127.0.0.1", 4000, Trust::AnyCertificate);
        let Some(ran) = run("tls::plain", &load) else { return };
        assert_eq!((ran.results.operations, ran.error("tls"), ran.errors().len()), (0, 30, 1), "{ran:#?}");
        let detail = &ran.results.error_details["tls"];
        assert!(detail.starts_with("not a message of TLS: \"HTTP/1.1 400"), "{detail}");
        stop(running);
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
