use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple_record::{LoadTls, LoadTlsSettings};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, CipherSuite, ClientConfig, ClientConnection, DigitallySignedStruct,
    Error, HandshakeKind, ProtocolVersion, RootCertStore, SignatureScheme,
};

use crate::load::LoadError;
use crate::load::workload::{Failure, ParseOutcome, ProtocolState, quoted};

/// The settings of https besides [`Trust`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// The server's name for the handshake and its certificate, instead of the target's host.
    pub name: Option<String>,
    /// Files (PEM) with the certificates and the private key of the client.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Makes each handshake a full one. Otherwise sessions are resumed, as in applications.
    pub full_handshakes: bool,
    /// The protocols that are offered (ALPN), none if empty; `None`: `http/1.1`.
    pub protocols: Option<Vec<String>>,
}

/// The protocol that is spoken.
const HTTP_1_1: &str = "http/1.1";

impl TlsOptions {
    /// Returns whether the text is a host name, which a TLS handshake can contain.
    pub fn is_name(text: &str) -> bool {
        matches!(ServerName::try_from(text), Ok(ServerName::DnsName(_)))
    }

    /// Returns the protocols that are offered by default (ALPN, RFC 7301): HTTP/2 for a run with streams.
    pub fn spoken(streams: Option<u32>) -> Vec<String> {
        vec![if streams.is_some() { "h2" } else { HTTP_1_1 }.to_owned()]
    }

    /// Returns the protocols that a run with this number of streams offers.
    fn offered(&self, streams: Option<u32>) -> Vec<String> {
        self.protocols.clone().unwrap_or_else(|| TlsOptions::spoken(streams))
    }

    /// Returns the settings for the record of a run with this number of streams.
    pub(crate) fn settings(&self, streams: Option<u32>) -> LoadTlsSettings {
        LoadTlsSettings {
            name: self.name.clone(),
            certificate: self.identity.as_ref().map(|(certificate, _)| certificate.display().to_string()),
            key: self.identity.as_ref().map(|(_, key)| key.display().to_string()),
            full_handshakes: self.full_handshakes,
            protocols: self.offered(streams),
        }
    }

    /// Reads certificates and key of the client.
    fn identity(&self, provider: &CryptoProvider) -> Result<Option<Arc<CertifiedKey>>, LoadError> {
        let Some((certificate, key)) = &self.identity else { return Ok(None) };
        let refuse = |path: &PathBuf, flag: &str, why: &dyn std::fmt::Display| {
            LoadError::Setting(format!("invalid value '{}' for '--{flag}': {why}", path.display()))
        };
        let chain = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<Vec<CertificateDer<'static>>, _>>)
            .map_err(|error| refuse(certificate, "cert", &error))?;
        if chain.is_empty() {
            return Err(refuse(certificate, "cert", &"expected a certificate in PEM"));
        }
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| match error {
            pem::Error::NoItemsFound => refuse(key, "key", &"expected a private key in PEM, not encrypted"),
            error => refuse(key, "key", &error),
        })?;
        let identity = CertifiedKey::from_der(chain, private, provider).map_err(|error| {
            refuse(key, "key", &format!("expected the key of the certificate of --cert: {error}"))
        })?;
        Ok(Some(Arc::new(identity)))
    }
}

/// What a TLS connection has negotiated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Session {
    version: u16,
    cipher: u16,
    protocol: Option<Vec<u8>>,
    resumed: bool,
}

impl Session {
    /// Returns what an established connection has negotiated.
    pub(crate) fn of(connection: &ClientConnection) -> Option<Session> {
        Some(Session {
            version: connection.protocol_version()?.into(),
            cipher: connection.negotiated_cipher_suite()?.suite().into(),
            protocol: connection.alpn_protocol().map(<[u8]>::to_vec),
            resumed: connection.handshake_kind() == Some(HandshakeKind::Resumed),
        })
    }

    /// Returns the session for the record, with its number of connections.
    pub(crate) fn counted(&self, connections: u64) -> LoadTls {
        let cipher = format!("{:?}", CipherSuite::from(self.cipher));
        LoadTls {
            version: match ProtocolVersion::from(self.version) {
                ProtocolVersion::TLSv1_3 => "TLS 1.3".to_owned(),
                ProtocolVersion::TLSv1_2 => "TLS 1.2".to_owned(),
                other => format!("{other:?}"),
            },
            // rustls tells the suites of TLS 1.3 from others by a prefix that IANA's names do not have.
            cipher: cipher.replace("TLS13_", "TLS_"),
            protocol: self.protocol.as_ref().map(|name| name.escape_ascii().to_string()),
            resumed: self.resumed,
            connections,
        }
    }
}

/// The TLS configuration that all connections of a run share.
#[derive(Clone)]
pub(crate) struct TlsSetup {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    client: Arc<Client>,
}

/// The certificate of the client, if it has one. Notes whether a server asked for it.
#[derive(Debug)]
struct Client {
    identity: Option<Arc<CertifiedKey>>,
    asked: AtomicBool,
}

impl ResolvesClientCert for Client {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.asked.store(true, Ordering::Relaxed);
        self.identity.clone()
    }

    fn has_certs(&self) -> bool {
        self.identity.is_some()
    }
}

impl TlsSetup {
    pub(crate) fn new(
        host: &str,
        trust: &Trust,
        options: &TlsOptions,
        streams: Option<u32>,
    ) -> Result<Self, LoadError> {
        let refuse = |why: String| LoadError::Tls(why);
        let host = options.name.as_deref().unwrap_or(host);
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|_| refuse(format!("{host:?} is not a name that a certificate could have")))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Verifier::new(trust, &provider)?;
        let client =
            Arc::new(Client { identity: options.identity(&provider)?, asked: AtomicBool::new(false) });
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refuse(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::clone(&client) as Arc<dyn ResolvesClientCert>);
        config.alpn_protocols = options.offered(streams).into_iter().map(String::into_bytes).collect();
        if options.full_handshakes {
            config.resumption = Resumption::disabled();
        }
        Ok(TlsSetup { config: Arc::new(config), name, client })
    }

    /// Begins a connection.
    pub(crate) fn connection(&self) -> Result<ClientConnection, Error> {
        let mut connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone())?;
        // By default rustls takes at most 64 KiB before they are sent, so a request would be cut there.
        connection.set_buffer_limit(None);
        Ok(connection)
    }

    /// Returns the failure for an error of TLS. `bytes`: what came last.
    pub(crate) fn failure(&self, error: &Error, bytes: &[u8]) -> Failure {
        failure(error, bytes, self.client.asked.load(Ordering::Relaxed))
    }

    pub(crate) fn wrap(&self, inner: Box<dyn ProtocolState>) -> Box<dyn ProtocolState> {
        Box::new(Tls {
            setup: self.clone(),
            connection: None,
            inner,
            answered: false,
            outgoing: Vec::new(),
            plain: vec![0; 16 * 1024],
        })
    }
}

/// The state of a TLS connection, with the state of the protocol inside it.
struct Tls {
    setup: TlsSetup,
    connection: Option<ClientConnection>,
    inner: Box<dyn ProtocolState>,
    /// Whether the server has sent plaintext since the last request.
    answered: bool,
    outgoing: Vec<u8>,
    plain: Vec<u8>,
}

impl Tls {
    /// Moves the encrypted bytes to send into `outgoing`. Writing to memory does not fail.
    fn collect(&mut self) {
        self.outgoing.clear();
        if let Some(connection) = &mut self.connection {
            while connection.wants_write() && connection.write_tls(&mut self.outgoing).is_ok() {}
        }
    }
}

impl ProtocolState for Tls {
    fn renew(&mut self) {
        self.inner.renew();
        self.connection = self.setup.connection().ok();
    }

    fn begin(&mut self, last: bool) {
        self.inner.begin(last);
        self.answered = false;
        if let Some(connection) = &mut self.connection {
            // rustls keeps these bytes until the handshake is complete.
            let written = connection.writer().write_all(self.inner.outgoing());
            written.expect("a buffer without a limit takes all bytes");
        }
        self.collect();
    }

    fn repeat(&mut self) {
        self.inner.repeat();
    }

    fn current(&self) -> usize {
        self.inner.current()
    }

    fn may_be_sent_again(&self) -> bool {
        self.inner.may_be_sent_again()
    }

    fn outgoing(&self) -> &[u8] {
        &self.outgoing
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        let Tls { setup, connection: Some(connection), inner, answered, plain, .. } = self else {
            return ParseOutcome::Failed(failure(&Error::HandshakeNotComplete, bytes, false));
        };
        if bytes.is_empty() {
            // Without close_notify the stream may have been cut at any byte (RFC 9112, 9.8), so this is not the end of
            // a body.
            let is_unanswered =
                !connection.is_handshaking() && inner.receive(&[]) == ParseOutcome::ClosedUnanswered;
            return if is_unanswered { ParseOutcome::ClosedUnanswered } else { ParseOutcome::CLOSED_EARLY };
        }
        let was_handshaking = connection.is_handshaking();
        let mut outcome = ParseOutcome::NeedMore;
        let decrypted = decrypt(connection, plain, bytes, |text| {
            *answered = true;
            if !matches!(outcome, ParseOutcome::Failed(_)) {
                outcome = inner.receive(text);
            }
        });
        if was_handshaking
            && !connection.is_handshaking()
            && let Some(name) = connection.alpn_protocol().filter(|name| !name.starts_with(b"http/1."))
        {
            let detail = Some(format!("the server chose {}, and load speaks HTTP/1.1", quoted(name)));
            return ParseOutcome::Failed(Failure { name: "tls-alpn".into(), detail });
        }
        outcome = match (outcome, decrypted) {
            (outcome, Ok(End::Open)) => outcome,
            // The server sends nothing more on this connection.
            (ParseOutcome::Complete { status, .. }, _) => ParseOutcome::Complete { closing: true, status },
            (_, Err(error)) => return ParseOutcome::Failed(setup.failure(&error, bytes)),
            (ParseOutcome::NeedMore, Ok(End::Closed)) if connection.is_handshaking() => {
                ParseOutcome::CLOSED_EARLY
            }
            (ParseOutcome::NeedMore, Ok(End::Closed)) => inner.receive(&[]),
            (outcome, Ok(End::Closed)) => outcome,
        };
        self.collect();
        match outcome {
            ParseOutcome::NeedMore if !self.outgoing.is_empty() => ParseOutcome::Send,
            other => other,
        }
    }

    fn answered(&self) -> bool {
        self.answered
    }

    fn idle(&mut self, bytes: &[u8]) -> bool {
        let Tls { connection: Some(connection), plain, .. } = self else { return false };
        // Session tickets and new keys may arrive at any time, but a response must not.
        let mut is_silent = true;
        let decrypted = decrypt(connection, plain, bytes, |_| is_silent = false);
        is_silent && matches!(decrypted, Ok(End::Open))
    }

    fn established(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| !connection.is_handshaking())
    }

    fn session(&self) -> Option<Session> {
        Session::of(self.connection.as_ref()?)
    }
}

/// Whether the server has sent close_notify.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Closed,
}

/// Decrypts `bytes` into `plain` and calls `take` with each piece of plaintext. Bytes after close_notify are ignored (RFC 8446,
/// 6.1).
fn decrypt(
    connection: &mut ClientConnection,
    plain: &mut [u8],
    mut bytes: &[u8],
    mut take: impl FnMut(&[u8]),
) -> Result<End, Error> {
    while !bytes.is_empty() {
        connection.read_tls(&mut bytes).map_err(|error| Error::General(error.to_string()))?;
        let state = connection.process_new_packets()?;
        let mut missing = state.plaintext_bytes_to_read();
        while missing > 0 {
            let count = connection.reader().read(plain).map_err(|error| Error::General(error.to_string()))?;
            take(&plain[..count]);
            missing -= count;
        }
        if state.peer_has_closed() {
            return Ok(End::Closed);
        }
    }
    Ok(End::Open)
}

/// Returns the failure for an error of TLS. `bytes`: what came last. `asked`: whether the server has asked for a certificate.
fn failure(error: &Error, bytes: &[u8], asked: bool) -> Failure {
    use CertificateError::{
        BadSignature, Expired, ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYet,
        NotValidYetContext, UnknownIssuer,
    };
    let name = match error {
        Error::InvalidCertificate(Expired | ExpiredContext { .. }) => "tls-expired",
        Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => "tls-not-yet-valid",
        Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }) => "tls-wrong-name",
        // A bad signature: an authority of the same name, with another key, is trusted.
        Error::InvalidCertificate(UnknownIssuer | BadSignature) => "tls-unknown-issuer",
        Error::InvalidCertificate(_) => "tls-certificate",
        Error::AlertReceived(AlertDescription::NoApplicationProtocol) | Error::NoApplicationProtocol => {
            "tls-alpn"
        }
        Error::AlertReceived(AlertDescription::CertificateRequired) => "tls-client-certificate",
        // TLS 1.2 has no alert for a missing certificate.
        Error::AlertReceived(_) if asked => "tls-client-certificate",
        _ => "tls",
    };
    let detail = match error {
        Error::InvalidMessage(_) => format!("not a message of TLS: {}", quoted(bytes)),
        Error::AlertReceived(alert) => format!("the server sent the alert {alert:?}"),
        // It contains names of the certificate.
        error => error.to_string().escape_debug().to_string().replace("\\\"", "\""),
    };
    Failure { name: name.into(), detail: Some(detail) }
}

/// The certificates that the client accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Certificates signed by an authority of this system.
    System,
    /// Certificates signed by an authority of this system or of this PEM file, and the certificates in the file.
    Also(PathBuf),
    /// Any certificate: for servers under test.
    AnyCertificate,
}

/// Returns the authorities of the system and of the file, and the certificates of the file.
fn roots(trust: &Trust) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), LoadError> {
    let mut roots = RootCertStore::empty();
    let mut given = Vec::new();
    let found = rustls_native_certs::load_native_certs();
    // Certificates of the system that rustls does not accept are skipped.
    roots.add_parsable_certificates(found.certs);
    if let Trust::Also(path) = trust {
        let place = path.display();
        let refuse = |why: &dyn std::fmt::Display| {
            LoadError::Setting(format!("invalid value '{place}' for '--ca': {why}"))
        };
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| refuse(&error))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| refuse(&error))?;
            roots.add(certificate.clone()).map_err(|error| refuse(&error))?;
            given.push(certificate);
        }
        if given.is_empty() {
            return Err(refuse(&"there is no certificate in it"));
        }
    }
    if roots.is_empty() {
        return Err(LoadError::Tls(
            "this system has no certificates of authorities: use --ca FILE or --insecure".into(),
        ));
    }
    Ok((roots, given))
}

/// Verifies the certificates of servers. Even with [`Trust::AnyCertificate`] the handshake must be signed with the certificate.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    /// `None`: any certificate is accepted.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    /// Certificates that are trusted directly. A server often sends the self-signed certificate itself; webpki rejects an
    /// authority's certificate (`openssl req -x509` makes one) as a server's certificate.
    given: Vec<CertificateDer<'static>>,
}

impl Verifier {
    pub(super) fn new(trust: &Trust, provider: &Arc<CryptoProvider>) -> Result<Self, LoadError> {
        let provider = Arc::clone(provider);
        if *trust == Trust::AnyCertificate {
            return Ok(Verifier { provider, authorities: None, given: Vec::new() });
        }
        let (roots, given) = roots(trust)?;
        let authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| LoadError::Tls(error.to_string()))?;
        Ok(Verifier { provider, authorities: Some(authorities), given })
    }
}

fn is_out_of_date(error: &Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(
        error,
        Error::InvalidCertificate(Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
    )
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(authorities) = &self.authorities else { return Ok(ServerCertVerified::assertion()) };
        let judged =
            authorities.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        if !self.given.contains(end_entity) {
            return judged;
        }
        match judged {
            // webpki checks the dates before it checks issuer and purpose.
            Err(error) if is_out_of_date(&error) => Err(error),
            _ => {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
