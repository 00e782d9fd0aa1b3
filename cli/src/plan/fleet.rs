//! Prefill and decode workers: what each rule of offloading would bring.

use clap::Args;
use kvbm_policies::offload::PrefillCosts;
use kvbm_policies::simulation::fleet::{Fleet, FleetOutcome, OffloadRule};
use serde::Serialize;

use super::what_if::{WhatIfCosts, parse_bandwidth};
use super::{PlanInput, each};
use crate::output::{self, CommandFailure, rounded};

/// The rules that are compared, with their names.
const RULES: [(&str, OffloadRule); 4] = [
    ("priced", OffloadRule::Priced),
    ("thresholds", OffloadRule::Thresholds { tokens: 2_048, percent: 70 }),
    ("never", OffloadRule::Never),
    ("always", OffloadRule::Always),
];

/// The options that ask for workers.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workers: prefill apart from decode")]
pub(super) struct FleetArgs {
    /// Simulate prefill and decode workers, such as 2:4, under four rules of who computes a prompt
    #[arg(long, value_name = "PREFILL:DECODE", value_parser = parse_workers)]
    workers: Option<(usize, usize)>,
    /// Bytes that move from a prefill worker to a decode worker in a second
    #[arg(long, value_name = "SIZE/S", default_value = "10GB", value_parser = parse_bandwidth)]
    link_bandwidth: u64,
    /// Milliseconds that a hand-over takes however short the prompt is
    #[arg(long, value_name = "MS", default_value_t = 10)]
    hand_over_ms: u32,
}

fn parse_workers(text: &str) -> Result<(usize, usize), String> {
    let number = |part: &str| part.parse().ok().filter(|number| (1..=1_024).contains(number));
    let parts =
        text.split_once(':').and_then(|(prefill, decode)| number(prefill).zip(number(decode)));
    parts.ok_or_else(|| "name two numbers from 1 to 1024, such as 2:4".to_owned())
}

/// What the rules brought. Serialises to a part of the command's JSON.
#[derive(Debug, Serialize)]
pub(super) struct FleetPlan {
    pub(super) prefill_workers: usize,
    pub(super) decode_workers: usize,
    pub(super) link_bytes_per_second: u64,
    pub(super) hand_over_ms: u32,
    pub(super) rules: Vec<RuleRow>,
}

/// One rule.
#[derive(Debug, Serialize)]
pub(super) struct RuleRow {
    pub(super) rule: &'static str,
    /// Requests whose prompt a prefill worker computed, of all: 0 to 1.
    pub(super) offloaded: f64,
    pub(super) mean_ttft_seconds: f64,
    pub(super) p50_ttft_seconds: f64,
    pub(super) p99_ttft_seconds: f64,
    /// What a request waited while it decoded, since its worker computed prompts.
    pub(super) mean_stall_seconds: f64,
}

impl FleetArgs {
    /// Plays the trace to the workers. `None`: no workers were asked for.
    pub(super) fn plan(
        &self,
        input: &PlanInput,
        costs: &WhatIfCosts,
    ) -> Result<Option<FleetPlan>, CommandFailure> {
        let Some((prefill, decode)) = self.workers else { return Ok(None) };
        if input.miniature.sample().stride() != 1 {
            return Err(CommandFailure::unusable(
                "--workers plays all blocks of a trace: leave out --sample, or take a smaller trace",
            ));
        }
        let token = 1.0 / costs.prefill_tokens_per_second;
        let fleet = Fleet {
            prefill,
            decode,
            costs: PrefillCosts {
                token_here: token,
                token_there: token,
                token_moved: costs.token_bytes() / self.link_bandwidth as f64,
                hand_over: f64::from(self.hand_over_ms) / 1e3,
            },
        };
        let rules = each("rules of offloading", &RULES, |&(rule, decides)| {
            row(rule, input.requests, &fleet.simulate(input.miniature.workload(), decides))
        });
        Ok(Some(FleetPlan {
            prefill_workers: prefill,
            decode_workers: decode,
            link_bytes_per_second: self.link_bandwidth,
            hand_over_ms: self.hand_over_ms,
            rules,
        }))
    }
}

fn row(rule: &'static str, requests: u64, outcome: &FleetOutcome) -> RuleRow {
    RuleRow {
        rule,
        offloaded: rounded(outcome.offloaded as f64 / requests.max(1) as f64),
        mean_ttft_seconds: rounded(outcome.mean_first_token()),
        p50_ttft_seconds: rounded(outcome.first_token_at(0.5)),
        p99_ttft_seconds: rounded(outcome.first_token_at(0.99)),
        mean_stall_seconds: rounded(outcome.mean_stall()),
    }
}

impl FleetPlan {
    /// A line for each rule, and what the seconds are made of.
    pub(super) fn to_text(&self) -> String {
        let titles = ["rule", "offloaded", "mean TTFT", "p50", "p99", "mean stall", "together"];
        let mut table = output::table(&titles, 0);
        for row in &self.rules {
            let seconds = |seconds: f64| format!("{seconds:.3} s");
            table.add_row([
                row.rule.to_owned(),
                super::outcome::rate(row.offloaded),
                seconds(row.mean_ttft_seconds),
                seconds(row.p50_ttft_seconds),
                seconds(row.p99_ttft_seconds),
                seconds(row.mean_stall_seconds),
                seconds(row.mean_ttft_seconds + row.mean_stall_seconds),
            ]);
        }
        format!(
            "{} prefill and {} decode workers\n{}\nA stall is what a request waits while it decodes. \
             The link moves {}/s; a hand-over takes {} ms.",
            self.prefill_workers,
            self.decode_workers,
            table.trim_fmt(),
            output::decimal_bytes(self.link_bytes_per_second as f64),
            self.hand_over_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_two_numbers() {
        assert_eq!(parse_workers("2:4"), Ok((2, 4)));
        for wrong in ["", "2", "2:", "0:1", "1:0", "2:4:1", "9999:1", "-1:2"] {
            assert!(parse_workers(wrong).is_err(), "{wrong}");
        }
    }
}
