//! Sends a request by HTTP.

use std::error::Error as _;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Identity, Response};

use crate::error::{Error, ErrorKind, Result};
use crate::peers::discovery::EtcdTls;

/// A machine that vanished is noticed after four of these, while nothing else is sent.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// A request to one member of etcd.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) url: String,
    /// Proves who asks.
    pub(super) token: Option<&'a str>,
    pub(super) body: String,
}

/// Sends requests. Tests have one that needs no network, whose time can be turned.
pub(super) trait Transport: Send + Sync + 'static {
    type Answer: Answer;

    /// The answer, as soon as it begins; else what is wrong. Names no secret.
    fn post(&self, call: Call<'_>) -> impl Future<Output = Result<Self::Answer, String>> + Send;
}

/// An answer that comes in pieces.
pub(super) trait Answer: Send {
    /// The status of HTTP.
    fn status(&self) -> u16;

    /// The next piece; `None`: there is no more. Nothing is lost if the future is dropped.
    fn piece(&mut self) -> impl Future<Output = Result<Option<Vec<u8>>, String>> + Send;
}

/// HTTP, with TLS where the URL says so.
#[derive(Debug)]
pub(super) struct Http(Client);

impl Http {
    pub(super) fn new(tls: Option<&EtcdTls>) -> Result<Self> {
        // The process may have chosen its cryptography already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .no_proxy()
            .redirect(Policy::none())
            .tcp_keepalive(PROBE_INTERVAL)
            .tcp_keepalive_interval(PROBE_INTERVAL)
            .tcp_keepalive_retries(PROBES);
        let client = match tls {
            Some(tls) => with_certificates(client, tls).and_then(ClientBuilder::build),
            None => client.build(),
        };
        client.map(Self).map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "peers in etcd need an HTTP client", error)
        })
    }
}

fn with_certificates(client: ClientBuilder, tls: &EtcdTls) -> reqwest::Result<ClientBuilder> {
    let ca = Certificate::from_pem_bundle(tls.ca.as_bytes())?;
    let identity = Identity::from_pem(tls.identity.as_bytes())?;
    Ok(client.tls_certs_merge(ca).identity(identity))
}

impl Transport for Http {
    type Answer = Response;

    async fn post(&self, call: Call<'_>) -> Result<Response, String> {
        let mut request =
            self.0.post(call.url).header(CONTENT_TYPE, "application/json").body(call.body);
        if let Some(token) = call.token {
            let mut token = HeaderValue::from_str(token)
                .map_err(|_| "its token has characters that no header may have".to_owned())?;
            token.set_sensitive(true);
            request = request.header(AUTHORIZATION, token);
        }
        // A member that lost the others refuses then, and ends a watch that would be silent.
        let request = request.header("Grpc-Metadata-hasleader", "true");
        request.send().await.map_err(described)
    }
}

impl Answer for Response {
    fn status(&self) -> u16 {
        Self::status(self).as_u16()
    }

    async fn piece(&mut self) -> Result<Option<Vec<u8>>, String> {
        let piece = self.chunk().await.map_err(described)?;
        Ok(piece.map(|piece| piece.to_vec()))
    }
}

/// An error and its causes, without the URL, which the caller names.
fn described(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    message
}
