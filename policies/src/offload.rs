//! Prefill here or elsewhere: whether a decode worker computes a prompt itself, or a prefill worker
//! does and hands its KV over.
//!
//! Both ways are priced in seconds, and the cheaper one is taken; of equals the worker stays at
//! home. A prefill here also costs those who decode here: while it runs, each of them waits. With
//! that left out, an idle decode worker would always be the faster one, and the others' time per
//! token would pay for it.

use std::fmt;

/// A prompt, in tokens. What is held are its leading tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// All of it.
    pub tokens: u32,
    /// What the decode worker holds, in any tier.
    pub held_here: u32,
    /// What the prefill worker holds, or reaches at its peers.
    pub held_there: u32,
}

/// What waits at both ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepths {
    /// Prompt tokens that the decode worker computes before this prompt.
    pub tokens_here: u64,
    /// Prompt tokens that the prefill worker computes before this prompt.
    pub tokens_there: u64,
    /// Requests that decode at the decode worker, and wait while it computes a prompt.
    pub decoding_here: u32,
}

/// Measured costs, in seconds; [`MeasuredCost`] learns them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCosts {
    /// To compute a prompt token at the decode worker.
    pub token_here: f64,
    /// To compute a prompt token at the prefill worker.
    pub token_there: f64,
    /// To move the KV of a token over the link.
    pub token_moved: f64,
    /// What a hand-over takes however short the prompt: messages, a lease, the first step.
    pub hand_over: f64,
}

/// What the decode worker's own prefill would take, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillHere {
    /// Waiting for prompts before it.
    pub queue: f64,
    /// Loading what the other side holds, where that is sooner than computing it.
    pub load: f64,
    /// Computing the rest.
    pub compute: f64,
    /// What all those who decode here lose meanwhile.
    pub stalls: f64,
}

/// What a prefill elsewhere would take, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillThere {
    /// Waiting for prompts before it.
    pub queue: f64,
    /// Computing what the prefill worker does not hold.
    pub compute: f64,
    /// The hand-over, and moving what the decode worker does not hold.
    pub hand_over: f64,
}

/// A decision with its reasons. Prints as a sentence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillDecision {
    /// Whether a prefill worker is to compute the prompt.
    pub is_offloaded: bool,
    /// What staying would cost.
    pub here: PrefillHere,
    /// What going would cost.
    pub there: PrefillThere,
}

impl PrefillHere {
    /// Until the first token, and what others wait.
    pub fn total(&self) -> f64 {
        self.queue + self.load + self.compute + self.stalls
    }
}

impl PrefillThere {
    /// Until the first token.
    pub fn total(&self) -> f64 {
        self.queue + self.compute + self.hand_over
    }
}

/// Where a prompt is computed.
pub fn should_offload_prefill(
    prompt: Prompt,
    queues: QueueDepths,
    costs: PrefillCosts,
) -> PrefillDecision {
    let tokens = f64::from(prompt.tokens);
    let own = f64::from(prompt.held_here.min(prompt.tokens));
    let at_peer = f64::from(prompt.held_there.min(prompt.tokens));
    let stalled = f64::from(queues.decoding_here);
    // What only the other side holds is loaded or computed, whichever costs less.
    let is_loaded = costs.token_moved < costs.token_here * (1.0 + stalled);
    let loaded = if is_loaded { (at_peer - own).max(0.0) } else { 0.0 };
    let compute = (tokens - own - loaded) * costs.token_here;
    let here = PrefillHere {
        queue: queues.tokens_here as f64 * costs.token_here,
        load: loaded * costs.token_moved,
        compute,
        stalls: compute * stalled,
    };
    let there = PrefillThere {
        queue: queues.tokens_there as f64 * costs.token_there,
        compute: (tokens - at_peer) * costs.token_there,
        hand_over: costs.hand_over + (tokens - own) * costs.token_moved,
    };
    PrefillDecision { is_offloaded: there.total() < here.total(), here, there }
}

impl fmt::Display for PrefillDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { is_offloaded, here, there } = self;
        write!(
            f,
            "{}: here {:.3} s (queue {:.3}, load {:.3}, compute {:.3}, stalls of others {:.3}), \
             there {:.3} s (queue {:.3}, compute {:.3}, hand-over {:.3})",
            if *is_offloaded { "offloaded" } else { "computed here" },
            here.total(),
            here.queue,
            here.load,
            here.compute,
            here.stalls,
            there.total(),
            there.queue,
            there.compute,
            there.hand_over,
        )
    }
}

/// Seconds for a unit of work, as measured lately.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredCost {
    seconds: f64,
    units: f64,
    memory: f64,
}

impl MeasuredCost {
    /// Before anything is measured it is `guess` seconds a unit. A measurement counts half once
    /// `memory` more units were measured.
    pub fn new(guess: f64, memory: f64) -> Self {
        // The guess weighs as much as a hundredth of the memory.
        let units = memory / 100.0;
        Self { seconds: guess * units, units, memory }
    }

    /// `units` took `seconds`. What is not a positive number of units is not counted.
    pub fn note(&mut self, units: f64, seconds: f64) {
        if units > 0.0 && seconds >= 0.0 && units.is_finite() && seconds.is_finite() {
            let kept = 0.5_f64.powf(units / self.memory);
            self.seconds = self.seconds * kept + seconds;
            self.units = self.units * kept + units;
        }
    }

    /// Seconds a unit.
    pub fn seconds(&self) -> f64 {
        self.seconds / self.units
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COSTS: PrefillCosts = PrefillCosts {
        token_here: 1.0 / 8_000.0,
        token_there: 1.0 / 8_000.0,
        token_moved: 1.0 / 100_000.0,
        hand_over: 0.02,
    };

    fn decided(prompt: Prompt, queues: QueueDepths) -> bool {
        should_offload_prefill(prompt, queues, COSTS).is_offloaded
    }

    fn busy() -> QueueDepths {
        QueueDepths { decoding_here: 16, ..QueueDepths::default() }
    }

    #[test]
    fn a_long_prompt_leaves_a_busy_worker() {
        let prompt = Prompt { tokens: 8_000, ..Prompt::default() };
        assert!(decided(prompt, busy()));
        assert!(!decided(prompt, QueueDepths { tokens_there: 200_000, ..busy() }));
        assert!(!decided(prompt, QueueDepths::default()), "no one is disturbed here");
    }

    #[test]
    fn a_short_prompt_and_a_large_hit_stay() {
        assert!(!decided(Prompt { tokens: 8, ..Prompt::default() }, busy()));
        let hit = Prompt { tokens: 8_000, held_here: 7_992, held_there: 0 };
        assert!(!decided(hit, busy()));
        let near = Prompt { tokens: 8_000, held_here: 0, held_there: 7_992 };
        assert!(!decided(near, busy()), "what a peer holds is loaded, not computed there");
    }

    #[test]
    fn a_decision_says_why() {
        let prompt = Prompt { tokens: 8_000, ..Prompt::default() };
        assert_eq!(
            should_offload_prefill(prompt, busy(), COSTS).to_string(),
            "offloaded: here 17.000 s (queue 0.000, load 0.000, compute 1.000, stalls of others 16.000), \
             there 1.100 s (queue 0.000, compute 1.000, hand-over 0.100)"
        );
    }

    #[test]
    fn a_cost_follows_what_is_measured() {
        let mut cost = MeasuredCost::new(1.0, 1_000.0);
        assert!((cost.seconds() - 1.0).abs() < 1e-12, "the guess");
        (0..40).for_each(|_| cost.note(100.0, 200.0));
        assert!((cost.seconds() - 2.0).abs() < 0.01, "{}", cost.seconds());
        (0..40).for_each(|_| cost.note(100.0, 50.0));
        assert!((cost.seconds() - 0.5).abs() < 0.15, "{}", cost.seconds());
        cost.note(0.0, 5.0);
        cost.note(f64::NAN, 5.0);
        cost.note(1.0, f64::INFINITY);
        assert!(cost.seconds().is_finite());
    }

    fn prompt() -> impl Strategy<Value = Prompt> {
        (0..200_000_u32, 0..200_000_u32, 0..200_000_u32)
            .prop_map(|(tokens, held_here, held_there)| Prompt { tokens, held_here, held_there })
    }

    fn queues() -> impl Strategy<Value = QueueDepths> {
        (0..100_000_u64, 0..100_000_u64, 0..64_u32).prop_map(
            |(tokens_here, tokens_there, decoding_here)| QueueDepths {
                tokens_here,
                tokens_there,
                decoding_here,
            },
        )
    }

    /// A link that is slower than computing is of no use; with one, a larger hit may move the rest.
    fn costs() -> impl Strategy<Value = PrefillCosts> {
        (1e-6_f64..1e-2, 1e-6_f64..1e-2, 0.0..1.0_f64, 0.0..1.0_f64).prop_map(
            |(token_here, token_there, share, hand_over)| PrefillCosts {
                token_here,
                token_there,
                token_moved: share * token_here,
                hand_over,
            },
        )
    }

    proptest! {
        #[test]
        fn more_of_one_argument_moves_it_one_way(
            prompt in prompt(), queues in queues(), costs in costs(), more in 1..50_000_u32,
        ) {
            let decide = |prompt, queues, costs| {
                should_offload_prefill(prompt, queues, costs).is_offloaded
            };
            let base = decide(prompt, queues, costs);
            // What may only send it away, and what may only keep it.
            let away = [
                QueueDepths { tokens_here: queues.tokens_here + u64::from(more), ..queues },
                QueueDepths { decoding_here: queues.decoding_here + more, ..queues },
            ];
            for busier in away {
                prop_assert!(!base || decide(prompt, busier, costs));
            }
            let queue = QueueDepths { tokens_there: queues.tokens_there + u64::from(more), ..queues };
            prop_assert!(base || !decide(prompt, queue, costs));
            let slower = PrefillCosts { hand_over: costs.hand_over + f64::from(more), ..costs };
            prop_assert!(base || !decide(prompt, queues, slower));
            let slower = PrefillCosts { token_there: costs.token_there * 2.0, ..costs };
            prop_assert!(base || !decide(prompt, queues, slower));
        }

        #[test]
        fn a_larger_hit_never_sends_the_rest_away(
            prompt in prompt(), queues in queues(), costs in costs(), more in 1..50_000_u32,
        ) {
            let larger = Prompt { held_here: prompt.held_here.saturating_add(more), ..prompt };
            let [now, then] = [prompt, larger].map(|prompt| should_offload_prefill(prompt, queues, costs));
            // The price of leaving, over that of staying, up to rounding.
            let gain = |of: PrefillDecision| of.here.total() - of.there.total();
            prop_assert!(gain(then) <= gain(now) + 1e-9 * (1.0 + now.here.total()));
        }

        #[test]
        fn a_prompt_that_grows_changes_its_place_once(
            queues in queues(), costs in costs(), held in 0..10_000_u32,
        ) {
            let at = |tokens| {
                let prompt = Prompt { tokens, held_here: held, held_there: held };
                should_offload_prefill(prompt, queues, costs).is_offloaded
            };
            let mut places: Vec<_> = (0..200).map(|step| at(held + step * 500)).collect();
            places.dedup();
            prop_assert!(places.len() <= 2);
        }
    }
}
