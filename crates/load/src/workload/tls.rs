use std::io::{Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Error};

use super::trust::Verifier;
use super::{Heard, Talk, Trust};
use crate::LoadError;

/// What every TLS connection of a run shares: sessions are resumed, as applications do.
#[derive(Clone)]
pub(crate) struct TlsSetup {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsSetup {
    pub(crate) fn new(host: &str, trust: &Trust) -> Result<Self, LoadError> {
        let refuse = |why: String| LoadError::Tls(why);
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|_| refuse(format!("{host:?} is not a name that a certificate could have")))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Verifier::new(trust, &provider)?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refuse(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsSetup { config: Arc::new(config), name })
    }

    pub(crate) fn talk(&self, inner: Box<dyn Talk>) -> Box<dyn Talk> {
        Box::new(Tls {
            setup: self.clone(),
            connection: None,
            inner,
            outgoing: Vec::new(),
            plain: vec![0; 16 * 1024],
        })
    }
}

/// Another talk, inside of TLS.
struct Tls {
    setup: TlsSetup,
    connection: Option<ClientConnection>,
    inner: Box<dyn Talk>,
    outgoing: Vec<u8>,
    plain: Vec<u8>,
}

impl Tls {
    /// Whatever is to be sent, encrypted. Writing to memory does not fail.
    fn collect(&mut self) {
        self.outgoing.clear();
        if let Some(connection) = &mut self.connection {
            while connection.wants_write() && connection.write_tls(&mut self.outgoing).is_ok() {}
        }
    }
}

impl Talk for Tls {
    fn renew(&mut self) {
        self.inner.renew();
        self.connection = ClientConnection::new(Arc::clone(&self.setup.config), self.setup.name.clone()).ok();
    }

    fn begin(&mut self, last: bool) {
        self.inner.begin(last);
        if let Some(connection) = &mut self.connection {
            // Kept until the handshake is over.
            let _ = connection.writer().write_all(self.inner.outgoing());
        }
        self.collect();
    }

    fn outgoing(&self) -> &[u8] {
        &self.outgoing
    }

    fn heard(&mut self, mut bytes: &[u8]) -> Heard {
        let Some(connection) = &mut self.connection else { return failed(&Error::HandshakeNotComplete) };
        if bytes.is_empty() {
            return if connection.is_handshaking() { Heard::CLOSED_EARLY } else { self.inner.heard(&[]) };
        }
        let mut heard = Heard::More;
        while !bytes.is_empty() {
            if let Err(error) = connection.read_tls(&mut bytes) {
                return failed(&Error::General(error.to_string()));
            }
            let state = match connection.process_new_packets() {
                Ok(state) => state,
                Err(error) => return failed(&error),
            };
            if state.plaintext_bytes_to_read() > 0 {
                // Not at the end of the stream, so that it can be read as far as it goes.
                while let Ok(count) = connection.reader().read(&mut self.plain)
                    && count > 0
                {
                    heard = self.inner.heard(&self.plain[..count]);
                }
            }
        }
        self.collect();
        match heard {
            Heard::More if !self.outgoing.is_empty() => Heard::Send,
            other => other,
        }
    }

    fn established(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| !connection.is_handshaking())
    }
}

fn failed(error: &Error) -> Heard {
    Heard::Failed(match error {
        Error::InvalidCertificate(_) => "tls-certificate".into(),
        _ => "tls".into(),
    })
}
