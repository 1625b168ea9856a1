use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, Error, SignatureScheme};

use crate::error::LoadError;
use crate::workload::protocol::{Failure, ParseOutcome, ProtocolState, quoted};
use crate::workload::trust::{Trust, Verifier};

/// The TLS configuration that all connections of a run share. Sessions are resumed, as in applications.
#[derive(Clone)]
pub(crate) struct TlsSetup {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    asked: Arc<NoCertificate>,
}

/// The certificate of the client: none. Notes whether a server asked for one.
#[derive(Debug, Default)]
struct NoCertificate(AtomicBool);

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.store(true, Ordering::Relaxed);
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

impl TlsSetup {
    pub(crate) fn new(host: &str, trust: &Trust) -> Result<Self, LoadError> {
        let refuse = |why: String| LoadError::Tls(why);
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|_| refuse(format!("{host:?} is not a name that a certificate could have")))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Verifier::new(trust, &provider)?;
        let asked = Arc::<NoCertificate>::default();
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refuse(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::clone(&asked) as Arc<dyn ResolvesClientCert>);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsSetup { config: Arc::new(config), name, asked })
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
        self.connection = ClientConnection::new(Arc::clone(&self.setup.config), self.setup.name.clone()).ok();
        if let Some(connection) = &mut self.connection {
            // By default rustls takes at most 64 KiB before they are sent, so the request would be cut there.
            connection.set_buffer_limit(None);
        }
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

    fn outgoing(&self) -> &[u8] {
        &self.outgoing
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        let Tls { setup, connection: Some(connection), inner, answered, plain, .. } = self else {
            return failed(&Error::HandshakeNotComplete, bytes, false);
        };
        if bytes.is_empty() {
            // Without close_notify the stream may have been cut at any byte (RFC 9112, 9.8), so this is not the end of
            // a body.
            let is_unanswered =
                !connection.is_handshaking() && inner.receive(&[]) == ParseOutcome::ClosedUnanswered;
            return if is_unanswered { ParseOutcome::ClosedUnanswered } else { ParseOutcome::CLOSED_EARLY };
        }
        let mut outcome = ParseOutcome::NeedMore;
        let decrypted = decrypt(connection, plain, bytes, |text| {
            *answered = true;
            if !matches!(outcome, ParseOutcome::Failed(_)) {
                outcome = inner.receive(text);
            }
        });
        outcome = match (outcome, decrypted) {
            (outcome, Ok(End::Open)) => outcome,
            // The server sends nothing more on this connection.
            (ParseOutcome::Complete { status, .. }, _) => ParseOutcome::Complete { closing: true, status },
            (_, Err(error)) => return failed(&error, bytes, setup.asked.0.load(Ordering::Relaxed)),
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
fn failed(error: &Error, bytes: &[u8], asked: bool) -> ParseOutcome {
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
    ParseOutcome::Failed(Failure { name: name.into(), detail: Some(detail) })
}
