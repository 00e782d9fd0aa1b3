//! How a store is named and reached: its URL, its keys, and what is wrong with them.

use std::fmt;

use object_store::path::Path;
use url::Url;

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
        return Err(invalid(format!("{setting} contains credentials: move them to {KEYS}")));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(format!("{setting} has a part after '?' or '#': remove it")));
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

pub(super) fn invalid(message: String) -> SetupError {
    SetupError::new(SetupErrorKind::Invalid, message)
}
