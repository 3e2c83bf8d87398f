//! Credentials out of a directory, whose files have the names of QEMU's `tls-creds-x509`.
//!
//! They are checked when they are loaded: a certificate that no peer would take is an error at the start, not at the
//! first connection.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, Error, RootCertStore, ServerConfig};

use crate::error::{TlsError, certificate};
use crate::verifier::Verifier;

/// Names of the files.
pub mod file {
    /// Certificates of the authorities that peers' certificates are of.
    pub const CA: &str = "ca-cert.pem";
    /// Certificates that are not to be taken any more.
    pub const REVOKED: &str = "ca-crl.pem";
    /// The server's certificate, and those between it and an authority.
    pub const SERVER_CERTIFICATE: &str = "server-cert.pem";
    /// The key of the server's certificate.
    pub const SERVER_KEY: &str = "server-key.pem";
    /// The client's certificate, and those between it and an authority.
    pub const CLIENT_CERTIFICATE: &str = "client-cert.pem";
    /// The key of the client's certificate.
    pub const CLIENT_KEY: &str = "client-key.pem";
}

/// Most bytes of a file.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// What a server shows, and what it wants of clients. Clones share it.
#[derive(Clone, Debug)]
pub struct ServerCredentials {
    pub(crate) config: Arc<ServerConfig>,
}

/// What a client shows, and what it wants of servers. Clones share it.
#[derive(Clone, Debug)]
pub struct ClientCredentials {
    pub(crate) config: Arc<ClientConfig>,
}

impl ServerCredentials {
    /// Reads a server's directory. With `verify_peer` clients need a certificate of an authority there.
    ///
    /// # Errors
    /// When a file is missing or malformed, or the server's certificate is not one that clients would take.
    pub fn load(directory: &Path, verify_peer: bool) -> Result<ServerCredentials, TlsError> {
        let directory = Directory::open(directory)?;
        let own = directory.identity(file::SERVER_CERTIFICATE, file::SERVER_KEY)?;
        directory.check_server(&own)?;
        let verifier = match verify_peer {
            true => directory.client_verifier()?,
            false => WebPkiClientVerifier::no_client_auth(),
        };
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions()?;
        let builder = builder.with_client_cert_verifier(verifier);
        let config = builder.with_single_cert(own.chain, own.key);
        let mut config = config.map_err(|error| directory.about(file::SERVER_KEY, &error))?;
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(ServerCredentials {
            config: Arc::new(config),
        })
    }
}

impl ClientCredentials {
    /// Reads a client's directory. Its own certificate may be missing; without `verify_peer` any server will do.
    ///
    /// # Errors
    /// As [`ServerCredentials::load`].
    pub fn load(directory: &Path, verify_peer: bool) -> Result<ClientCredentials, TlsError> {
        let directory = Directory::open(directory)?;
        let inner = WebPkiServerVerifier::builder_with_provider(
            Arc::clone(&directory.authorities),
            provider(),
        );
        let inner = inner.with_crls(directory.revoked()?);
        let inner = inner.allow_unknown_revocation_status().build();
        let inner = inner.map_err(|error| directory.about(file::REVOKED, &error))?;
        let verifier = Verifier {
            inner,
            any: !verify_peer,
        };
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions()?;
        let builder = builder.dangerous();
        let builder = builder.with_custom_certificate_verifier(Arc::new(verifier));
        let [certificate, key] = [file::CLIENT_CERTIFICATE, file::CLIENT_KEY];
        let mut config = match directory.has(certificate) || directory.has(key) {
            false => builder.with_no_client_auth(),
            true => {
                let own = directory.identity(certificate, key)?;
                directory.check_client(&own)?;
                let config = builder.with_client_auth_cert(own.chain, own.key);
                config.map_err(|error| directory.about(key, &error))?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientCredentials {
            config: Arc::new(config),
        })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A certificate with those behind it, and its key.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

struct Directory {
    path: PathBuf,
    authorities: Arc<RootCertStore>,
}

impl Directory {
    fn open(path: &Path) -> Result<Directory, TlsError> {
        let mut directory = Directory {
            path: path.to_owned(),
            authorities: Arc::new(RootCertStore::empty()),
        };
        let mut authorities = RootCertStore::empty();
        for one in directory.certificates(file::CA)? {
            let added = authorities.add(one);
            added.map_err(|error| directory.about(file::CA, &error))?;
        }
        directory.authorities = Arc::new(authorities);
        Ok(directory)
    }

    fn has(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }

    fn about(&self, name: &str, error: &dyn std::fmt::Display) -> TlsError {
        TlsError::about(&self.path.join(name), error)
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, TlsError> {
        let path = self.path.join(name);
        let about = |error: std::io::Error| TlsError::about(&path, text_of(&error));
        let facts = path.metadata().map_err(about)?;
        if !facts.is_file() || facts.len() > FILE_BYTES_MAX {
            return Err(TlsError::about(&path, "is no file of a few KiB"));
        }
        std::fs::read(&path).map_err(about)
    }

    fn objects<T: PemObject>(&self, name: &str) -> Result<Vec<T>, TlsError> {
        let bytes = self.read(name)?;
        let objects: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&bytes).collect();
        let objects = objects.map_err(|error| self.about(name, &error))?;
        match objects.is_empty() {
            true => Err(self.about(name, &"has nothing of its kind in PEM form")),
            false => Ok(objects),
        }
    }

    fn certificates(&self, name: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        self.objects(name)
    }

    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        match self.has(file::REVOKED) {
            true => self.objects(file::REVOKED),
            false => Ok(Vec::new()),
        }
    }

    fn identity(&self, certificate: &str, key: &str) -> Result<Identity, TlsError> {
        let chain = self.certificates(certificate)?;
        let bytes = self.read(key)?;
        let encrypted = bytes.windows(9).any(|word| word == b"ENCRYPTED");
        let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| match encrypted {
            true => self.about(key, &"is encrypted, which is not supported"),
            false => self.about(key, &error),
        })?;
        Ok(Identity { chain, key })
    }

    fn client_verifier(&self) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let authorities = Arc::clone(&self.authorities);
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities, provider());
        let verifier = verifier.with_crls(self.revoked()?);
        let verifier = verifier.allow_unknown_revocation_status().build();
        verifier.map_err(|error| self.about(file::REVOKED, &error))
    }

    fn check_server(&self, own: &Identity) -> Result<(), TlsError> {
        self.check(own, file::SERVER_CERTIFICATE, |first, rest| {
            verify_server_cert_signed_by_trust_anchor(
                &ParsedCertificate::try_from(first)?,
                &self.authorities,
                rest,
                UnixTime::now(),
                provider().signature_verification_algorithms.all,
            )
        })
    }

    fn check_client(&self, own: &Identity) -> Result<(), TlsError> {
        let verifier = self.client_verifier()?;
        self.check(own, file::CLIENT_CERTIFICATE, |first, rest| {
            let verified = verifier.verify_client_cert(first, rest, UnixTime::now());
            verified.map(drop)
        })
    }

    /// Whether peers with the same authorities would take our certificate.
    fn check(
        &self,
        own: &Identity,
        name: &str,
        verify: impl FnOnce(&CertificateDer<'_>, &[CertificateDer<'_>]) -> Result<(), Error>,
    ) -> Result<(), TlsError> {
        let Some((first, rest)) = own.chain.split_first() else {
            return Ok(());
        };
        verify(first, rest).map_err(|error| match error {
            Error::InvalidCertificate(reason) => self.about(name, &certificate(&reason)),
            other => self.about(name, &other),
        })
    }
}

fn text_of(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        _ => error.to_string(),
    }
}
