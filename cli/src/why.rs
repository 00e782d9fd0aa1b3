//! `kvbm why`: asks a running manager what was found, and why not more. How a process is asked that
//! serves its state.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use url::Url;

use crate::GlobalOptions;
use crate::output::{CommandFailure, with_causes};
use crate::stop;

/// Asks a process that serves its state (`DYN_KVBM_METRICS=true`) how much of a chain is in which
/// tier, or what a request found, and why the next block was not there.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    #[command(flatten)]
    process: AskedProcess,
    #[command(flatten)]
    what: AskedThing,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct AskedThing {
    /// Block hashes, root first, with commas between them
    #[arg(long, value_name = "HASH,…")]
    chain: Option<String>,
    /// The name of a recent request, from the engine: a number, or text such as vLLM's chatcmpl-…
    #[arg(long, value_name = "NAME")]
    request: Option<String>,
}

pub(crate) fn run(args: &WhyArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let asked = match &args.what {
        AskedThing { chain: Some(chain), .. } => ("chain", chain.clone()),
        AskedThing { request, .. } => ("request", request.clone().unwrap_or_default()),
    };
    let answer = stop::runtime()?.block_on(args.process.get("v1/why", &[(asked.0, &asked.1)]))?;
    global.show(&answer, text)
}

/// In a line, or a few.
fn text(why: &Value) -> String {
    [Some(found(why)), missing(&why["next"]), from_peer(&why["from_peer"])]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join("\n")
}

fn found(why: &Value) -> String {
    let found = why["found"].as_array().into_iter().flatten();
    let found: Vec<_> =
        found.map(|of| format!("{} {} blocks", word(&of["tier"]), of["blocks"])).collect();
    format!("{} of {}", found.join(", "), why["blocks"])
}

fn missing(next: &Value) -> Option<String> {
    if next.is_null() {
        return None;
    }
    let block: String = word(&next["block"]).chars().take(6).collect();
    let tier = next["tier"].as_str().map(|tier| format!(" ({tier})")).unwrap_or_default();
    let age = next["age_s"].as_u64().map(|age| format!(", {age} s ago")).unwrap_or_default();
    let policy = next["policy"].as_str().map(|policy| format!(": {policy}")).unwrap_or_default();
    let (position, reason) = (&next["position"], word(&next["reason"]));
    Some(format!("block {position} ({block}…): {reason}{tier}{age}{policy}"))
}

fn from_peer(taken: &Value) -> Option<String> {
    let peer = taken["peer"].as_str()?;
    let why = taken["why"].as_str().map(|why| format!(": {why}")).unwrap_or_default();
    let Some(way) = taken["way"].as_str() else {
        return Some(format!("peer {peer} gave no lease{why}"));
    };
    let (copied, leased) = (&taken["copied_blocks"], &taken["leased_blocks"]);
    Some(format!("peer {peer}: {copied} of {leased} leased blocks came by {way}{why}"))
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_is_told_in_two_lines() {
        let found = json!([{"tier": "device", "blocks": 3}, {"tier": "disk", "blocks": 112}]);
        let next = json!({"block": "c0ffee00", "position": 112, "reason": "evicted", "tier": "disk", "age_s": 95,
            "policy": "eviction = hazard"});
        let told = text(&json!({"blocks": 160, "found": found, "next": next}));
        let expected = "device 3 blocks, disk 112 blocks of 160\n\
                        block 112 (c0ffee…): evicted (disk), 95 s ago: eviction = hazard";
        assert_eq!(told, expected);
        let never = json!({"block": "c0ffee00", "position": 0, "reason": "never_seen", "tier": null, "age_s": null,
            "policy": null});
        let told = text(&json!({"blocks": 1, "found": [], "next": never}));
        assert!(told.ends_with("block 0 (c0ffee…): never_seen"), "{told}");
    }

    #[test]
    fn a_peer_is_named_with_what_came_from_it() {
        let why = |from_peer| text(&json!({"blocks": 9, "found": [], "from_peer": from_peer}));
        let told =
            why(json!({"peer": "prefill-1", "way": "tcp", "leased_blocks": 4, "copied_blocks": 3,
            "why": "it did not answer in time"}));
        let expected =
            "peer prefill-1: 3 of 4 leased blocks came by tcp: it did not answer in time";
        assert_eq!(told.lines().last(), Some(expected));
        let told =
            why(json!({"peer": "prefill-1", "way": null, "leased_blocks": 0, "copied_blocks": 0,
            "why": "it is away"}));
        assert_eq!(told.lines().last(), Some("peer prefill-1 gave no lease: it is away"));
    }
}
