//! Which workers a prompt goes to.

use std::sync::Arc;

use kvbm_policies::offload::{MeasuredCost, PrefillCosts, PrefillDecision, Prompt, QueueDepths};
use kvbm_policies::should_offload_prefill;
use parking_lot::Mutex;

use crate::Shared;
use crate::prompts::PromptText;
use crate::workers::Worker;

/// Seconds a token before anything is measured: 8,000 tokens a second, and ten times as many moved.
const GUESS: f64 = 1.0 / 8_000.0;
const GUESS_MOVED: f64 = GUESS / 10.0;
/// Tokens after which a measurement counts half.
const MEMORY: f64 = 100_000.0;

/// What prompts were measured to cost.
#[derive(Debug)]
pub(crate) struct Costs {
    pub(crate) here: Mutex<MeasuredCost>,
    pub(crate) there: Mutex<MeasuredCost>,
    pub(crate) moved: Mutex<MeasuredCost>,
    hand_over: f64,
}

/// Where a prompt goes.
#[derive(Debug)]
pub(crate) struct Route {
    /// Who answers.
    pub(crate) decode: Arc<Worker>,
    /// Tokens of the prompt that it lacks.
    pub(crate) missing: u32,
    /// Who may compute the prompt for it, best first; empty where it does so itself.
    pub(crate) prefill: Vec<Arc<Worker>>,
    /// Why; `None` where there was nothing to decide.
    pub(crate) decision: Option<PrefillDecision>,
}

impl Costs {
    pub(crate) fn new(hand_over: f64) -> Self {
        let measured = |guess| Mutex::new(MeasuredCost::new(guess, MEMORY));
        Self {
            here: measured(GUESS),
            there: measured(GUESS),
            moved: measured(GUESS_MOVED),
            hand_over,
        }
    }

    fn now(&self) -> PrefillCosts {
        PrefillCosts {
            token_here: self.here.lock().seconds(),
            token_there: self.there.lock().seconds(),
            token_moved: self.moved.lock().seconds(),
            hand_over: self.hand_over,
        }
    }
}

impl Shared {
    /// Where a prompt goes, `tried` aside. `None`: no decode worker is left.
    pub(crate) fn route(&self, prompt: &PromptText, tried: &[Arc<Worker>]) -> Option<Route> {
        let decode = best(&self.decode, prompt, tried).into_iter().next()?;
        let held_here = decode.held(prompt);
        let missing = prompt.tokens().saturating_sub(held_here);
        let prefill = best(&self.prefill, prompt, &[]);
        let decision = prefill.first().map(|there| {
            should_offload_prefill(
                Prompt { tokens: prompt.tokens(), held_here, held_there: there.held(prompt) },
                QueueDepths {
                    tokens_here: decode.waiting(),
                    tokens_there: there.waiting(),
                    decoding_here: decode.decoding(),
                },
                self.costs.now(),
            )
        });
        let is_offloaded = decision.is_some_and(|decision| decision.is_offloaded);
        let prefill = if is_offloaded { prefill } else { Vec::new() };
        Some(Route { decode, missing, prefill, decision })
    }
}

/// Healthy workers, first those with least to compute before the prompt is computed.
fn best(workers: &[Arc<Worker>], prompt: &PromptText, tried: &[Arc<Worker>]) -> Vec<Arc<Worker>> {
    let is_left = |worker: &&Arc<Worker>| {
        worker.is_healthy() && !tried.iter().any(|tried| Arc::ptr_eq(tried, worker))
    };
    let mut left: Vec<_> = workers.iter().filter(is_left).map(Arc::clone).collect();
    left.sort_by_cached_key(|worker| {
        let missing = prompt.tokens().saturating_sub(worker.held(prompt));
        (worker.waiting() + u64::from(missing), worker.decoding())
    });
    left
}
