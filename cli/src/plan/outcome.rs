//! What a plan found, and the text of it for people.

use serde::Serialize;

use super::fleet::FleetPlan;
use super::model::KvModel;
use super::tiers::BitsStaircase;
use super::what_if::{WhatIf, WhatIfPoint};
use crate::output;

/// What a plan found. Serialises to the command's JSON.
#[derive(Debug, Serialize)]
pub(super) struct PlanOutcome {
    /// The trace, as it was named.
    pub(super) trace: String,
    pub(super) requests: u64,
    pub(super) prompt_tokens: u64,
    /// Distinct full blocks; an estimate where they are sampled.
    pub(super) blocks: u64,
    /// From the first request to the last one.
    pub(super) seconds: f64,
    /// Blocks that one in the sample stands for; 1 where all are simulated.
    pub(super) sample_stride: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<KvModel>,
    /// One for each policy and capacity, in the order asked for: policy by policy.
    pub(super) rows: Vec<OutcomeRow>,
    /// LRU at many capacities; where it was asked what more would bring.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lru_curve: Option<MissCurve>,
    /// Several tiers together: one for each way of admission, the chosen one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tiers: Vec<BitsStaircase>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) what_if: Option<WhatIf>,
    /// Prefill and decode workers; where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fleet: Option<FleetPlan>,
    /// What the reader should know about the figures.
    pub(super) notes: Vec<String>,
}

/// One policy at one capacity.
#[derive(Debug, Serialize)]
pub(super) struct OutcomeRow {
    /// The policy's name.
    pub(super) eviction: &'static str,
    /// Blocks that the tier holds.
    pub(super) capacity: u32,
    /// What they take, where the model is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
    /// Hit tokens over prompt tokens, to four decimals: 0 to 1.
    pub(super) token_hit_rate: f64,
}

/// Stack distances turned into hit rates.
#[derive(Debug, Serialize)]
pub(super) struct MissCurve {
    /// Capacity in blocks, and token hit rate.
    pub(super) points: Vec<(u32, f64)>,
    /// What measuring it took, per request of the trace.
    pub(super) microseconds_per_request: f64,
}

impl PlanOutcome {
    /// Everything that was asked for.
    pub(super) fn to_text(&self) -> String {
        let mut parts = vec![summary(self), rates(&self.rows)];
        parts.extend(self.tiers.iter().map(staircase));
        if let Some(what_if) = &self.what_if {
            parts.extend(
                what_if.tiers.iter().map(|tier| what_if_tier(tier.tier, &tier.points, what_if)),
            );
            parts.push(costs(self, what_if));
        }
        parts.extend(self.fleet.iter().map(FleetPlan::to_text));
        parts.join("\n\n")
    }
}

fn summary(plan: &PlanOutcome) -> String {
    let trace = format!(
        "{}: {} requests over {}, {} prompt tokens, {} distinct blocks",
        plan.trace,
        output::count(plan.requests),
        duration(plan.seconds),
        output::count(plan.prompt_tokens),
        output::count(plan.blocks)
    );
    match &plan.model {
        Some(model) => format!("{trace}\n{}", model.describe()),
        None => trace,
    }
}

/// `59 min`.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        ..7_200.0 => format!("{:.0} min", seconds / 60.0),
        ..172_800.0 => format!("{:.1} h", seconds / 3_600.0),
        _ => format!("{:.1} days", seconds / 86_400.0),
    }
}

/// `5,000`, or with the model known `5,000 (839 GB)`.
pub(super) fn capacity(blocks: u32, bytes: Option<u64>) -> String {
    let blocks = output::count(blocks.into());
    bytes.map_or_else(
        || blocks.clone(),
        |bytes| format!("{blocks} ({})", output::decimal_bytes(bytes as f64)),
    )
}

/// `12.34 %`.
pub(super) fn rate(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// A line for each capacity, a column for each policy.
fn rates(rows: &[OutcomeRow]) -> String {
    let columns: Vec<&[OutcomeRow]> = rows.chunk_by(|a, b| a.eviction == b.eviction).collect();
    let policies = columns.iter().map(|column| column[0].eviction);
    let titles: Vec<_> = ["capacity (blocks)"].into_iter().chain(policies).collect();
    let mut table = output::table(&titles, 0);
    for (line, first) in columns.first().into_iter().copied().flatten().enumerate() {
        let rates = columns
            .iter()
            .filter_map(|column| column.get(line))
            .map(|row| rate(row.token_hit_rate));
        let size = capacity(first.capacity, first.bytes);
        table.add_row(std::iter::once(size).chain(rates).collect::<Vec<_>>());
    }
    format!("Token hit rate of one tier\n{}", table.trim_fmt())
}

fn staircase(case: &BitsStaircase) -> String {
    let titles = ["tier", "capacity (blocks)", "token hit rate", "read/request", "written/request"];
    let mut table = output::table(&titles, 1);
    for step in &case.tiers {
        table.add_row([
            step.tier.to_owned(),
            capacity(step.capacity, step.bytes),
            rate(step.token_hit_rate),
            amount(step.blocks_read_per_request, step.bytes_read_per_request),
            amount(step.blocks_written_per_request, step.bytes_written_per_request),
        ]);
    }
    let total = format!(
        "Tiers together, {} and {}: token hit rate {}\n{}",
        case.eviction,
        case.admission,
        rate(case.token_hit_rate),
        table.trim_fmt()
    );
    match &case.disk {
        Some(disk) => format!(
            "{total}\nAt this rate of requests the disk is written {} a day: {:.2} drive writes of its size.",
            disk.bytes_per_day.map_or_else(
                || format!("{} blocks", output::count(disk.blocks_per_day as u64)),
                output::decimal_bytes
            ),
            disk.drive_writes_per_day
        ),
        None => total,
    }
}

/// `12.3 blocks`, or with the model known their bytes.
pub(super) fn amount(blocks: f64, bytes: Option<f64>) -> String {
    bytes.map_or_else(|| format!("{blocks:.1} blocks"), output::decimal_bytes)
}

/// `+64.0 GB`, or in blocks where the model is not known.
pub(super) fn more(point: &WhatIfPoint) -> String {
    let sign = if point.more_blocks < 0 { '−' } else { '+' };
    match (point.more_blocks, point.more_bytes) {
        (0, _) => "as it is".to_owned(),
        (_, Some(bytes)) => format!("{sign}{}", output::decimal_bytes(bytes.abs())),
        (blocks, None) => format!("{sign}{} blocks", output::count(blocks.unsigned_abs())),
    }
}

/// `+3.1 points`.
pub(super) fn gain_points(point: &WhatIfPoint, what_if: &WhatIf) -> String {
    signed((point.token_hit_rate - what_if.token_hit_rate) * 100.0, 2)
}

/// `−0.41 s`.
pub(super) fn gain_seconds(point: &WhatIfPoint, what_if: &WhatIf) -> String {
    signed(point.mean_ttft_seconds - what_if.mean_ttft_seconds, 3)
}

/// With a true minus, and no sign for what is rounded to nothing.
fn signed(number: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", number.abs());
    let is_zero = text.bytes().all(|byte| matches!(byte, b'0' | b'.'));
    match number {
        _ if is_zero => text,
        ..0.0 => format!("−{text}"),
        _ => format!("+{text}"),
    }
}

fn what_if_tier(tier: &str, points: &[WhatIfPoint], what_if: &WhatIf) -> String {
    let titles =
        ["change", "capacity (blocks)", "token hit rate", "points", "mean TTFT", "seconds"];
    let mut table = output::table(&titles, 0);
    for point in points {
        let now = point.more_blocks == 0;
        let gain = |gain: String| if now { String::new() } else { gain };
        table.add_row([
            more(point),
            output::count(point.capacity.into()),
            rate(point.token_hit_rate),
            gain(gain_points(point, what_if)),
            format!("{:.3} s", point.mean_ttft_seconds),
            gain(gain_seconds(point, what_if)),
        ]);
    }
    format!("What if the {tier} tier were another size\n{}", table.trim_fmt())
}

fn costs(plan: &PlanOutcome, what_if: &WhatIf) -> String {
    let curve = plan.lru_curve.as_ref().map(|curve| {
        format!(
            " The curve of LRU at every capacity took {:.1} µs a request.",
            curve.microseconds_per_request
        )
    });
    format!(
        "{}\nA simulation took {:.1} µs a request.{}",
        assumptions(what_if),
        what_if.microseconds_per_request,
        curve.unwrap_or_default()
    )
}

/// What the seconds are made of.
pub(super) fn assumptions(what_if: &WhatIf) -> String {
    let costs = &what_if.costs;
    let speed = |bytes: u64| output::decimal_bytes(bytes as f64);
    format!(
        "Mean TTFT is loading, then computing the rest; no queues.\n\
         Prefill {} tokens/s; host {}/s, disk {}/s, object {}/s.",
        output::count(costs.prefill_tokens_per_second as u64),
        speed(costs.host_bytes_per_second),
        speed(costs.disk_bytes_per_second),
        speed(costs.object_bytes_per_second)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_people_read_them() {
        assert_eq!(
            [3.12, -0.5, 0.001, -0.004].map(|number| signed(number, 2)),
            ["+3.12", "−0.50", "0.00", "0.00"]
        );
        assert_eq!(
            [3.0, 3_540.0, 9_720.0, 400_000.0].map(duration),
            ["3.0 s", "59 min", "2.7 h", "4.6 days"]
        );
        assert_eq!(capacity(5_000, Some(64_000_000_000)), "5,000 (64.0 GB)");
        assert_eq!(amount(12.345, None), "12.3 blocks");
    }
}
