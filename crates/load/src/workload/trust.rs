use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::LoadError;

/// Whose certificates are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Those that an authority of this system has signed.
    System,
    /// These (PEM) too.
    Also(PathBuf),
    /// Anybody's: for servers under test.
    Anybody,
}

/// The authorities of the system and those of the file, and what is in the file.
fn roots(trust: &Trust) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), LoadError> {
    let mut roots = RootCertStore::empty();
    let mut given = Vec::new();
    let found = rustls_native_certs::load_native_certs();
    // A system may have some that are out of fashion: those are left out, as everybody does.
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

/// Judges the certificates of servers. Whoever is trusted, the handshake must be signed with the certificate.
#[derive(Debug)]
pub(super) struct Verifier {
    provider: Arc<CryptoProvider>,
    /// `None`: anybody will do.
    authorities: Option<Arc<WebPkiServerVerifier>>,
    /// Certificates that are trusted by themselves. A server often shows the very one that it signed itself, which as an
    /// authority (`openssl req -x509` makes it one) is no server's certificate for webpki.
    given: Vec<CertificateDer<'static>>,
}

impl Verifier {
    pub(super) fn new(trust: &Trust, provider: &Arc<CryptoProvider>) -> Result<Self, LoadError> {
        let provider = Arc::clone(provider);
        if *trust == Trust::Anybody {
            return Ok(Verifier { provider, authorities: None, given: Vec::new() });
        }
        let (roots, given) = roots(trust)?;
        let authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| LoadError::Tls(error.to_string()))?;
        Ok(Verifier { provider, authorities: Some(authorities), given })
    }
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
        if self.given.contains(end_entity) {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            return Ok(ServerCertVerified::assertion());
        }
        authorities.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
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
