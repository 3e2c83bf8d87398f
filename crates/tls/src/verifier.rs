//! Checking a server's certificate: as rustls does, and with the common name where a certificate has no other names,
//! as GnuTLS does and QEMU's users rely on; or not at all.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};
use webpki::EndEntityCert;

use crate::distinguished_name;

/// The check.
#[derive(Debug)]
pub(crate) struct Verifier {
    pub(crate) inner: Arc<WebPkiServerVerifier>,
    /// Any server will do (`verify-peer=no`).
    pub(crate) any: bool,
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
        if self.any {
            return Ok(ServerCertVerified::assertion());
        }
        let verified = self.inner.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        match verified {
            // The name is looked at last: everything else was right.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if is_common_name(end_entity, server_name) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Whether a certificate without DNS names has this one as its common name.
fn is_common_name(certificate: &CertificateDer<'_>, wanted: &ServerName<'_>) -> bool {
    let (ServerName::DnsName(wanted), Ok(found)) = (wanted, EndEntityCert::try_from(certificate))
    else {
        return false;
    };
    let common_name = distinguished_name::common_name(found.subject());
    found.valid_dns_names().next().is_none()
        && common_name.is_some_and(|name| name.eq_ignore_ascii_case(wanted.as_ref()))
}
