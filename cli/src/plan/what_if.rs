//! What more or less of a tier would bring: hits, and seconds until the first token.

use clap::Args;
use kvbm::Tier;
use kvbm_policies::{AdmissionKind, BLOCK_TOKENS, EvictionKind};
use kvbm_settings::parse_size;
use kvbm_tiers::clock;
use serde::Serialize;

use super::PlanInput;
use super::tiers::{self, TierSize, TierTraffic};
use crate::output::rounded;

/// Sizes that are tried, in parts of what the tier has.
const FACTORS: [f64; 4] = [0.0, 0.5, 2.0, 4.0];

/// What a request's first token waits for, queues aside: computing what no tier holds, after
/// loading what the slower tiers hold. The options are named shorter than what is in the JSON.
#[derive(Clone, Copy, Debug, Args, Serialize)]
#[command(next_help_heading = "Costs: what the seconds of --what-if are made of")]
pub(super) struct WhatIfCosts {
    /// Prompt tokens that the engine computes in a second
    #[arg(long = "prefill-rate", value_name = "TOKENS/S", default_value_t = 8_000.0, value_parser = parse_prefill_rate)]
    pub(super) prefill_tokens_per_second: f64,
    /// Bytes that a rank loads from the host tier in a second
    #[arg(long = "host-bandwidth", value_name = "SIZE/S", default_value = "25GB", value_parser = parse_bandwidth)]
    pub(super) host_bytes_per_second: u64,
    /// Bytes that a rank loads from the disk tier in a second
    #[arg(long = "disk-bandwidth", value_name = "SIZE/S", default_value = "6GB", value_parser = parse_bandwidth)]
    pub(super) disk_bytes_per_second: u64,
    /// Bytes that a rank loads from the object tier in a second
    #[arg(long = "object-bandwidth", value_name = "SIZE/S", default_value = "1GB", value_parser = parse_bandwidth)]
    pub(super) object_bytes_per_second: u64,
    /// Where it is not known, loading counts as free.
    #[arg(skip)]
    #[serde(skip)]
    pub(super) block_bytes: Option<u64>,
}

fn parse_prefill_rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if rate > 0.0 && rate.is_finite() { Ok(rate) } else { Err("it has to be above 0".to_owned()) }
}

pub(super) fn parse_bandwidth(text: &str) -> Result<u64, String> {
    match parse_size(text.strip_suffix("/s").unwrap_or(text)).map_err(|error| error.to_string())? {
        0 => Err("it has to be above 0".to_owned()),
        bytes => Ok(bytes),
    }
}

impl WhatIfCosts {
    /// What a prompt token takes on a rank, in bytes; nothing where the model is not known.
    pub(super) fn token_bytes(&self) -> f64 {
        self.block_bytes.unwrap_or(0) as f64 / f64::from(BLOCK_TOKENS)
    }

    /// Seconds to load a block. What is on the device is there.
    fn seconds_per_block(&self, tier: Tier) -> f64 {
        let bandwidth = match tier {
            Tier::Device => return 0.0,
            Tier::Host => self.host_bytes_per_second,
            Tier::Disk => self.disk_bytes_per_second,
            Tier::Object => self.object_bytes_per_second,
        };
        self.block_bytes.unwrap_or(0) as f64 / bandwidth as f64
    }

    fn mean_seconds(&self, input: &PlanInput, traffic: &[TierTraffic]) -> f64 {
        let hits: f64 = traffic.iter().map(|tier| tier.hit_tokens).sum();
        let computing =
            (input.prompt_tokens as f64 - hits).max(0.0) / self.prefill_tokens_per_second;
        let load = |tier: &TierTraffic| tier.blocks_read * self.seconds_per_block(tier.tier);
        (computing + traffic.iter().map(load).sum::<f64>()) / input.requests.max(1) as f64
    }

    /// What the reader should know about the seconds.
    pub(super) fn notes(&self, sizes: &[TierSize]) -> Vec<String> {
        if self.block_bytes.is_none() {
            return vec![
                "loading counts as free, for what a block takes depends on the model: name it with --model"
                    .into(),
            ];
        }
        let computing = f64::from(BLOCK_TOKENS) / self.prefill_tokens_per_second;
        let is_slow = |size: &&TierSize| self.seconds_per_block(size.tier) > computing;
        let note = |size: &TierSize| {
            format!(
                "a block is loaded from the {} tier in {:.0} ms and computed in {:.0} ms: its hits cost time",
                size.tier,
                self.seconds_per_block(size.tier) * 1e3,
                computing * 1e3
            )
        };
        sizes.iter().filter(is_slow).map(note).collect()
    }
}

/// What other sizes would bring. Serialises to a part of the command's JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct WhatIf {
    pub(super) costs: WhatIfCosts,
    /// With the tiers as they are.
    pub(super) token_hit_rate: f64,
    pub(super) mean_ttft_seconds: f64,
    pub(super) tiers: Vec<TierWhatIf>,
    /// What a simulation took, per request of the trace, on average.
    pub(super) microseconds_per_request: f64,
}

/// One tier with other sizes, the other tiers as they are.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TierWhatIf {
    pub(super) tier: &'static str,
    /// By capacity, the present one among them.
    pub(super) points: Vec<WhatIfPoint>,
}

/// One size.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct WhatIfPoint {
    pub(super) capacity: u32,
    /// Blocks more than there are.
    pub(super) more_blocks: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) more_bytes: Option<f64>,
    /// Of all tiers together.
    pub(super) token_hit_rate: f64,
    pub(super) mean_ttft_seconds: f64,
}

/// Simulates each tier in other sizes.
pub(super) fn explore(
    input: &PlanInput,
    sizes: &[TierSize],
    eviction: EvictionKind,
    admission: AdmissionKind,
    costs: WhatIfCosts,
) -> WhatIf {
    let cases: Vec<_> = std::iter::once(sizes.to_vec()).chain(variants(sizes)).collect();
    let results = super::each("other sizes", &cases, |case| {
        let started = clock::now();
        let traffic = tiers::simulate(input, case, eviction, admission);
        let hits: f64 = traffic.iter().map(|tier| tier.hit_tokens).sum();
        let rate = hits / input.prompt_tokens.max(1) as f64;
        (
            rounded(rate),
            rounded(costs.mean_seconds(input, &traffic)),
            started.elapsed().as_secs_f64(),
        )
    });
    let (token_hit_rate, mean_ttft_seconds, _) = results[0];
    let point = |at: usize, case: &[TierSize], result: &(f64, f64, f64)| {
        let more_blocks = i64::from(case[at].capacity) - i64::from(sizes[at].capacity);
        WhatIfPoint {
            capacity: case[at].capacity,
            more_blocks,
            more_bytes: costs.block_bytes.map(|bytes| bytes as f64 * more_blocks as f64),
            token_hit_rate: result.0,
            mean_ttft_seconds: result.1,
        }
    };
    let tier = |at: usize| {
        let changed = cases.iter().zip(&results).skip(1).filter(|(case, _)| case[at] != sizes[at]);
        let mut points: Vec<_> = changed.map(|(case, result)| point(at, case, result)).collect();
        points.push(point(at, sizes, &results[0]));
        points.sort_by_key(|point| point.capacity);
        TierWhatIf { tier: sizes[at].tier.name(), points }
    };
    let seconds: f64 = results.iter().map(|result| result.2).sum();
    let simulated = results.len() as f64 * input.requests.max(1) as f64;
    WhatIf {
        costs,
        token_hit_rate,
        mean_ttft_seconds,
        tiers: (0..sizes.len()).map(tier).collect(),
        microseconds_per_request: rounded(seconds * 1e6 / simulated),
    }
}

/// The tiers with one of them in another size, for each of them and each size.
fn variants(sizes: &[TierSize]) -> impl Iterator<Item = Vec<TierSize>> {
    (0..sizes.len()).flat_map(move |at| {
        FACTORS.iter().filter_map(move |factor| {
            let capacity = (f64::from(sizes[at].capacity) * factor) as u32;
            let mut case = sizes.to_vec();
            case[at].capacity = capacity;
            (capacity != sizes[at].capacity).then_some(case)
        })
    })
}
