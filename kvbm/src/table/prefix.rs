//! The match: how many leading blocks of a chain each tier holds.
//!
//! Tiers are prefix-closed, so in each of them residency along a chain is true up to a boundary and false
//! behind it. One search finds the boundaries of all tiers at once: every probe reads one record and
//! answers for four tiers. It works in rounds of independent probes whose cache misses overlap: the first
//! round gallops (positions 0, 1, 3, 7 …), the others cut each remaining interval into equal parts.

use kvbm_tiers::Tier;

use super::Table;
use super::record::TierSet;
use crate::hash::Chain;

/// Parts into which a round cuts an interval. Measured at a million records: fewer parts mean more rounds
/// of dependent misses, more parts more probes than the memory system overlaps.
const PARTS: usize = 8;
/// Most probes in a round: all tiers' cuts, and no fewer than the gallop of a chain of 2³⁰ blocks.
const ROUND: usize = Tier::COUNT * PARTS;

/// How many leading blocks of a chain each tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    blocks: [u32; Tier::COUNT],
}

impl Match {
    pub(crate) const fn new(blocks: [u32; Tier::COUNT]) -> Self {
        Self { blocks }
    }

    /// Leading blocks in `tier`.
    pub const fn blocks(&self, tier: Tier) -> usize {
        self.blocks[tier.index()] as usize
    }

    pub(crate) const fn set(&mut self, tier: Tier, blocks: u32) {
        self.blocks[tier.index()] = blocks;
    }

    /// Leading blocks that some tier holds.
    pub fn longest(&self) -> usize {
        Tier::ALL.iter().map(|&tier| self.blocks(tier)).max().unwrap_or(0)
    }

    /// The read plan: each block from the fastest tier whose prefix covers it, as at most four ranges.
    pub fn plan(&self) -> impl Iterator<Item = (Tier, std::ops::Range<usize>)> + '_ {
        let mut covered = 0;
        Tier::ALL.into_iter().filter_map(move |tier| {
            let range = covered..self.blocks(tier).max(covered);
            covered = range.end;
            (!range.is_empty()).then_some((tier, range))
        })
    }
}

/// Where each tier's boundary can still be: between `low` (held) and `high` (not held).
struct Search {
    low: [u32; Tier::COUNT],
    high: [u32; Tier::COUNT],
}

/// Positions to probe next.
struct Round {
    at: [u32; ROUND],
    len: usize,
}

impl Round {
    const fn empty() -> Self {
        Self { at: [0; ROUND], len: 0 }
    }

    const fn push(&mut self, position: u32) {
        self.at[self.len] = position;
        self.len += 1;
    }

    fn gallop(blocks: u32) -> Self {
        let mut round = Self::empty();
        let mut position = 0;
        while position < blocks - 1 {
            round.push(position);
            position = position * 2 + 1;
        }
        round.push(blocks - 1);
        round
    }

    fn positions(&self) -> &[u32] {
        &self.at[..self.len]
    }
}

impl Search {
    fn next_round(&self) -> Round {
        let mut round = Round::empty();
        for tier in 0..Tier::COUNT {
            let interval = (self.low[tier], self.high[tier]);
            let seen = (0..tier).any(|other| (self.low[other], self.high[other]) == interval);
            if !seen {
                Self::cut(&mut round, interval.0, interval.1);
            }
        }
        round
    }

    fn cut(round: &mut Round, low: u32, high: u32) {
        let width = high - low;
        let cuts = width.min(PARTS as u32 - 1);
        for cut in 1..=cuts {
            round.push(low + (u64::from(width) * u64::from(cut) / u64::from(cuts + 1)) as u32);
        }
    }

    fn learn(&mut self, position: u32, held: TierSet) {
        for tier in Tier::ALL {
            let t = tier.index();
            if held.has(tier) {
                self.low[t] = self.low[t].max(position + 1);
            } else {
                self.high[t] = self.high[t].min(position);
            }
        }
    }
}

impl Table {
    /// How many leading blocks of `chain` each tier holds. No side effect.
    pub fn matches(&self, chain: Chain<'_>) -> Match {
        let blocks = chain.len().min(u32::MAX as usize >> 2) as u32;
        if blocks == 0 {
            return Match::default();
        }
        let mut search = Search { low: [0; Tier::COUNT], high: [blocks; Tier::COUNT] };
        let mut round = Round::gallop(blocks);
        while round.len > 0 {
            self.probe(chain, &round, &mut search);
            round = search.next_round();
        }
        Match::new(search.low)
    }

    /// Reads all buckets of a round before it looks at any, so that their misses overlap.
    fn probe(&self, chain: Chain<'_>, round: &Round, search: &mut Search) {
        let mut firsts = [(super::index::Tag::of(chain.key(0)), None); ROUND];
        for (first, &position) in firsts.iter_mut().zip(round.positions()) {
            let tag = super::index::Tag::of(chain.key(position as usize));
            *first = (tag, Some(self.index.first(tag)));
        }
        for (&(tag, first), &position) in firsts.iter().zip(round.positions()) {
            let key = chain.key(position as usize);
            let found = first.and_then(|first| self.index.find(tag, first, |r| self.records.at(r).is(key)));
            search.learn(position, found.map_or(TierSet::default(), |r| self.records.at(r).resident()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_reads_each_block_once_from_the_fastest_tier() {
        let held = Match::new([2, 5, 4, 9]);
        let plan: Vec<_> = held.plan().collect();
        assert_eq!(plan, [(Tier::Device, 0..2), (Tier::Host, 2..5), (Tier::Object, 5..9)]);
        assert_eq!(held.longest(), 9);
        assert_eq!(Match::default().plan().count(), 0);
    }
}
