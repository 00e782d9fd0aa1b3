//! What leases found and what they missed.
//!
//! A lease is short: finding a counter by its labels takes longer than pinning a block, and in a
//! large table each further cache line is one more wait. So leases count in two cache lines, and
//! the registry's counters catch up when they are read.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kvbm_tiers::Tier;
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec};

use super::builder::MetricsBuilder;
use super::catch_up;
use super::upstream::UpstreamHits;
use crate::error::Result;
use crate::table::{Match, Miss, MissReason};

/// Bounds of the histogram of ages, in seconds: 1 s to 9 h.
const AGE_BOUNDS: [f64; 16] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0,
    16_384.0, 32_768.0,
];

/// What is counted with each lease, in blocks.
#[derive(Debug, Default)]
#[repr(align(64))]
struct LeaseCounts {
    requests: AtomicU64,
    requested: AtomicU64,
    hit: [AtomicU64; Tier::COUNT],
    /// By reason and tier; those without a tier come last.
    missed: [[MissedBlocks; Tier::COUNT + 1]; MissReason::ALL.len()],
}

#[derive(Debug, Default)]
struct MissedBlocks {
    chains: AtomicU64,
    blocks: AtomicU64,
}

/// What leases asked for and found, in blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookups {
    pub(crate) blocks: u64,
    pub(crate) hit: [u64; Tier::COUNT],
}

fn count(counter: &AtomicU64, blocks: usize) {
    counter.fetch_add(blocks as u64, Ordering::Relaxed);
}

/// Counts leases, and holds the registry's counters.
pub(super) struct LeaseMetrics {
    counts: LeaseCounts,
    /// By tier, made when a request first asks for a block that left it.
    ages: [OnceLock<Histogram>; Tier::COUNT],
    block_tokens: u64,
    requests: IntCounter,
    requested_tokens: IntCounter,
    hit_tokens: IntCounterVec,
    misses: IntCounterVec,
    missed_tokens: IntCounterVec,
    miss_age: HistogramVec,
    upstream: UpstreamHits,
}

impl LeaseMetrics {
    pub(super) fn new(b: &mut MetricsBuilder, block_tokens: u64) -> Result<Self> {
        let ages = HistogramOpts::new(
            "kvbm_miss_age_seconds",
            "How long a block had been gone when it was missed.",
        );
        Ok(Self {
            counts: LeaseCounts::default(),
            ages: Default::default(),
            block_tokens,
            requests: b.counter("kvbm_requests_total", "Chains leased.")?,
            requested_tokens: b
                .counter("kvbm_requested_tokens_total", "Tokens of leased chains.")?,
            hit_tokens: b.counters(
                "kvbm_hit_tokens_total",
                "Tokens found, by the fastest tier that had them.",
                &["tier"],
            )?,
            misses: b.counters(
                "kvbm_misses_total",
                "Chains held in part or not at all, by why the first block behind is not there.",
                &["reason", "tier"],
            )?,
            missed_tokens: b.counters(
                "kvbm_missed_tokens_total",
                "Tokens not found, by why the first block of them is not there.",
                &["reason"],
            )?,
            miss_age: b.keep(HistogramVec::new(ages.buckets(AGE_BOUNDS.to_vec()), &["tier"]))?,
            upstream: UpstreamHits::new(b)?,
        })
    }

    /// A chain of `blocks` blocks was leased.
    pub(super) fn requested(&self, blocks: usize, held: &Match) {
        count(&self.counts.requests, 1);
        count(&self.counts.requested, blocks);
        for (tier, range) in held.plan() {
            count(&self.counts.hit[tier.index()], range.len());
        }
    }

    /// The last `blocks` blocks of a chain were not found, the first of them because of `miss`.
    pub(super) fn missed(&self, blocks: usize, miss: Miss) {
        let missed =
            &self.counts.missed[miss.reason as usize][miss.tier.map_or(Tier::COUNT, Tier::index)];
        count(&missed.chains, 1);
        count(&missed.blocks, blocks);
        if let (Some(tier), Some(age_s)) = (miss.tier, miss.age_s) {
            let ages = self.ages[tier.index()]
                .get_or_init(|| self.miss_age.with_label_values(&[tier.name()]));
            ages.observe(age_s as f64);
        }
    }

    pub(super) fn lookups(&self) -> Lookups {
        // In this order: no rate is above 1.
        let hit = self.counts.hit.each_ref().map(|blocks| blocks.load(Ordering::Relaxed));
        Lookups { hit, blocks: self.counts.requested.load(Ordering::Relaxed) }
    }

    fn tokens(&self, blocks: &AtomicU64) -> u64 {
        blocks.load(Ordering::Relaxed) * self.block_tokens
    }

    /// Brings the registry's counters up to date, one call at a time.
    pub(super) fn catch_up(&self) {
        // Hits before requests: leases in between cannot make a rate above 1.
        let hit = self.counts.hit.each_ref().map(|blocks| self.tokens(blocks));
        let requested = self.tokens(&self.counts.requested);
        catch_up(&self.requests, self.counts.requests.load(Ordering::Relaxed));
        catch_up(&self.requested_tokens, requested);
        for tier in Tier::ALL {
            // Asking for a counter by its labels makes it appear.
            if hit[tier.index()] > 0 {
                catch_up(&self.hit_tokens.with_label_values(&[tier.name()]), hit[tier.index()]);
            }
        }
        MissReason::ALL.into_iter().for_each(|reason| self.catch_up_with_misses(reason));
        if self.requests.get() > 0 {
            self.upstream.catch_up(hit, requested);
        }
    }

    fn catch_up_with_misses(&self, reason: MissReason) {
        let missed = &self.counts.missed[reason as usize];
        let tiers = Tier::ALL.map(Tier::name).into_iter().chain(["none"]);
        for (missed, tier) in missed.iter().zip(tiers) {
            let chains = missed.chains.load(Ordering::Relaxed);
            if chains > 0 {
                catch_up(&self.misses.with_label_values(&[reason.name(), tier]), chains);
            }
        }
        let tokens: u64 = missed.iter().map(|missed| self.tokens(&missed.blocks)).sum();
        if tokens > 0 {
            catch_up(&self.missed_tokens.with_label_values(&[reason.name()]), tokens);
        }
    }
}
