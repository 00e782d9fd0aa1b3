//! TLS between workers: version 1.3, and both sides show a certificate that one CA signed.
//!
//! A reader compares the certificate with the host that it dialled. A holder takes every
//! certificate of the CA: so the CA says who may read.

use std::fmt;
use std::sync::Arc;

use kvbm_settings::PeerSettings;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error as TlsError, RootCertStore,
    ServerConfig,
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::protocol::BrokenLink;
use super::stream::{ONE_SIDED, linger};
use crate::error::{Error, Result};
use crate::secret::{read_private, read_text};

/// This worker's certificate, and who signs those of others.
pub(super) struct PeerTls {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerTls")
    }
}

impl PeerTls {
    /// Reads the files that the settings name. `None`: they name none.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable): one cannot be read.
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): others can read the key, a file is not what
    /// it should be, or others would refuse the certificate.
    pub(super) fn of(settings: &PeerSettings) -> Result<Option<Self>> {
        let PeerSettings { tls_certificate, tls_key, tls_ca, .. } = settings;
        let (Some(certificate), Some(key), Some(ca)) = (tls_certificate, tls_key, tls_ca) else {
            return Ok(None);
        };
        let chain = certificates(certificate, "peers.tls_certificate")?;
        let text = read_private(key, "peers.tls_key")?;
        let key = PrivateKeyDer::from_pem_slice(text.as_bytes())
            .map_err(|error| no_pem(key, "peers.tls_key", "private key", &error))?;
        let files = TlsFiles { chain, key, ca: certificates(ca, "peers.tls_ca")? };
        files.check().and_then(|()| Self::new(files)).map(Some).map_err(|error| {
            let why = remedy(&error);
            Error::invalid(format!("peers.tls_certificate ({certificate}): {why}"))
        })
    }

    fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let provider = provider();
        let roots = files.roots()?;
        let server =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider.clone())
                .build()
                .map_err(unusable)?;
        let client = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(unusable)?;
        let connecting = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(server)
            .with_client_auth_cert(files.chain.clone(), files.key.clone_key())?;
        let mut accepting = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(client)
            .with_single_cert(files.chain, files.key)?;
        // None is resumed: each connection shows its certificate.
        accepting.send_tls13_tickets = 0;
        Ok(Self { connector: Arc::new(connecting).into(), acceptor: Arc::new(accepting).into() })
    }

    /// Goes on in TLS with the holder at `address`, which is a `host:port`.
    pub(super) async fn connect(
        &self,
        address: &str,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, BrokenLink> {
        let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host)
            .map_err(|_| BrokenLink::Unexpected("no certificate can name its host"))?;
        let connected = self.connector.connect(name, stream).await;
        connected.map(TlsStream::Client).map_err(|error| explained(error.into()))
    }

    /// Goes on in TLS with a reader.
    pub(super) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, BrokenLink> {
        match self.acceptor.accept(stream).into_fallible().await {
            Ok(stream) => Ok(TlsStream::Server(stream)),
            Err((error, stream)) => {
                linger(stream).await;
                Err(explained(error.into()))
            }
        }
    }
}

/// What the files hold.
struct TlsFiles {
    /// This worker's certificate first, then those between it and the CA.
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    ca: Vec<CertificateDer<'static>>,
}

impl TlsFiles {
    fn roots(&self) -> Result<Arc<RootCertStore>, TlsError> {
        let mut roots = RootCertStore::empty();
        self.ca.iter().try_for_each(|certificate| roots.add(certificate.clone()))?;
        Ok(Arc::new(roots))
    }

    /// Whether others would take the certificate.
    fn check(&self) -> Result<(), TlsError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, provider());
        let verifier = verifier.build().map_err(unusable)?;
        let Some((own, between)) = self.chain.split_first() else {
            return Err(TlsError::NoCertificatesPresented);
        };
        verifier.verify_client_cert(own, between, UnixTime::now()).map(drop)
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn unusable(error: impl fmt::Display) -> TlsError {
    TlsError::General(error.to_string())
}

fn certificates(path: &str, setting: &str) -> Result<Vec<CertificateDer<'static>>> {
    let text = read_text(path, setting)?;
    let found = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if found.is_empty() => {
            Err(no_pem(path, setting, "certificate", &pem::Error::NoItemsFound))
        }
        found => found.map_err(|error| no_pem(path, setting, "certificate", &error)),
    }
}

fn no_pem(path: &str, setting: &str, what: &str, error: &pem::Error) -> Error {
    Error::invalid(format!("{path} ({setting}) holds no {what} in PEM: {error}"))
}

/// Why a connection ended, with what to do about it if TLS ended it.
pub(super) fn explained(why: BrokenLink) -> BrokenLink {
    let BrokenLink::Closed(error) = &why else { return why };
    let error = error.get_ref().and_then(|error| error.downcast_ref::<TlsError>());
    error.map(|error| BrokenLink::Tls(remedy(error))).unwrap_or(why)
}

fn remedy(error: &TlsError) -> String {
    use CertificateError::{
        Expired, ExpiredContext, NotValidForName, NotValidForNameContext, UnknownIssuer,
    };
    match error {
        TlsError::InvalidMessage(_) => ONE_SIDED.to_owned(),
        TlsError::NoCertificatesPresented => {
            "it shows no certificate: give it one of the CA (peers.tls_certificate)".to_owned()
        }
        TlsError::InvalidCertificate(UnknownIssuer) => {
            "another CA signed the certificate: give all workers certificates of one CA, and that as peers.tls_ca"
                .to_owned()
        }
        TlsError::InvalidCertificate(Expired | ExpiredContext { .. }) => {
            "the certificate has expired: have the CA sign another".to_owned()
        }
        TlsError::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }) => {
            format!("{error}: name the host of its address in the certificate (subjectAltName)")
        }
        TlsError::AlertReceived(alert) => refusal(*alert),
        _ => format!("TLS failed: {error}"),
    }
}

/// What the other side thinks of our certificate.
fn refusal(alert: AlertDescription) -> String {
    let what = match alert {
        AlertDescription::UnknownCA => "its peers.tls_ca did not sign it",
        AlertDescription::CertificateExpired => "it has expired",
        AlertDescription::CertificateRequired => "there is none",
        AlertDescription::BadCertificate => "it does not name this worker's host, or is damaged",
        _ => return format!("it refuses TLS: {alert:?}"),
    };
    format!("it refuses our certificate (peers.tls_certificate): {what}")
}

#[cfg(test)]
pub(super) mod tests;
