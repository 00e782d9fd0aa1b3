//! How a store is named and reached: its URL, its keys, what is wrong with them, and the S3
//! protocol.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use url::{Host, Url};

use super::error::UrlSecrets;
use crate::error::{SetupError, SetupErrorKind};

pub(super) const URL: &str = "object.url (DYN_KVBM_OBJECT_URL)";
pub(super) const ENDPOINT: &str = "object.endpoint (DYN_KVBM_OBJECT_ENDPOINT)";
pub(super) const KEYS: &str = "object.access_key and object.secret_key (DYN_KVBM_OBJECT_ACCESS_KEY, DYN_KVBM_OBJECT_SECRET_KEY)";
pub(super) const FORMS: &str = "use file:///directory, s3://bucket/prefix or memory:///";

/// How an S3-compatible store is reached. Without keys, keys and everything else that is `None`
/// come from the `AWS_*` variables, else from the instance that this runs on.
#[derive(Clone, Default)]
pub struct StoreOptions {
    /// `http://…` or `https://…`; `None`: AWS.
    pub endpoint: Option<String>,
    /// Region; `None`: `us-east-1`.
    pub region: Option<String>,
    /// Access key.
    pub access_key: Option<String>,
    /// Secret key.
    pub secret_key: Option<String>,
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions").field("region", &self.region).finish_non_exhaustive()
    }
}

/// The text is not quoted until it is known that it holds no credentials.
pub(super) fn parse(text: &str, setting: &str) -> Result<Url, SetupError> {
    let url = Url::parse(text).map_err(|e| {
        SetupError::caused(SetupErrorKind::Invalid, format!("{setting} is not a URL: {FORMS}"), e)
    })?;
    // A bucket has no port: what looks like one may be a secret whose `@` was forgotten.
    let is_odd = url.scheme() == "s3" && url.port().is_some();
    if !url.username().is_empty() || url.password().is_some() || is_odd {
        return Err(SetupError::invalid(format!(
            "{setting} contains credentials: move them to {KEYS}"
        )));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(SetupError::invalid(format!(
            "{setting} has a part after '?' or '#': remove it"
        )));
    }
    Ok(url)
}

pub(super) fn path_of(url: &Url) -> Result<Path, SetupError> {
    Path::from_url_path(url.path()).map_err(|e| {
        let message = format!("{URL} is '{url}', whose path cannot be part of an object's name");
        SetupError::caused(SetupErrorKind::Invalid, message, e)
    })
}

pub(super) fn secrets(options: &StoreOptions) -> UrlSecrets {
    let variables = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];
    let from_environment = variables.iter().filter_map(|name| std::env::var(name).ok());
    let given = [&options.access_key, &options.secret_key];
    UrlSecrets::new(given.into_iter().flatten().cloned().chain(from_environment))
}

/// A request that takes longer is given up. A segment of 32 MiB at 20 Mbit/s fits.
const REQUEST_LIMIT: Duration = Duration::from_secs(15);
/// No retry begins after this: a store that is down is noticed soon, and blocks are recomputed
/// meanwhile.
const RETRY_LIMIT: Duration = Duration::from_secs(4);
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
const MAX_RETRIES: usize = 3;

/// Opens the bucket that `url` names.
pub(super) fn open_s3(url: &Url, options: &StoreOptions) -> Result<AmazonS3, SetupError> {
    let mut builder = builder(options)?;
    let plain_http = match endpoint(options, &builder) {
        Some(endpoint) => {
            let plain_http = is_plain_http(&parse(&endpoint, ENDPOINT)?)?;
            // The more specific of the two keys, so that no variable prevails over a setting.
            builder =
                builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint.trim_end_matches('/'));
            plain_http
        }
        None => false,
    };
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    choose_cryptography();
    builder
        .with_bucket_name(url.host_str().unwrap_or_default())
        .with_client_options(client_options(plain_http))
        .with_retry(retries())
        // Over TLS the bytes are authenticated anyway, and every block has its own checksum.
        .with_unsigned_payload(!plain_http)
        // Not every S3-compatible store has the request that deletes many.
        .with_disable_bulk_delete(true)
        .build()
        .map_err(|e| {
            let message =
                format!("cannot use the object store '{url}': check {URL} and {ENDPOINT}");
            SetupError::caused(SetupErrorKind::Invalid, message, secrets(options).scrub(&e))
        })
}

fn builder(options: &StoreOptions) -> Result<AmazonS3Builder, SetupError> {
    match (&options.access_key, &options.secret_key) {
        (Some(access_key), Some(secret_key)) => Ok(AmazonS3Builder::new()
            .with_access_key_id(access_key)
            .with_secret_access_key(secret_key)),
        (None, None) => Ok(AmazonS3Builder::from_env()),
        _ => Err(SetupError::invalid(format!("only one of {KEYS} is set: set both or neither"))),
    }
}

fn endpoint(options: &StoreOptions, builder: &AmazonS3Builder) -> Option<String> {
    let variables = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let from_environment = || variables.iter().find_map(|key| builder.get_config_value(key));
    options.endpoint.clone().or_else(from_environment)
}

fn is_plain_http(endpoint: &Url) -> Result<bool, SetupError> {
    match (endpoint.scheme(), endpoint.host()) {
        ("https", Some(_)) => Ok(false),
        ("http", Some(host)) => {
            if !is_loopback(&host) {
                tracing::warn!(%endpoint, "KV blocks and signatures travel unencrypted: prefer https");
            }
            Ok(true)
        }
        _ => Err(SetupError::invalid(format!(
            "{ENDPOINT} must be http://host:port or https://host:port"
        ))),
    }
}

fn is_loopback(host: &Host<&str>) -> bool {
    match host {
        Host::Domain(name) => *name == "localhost",
        Host::Ipv4(address) => IpAddr::V4(*address).is_loopback(),
        Host::Ipv6(address) => IpAddr::V6(*address).is_loopback(),
    }
}

fn client_options(plain_http: bool) -> ClientOptions {
    ClientOptions::new()
        .with_timeout(REQUEST_LIMIT)
        .with_connect_timeout(CONNECT_LIMIT)
        .with_allow_http(plain_http)
}

fn retries() -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(1),
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: RETRY_LIMIT }
}

/// The HTTP client takes the process's cryptography; where none was chosen, ours needs no `CMake`
/// to build.
fn choose_cryptography() {
    // An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
