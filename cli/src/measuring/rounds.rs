//! How it is timed.
//!
//! Absolute times mean little on a shared machine: what is to be compared is timed in turns, and
//! medians are reported with their quartiles.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::chains::{Prompt, Random, SHORT};
use super::subject::Subject;

/// Chains of a round of cycles: one sample times this many.
const ROUND: usize = 16;

/// Median of many samples, and the quartiles around it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// A quarter of the samples are below.
    pub p25: f64,
    /// Half of them.
    pub median: f64,
    /// Three quarters.
    pub p75: f64,
}

impl Spread {
    /// Of at least one sample.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |quarter: usize| samples[(samples.len() - 1) * quarter / 4];
        Self { p25: at(1), median: at(2), p75: at(3) }
    }
}

/// Fills the caches with something else; one of no bytes does nothing.
#[derive(Debug)]
pub struct CacheSweep(Vec<u64>);

impl CacheSweep {
    /// A buffer that displaces `bytes` of cache.
    pub fn new(bytes: usize) -> Self {
        Self(vec![1; bytes / size_of::<u64>()])
    }

    /// Writes to every cache line of the buffer, in passing.
    pub fn sweep(&mut self) {
        self.0.iter_mut().step_by(8).for_each(|word| *word += 1);
        black_box(&self.0);
    }
}

/// Picks prompts at random, never the same twice in a row.
#[derive(Debug)]
pub struct Picks {
    random: Random,
    last: usize,
    of: usize,
}

impl Picks {
    /// From `of` prompts, at least two.
    pub const fn new(of: usize) -> Self {
        Self { random: Random::new(3), last: 0, of }
    }

    /// The next prompt's number.
    pub const fn pick(&mut self) -> usize {
        self.last = (self.last + 1 + self.random.below(self.of - 1)) % self.of;
        self.last
    }
}

/// One prompt in a subject's terms, as it comes from the engine: just written, hence in the cache.
#[derive(Debug)]
pub struct PromptArrival<N>(Vec<N>);

impl<N: Copy> PromptArrival<N> {
    /// Room for a prompt.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Sweeps the caches if that is wanted, lets `prompt` arrive and times its match. Returns that
    /// and the blocks found.
    pub fn time_match<S: Subject<Name = N>>(
        &mut self,
        subject: &S,
        prompt: &[N],
        cold: &mut CacheSweep,
    ) -> (Duration, usize) {
        cold.sweep();
        self.0.clear();
        self.0.extend_from_slice(prompt);
        let started = Instant::now();
        let blocks = black_box(subject.match_prompt(black_box(&self.0)));
        (started.elapsed(), blocks)
    }
}

impl<N: Copy> Default for PromptArrival<N> {
    fn default() -> Self {
        Self::new()
    }
}

/// Microseconds of a match, over `samples` random prompts. Each is leased once before.
///
/// # Panics
/// If the subject does not find what it holds.
pub fn match_us<S: Subject<Name = kvbm::BlockHash>>(
    subject: &S,
    prompts: &[Prompt],
    samples: usize,
    cold: &mut CacheSweep,
) -> Spread {
    let (mut picks, mut arrival) = (Picks::new(prompts.len()), PromptArrival::new());
    for prompt in prompts {
        subject.match_prompt(&prompt.hashes);
    }
    let sample = |_| {
        let prompt = &prompts[picks.pick()];
        let (time, found) = arrival.time_match(subject, &prompt.hashes, cold);
        assert_eq!(found, prompt.saved, "the match must find what the table holds");
        time.as_secs_f64() * 1e6
    };
    Spread::of((0..samples).map(sample).collect())
}

/// A tier that is full of short chains whose last uses are in random order, and new chains to put
/// into it.
#[derive(Debug)]
pub struct FullTier<S> {
    subject: S,
}

impl<S: Subject> FullTier<S> {
    /// Fills `subject`, whose size is `slots` blocks.
    pub fn new(subject: S, slots: usize) -> Self {
        let mut random = Random::new(4);
        let mut chains: Vec<_> =
            (0..slots / SHORT).map(|_| S::names(&random.chain(SHORT))).collect();
        chains.iter().for_each(|chain| subject.publish(chain, 0));
        random.shuffle(&mut chains);
        for chain in &chains {
            assert_eq!(subject.match_prompt(chain), SHORT, "the tier holds every chain");
        }
        Self { subject }
    }

    /// What is in it.
    pub const fn subject(&self) -> &S {
        &self.subject
    }

    /// Puts the chains in, each evicting as many blocks as it has. Returns nanoseconds per block.
    pub fn time_round(&self, chains: &[Vec<kvbm::BlockHash>]) -> f64 {
        let names: Vec<_> = chains.iter().map(|chain| S::names(chain)).collect();
        let started = Instant::now();
        names.iter().for_each(|chain| self.subject.publish(black_box(chain), 0));
        started.elapsed().as_secs_f64() * 1e9 / (chains.len() * SHORT) as f64
    }
}

/// New chains for one round, the same for every subject.
pub fn round_of_chains(random: &mut Random) -> Vec<Vec<kvbm::BlockHash>> {
    (0..ROUND).map(|_| random.chain(SHORT)).collect()
}

/// Nanoseconds per block of a cycle through a full tier.
pub fn cycle_ns<S: Subject>(tier: &FullTier<S>, rounds: usize) -> Spread {
    let mut random = Random::new(5);
    Spread::of((0..rounds).map(|_| tier.time_round(&round_of_chains(&mut random))).collect())
}
