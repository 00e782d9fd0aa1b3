//! `kvbm plan`: what policies, capacities and tiers would bring, by simulation alone.
//!
//! | module | holds |
//! |---|---|
//! | `model` | what a block takes; capacities in blocks or bytes |
//! | `tiers` | several tiers: where hits come from, what is written |
//! | `fleet` | prefill workers apart from decode workers |
//! | `what_if` | what more of a tier would bring, in hits and seconds |
//! | `outcome` | the result, as JSON and as text |
//! | `html` | the result as a page |

mod fleet;
mod html;
mod model;
mod outcome;
mod tiers;
mod what_if;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use clap::Args;
use kvbm_policies::{AdmissionKind, EvictionKind, Miniature, Policy, Sample, TraceThinning};
use kvbm_tiers::clock;

use self::fleet::FleetArgs;
use self::model::{CostAmount, KvModel, ModelArgs};
use self::outcome::{MissCurve, OutcomeRow, PlanOutcome};
use self::tiers::TierAmount;
use self::what_if::WhatIfCosts;
use crate::output::{self, CommandFailure, rounded};
use crate::trace::{TraceError, TraceReader};
use crate::{GlobalOptions, by_name};

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
        value_parser = by_name(Policy::all().map(|policy| (policy.name(), policy)))
    )]
    eviction: Vec<Policy>,
    /// Tiers to simulate together: device, host, disk, object, each with blocks or a size
    #[arg(long, value_name = "TIER=CAPACITY", value_delimiter = ',', value_parser = TierAmount::parse)]
    tiers: Vec<TierAmount>,
    /// When blocks go down a tier; selective and auto are for disk and object, or for the last tier
    #[arg(
        long,
        value_name = "MODE",
        default_value_t,
        value_parser = by_name(AdmissionKind::ALL.map(|kind| (kind.name(), kind)))
    )]
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
    costs: WhatIfCosts,
    #[command(flatten)]
    fleet: FleetArgs,
}

pub(crate) fn run(args: &PlanArgs, global: &GlobalOptions) -> Result<(), CommandFailure> {
    global.load(|loader| loader)?;
    let page = args.html.as_deref().map(html::PlanPage::create).transpose()?;
    let plan = plan(args)?;
    plan.notes.iter().for_each(|note| output::tell(&format!("note: {note}")));
    if let Some(page) = page {
        page.write(&plan)?;
    }
    global.show(&plan, PlanOutcome::to_text)
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
    let input = read(&args.trace, sample)?;
    let block_bytes = model.as_ref().map(|model| model.bytes_per_block);
    let costs = WhatIfCosts { block_bytes, ..args.costs };
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
        fleet: args.fleet.plan(&input, &costs)?,
        notes: notes(&input, &capacities),
        model,
    };
    if is_deep && args.tiers.is_empty() {
        plan.notes.push(format!("no tiers were given: blocks of {TIERS} are taken; see --tiers"));
    }
    plan.notes.extend(tiers::notes(&tiers, input.miniature.blocks()));
    if plan.fleet.is_some() && block_bytes.is_none() {
        plan.notes.push(
            "moving a prompt counts as free, for what a token takes depends on the model: name it with --model"
                .to_owned(),
        );
    }
    if args.what_if {
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
    each("policies and capacities", &jobs, |&(policy, capacity)| OutcomeRow {
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

/// Blocks of all paths that are kept, before only a sample of them is.
const MAX_BLOCKS: usize = 20_000_000;

/// A trace in memory.
#[derive(Debug)]
struct PlanInput {
    miniature: Miniature,
    requests: u64,
    prompt_tokens: u64,
    /// From the first request to the last one, in seconds.
    seconds: f64,
    out_of_order: u64,
}

/// Reads the trace, or as much of each path as `sample` says. Where nothing is said, that is all of
/// it, unless the trace is a file too large for that.
fn read(trace: &Path, sample: Option<Sample>) -> Result<PlanInput, TraceError> {
    let is_file =
        File::open(trace).and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.is_file());
    let most = if sample.is_none() && is_file { MAX_BLOCKS } else { usize::MAX };
    read_at_most(trace, sample.unwrap_or(Sample::ALL), most)
}

fn read_at_most(trace: &Path, first: Sample, max_blocks: usize) -> Result<PlanInput, TraceError> {
    let mut sample = first;
    loop {
        if let Some(input) = read_sample(trace, sample, max_blocks)? {
            return Ok(input);
        }
        sample = Sample::one_in(4 * sample.stride());
    }
}

/// `None` where the sample has more blocks than the limit.
fn read_sample(
    trace: &Path,
    sample: Sample,
    max_blocks: usize,
) -> Result<Option<PlanInput>, TraceError> {
    let mut reader = TraceReader::open(trace)?;
    let mut thinning = TraceThinning::new(sample);
    let (mut requests, mut prompt_tokens, mut times) = (0, 0, None);
    for request in reader.by_ref() {
        let request = request?;
        requests += 1;
        prompt_tokens += u64::from(request.input_length);
        let (first, _) = times.unwrap_or((request.timestamp_ms, 0));
        times = Some((first, request.timestamp_ms));
        thinning.push(&request);
        if thinning.blocks() > max_blocks {
            return Ok(None);
        }
    }
    let (first, last) = times.unwrap_or_default();
    Ok(Some(PlanInput {
        miniature: thinning.finish(),
        requests,
        prompt_tokens,
        seconds: (last - first) as f64 / 1e3,
        out_of_order: reader.out_of_order(),
    }))
}

/// Does `work` for each job, as many at a time as there are cores. The results are in the order of
/// the jobs.
fn each<J: Sync, R: Send>(what: &'static str, jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let bar =
        output::moving_bar(Some(jobs.len() as u64), "{bar:30} {pos}/{len} {msg} ({eta} left)");
    bar.set_message(what);
    let waiting = Mutex::new(jobs.iter().enumerate());
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let work_on = || {
        let mut done = Vec::new();
        while let Some((at, job)) = next() {
            done.push((at, work(job)));
            bar.inc(1);
        }
        done
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut done = thread::scope(|scope| {
        let threads: Vec<_> = (1..cores).map(|_| scope.spawn(work_on)).collect();
        let mut done = work_on();
        for thread in threads {
            done.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    bar.finish_and_clear();
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
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

    #[test]
    fn what_is_too_large_is_read_again_as_a_sample() {
        let text = (0_u64..200).fold(String::new(), |mut text, request| {
            let ids: Vec<_> = (0..20_u64).map(|block| (request << 8 | block).to_string()).collect();
            let _ = writeln!(
                text,
                r#"{{"timestamp":{request},"input_length":10240,"output_length":1,"hash_ids":[{}]}}"#,
                ids.join(",")
            );
            text
        });
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        std::fs::write(&path, text).unwrap();
        let input = |most| read_at_most(&path, Sample::ALL, most).unwrap();
        assert_eq!(input(4_000).miniature.sample(), Sample::ALL);
        let small = input(1_500);
        assert_eq!(small.miniature.sample(), Sample::one_in(4));
        assert_eq!((small.requests, small.prompt_tokens), (200, 200 * 10_240));
        assert!((small.seconds - 0.199).abs() < 1e-9);
    }

    #[test]
    fn results_come_in_order() {
        let jobs: Vec<u32> = (0..100).collect();
        assert_eq!(
            each("squares", &jobs, |job| job * job),
            jobs.iter().map(|job| job * job).collect::<Vec<_>>()
        );
        assert_eq!(each("nothing", &[], |job: &u32| *job), [0; 0]);
    }
}
