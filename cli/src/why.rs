//! `kvbm why`: asks a running manager what was found, and why not more.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use url::Url;

use crate::failure::{Failure, with_causes};
use crate::global::Global;
use crate::output;
use crate::stop;

/// Asks a process that serves its state (`DYN_KVBM_METRICS=true`) how much of a chain is in which tier, or what a request
/// found, and why the next block was not there.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// Where it serves
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:6880")]
    url: Url,
    #[command(flatten)]
    what: What,
    /// File of the token to show
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct What {
    /// Block hashes, root first, with commas between them
    #[arg(long, value_name = "HASH,…")]
    chain: Option<String>,
    /// The number that the engine gave a request of late
    #[arg(long, value_name = "NUMBER")]
    request: Option<u64>,
}

/// Nobody needs longer to answer.
const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &WhyArgs, global: &Global) -> Result<(), Failure> {
    let answer = stop::runtime()?.block_on(ask(args))?;
    if global.json { output::print_json(&answer) } else { output::print(&text(&answer)) }
}

async fn ask(args: &WhyArgs) -> Result<Value, Failure> {
    let mut url = args.url.join("v1/why").map_err(|error| Failure::unusable(format!("--url: {error}")))?;
    let (name, value) = match &args.what {
        What { chain: Some(chain), .. } => ("chain", chain.clone()),
        What { request, .. } => ("request", request.unwrap_or_default().to_string()),
    };
    url.query_pairs_mut().append_pair(name, &value);
    // The process may have chosen one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let unusable = |error: reqwest::Error| {
        let error = with_causes(&error.without_url());
        Failure::unusable(format!("{} does not answer: {error}; is metrics.enabled set there?", args.url))
    };
    let client = reqwest::Client::builder().timeout(LIMIT).no_proxy().build().map_err(unusable)?;
    let mut request = client.get(url);
    if let Some(path) = &args.token_file {
        let token = std::fs::read_to_string(path).map_err(|error| {
            Failure::unusable(format!("cannot read the token in {}: {error}", path.display()))
        })?;
        request = request.bearer_auth(token.trim());
    }
    let answer = request.send().await.map_err(unusable)?;
    let status = answer.status();
    let body = answer.bytes().await.map_err(unusable)?;
    let body: Value = serde_json::from_slice(&body)
        .map_err(|_| Failure::unusable(format!("{} is no kvbm: it answered {status}", args.url)))?;
    match body["error"].as_str() {
        Some(error) => Err(Failure::unusable(format!("{}: {error}", args.url))),
        None => Ok(body),
    }
}

/// In a line or two.
fn text(why: &Value) -> String {
    let found = why["found"].as_array().into_iter().flatten();
    let found: Vec<_> = found.map(|of| format!("{} {} blocks", word(&of["tier"]), of["blocks"])).collect();
    let summary = format!("{} of {}", found.join(", "), why["blocks"]);
    let next = &why["next"];
    if next.is_null() {
        return summary;
    }
    let block: String = word(&next["block"]).chars().take(6).collect();
    let tier = next["tier"].as_str().map(|tier| format!(" ({tier})")).unwrap_or_default();
    let age = next["age_s"].as_u64().map(|age| format!(", {age} s ago")).unwrap_or_default();
    let policy = next["policy"].as_str().map(|policy| format!(": {policy}")).unwrap_or_default();
    format!("{summary}\nblock {} ({block}…): {}{tier}{age}{policy}", next["position"], word(&next["reason"]))
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
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
}
