//! What happened, for the table and the page.

use std::sync::{Mutex, PoisonError};

use kvbm::SlotCounts;
use kvbm::Tier;
use serde::Serialize;

use crate::engine::{DrainedAudit, HitTokens, ServedTally, SimulatedEngine};
use crate::output;

/// What a GPU is assumed to compute, in prompt tokens per second; it prices the tokens that were
/// cached.
pub(super) const PREFILL_TOKENS_PER_SECOND: u64 = 8_000;

/// The state after a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct DemoSample {
    /// Since the start.
    pub(super) prompt_tokens: u64,
    pub(super) hit_tokens: HitTokens,
    /// Blocks by tier.
    pub(super) resident: [u32; Tier::COUNT],
}

impl DemoSample {
    /// Before the first request.
    pub(super) const ZERO: Self = Self {
        prompt_tokens: 0,
        hit_tokens: HitTokens { device: 0, host: 0, disk: 0, object: 0 },
        resident: [0; Tier::COUNT],
    };
}

/// Bytes that took one route.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RouteTraffic {
    pub(super) from: Tier,
    pub(super) to: Tier,
    pub(super) bytes: u64,
}

/// Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(super) struct DemoSummary {
    pub(super) requests: u64,
    pub(super) prompt_tokens: u64,
    pub(super) hit_tokens: HitTokens,
    pub(super) token_hit_rate: f64,
    pub(super) blocks_verified: u64,
    pub(super) mismatches: u64,
    pub(super) failed_loads: u64,
    pub(super) bytes: Vec<RouteTraffic>,
    /// Assumed.
    pub(super) prefill_tokens_per_second: u64,
    /// What computing the hit tokens would have taken at that rate.
    pub(super) prefill_seconds_avoided: f64,
    /// What loading them took.
    pub(super) load_seconds: f64,
    pub(super) seconds: f64,
}

/// Everything that the report shows.
#[derive(Debug)]
pub(super) struct DemoRecord {
    pub(super) summary: DemoSummary,
    pub(super) samples: Vec<DemoSample>,
    pub(super) slots: Vec<(Tier, SlotCounts)>,
    /// Invariants of the table that do not hold.
    pub(super) drift: usize,
}

/// Takes a sample after each request.
#[derive(Debug)]
pub(super) struct DemoRecorder<'e> {
    engine: &'e SimulatedEngine,
    samples: Mutex<Vec<DemoSample>>,
}

impl<'e> DemoRecorder<'e> {
    pub(super) const fn new(engine: &'e SimulatedEngine) -> Self {
        Self { engine, samples: Mutex::new(Vec::new()) }
    }

    pub(super) fn sample(&self, tally: &ServedTally) {
        let mut resident = [0; Tier::COUNT];
        self.engine
            .slots()
            .iter()
            .for_each(|(tier, counts)| resident[tier.index()] = counts.resident);
        let sample = DemoSample {
            prompt_tokens: tally.prompt_tokens,
            hit_tokens: tally.hit_tokens,
            resident,
        };
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
    }

    pub(super) fn finish(
        self,
        tally: &ServedTally,
        audited: &DrainedAudit,
        seconds: f64,
    ) -> DemoRecord {
        let bytes = self.engine.manager().admin().bytes().into_iter();
        let hits = tally.hit_tokens.total();
        let summary = DemoSummary {
            requests: tally.requests,
            prompt_tokens: tally.prompt_tokens,
            hit_tokens: tally.hit_tokens,
            token_hit_rate: output::share(hits, tally.prompt_tokens),
            blocks_verified: tally.blocks_verified,
            mismatches: tally.mismatches,
            failed_loads: tally.failed_loads,
            bytes: bytes.map(|(from, to, bytes)| RouteTraffic { from, to, bytes }).collect(),
            prefill_tokens_per_second: PREFILL_TOKENS_PER_SECOND,
            prefill_seconds_avoided: hits as f64 / PREFILL_TOKENS_PER_SECOND as f64,
            load_seconds: tally.load_time.as_secs_f64(),
            seconds,
        };
        let samples = self.samples.into_inner().unwrap_or_else(PoisonError::into_inner);
        DemoRecord { summary, samples, slots: self.engine.slots(), drift: audited.drift.len() }
    }
}

impl DemoSummary {
    /// Seconds of prefill avoided, less those spent loading.
    pub(super) fn seconds_saved(&self) -> f64 {
        self.prefill_seconds_avoided - self.load_seconds
    }
}

impl DemoRecord {
    /// Two tables and the conclusion.
    pub(super) fn to_text(&self) -> String {
        let DemoSummary { requests, blocks_verified, mismatches, seconds, .. } = &self.summary;
        format!(
            "{}\n{}\n{} requests in {seconds:.1} s; {} blocks came back and were checked byte by byte: {} mismatches.\n\
             Time saved: {}, if a GPU computes {} prompt tokens/s (an assumption): the {} cached tokens would have \
             taken it {:.0} s, loading them took {:.1} s.",
            self.tiers(),
            self.routes(),
            output::count(*requests),
            output::count(*blocks_verified),
            output::count(*mismatches),
            minutes(self.summary.seconds_saved()),
            output::count(PREFILL_TOKENS_PER_SECOND),
            output::count(self.summary.hit_tokens.total()),
            self.summary.prefill_seconds_avoided,
            self.summary.load_seconds,
        )
    }

    fn tiers(&self) -> String {
        let mut table = output::table(&["tier", "medium", "blocks", "hit tokens", "of prompt"], 2);
        for (tier, slots) in &self.slots {
            let hits = self.summary.hit_tokens.of(*tier);
            table.add_row([
                tier.to_string(),
                medium(*tier).to_owned(),
                output::count(slots.resident.into()),
                output::count(hits),
                output::percent(output::share(hits, self.summary.prompt_tokens)),
            ]);
        }
        let hits = self.summary.hit_tokens.total();
        let rate = output::percent(self.summary.token_hit_rate);
        table.add_row(["all".to_owned(), String::new(), String::new(), output::count(hits), rate]);
        table.trim_fmt()
    }

    fn routes(&self) -> String {
        let mut table = output::table(&["route", "bytes"], 1);
        for RouteTraffic { from, to, bytes } in &self.summary.bytes {
            table.add_row([format!("{from} → {to}"), output::bytes(*bytes)]);
        }
        table.trim_fmt()
    }
}

/// `12 min 5 s`.
pub(super) fn minutes(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    if seconds < 60 {
        format!("{seconds} s")
    } else {
        format!("{} min {} s", seconds / 60, seconds % 60)
    }
}

/// What a tier is made of here.
pub(super) const fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "emulated in host memory",
        Tier::Host => "DRAM",
        Tier::Disk => "slot file on a local drive",
        Tier::Object => "object store in files",
    }
}
