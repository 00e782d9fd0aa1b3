//! Several tiers together: where hits come from, what is read and written for them.

use kvbm::Tier;
use kvbm_policies::simulation::hierarchy::TierOutcome;
use kvbm_policies::{AdmissionKind, BLOCK_TOKENS, EvictionKind, Hierarchy, TierPlan};
use serde::Serialize;

use super::PlanInput;
use super::model::{CostAmount, KvModel};
use crate::output::{self, CommandFailure, rounded};

const SECONDS_PER_DAY: f64 = 86_400.0;

/// A tier as it was given, such as `host=64GB`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TierAmount {
    tier: Tier,
    amount: CostAmount,
}

impl TierAmount {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let valid = || Tier::ALL.map(Tier::name).join(", ");
        let (name, amount) = text
            .split_once('=')
            .ok_or_else(|| format!("not TIER=CAPACITY, such as host=5000; tiers: {}", valid()))?;
        let tier = Tier::ALL.into_iter().find(|tier| tier.name() == name.trim());
        let tier = tier.ok_or_else(|| format!("unknown tier `{name}`; valid: {}", valid()))?;
        Ok(Self { tier, amount: CostAmount::parse(amount)? })
    }
}

/// A tier and the blocks that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierSize {
    pub(super) tier: Tier,
    pub(super) capacity: u32,
}

/// The tiers in blocks, from fast to slow.
///
/// # Errors
/// A tier given twice, and a size without a model.
pub(super) fn sizes(
    amounts: &[TierAmount],
    model: Option<&KvModel>,
) -> Result<Vec<TierSize>, CommandFailure> {
    let size = |given: &TierAmount| {
        Ok(TierSize { tier: given.tier, capacity: given.amount.blocks(model)? })
    };
    let mut sizes = amounts.iter().map(size).collect::<Result<Vec<_>, CommandFailure>>()?;
    sizes.sort_by_key(|size| size.tier.index());
    match sizes.windows(2).find(|pair| pair[0].tier == pair[1].tier) {
        Some(pair) => {
            Err(CommandFailure::unusable(format!("--tiers names {} twice", pair[0].tier)))
        }
        None => Ok(sizes),
    }
}

/// What went through a tier, of the whole trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierTraffic {
    pub(super) tier: Tier,
    pub(super) hit_tokens: f64,
    pub(super) blocks_read: f64,
    blocks_written: f64,
}

/// Simulates the tiers; one of 0 blocks is left out.
pub(super) fn simulate(
    input: &PlanInput,
    sizes: &[TierSize],
    eviction: EvictionKind,
    admission: AdmissionKind,
) -> Vec<TierTraffic> {
    let small = &input.miniature;
    let sizes: Vec<_> = sizes.iter().filter(|size| size.capacity > 0).collect();
    let plan = |size: &&TierSize| TierPlan {
        capacity: small.capacity(size.capacity),
        eviction,
        admission: admission_to(size.tier, &sizes, admission),
    };
    let outcome =
        Hierarchy::new(&sizes.iter().map(plan).collect::<Vec<_>>()).simulate(small.workload());
    let traffic = |(size, tier): (&&TierSize, &TierOutcome)| TierTraffic {
        tier: size.tier,
        hit_tokens: small.scaled(tier.hit_tokens),
        blocks_read: small.scaled(tier.blocks_read),
        blocks_written: small.scaled(tier.blocks_written),
    };
    let mut traffic: Vec<_> = sizes.iter().zip(&outcome.tiers).map(traffic).collect();
    if let Some(first) = traffic.first_mut() {
        let hot = small.hot_hit_tokens() as f64;
        first.hit_tokens += hot;
        first.blocks_read += hot / f64::from(BLOCK_TOKENS);
    }
    traffic
}

/// What is refused is lost to all tiers further down, so memory takes everything unless it is the
/// last.
fn admission_to(tier: Tier, sizes: &[&TierSize], chosen: AdmissionKind) -> AdmissionKind {
    let is_memory = matches!(tier, Tier::Device | Tier::Host);
    let is_last = sizes.last().is_some_and(|last| last.tier == tier);
    match chosen {
        AdmissionKind::Selective | AdmissionKind::Auto if is_memory && !is_last => {
            AdmissionKind::WriteBack
        }
        _ => chosen,
    }
}

/// Tiers under one way of admission. Serialises to a part of the command's JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct BitsStaircase {
    pub(super) admission: &'static str,
    pub(super) eviction: &'static str,
    /// Of all tiers together: 0 to 1.
    pub(super) token_hit_rate: f64,
    /// From fast to slow.
    pub(super) tiers: Vec<TierStep>,
    /// What the disk tier has to endure, where there is one and the trace takes any time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk: Option<DriveEndurance>,
}

/// One tier.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TierStep {
    pub(super) tier: &'static str,
    pub(super) capacity: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
    /// Of what no faster tier held, over all prompt tokens.
    pub(super) token_hit_rate: f64,
    pub(super) blocks_read_per_request: f64,
    pub(super) blocks_written_per_request: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes_read_per_request: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes_written_per_request: Option<f64>,
}

/// Writes at the trace's rate of requests, kept up for a day.
#[derive(Clone, Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "these are the names in the JSON")]
pub(super) struct DriveEndurance {
    pub(super) blocks_per_day: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes_per_day: Option<f64>,
    /// Of a drive as large as the tier.
    pub(super) drive_writes_per_day: f64,
}

/// The tiers under each way of admission; nothing where there are none.
pub(super) fn staircases(
    input: &PlanInput,
    sizes: &[TierSize],
    eviction: EvictionKind,
    admissions: &[AdmissionKind],
    block_bytes: Option<u64>,
) -> Vec<BitsStaircase> {
    if sizes.iter().all(|size| size.capacity == 0) {
        return Vec::new();
    }
    super::each("ways of admission", admissions, |&admission| {
        let traffic = simulate(input, sizes, eviction, admission);
        let requests = input.requests.max(1) as f64;
        let tokens = input.prompt_tokens.max(1) as f64;
        let step = |traffic: &TierTraffic| {
            let capacity =
                sizes.iter().find(|size| size.tier == traffic.tier).map_or(0, |size| size.capacity);
            let bytes = |blocks: f64| block_bytes.map(|bytes| (blocks * bytes as f64).round());
            let (read, written) =
                (traffic.blocks_read / requests, traffic.blocks_written / requests);
            TierStep {
                tier: traffic.tier.name(),
                capacity,
                bytes: block_bytes.map(|bytes| bytes.saturating_mul(capacity.into())),
                token_hit_rate: rounded(traffic.hit_tokens / tokens),
                blocks_read_per_request: rounded(read),
                blocks_written_per_request: rounded(written),
                bytes_read_per_request: bytes(read),
                bytes_written_per_request: bytes(written),
            }
        };
        BitsStaircase {
            admission: admission.name(),
            eviction: eviction.name(),
            token_hit_rate: rounded(
                traffic.iter().map(|tier| tier.hit_tokens).sum::<f64>() / tokens,
            ),
            tiers: traffic.iter().map(step).collect(),
            disk: endurance(input, sizes, &traffic, block_bytes),
        }
    })
}

fn endurance(
    input: &PlanInput,
    sizes: &[TierSize],
    traffic: &[TierTraffic],
    block_bytes: Option<u64>,
) -> Option<DriveEndurance> {
    let size = sizes.iter().find(|size| size.tier == Tier::Disk)?;
    let disk = traffic.iter().find(|traffic| traffic.tier == Tier::Disk)?;
    let per_day = (input.seconds > 0.0).then_some(SECONDS_PER_DAY / input.seconds)?;
    let blocks_per_day = disk.blocks_written * per_day;
    Some(DriveEndurance {
        blocks_per_day: blocks_per_day.round(),
        bytes_per_day: block_bytes.map(|bytes| (blocks_per_day * bytes as f64).round()),
        drive_writes_per_day: rounded(blocks_per_day / f64::from(size.capacity)),
    })
}

/// What is odd about the tiers.
pub(super) fn notes(sizes: &[TierSize], blocks: u64) -> Vec<String> {
    let mut notes = Vec::new();
    for size in sizes.iter().filter(|size| size.capacity == 0) {
        notes.push(format!("the {} tier has 0 blocks: it is left out", size.tier));
    }
    let real: Vec<_> = sizes.iter().filter(|size| size.capacity > 0).collect();
    for pair in real.windows(2).filter(|pair| pair[1].capacity <= pair[0].capacity) {
        notes.push(format!(
            "the {} tier is no larger than the {} tier above it, whose blocks it holds too: it brings little",
            pair[1].tier, pair[0].tier
        ));
    }
    if let Some(ample) = real.iter().find(|size| u64::from(size.capacity) > blocks && blocks > 0) {
        notes.push(format!(
            "the {} tier holds all {} distinct blocks of the trace: nothing ever leaves it",
            ample.tier,
            output::count(blocks)
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiers(list: &str) -> Result<Vec<TierSize>, String> {
        let amounts: Result<Vec<_>, _> = list.split(',').map(TierAmount::parse).collect();
        sizes(&amounts?, None).map_err(|failure| failure.to_string())
    }

    #[test]
    fn tiers_are_sorted_from_fast_to_slow() {
        let sizes = tiers("disk=50,device=1,host=5").unwrap();
        assert_eq!(
            sizes.iter().map(|size| (size.tier.name(), size.capacity)).collect::<Vec<_>>(),
            [("device", 1), ("host", 5), ("disk", 50)]
        );
    }

    #[test]
    fn what_is_no_tier_says_what_is() {
        for (list, part) in [
            ("ssd=5", "unknown tier `ssd`; valid: device, host, disk, object"),
            ("host", "host=5000"),
            ("host=lots", "64GB"),
            ("host=5,host=6", "host twice"),
            ("host=64GB", "--model"),
        ] {
            let error = tiers(list).unwrap_err();
            assert!(error.contains(part), "{list}: {error}");
        }
    }

    #[test]
    fn odd_tiers_are_noted() {
        let notes = notes(&tiers("device=0,host=5,disk=5,object=1000").unwrap(), 100);
        assert_eq!(notes.len(), 3, "{notes:?}");
    }
}
