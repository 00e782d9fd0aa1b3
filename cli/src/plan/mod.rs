//! `kvbm plan`: what policies, capacities and tiers would bring, by simulation alone.
//!
//! | module | holds |
//! |---|---|
//! | `input` | the trace in memory, whole or as a sample |
//! | `model`, `amount` | what a block takes; capacities in blocks or bytes |
//! | `tiers` | several tiers: where hits come from, what is written |
//! | `what_if` | what more of a tier would bring, in hits and seconds |
//! | `text`, `html` | the result for people |
//! | `jobs` | independent simulations on all cores |

mod amount;
mod html;
mod input;
mod jobs;
mod model;
mod outcome;
mod text;
mod tiers;
mod what_if;

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kvbm_policies::{AdmissionKind, EvictionKind, Policy, Sample};
use kvbm_tiers::clock;

use self::amount::CostAmount;
use self::input::PlanInput;
use self::model::{KvModel, ModelArgs};
use self::outcome::{MissCurve, OutcomeRow, PlanOutcome};
use self::tiers::TierAmount;
use self::what_if::CostArgs;
use crate::failure::CommandFailure;
use crate::global::GlobalOptions;
use crate::output::{self, rounded};

/// Capacities of the table, in blocks.
const CAPACITIES: [u32; 4] = [1_000, 5_000, 10_000, 30_000];
/// Capacities of the pictures.
const FINE_CAPACITIES: [u32; 10] =
    [500, 1_000, 2_000, 3_000, 5_000, 7_000, 10_000, 20_000, 30_000, 50_000];
/// Tiers that are taken where the question needs some and none are given.
const TIERS: &str = "device=1000,host=5000,disk=50000";

/// Everything is simulated: no block is moved, no tier is opened. What a session needs of time and
/// memory depends on the trace alone. docs/planning.md says what the figures mean and how far off
/// they are.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Trace in the Mooncake format: JSON lines, plain, gzip or zstd
    trace: PathBuf,
    /// Capacities to try: blocks of 512 tokens, or sizes such as 64GB, which need a model
    /// [default: 1000,5000,10000,30000; with --html, ten from 500 to 50000]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = CostAmount::parse)]
    capacity: Vec<CostAmount>,
    /// Policies to try; belady knows the future and serves as a bound. Tiers use the first that
    /// does not
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "hazard,lru,belady",
        value_parser = policies()
    )]
    eviction: Vec<Policy>,
    /// Tiers to simulate together: device, host, disk, object, each with blocks or a size
    #[arg(long, value_name = "TIER=CAPACITY", value_delimiter = ',', value_parser = TierAmount::parse)]
    tiers: Vec<TierAmount>,
    /// When blocks go down a tier; selective and auto are for disk and object, or for the last tier
    #[arg(long, value_name = "MODE", default_value_t, value_parser = admissions())]
    admission: AdmissionKind,
    /// Say what more or less of each tier would bring [tiers by default:
    /// device=1000,host=5000,disk=50000]
    #[arg(long)]
    what_if: bool,
    /// Let a share of all blocks stand for all, such as 0.05 [default: all, of very large traces
    /// fewer]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    sample: Option<f64>,
    /// Write a report with pictures, one file that needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    costs: CostArgs,
}

pub(crate) fn run(args: &PlanArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    global.load(|loader| loader)?;
    let page = args.html.as_deref().map(html::PlanPage::create).transpose()?;
    let plan = plan(args)?;
    plan.notes.iter().for_each(|note| output::tell(&format!("note: {note}")));
    if let Some(page) = page {
        page.write(&plan)?;
    }
    if global.json { output::print_json(&plan) } else { output::print(&text::page(&plan)) }
}

fn policies() -> impl TypedValueParser<Value = Policy> {
    PossibleValuesParser::new(Policy::all().map(Policy::name))
        .try_map(|name| name.parse::<Policy>())
}

fn admissions() -> impl TypedValueParser<Value = AdmissionKind> {
    PossibleValuesParser::new(AdmissionKind::ALL.map(AdmissionKind::name))
        .try_map(|name| name.parse::<AdmissionKind>())
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if rate > 0.0 && rate <= 1.0 {
        Ok(rate)
    } else {
        Err("a rate is above 0 and at most 1".to_owned())
    }
}

fn plan(args: &PlanArgs) -> Result<PlanOutcome, CommandFailure> {
    let model = args.model.model()?;
    let capacities = args.capacities(model.as_ref())?;
    let tiers = args.tiers(model.as_ref())?;
    let sample = args.sample.map(|rate| Sample::one_in((1.0 / rate).round() as u32));
    let input = input::read(&args.trace, sample)?;
    let block_bytes = model.as_ref().map(|model| model.bytes_per_block);
    let is_deep = args.what_if || args.html.is_some();
    let admissions = admissions_to_compare(args.admission, args.html.is_some());
    let eviction = args.tier_eviction();
    let mut plan = PlanOutcome {
        trace: args.trace.display().to_string(),
        requests: input.requests,
        prompt_tokens: input.prompt_tokens,
        blocks: input.miniature.blocks(),
        seconds: input.seconds,
        sample_stride: input.miniature.sample().stride(),
        rows: rows(&input, &args.eviction, &capacities, block_bytes),
        lru_curve: is_deep.then(|| lru_curve(&input)),
        tiers: tiers::staircases(&input, &tiers, eviction, &admissions, block_bytes),
        what_if: None,
        notes: notes(&input, &capacities),
        model,
    };
    if is_deep && args.tiers.is_empty() {
        plan.notes.push(format!("no tiers were given: blocks of {TIERS} are taken; see --tiers"));
    }
    plan.notes.extend(tiers::notes(&tiers, input.miniature.blocks()));
    if args.what_if {
        let costs = args.costs.costs(block_bytes);
        plan.what_if = Some(what_if::explore(&input, &tiers, eviction, args.admission, costs));
        plan.notes.extend(costs.notes(&tiers));
    }
    Ok(plan)
}

impl PlanArgs {
    fn capacities(&self, model: Option<&KvModel>) -> Result<Vec<u32>, CommandFailure> {
        if self.capacity.is_empty() {
            return Ok(if self.html.is_some() {
                FINE_CAPACITIES.into()
            } else {
                CAPACITIES.into()
            });
        }
        self.capacity.iter().map(|amount| amount.blocks(model)).collect()
    }

    /// The tiers in question, from fast to slow; none where nothing is asked of them.
    fn tiers(&self, model: Option<&KvModel>) -> Result<Vec<tiers::TierSize>, CommandFailure> {
        if self.tiers.is_empty() && (self.what_if || self.html.is_some()) {
            let amounts: Result<Vec<_>, _> = TIERS.split(',').map(TierAmount::parse).collect();
            return tiers::sizes(&amounts.map_err(CommandFailure::unusable)?, model);
        }
        tiers::sizes(&self.tiers, model)
    }

    fn tier_eviction(&self) -> EvictionKind {
        let online = |policy: &Policy| match policy {
            Policy::Online(kind) => Some(*kind),
            Policy::Belady => None,
        };
        self.eviction.iter().find_map(online).unwrap_or(EvictionKind::Hazard)
    }
}

fn admissions_to_compare(chosen: AdmissionKind, all: bool) -> Vec<AdmissionKind> {
    let others = AdmissionKind::ALL.into_iter().filter(|&kind| all && kind != chosen);
    std::iter::once(chosen).chain(others).collect()
}

/// Each policy at each capacity.
fn rows(
    input: &PlanInput,
    policies: &[Policy],
    capacities: &[u32],
    block_bytes: Option<u64>,
) -> Vec<OutcomeRow> {
    let jobs: Vec<_> =
        policies.iter().flat_map(|&policy| capacities.iter().map(move |&c| (policy, c))).collect();
    jobs::each("policies and capacities", &jobs, |&(policy, capacity)| OutcomeRow {
        eviction: policy.name(),
        capacity,
        bytes: block_bytes.map(|bytes| bytes.saturating_mul(capacity.into())),
        token_hit_rate: rounded(input.miniature.simulate(policy, capacity).token_hit_rate()),
    })
}

/// Eight capacities to each doubling, up to where everything fits.
fn lru_curve(input: &PlanInput) -> MissCurve {
    const FIRST: f64 = 64.0;
    let all = u32::try_from(input.miniature.blocks()).unwrap_or(u32::MAX);
    let steps = (0..).map(|step| (FIRST * 2_f64.powf(f64::from(step) / 8.0)) as u32);
    let capacities: Vec<_> = steps.take_while(|&capacity| capacity < all).chain([all]).collect();
    let started = clock::now();
    let rates = input.miniature.lru_token_hit_rates(&capacities);
    let seconds = started.elapsed().as_secs_f64();
    MissCurve {
        points: capacities.into_iter().zip(rates.into_iter().map(rounded)).collect(),
        microseconds_per_request: rounded(seconds * 1e6 / input.requests.max(1) as f64),
    }
}

fn notes(input: &PlanInput, capacities: &[u32]) -> Vec<String> {
    let blocks = input.miniature.blocks();
    let mut notes = Vec::new();
    if input.out_of_order > 0 {
        notes.push(format!(
            "{} requests carry a timestamp before that of an earlier one; they were taken in the order of the file",
            input.out_of_order
        ));
    }
    if input.miniature.sample() != Sample::ALL {
        notes.push(format!(
            "one block in {} stands for all: rates are estimates (docs/planning.md says how good)",
            input.miniature.sample().stride()
        ));
    }
    if blocks == 0 {
        notes.push("no prompt fills a block, so there is nothing to cache".to_owned());
    } else if let Some(most) = capacities.iter().find(|&&capacity| u64::from(capacity) > blocks) {
        notes.push(format!(
            "the trace has {} distinct blocks: {} and more of them hold everything",
            output::count(blocks),
            output::count((*most).into())
        ));
    }
    if capacities.contains(&0) {
        notes.push("a capacity of 0 blocks caches nothing".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::{CommandFactory, Parser};

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
            let list: Vec<_> = figures.iter().map(|(capacity, _)| capacity.to_string()).collect();
            let list = list.join(",");
            let plan = planned(&trace, &["--capacity", &list, "--eviction", policy]).unwrap();
            for (row, (_, percent)) in plan.rows.iter().zip(*figures) {
                let off = row.token_hit_rate * 100.0 - percent;
                assert!(off.abs() <= 0.05, "{row:?} is {off:.2} points off {percent}");
            }
        }
    }

    /// The trace from `KVBM_TRACES`, or beside the checkout. Its absence is said and skips the
    /// test.
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

    #[derive(Parser)]
    struct PlanCommand {
        #[command(flatten)]
        args: PlanArgs,
    }

    fn planned(trace: &Path, options: &[&str]) -> Result<PlanOutcome, CommandFailure> {
        let line = ["plan", trace.to_str().unwrap()].into_iter().chain(options.iter().copied());
        plan(&PlanCommand::try_parse_from(line).unwrap().args)
    }

    fn plan_of(text: &str, options: &[&str]) -> Result<PlanOutcome, CommandFailure> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        planned(&path, options)
    }

    const LINE: &str =
        r#"{"timestamp":0,"input_length":1500,"output_length":1,"hash_ids":[1,2,3]}"#;

    #[test]
    fn the_json_has_a_row_for_each_policy_and_capacity() {
        let options = ["--capacity", "1,2", "--eviction", "lru,belady"];
        let mut plan = plan_of(&format!("{LINE}\n{LINE}\n"), &options).unwrap();
        plan.trace = "t".to_owned();
        assert_eq!(
            serde_json::to_string(&plan).unwrap(),
            r#"{"trace":"t","requests":2,"prompt_tokens":3000,"blocks":2,"seconds":0.0,"sample_stride":1,"rows":["#
                .to_owned()
                + r#"{"eviction":"lru","capacity":1,"token_hit_rate":0.1707},"#
                + r#"{"eviction":"lru","capacity":2,"token_hit_rate":0.3413},"#
                + r#"{"eviction":"belady","capacity":1,"token_hit_rate":0.1707},"#
                + r#"{"eviction":"belady","capacity":2,"token_hit_rate":0.3413}],"notes":[]}"#
        );
    }

    #[test]
    fn what_makes_the_figures_odd_is_noted() {
        let text = r#"{"timestamp":5,"input_length":5,"output_length":1,"hash_ids":[1]}
                      {"timestamp":4,"input_length":0,"output_length":1,"hash_ids":[]}"#;
        let all = Policy::all().map(Policy::name).collect::<Vec<_>>().join(",");
        let plan = plan_of(text, &["--capacity", "0", "--eviction", &all]).unwrap();
        assert_eq!(plan.notes.len(), 3, "{:?}", plan.notes);
        assert!(plan.rows.iter().all(|row| row.token_hit_rate == 0.0));
        let ample = plan_of(LINE, &["--capacity", "3,100", "--sample", "0.5"]).unwrap();
        assert_eq!(ample.notes.len(), 2, "{:?}", ample.notes);
    }

    #[test]
    fn nothing_is_no_reason_to_stumble() {
        let text = r#"{"timestamp":0,"input_length":0,"output_length":0,"hash_ids":[]}"#;
        for options in
            [["--what-if", "--tiers", "device=0"], ["--what-if", "--tiers", "host=1,disk=0"]]
        {
            let plan = plan_of(text, &options).unwrap();
            let json = serde_json::to_string(&plan).unwrap();
            assert!(!json.contains("null"), "no number is infinite: {json}");
        }
    }

    #[test]
    fn a_larger_tier_hits_more_and_waits_less() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        let line = |request: u64| {
            let ids: Vec<_> =
                (0..10).map(|block| ((request % 10) << 8 | block).to_string()).collect();
            format!(
                r#"{{"timestamp":{},"input_length":5120,"output_length":1,"hash_ids":[{}]}}"#,
                request * 1_000,
                ids.join(",")
            )
        };
        std::fs::write(&path, (0..200).map(line).collect::<Vec<_>>().join("\n")).unwrap();
        let options = [
            "--what-if",
            "--tiers",
            "device=20,host=40",
            "--model",
            "llama-3-8b",
            "--eviction",
            "lru",
        ];
        let plan = planned(&path, &options).unwrap();
        let what_if = plan.what_if.unwrap();
        let host = &what_if.tiers[1];
        assert_eq!(host.tier, "host");
        assert!(host.points.is_sorted_by_key(|point| point.capacity));
        let (least, most) = (host.points.first().unwrap(), host.points.last().unwrap());
        assert!(most.token_hit_rate > 0.9 && least.token_hit_rate < 0.1, "{host:?}");
        assert!(most.mean_ttft_seconds < 0.2 * least.mean_ttft_seconds, "{host:?}");
        let curve = plan.lru_curve.unwrap().points;
        assert!((curve.last().unwrap().1 - most.token_hit_rate).abs() < 1e-3, "{curve:?}");
    }

    #[test]
    fn every_option_is_documented() {
        let page = include_str!("../../../docs/planning.md");
        for option in PlanCommand::command().get_arguments().filter_map(clap::Arg::get_long) {
            assert!(page.contains(&format!("`--{option}")), "docs/planning.md lacks --{option}");
        }
    }

    #[test]
    fn a_bad_trace_gives_no_plan() {
        assert!(plan_of("{}\n", &[]).unwrap_err().to_string().contains("trace.jsonl:1: "));
        assert!(plan_of("", &[]).unwrap_err().to_string().contains("holds no request"));
    }
}
