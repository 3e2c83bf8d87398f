//! What can go wrong, in one line.

use std::path::Path;

use rustls::{AlertDescription, CertificateError, Error};

/// What went wrong, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    pub(crate) fn new(message: impl Into<String>) -> TlsError {
        TlsError(message.into())
    }

    /// About a file of a directory with credentials.
    pub(crate) fn about(file: &Path, message: impl std::fmt::Display) -> TlsError {
        TlsError(format!("{}: {message}", file.display()))
    }
}

impl From<Error> for TlsError {
    fn from(error: Error) -> TlsError {
        TlsError(explain(&error))
    }
}

/// What an error of the library means to who has to mend it.
pub(crate) fn explain(error: &Error) -> String {
    match error {
        Error::NoCertificatesPresented => "the client has no certificate".to_owned(),
        Error::InvalidCertificate(reason) => {
            format!("the peer's certificate {}", certificate(reason))
        }
        Error::AlertReceived(alert) => format!("the peer refused: {}", refusal(*alert)),
        Error::InvalidMessage(_) => "the peer does not speak TLS".to_owned(),
        other => {
            let text = other.to_string();
            text.lines().collect::<Vec<_>>().join(" ")
        }
    }
}

/// What is wrong with a certificate; the certificate is the subject of the sentence.
pub(crate) fn certificate(reason: &CertificateError) -> String {
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "has expired".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet".to_owned()
        }
        CertificateError::Revoked => "was revoked".to_owned(),
        CertificateError::UnknownIssuer => "is of no authority in ca-cert.pem".to_owned(),
        CertificateError::NotValidForName => "is for another host name".to_owned(),
        CertificateError::NotValidForNameContext { expected, .. } => {
            let expected = expected.to_str();
            format!("does not match the hostname {expected}")
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is for another purpose".to_owned()
        }
        CertificateError::BadSignature => {
            "has a signature of no authority in ca-cert.pem".to_owned()
        }
        CertificateError::BadEncoding => "is malformed".to_owned(),
        other => format!("was refused: {other}"),
    }
}

fn refusal(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => "it wants a certificate".to_owned(),
        AlertDescription::CertificateExpired => "our certificate has expired".to_owned(),
        AlertDescription::CertificateRevoked => "our certificate was revoked".to_owned(),
        AlertDescription::UnknownCA => "it does not know our certificate's authority".to_owned(),
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "it does not take our certificate".to_owned()
        }
        AlertDescription::AccessDenied => "it does not let us in".to_owned(),
        AlertDescription::ProtocolVersion => "it has no version of TLS from 1.2 on".to_owned(),
        AlertDescription::HandshakeFailure => "it has no cipher in common with us".to_owned(),
        other => format!("{other:?}"),
    }
}
