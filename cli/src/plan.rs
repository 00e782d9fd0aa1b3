//! `kvbm plan`: the hit rate that a policy would reach at a capacity, by simulation alone.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kvbm_policies::{Policy, Workload};
use serde::Serialize;

use crate::Global;
use crate::failure::Failure;
use crate::output;
use crate::trace::{TraceError, TraceReader};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Trace in the Mooncake format: JSON lines, plain, gzip or zstd
    trace: PathBuf,
    /// Capacities to try, in blocks of 512 tokens
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', default_value = "1000,5000,10000,30000")]
    capacity: Vec<u32>,
    /// Policies to try; belady knows the future and serves as a bound
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "lru,belady", value_parser = policies())]
    eviction: Vec<Policy>,
}

pub(crate) fn run(args: &PlanArgs, global: &Global) -> Result<(), Failure> {
    global.load(|loader| loader)?;
    let plan = plan(&args.trace, &args.capacity, &args.eviction)?;
    plan.notes.iter().for_each(|note| output::tell(&format!("note: {note}")));
    if global.json { output::print_json(&plan) } else { output::print(&table(&plan.rows, &args.capacity)) }
}

fn policies() -> impl TypedValueParser<Value = Policy> {
    PossibleValuesParser::new(Policy::all().map(Policy::name)).try_map(|name| name.parse::<Policy>())
}

/// A line for each capacity, a column for each policy.
fn table(rows: &[Row], capacities: &[u32]) -> String {
    let policies: Vec<_> = rows.iter().step_by(capacities.len().max(1)).map(|row| row.eviction).collect();
    let titles: Vec<_> = ["capacity (blocks)"].into_iter().chain(policies).collect();
    let mut table = output::table(&titles, 0);
    for (line, &capacity) in capacities.iter().enumerate() {
        let rates = rows.iter().skip(line).step_by(capacities.len());
        let rates = rates.map(|row| format!("{:.2} %", row.token_hit_rate * 100.0));
        table.add_row([output::count(capacity.into())].into_iter().chain(rates).collect::<Vec<_>>());
    }
    format!("Token hit rate\n{}", table.trim_fmt())
}

/// What a plan found. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Plan {
    /// The trace, as it was named.
    pub(crate) trace: String,
    /// One for each policy and capacity, in the order asked for: policy by policy.
    pub(crate) rows: Vec<Row>,
    /// What the reader should know about the figures; for people, not part of the JSON.
    #[serde(skip)]
    pub(crate) notes: Vec<String>,
}

/// One policy at one capacity.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// The policy's name.
    pub(crate) eviction: &'static str,
    /// Blocks that the tier holds.
    pub(crate) capacity: u32,
    /// Hit tokens over prompt tokens, to four decimals: 0 to 1.
    pub(crate) token_hit_rate: f64,
}

/// Simulates each policy at each capacity, in blocks, over the trace.
pub(crate) fn plan(trace: &Path, capacities: &[u32], policies: &[Policy]) -> Result<Plan, TraceError> {
    let mut reader = TraceReader::open(trace)?;
    let mut workload = Workload::default();
    for request in reader.by_ref() {
        workload.push(&request?);
    }
    let row = |policy: Policy, capacity| Row {
        eviction: policy.name(),
        capacity,
        token_hit_rate: rounded(policy.simulate(&workload, capacity).token_hit_rate()),
    };
    let rows = policies.iter().flat_map(|&policy| capacities.iter().map(move |&capacity| (policy, capacity)));
    Ok(Plan {
        trace: trace.display().to_string(),
        rows: rows.map(|(policy, capacity)| row(policy, capacity)).collect(),
        notes: notes(&workload, capacities, reader.out_of_order()),
    })
}

fn rounded(rate: f64) -> f64 {
    (rate * 1e4).round() / 1e4
}

fn notes(workload: &Workload, capacities: &[u32], out_of_order: u64) -> Vec<String> {
    let mut notes = Vec::new();
    if out_of_order > 0 {
        notes.push(format!(
            "{out_of_order} requests carry a timestamp before that of an earlier one; they were taken in the \
             order of the file"
        ));
    }
    if workload.blocks() == 0 {
        notes.push("no prompt fills a block, so there is nothing to cache".to_owned());
    }
    if capacities.contains(&0) {
        notes.push("a capacity of 0 blocks caches nothing".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published figures in per cent, by policy and capacity, of the two traces.
    const CONVERSATION: &[(&str, &[(u32, f64)])] = &[
        (
            "lru",
            &[
                (1_000, 4.59),
                (3_000, 6.86),
                (5_000, 12.09),
                (10_000, 21.93),
                (20_000, 29.95),
                (30_000, 33.71),
            ],
        ),
        (
            "belady",
            &[
                (1_000, 19.44),
                (3_000, 30.01),
                (5_000, 34.78),
                (10_000, 37.34),
                (20_000, 37.34),
                (30_000, 37.34),
            ],
        ),
    ];
    const AGENTIC: &[(&str, &[(u32, f64)])] = &[
        ("lru", &[(1_000, 20.62), (5_000, 73.78), (10_000, 91.39), (20_000, 95.25)]),
        ("belady", &[(1_000, 46.74), (5_000, 86.68), (10_000, 94.58), (20_000, 96.11)]),
    ];

    #[test]
    fn the_conversation_trace_gives_the_published_figures() {
        check("conversation.jsonl.gz", CONVERSATION);
    }

    #[test]
    fn the_agentic_trace_gives_the_published_figures() {
        check("agentic.jsonl.gz", AGENTIC);
    }

    fn check(trace: &str, published: &[(&str, &[(u32, f64)])]) {
        let Some(trace) = find(trace) else { return };
        for (policy, figures) in published {
            let capacities: Vec<_> = figures.iter().map(|&(capacity, _)| capacity).collect();
            let plan = plan(&trace, &capacities, &[policy.parse().unwrap()]).unwrap();
            for (row, (_, percent)) in plan.rows.iter().zip(*figures) {
                let off = row.token_hit_rate * 100.0 - percent;
                assert!(off.abs() <= 0.05, "{row:?} is {off:.2} points off {percent}");
            }
        }
    }

    /// The trace from `KVBM_TRACES`, or beside the checkout. Its absence is said and skips the test.
    fn find(trace: &str) -> Option<PathBuf> {
        let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces");
        let directory = std::env::var_os("KVBM_TRACES").unwrap_or_else(|| beside.into());
        let path = Path::new(&directory).join(trace);
        if !path.exists() {
            eprintln!("SKIPPED: no {}; set KVBM_TRACES to the directory of traces", path.display());
            return None;
        }
        Some(path)
    }

    fn plan_of(text: &str, capacities: &[u32]) -> Result<Plan, TraceError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        plan(&path, capacities, &Policy::all().collect::<Vec<_>>())
    }

    #[test]
    fn the_json_has_a_row_for_each_policy_and_capacity() {
        let line = r#"{"timestamp":0,"input_length":1500,"output_length":1,"hash_ids":[1,2,3]}"#;
        let mut plan = plan_of(&format!("{line}\n{line}\n"), &[1, 5]).unwrap();
        plan.rows.retain(|row| ["lru", "belady"].contains(&row.eviction));
        plan.trace = "t".to_owned();
        assert_eq!(
            serde_json::to_string(&plan).unwrap(),
            r#"{"trace":"t","rows":["#.to_owned()
                + r#"{"eviction":"lru","capacity":1,"token_hit_rate":0.1707},"#
                + r#"{"eviction":"lru","capacity":5,"token_hit_rate":0.3413},"#
                + r#"{"eviction":"belady","capacity":1,"token_hit_rate":0.1707},"#
                + r#"{"eviction":"belady","capacity":5,"token_hit_rate":0.3413}]}"#
        );
        assert!(plan.notes.is_empty());
    }

    #[test]
    fn what_makes_the_figures_odd_is_noted() {
        let text = r#"{"timestamp":5,"input_length":5,"output_length":1,"hash_ids":[1]}
                      {"timestamp":4,"input_length":0,"output_length":1,"hash_ids":[]}"#;
        let plan = plan_of(text, &[0]).unwrap();
        assert_eq!(plan.notes.len(), 3, "{:?}", plan.notes);
        assert!(plan.rows.iter().all(|row| row.token_hit_rate == 0.0));
    }

    #[test]
    fn a_bad_trace_gives_no_plan() {
        assert!(matches!(plan_of("{}\n", &[1]), Err(TraceError::Line { line: 1, .. })));
        assert!(matches!(plan_of("", &[1]), Err(TraceError::Empty { .. })));
    }
}
