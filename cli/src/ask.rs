//! Asking a process that serves its state (`DYN_KVBM_METRICS=true`).

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use url::Url;

use crate::failure::{CommandFailure, with_causes};

/// Whom to ask.
#[derive(Debug, Args)]
pub(crate) struct AskedProcess {
    /// Where it serves
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:6880")]
    pub(crate) url: Url,
    /// File of the token to show
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// No process needs longer to answer.
const LIMIT: Duration = Duration::from_secs(10);

impl AskedProcess {
    /// What it answers at `path`.
    pub(crate) async fn get(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Value, CommandFailure> {
        let mut url = self
            .url
            .join(path)
            .map_err(|error| CommandFailure::unusable(format!("--url: {error}")))?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        // The process may have chosen one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let unusable = |error: reqwest::Error| {
            let error = with_causes(&error.without_url());
            CommandFailure::unusable(format!(
                "{} does not answer: {error}; is metrics.enabled set there?",
                self.url
            ))
        };
        let client =
            reqwest::Client::builder().timeout(LIMIT).no_proxy().build().map_err(unusable)?;
        let mut request = client.get(url);
        if let Some(path) = &self.token_file {
            let token = std::fs::read_to_string(path).map_err(|error| {
                CommandFailure::unusable(format!(
                    "cannot read the token in {}: {error}",
                    path.display()
                ))
            })?;
            request = request.bearer_auth(token.trim());
        }
        let answer = request.send().await.map_err(unusable)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(unusable)?;
        let body: Value = serde_json::from_slice(&body).map_err(|_| {
            CommandFailure::unusable(format!("{} is no kvbm: it answered {status}", self.url))
        })?;
        match body["error"].as_str() {
            Some(error) => Err(CommandFailure::unusable(format!("{}: {error}", self.url))),
            None => Ok(body),
        }
    }
}
