use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::error::LoadError;

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
pub(super) struct Verifier {
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
