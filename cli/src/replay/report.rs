//! What a replay found.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use kvbm::{RecoveryReport, SlotCounts, Tier};
use prometheus::Registry;
use prometheus::proto::MetricFamily;
use serde::Serialize;

use super::acknowledged::FoundBlocks;
use super::chaos::ChaosReport;
use crate::engine::{DrainedAudit, HitTokens, ServedTally, SimulatedEngine};
use crate::output::{self, CommandFailure};

/// Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(super) struct ReplayReport {
    trace: String,
    requests: u64,
    prompt_tokens: u64,
    hit_tokens: HitTokens,
    /// Hit tokens over prompt tokens, to four decimals: 0 to 1.
    token_hit_rate: f64,
    blocks_verified: u64,
    mismatches: u64,
    failed_loads: u64,
    failed_saves: u64,
    /// Prompts longer than the device, of which only the first part is kept.
    cut_prompts: u64,
    full_waits: u64,
    unsaved_blocks: u64,
    /// By route, such as `host_disk`.
    bytes: BTreeMap<String, u64>,
    /// Of all kinds, where there is an object tier that counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    object_requests: Option<u64>,
    slots: BTreeMap<&'static str, SlotCounts>,
    /// What the device tier is made of.
    device: &'static str,
    /// Whether everything was flushed at the end.
    drained: bool,
    /// Invariants of the block table that do not hold.
    drift: Vec<String>,
    /// From the first request to the end of the last one.
    seconds: f64,
    /// What an earlier run had left, by tier that outlives the process.
    recovered: Vec<RecoveryReport>,
    /// What of the blocks that an earlier run was told are durable was there.
    #[serde(skip_serializing_if = "Option::is_none")]
    acknowledged: Option<FoundBlocks>,
    #[serde(flatten)]
    chaos: Option<ChaosReport>,
}

impl ReplayReport {
    pub(super) fn new(
        trace: &Path,
        tally: &ServedTally,
        audited: DrainedAudit,
        engine: &SimulatedEngine,
        seconds: f64,
    ) -> Self {
        let rate = output::share(tally.hit_tokens.total(), tally.prompt_tokens);
        let bytes = engine.manager().admin().bytes().into_iter();
        Self {
            trace: trace.display().to_string(),
            requests: tally.requests,
            prompt_tokens: tally.prompt_tokens,
            hit_tokens: tally.hit_tokens,
            token_hit_rate: (rate * 1e4).round() / 1e4,
            blocks_verified: tally.blocks_verified,
            mismatches: tally.mismatches,
            failed_loads: tally.failed_loads,
            failed_saves: tally.failed_saves,
            cut_prompts: tally.cut_prompts,
            full_waits: tally.full_waits,
            unsaved_blocks: tally.unsaved_blocks,
            bytes: bytes.map(|(from, to, bytes)| (format!("{from}_{to}"), bytes)).collect(),
            object_requests: None,
            slots: engine.slots().into_iter().map(|(tier, counts)| (tier.name(), counts)).collect(),
            device: engine.manager().admin().device().unwrap_or("none"),
            drained: audited.drained,
            drift: audited.drift,
            seconds: (seconds * 1e3).round() / 1e3,
            recovered: engine.manager().admin().recovered().to_vec(),
            acknowledged: None,
            chaos: None,
        }
    }

    /// The same, of a replay with faults.
    pub(super) fn with(self, chaos: Option<ChaosReport>) -> Self {
        Self { chaos, ..self }
    }

    /// The same, with what the object store was asked.
    pub(super) fn with_object_requests(self, registry: &Registry) -> Self {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == "kvbm_object_requests_total");
        let count = |family: &MetricFamily| {
            family.get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum()
        };
        Self { object_requests: family.map(count), ..self }
    }

    /// The same, of a replay with a log of what is durable.
    pub(super) fn with_acknowledged(self, acknowledged: Option<FoundBlocks>) -> Self {
        Self { acknowledged, ..self }
    }

    /// For people: tiers, routes, and a few lines.
    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{}\n{}\n{}\n", self.tiers(), self.routes(), self.summary());
        if let Some(chaos) = &self.chaos {
            let _ = write!(text, "\n{}", chaos.summary());
        }
        for RecoveryReport { tier, blocks, took_us, .. } in &self.recovered {
            let blocks = output::count(*blocks as u64);
            let _ = write!(
                text,
                "\n{blocks} blocks of an earlier run were in the {tier} tier, found in {took_us} µs."
            );
        }
        if let Some(found) = &self.acknowledged {
            let _ = write!(text, "\n{}", found.summary());
        }
        for drift in &self.drift {
            let _ = write!(text, "\ndrift in the block table: {drift}");
        }
        text
    }

    fn tiers(&self) -> String {
        let mut table = output::table(
            &["tier", "hit tokens", "of prompt", "slots", "resident", "free", "lost"],
            1,
        );
        for tier in Tier::ALL {
            let Some(slots) = self.slots.get(tier.name()) else { continue };
            let hits = self.hit_tokens.of(tier);
            table.add_row([
                if tier == Tier::Device {
                    format!("device ({})", self.device)
                } else {
                    tier.to_string()
                },
                output::count(hits),
                output::percent(output::share(hits, self.prompt_tokens)),
                output::count(slots.total.into()),
                output::count(slots.resident.into()),
                output::count(slots.free.into()),
                output::count(slots.lost.into()),
            ]);
        }
        table.trim_fmt()
    }

    fn routes(&self) -> String {
        let mut table = output::table(&["route", "bytes", "per second"], 1);
        for (route, &bytes) in &self.bytes {
            let rate = bytes as f64 / self.seconds.max(1e-3);
            let route = route.replace('_', " → ");
            table.add_row([
                route,
                output::bytes(bytes),
                format!("{}/s", output::bytes(rate as u64)),
            ]);
        }
        table.trim_fmt()
    }

    fn summary(&self) -> String {
        format!(
            "{} requests in {:.1} s: {} of {} prompt tokens were cached ({}).\n\
             {} blocks came back and were checked byte by byte: {} mismatches; {} loads and {} saves failed.\n\
             {} waits for room; {} blocks went unsaved; {} prompts are longer than the device.",
            output::count(self.requests),
            self.seconds,
            output::count(self.hit_tokens.total()),
            output::count(self.prompt_tokens),
            output::percent(self.token_hit_rate),
            output::count(self.blocks_verified),
            output::count(self.mismatches),
            output::count(self.failed_loads),
            output::count(self.failed_saves),
            output::count(self.full_waits),
            output::count(self.unsaved_blocks),
            output::count(self.cut_prompts),
        )
    }

    /// Fails if anything is wrong that never may be.
    pub(super) fn verdict(&self) -> Result<(), CommandFailure> {
        if self.mismatches > 0 {
            let message = format!("{} blocks came back with wrong bytes", self.mismatches);
            return Err(CommandFailure::unexpected(message));
        }
        let wrong = self.acknowledged.as_ref().map_or(0, |found| found.wrong);
        if wrong > 0 {
            return Err(CommandFailure::unexpected(format!(
                "{wrong} blocks of an earlier run had wrong bytes"
            )));
        }
        if !self.drift.is_empty() {
            let message = format!("{} invariants of the block table do not hold", self.drift.len());
            return Err(CommandFailure::unexpected(message));
        }
        let wrong = self.chaos.as_ref().map(ChaosReport::faults).unwrap_or_default();
        if !wrong.is_empty() {
            return Err(CommandFailure::unexpected(format!(
                "after the faults there are {}",
                wrong.join(", ")
            )));
        }
        Ok(())
    }
}
