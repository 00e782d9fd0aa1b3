//! Prefill and decode workers under a workload: what a rule of offloading does to the time to the
//! first token, and to those who decode meanwhile.
//!
//! Workers keep every block that they have computed or received, compute one prompt at a time, and
//! decode any number of requests at once. A decode worker that computes a prompt holds up those who
//! decode there. The link is never the bottleneck of two transfers at once.

use std::collections::HashSet;

use super::single::ChainSource;
use super::workload::{BLOCK_TOKENS, BlockVisit, TOKEN_MS, Workload};
use crate::offload::{PrefillCosts, Prompt, QueueDepths, should_offload_prefill};
use crate::seam::BlockId;

/// Who decides where a prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadRule {
    /// [`should_offload_prefill`].
    Priced,
    /// Two thresholds, as Dynamo's router has them: a prompt stays if fewer than `tokens` of it are
    /// to be computed, and less than `percent` of it.
    Thresholds {
        /// Tokens below which it stays.
        tokens: u32,
        /// Share of the prompt below which it stays, in per cent.
        percent: u32,
    },
    /// Decode workers compute everything.
    Never,
    /// Prefill workers compute everything.
    Always,
}

/// The workers, and what their work costs.
#[derive(Clone, Copy, Debug)]
pub struct Fleet {
    /// Workers that only compute prompts; at least one.
    pub prefill: usize,
    /// Workers that decode, and may compute prompts; at least one.
    pub decode: usize,
    /// The same for all of them.
    pub costs: PrefillCosts,
}

/// What a rule brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetOutcome {
    /// Seconds from each request's arrival to its first token, the shortest first.
    pub first_token: Vec<f64>,
    /// Seconds that decoding requests waited for prompts, of all requests together.
    pub stalls: f64,
    /// Requests whose prompt was computed by a prefill worker.
    pub offloaded: u64,
}

impl FleetOutcome {
    /// Mean seconds to the first token.
    pub fn mean_first_token(&self) -> f64 {
        self.first_token.iter().sum::<f64>() / self.first_token.len().max(1) as f64
    }

    /// Seconds to the first token that a share `rank` of the requests did not exceed.
    pub fn first_token_at(&self, rank: f64) -> f64 {
        let last = self.first_token.len().saturating_sub(1);
        self.first_token.get((rank * last as f64).round() as usize).copied().unwrap_or(0.0)
    }

    /// Mean seconds that a request waited while it decoded.
    pub fn mean_stall(&self) -> f64 {
        self.stalls / self.first_token.len().max(1) as f64
    }
}

impl Fleet {
    /// Plays `workload` to idle workers that hold nothing.
    pub fn simulate(&self, workload: &Workload, rule: OffloadRule) -> FleetOutcome {
        let mut outcome = FleetOutcome::default();
        let mut prefill = vec![Worker::default(); self.prefill.max(1)];
        let mut decode = vec![Worker::default(); self.decode.max(1)];
        for visit in workload.visits() {
            let now = visit.timestamp_ms as f64 / 1e3;
            decode.iter_mut().for_each(|worker| worker.decoding.retain(|end| *end > now));
            let here = soonest(&mut decode, workload, visit, self.costs.token_here);
            let there = soonest(&mut prefill, workload, visit, self.costs.token_there);
            let prompt = Prompt {
                tokens: visit.prompt_tokens,
                held_here: here.held(workload, visit),
                held_there: there.held(workload, visit),
            };
            let queues = QueueDepths {
                tokens_here: (here.wait(now) / self.costs.token_here) as u64,
                tokens_there: (there.wait(now) / self.costs.token_there) as u64,
                decoding_here: here.decoding.len() as u32,
            };
            let priced = should_offload_prefill(prompt, queues, self.costs);
            let first_token = if rule.offloads(prompt, priced.is_offloaded) {
                outcome.offloaded += 1;
                there.work(now, priced.there.compute);
                there.keep(workload, visit);
                there.wait(now) + priced.there.hand_over
            } else {
                let own = priced.here.load + priced.here.compute;
                outcome.stalls += priced.here.stalls;
                here.decoding.iter_mut().for_each(|end| *end += priced.here.compute);
                here.work(now, own);
                here.wait(now)
            };
            here.keep(workload, visit);
            let tokens_s = (TOKEN_MS * u64::from(visit.output_tokens)) as f64 / 1e3;
            here.decoding.push(now + first_token + tokens_s);
            outcome.first_token.push(first_token);
        }
        outcome.first_token.sort_by(f64::total_cmp);
        outcome
    }
}

impl OffloadRule {
    fn offloads(self, prompt: Prompt, is_cheaper: bool) -> bool {
        let missing = prompt.tokens.saturating_sub(prompt.held_here);
        match self {
            Self::Priced => is_cheaper,
            Self::Thresholds { tokens, percent } => {
                let share = u64::from(missing) * 100;
                missing >= tokens || share >= u64::from(prompt.tokens) * u64::from(percent)
            }
            Self::Never => false,
            Self::Always => true,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Worker {
    blocks: HashSet<BlockId>,
    /// When it has computed what waits.
    free_at: f64,
    /// When the requests that it decodes end.
    decoding: Vec<f64>,
}

/// The worker that would have the prompt computed first.
fn soonest<'w>(
    workers: &'w mut [Worker],
    workload: &Workload,
    visit: &BlockVisit,
    token_s: f64,
) -> &'w mut Worker {
    let now = visit.timestamp_ms as f64 / 1e3;
    let ready = |worker: &Worker| {
        let missing = visit.prompt_tokens.saturating_sub(worker.held(workload, visit));
        worker.wait(now) + f64::from(missing) * token_s
    };
    let least = |a: &&mut Worker, b: &&mut Worker| ready(a).total_cmp(&ready(b));
    workers.iter_mut().min_by(least).expect("a fleet has workers of each kind")
}

impl Worker {
    /// Leading tokens of a prompt that it holds.
    fn held(&self, workload: &Workload, visit: &BlockVisit) -> u32 {
        let deepest = path(workload, visit).find(|block| self.blocks.contains(block));
        deepest.map_or(0, |block| workload.depth(block) * BLOCK_TOKENS)
    }

    fn wait(&self, now: f64) -> f64 {
        (self.free_at - now).max(0.0)
    }

    fn work(&mut self, now: f64, seconds: f64) {
        self.free_at = self.free_at.max(now) + seconds;
    }

    fn keep(&mut self, workload: &Workload, visit: &BlockVisit) {
        // What it holds is closed by prefix: above a block that it has, it has all.
        for block in path(workload, visit) {
            if !self.blocks.insert(block) {
                return;
            }
        }
    }
}

/// The blocks of a request, the deepest first.
fn path<'w>(workload: &'w Workload, visit: &BlockVisit) -> impl Iterator<Item = BlockId> + 'w {
    std::iter::successors(visit.deepest, |&block| workload.parent(block))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Request;

    const COSTS: PrefillCosts =
        PrefillCosts { token_here: 1e-3, token_there: 1e-3, token_moved: 1e-5, hand_over: 0.01 };

    fn request(timestamp_ms: u64, hash_ids: &[u64]) -> Request {
        let input_length = hash_ids.len() as u32 * BLOCK_TOKENS;
        Request { timestamp_ms, input_length, output_length: 100, hash_ids: hash_ids.to_vec() }
    }

    fn outcome(requests: &[Request], rule: OffloadRule) -> FleetOutcome {
        let fleet = Fleet { prefill: 1, decode: 1, costs: COSTS };
        fleet.simulate(&requests.iter().collect(), rule)
    }

    fn is_near(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    #[test]
    fn a_prompt_at_home_stalls_who_decodes() {
        let requests = [request(0, &[1, 2]), request(1_100, &[3, 4])];
        let home = outcome(&requests, OffloadRule::Never);
        assert_eq!(home.offloaded, 0);
        assert!(is_near(home.stalls, 1.024), "{home:?}");
        assert!(is_near(home.mean_first_token(), 1.024));
        let away = outcome(&requests, OffloadRule::Always);
        assert_eq!((away.offloaded, away.stalls), (2, 0.0));
        assert!(is_near(away.mean_first_token(), 1.024 + 0.01 + 1024.0 * 1e-5));
    }

    #[test]
    fn prompts_queue_and_held_blocks_cost_nothing() {
        let requests = [request(0, &[1, 2]), request(0, &[1, 2]), request(0, &[1, 2, 3])];
        let home = outcome(&requests, OffloadRule::Never);
        assert_eq!(home.first_token.len(), 3);
        assert!(is_near(home.first_token[1], 1.024) && is_near(home.first_token[2], 1.536));
        assert!(
            is_near(home.first_token_at(1.0), 1.536) && is_near(home.first_token_at(0.0), 1.024)
        );
    }

    #[test]
    fn the_rules_decide() {
        let requests = [request(0, &[1, 2]), request(1_100, &[1, 2, 3]), request(1_200, &[7; 8])];
        let offloaded = |rule| outcome(&requests, rule).offloaded;
        assert_eq!(offloaded(OffloadRule::Thresholds { tokens: 2_048, percent: 70 }), 2);
        assert_eq!(offloaded(OffloadRule::Thresholds { tokens: 8_000, percent: 101 }), 0);
        // The first finds an idle worker and the second most of its prompt; the third would hold up
        // both.
        assert_eq!(offloaded(OffloadRule::Priced), 1);
        assert_eq!(outcome(&[], OffloadRule::Priced), FleetOutcome::default());
    }
}
