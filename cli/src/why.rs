//! `kvbm why`: asks a running manager what was found, and why not more.

use clap::Args;
use serde_json::Value;

use crate::ask::AskedProcess;
use crate::failure::CommandFailure;
use crate::global::GlobalOptions;
use crate::output;
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
    /// What the engine named a request of late: a number, or text such as vLLM's chatcmpl-…
    #[arg(long, value_name = "NAME")]
    request: Option<String>,
}

pub(crate) fn run(args: &WhyArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    let asked = match &args.what {
        AskedThing { chain: Some(chain), .. } => ("chain", chain.clone()),
        AskedThing { request, .. } => ("request", request.clone().unwrap_or_default()),
    };
    let answer = stop::runtime()?.block_on(args.process.get("v1/why", &[(asked.0, &asked.1)]))?;
    if global.json { output::print_json(&answer) } else { output::print(&text(&answer)) }
}

/// In a line or two.
fn text(why: &Value) -> String {
    let found = why["found"].as_array().into_iter().flatten();
    let found: Vec<_> =
        found.map(|of| format!("{} {} blocks", word(&of["tier"]), of["blocks"])).collect();
    let summary = format!("{} of {}", found.join(", "), why["blocks"]);
    let next = &why["next"];
    if next.is_null() {
        return summary;
    }
    let block: String = word(&next["block"]).chars().take(6).collect();
    let tier = next["tier"].as_str().map(|tier| format!(" ({tier})")).unwrap_or_default();
    let age = next["age_s"].as_u64().map(|age| format!(", {age} s ago")).unwrap_or_default();
    let policy = next["policy"].as_str().map(|policy| format!(": {policy}")).unwrap_or_default();
    format!(
        "{summary}\nblock {} ({block}…): {}{tier}{age}{policy}",
        next["position"],
        word(&next["reason"])
    )
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
