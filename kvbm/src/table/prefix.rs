//! The match: how many leading blocks of a chain each tier holds.
//!
//! Tiers are prefix-closed, so each holds a chain up to a boundary and nothing behind it. One
//! search finds the boundaries of all tiers at once: every probe reads one index bucket and answers
//! for four tiers. It works in rounds of independent probes whose cache misses overlap: the first
//! one looks where the boundaries were last, if that is known; one gallops from there (1, 3, 7 …
//! positions on) or from the root; the others cut each remaining interval into equal parts.

use kvbm_tiers::Tier;

use super::Table;
use super::budget::Budget;
use super::index::{EMPTY, IndexBucket, KeyHash, RecordId};
use super::record::TierSet;
use crate::names::hash::{BlockHash, Chain};

/// Parts into which a round cuts an interval. Measured at a million records
/// (docs/adr/0002-records-and-slots.md): fewer parts mean more rounds of dependent misses, more
/// parts more probes than the memory system overlaps.
const PARTS: usize = 8;
/// Longest chain that is searched; blocks behind count as absent.
const MAX_BLOCKS: usize = 1 << 30;
/// Most probes in a round: the cuts of all tiers, or the gallop of the longest chain.
const ROUND: usize = if Tier::COUNT * PARTS > 32 { Tier::COUNT * PARTS } else { 32 };

/// How many leading blocks of a chain each tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    blocks: [u32; Tier::COUNT],
    /// How many leading blocks are worth loading; `None`: all are.
    worth_loading: Option<u32>,
}

impl Match {
    pub(crate) const fn new(blocks: [u32; Tier::COUNT]) -> Self {
        Self { blocks, worth_loading: None }
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

    /// Leading blocks that are faster to load than to compute again, as far as the pace of both is
    /// known: loading ends there. See [`kvbm_policies::split()`].
    pub fn worth_loading(&self) -> usize {
        self.worth_loading.map_or(self.longest(), |blocks| self.longest().min(blocks as usize))
    }

    /// Notes how many leading blocks are worth loading.
    pub(crate) const fn judge(&mut self, worth_loading: u32) {
        self.worth_loading = Some(worth_loading);
    }

    /// The read plan: each block from the fastest tier whose prefix covers it, as at most four
    /// ranges.
    pub fn plan(&self) -> impl Iterator<Item = (Tier, std::ops::Range<usize>)> + '_ {
        let mut covered = 0;
        Tier::ALL.into_iter().filter_map(move |tier| {
            let range = covered..self.blocks(tier).max(covered);
            covered = range.end;
            (!range.is_empty()).then_some((tier, range))
        })
    }
}

/// Where each tier's boundary can still be: between `low` (held) and `high` (not held). An index
/// that overstates can make them cross; the confirmation then fails.
struct PrefixSearch {
    /// Tiers that give nothing are not searched.
    tiers: TierSet,
    low: [u32; Tier::COUNT],
    high: [u32; Tier::COUNT],
}

/// Positions to probe next.
struct ProbeRound {
    at: [u32; ROUND],
    len: usize,
}

impl ProbeRound {
    const fn empty() -> Self {
        Self { at: [0; ROUND], len: 0 }
    }

    const fn push(&mut self, position: u32) {
        self.at[self.len] = position;
        self.len += 1;
    }

    /// Positions further and further from `from`, and the last one.
    fn gallop(from: u32, blocks: u32) -> Self {
        let mut round = Self::empty();
        let mut step = 0;
        while from + step < blocks - 1 {
            round.push(from + step);
            step = step * 2 + 1;
        }
        round.push(blocks - 1);
        round
    }

    /// The last position before each boundary, and the first one behind.
    fn around(boundaries: TierBoundaries, blocks: u32) -> Self {
        let mut round = Self::empty();
        for boundary in boundaries {
            for position in [boundary.wrapping_sub(1), boundary] {
                // There is nothing before the root or behind the end.
                if position < blocks && !round.positions().contains(&position) {
                    round.push(position);
                }
            }
        }
        round
    }

    fn positions(&self) -> &[u32] {
        &self.at[..self.len]
    }
}

impl PrefixSearch {
    /// The first position where some tier's boundary can still be.
    fn first_open(&self) -> Option<u32> {
        let open = self.low.iter().zip(&self.high).filter(|(low, high)| low < high);
        open.map(|(&low, _)| low).min()
    }

    fn next_round(&self) -> ProbeRound {
        let mut round = ProbeRound::empty();
        for tier in 0..Tier::COUNT {
            let interval = (self.low[tier], self.high[tier]);
            // Tiers often hold the same prefix: a shared interval is cut once.
            let seen = (0..tier).any(|other| (self.low[other], self.high[other]) == interval);
            if !seen {
                Self::cut(&mut round, interval.0, interval.1);
            }
        }
        round
    }

    fn cut(round: &mut ProbeRound, low: u32, high: u32) {
        let width = high.saturating_sub(low);
        // In a narrow interval every position is probed: then this round is the last.
        let cuts = width.min(PARTS as u32 - 1);
        for cut in 1..=cuts {
            round.push(low + (u64::from(width) * u64::from(cut) / u64::from(cuts + 1)) as u32);
        }
    }

    fn learn(&mut self, position: u32, held: TierSet) {
        for tier in Tier::ALL.into_iter().filter(|&tier| self.tiers.has(tier)) {
            let t = tier.index();
            // A probe for one tier also tells about the others, wherever it lies in their
            // intervals.
            if held.has(tier) {
                self.low[t] = self.low[t].max(position + 1);
            } else {
                self.high[t] = self.high[t].min(position);
            }
        }
    }
}

/// What a match found.
pub(super) struct FoundBoundaries {
    pub(super) held: Match,
    /// The deepest block that each tier holds.
    pub(super) deepest: [Option<RecordId>; Tier::COUNT],
}

impl Table {
    /// How many leading blocks of `chain` each tier holds. It has no side effect.
    pub fn matches(&self, chain: Chain<'_>) -> Match {
        self.locate(chain).held
    }

    /// The match, with the records at its boundaries.
    ///
    /// The index alone may overstate a boundary: if two blocks share a tag, or if the end of the
    /// chain was stored without its beginning, as a chain of its own. So the search looks at the
    /// records there, and is repeated on records if one of them is not what it seemed.
    pub(super) fn locate(&self, chain: Chain<'_>) -> FoundBoundaries {
        let chain = self.enter(chain);
        let hint = self.boundary_hints.find(chain);
        let by_index = self.search(chain, hint, |_, hash, first| self.index.residence(hash, first));
        let mut found = self.confirm(chain, by_index).unwrap_or_else(|| {
            // Records are exact, at one more cache miss for each probe. Two blocks share a tag once
            // in millions of matches.
            let by_record = self.search(chain, None, |position, hash, first| {
                let key = chain.key(position as usize);
                let found = self.index.find(hash, first, |r| self.records.at(r).is(key));
                let found = found.filter(|&r| self.is_of_chain(r, chain, position));
                found.map_or(TierSet::default(), |r| self.records.at(r).resident())
            });
            self.confirm(chain, by_record)
                .unwrap_or(FoundBoundaries { held: Match::default(), deepest: [None; Tier::COUNT] })
        });
        self.hide_dropping(chain, &mut found);
        found
    }

    /// Whether a record has as many ancestors as its position in the chain says: else its own chain
    /// begins in between.
    fn is_of_chain(&self, record: RecordId, chain: Chain<'_>, position: u32) -> bool {
        let depth = self.records.depth(record);
        depth == position + 1
            || self.depth_of_first(chain).is_some_and(|first| depth == first + position)
    }

    /// More than one, if a chain begins in the middle of a longer one. `None`: its first block is
    /// not known.
    pub(super) fn depth_of_first(&self, chain: Chain<'_>) -> Option<u32> {
        self.find(chain.key(0)).map(|first| self.records.depth(first))
    }

    /// Whether a tier has a block, as the last one of a chain of `blocks` blocks.
    pub(crate) fn is_held_at(&self, last: BlockHash, blocks: usize) -> bool {
        let known = self.known_at(self.enter(Chain::from(std::slice::from_ref(&last))), blocks);
        known.is_some_and(|record| self.records.at(record).resident() != TierSet::default())
    }

    fn known_at(&self, last: Chain<'_>, blocks: usize) -> Option<RecordId> {
        self.find(last.key(0)).filter(|&record| self.records.depth(record) as usize == blocks)
    }

    /// Adds the names of a block and its ancestors, `blocks` in all, to `chain`, deepest first, as
    /// far as one hold goes. False: they are not known.
    pub(crate) fn name_ancestors(
        &self,
        last: BlockHash,
        blocks: usize,
        chain: &mut Vec<BlockHash>,
    ) -> bool {
        let entered = self.enter(Chain::from(std::slice::from_ref(&last)));
        let Some(mut next) = self.known_at(entered, blocks) else { return false };
        let end = chain.len() + blocks;
        let mut hold = Budget::of_a_hold();
        while hold.look() {
            let known = self.records.at(next);
            chain.push(entered.hash_of(known.key()));
            match known.parent() {
                Some(parent) => next = parent,
                // A chain that is being dropped loses its beginning first.
                None => return chain.len() == end,
            }
        }
        true
    }

    /// The records at the boundaries; `None` if one of them is not resident there, or not of the
    /// chain.
    fn confirm(&self, chain: Chain<'_>, boundaries: TierBoundaries) -> Option<FoundBoundaries> {
        let mut deepest = [None; Tier::COUNT];
        for tier in Tier::ALL {
            let Some(last) = (boundaries[tier.index()] as usize).checked_sub(1) else { continue };
            let record =
                self.find(chain.key(last)).filter(|&r| self.records.at(r).resident().has(tier))?;
            if !self.is_of_chain(record, chain, last as u32) {
                return None;
            }
            deepest[tier.index()] = Some(record);
        }
        Some(FoundBoundaries { held: Match::new(boundaries), deepest })
    }

    fn search(
        &self,
        chain: Chain<'_>,
        hint: Option<TierBoundaries>,
        probe: impl Fn(u32, KeyHash, IndexBucket) -> TierSet,
    ) -> TierBoundaries {
        let blocks = chain.len().min(MAX_BLOCKS) as u32;
        let in_use = Tier::ALL.into_iter().filter(|&tier| self.is_in_use(tier));
        let tiers = in_use.fold(TierSet::default(), TierSet::with);
        let high = Tier::ALL.map(|tier| if tiers.has(tier) { blocks } else { 0 });
        let mut search = PrefixSearch { tiers, low: [0; Tier::COUNT], high };
        if let Some(boundaries) = hint {
            self.probe(chain, &ProbeRound::around(boundaries, blocks), &mut search, &probe);
        }
        let Some(from) = search.first_open() else { return search.low };
        let mut round = ProbeRound::gallop(from, blocks);
        while round.len > 0 {
            self.probe(chain, &round, &mut search, &probe);
            round = search.next_round();
        }
        search.low
    }

    /// Reads all buckets of a round before it looks at any, so that their misses overlap.
    fn probe(
        &self,
        chain: Chain<'_>,
        round: &ProbeRound,
        search: &mut PrefixSearch,
        probe: &impl Fn(u32, KeyHash, IndexBucket) -> TierSet,
    ) {
        let mut firsts = [(KeyHash::default(), EMPTY); ROUND];
        for (first, &position) in firsts.iter_mut().zip(round.positions()) {
            let hash = KeyHash::of(chain.key(position as usize));
            *first = (hash, self.index.first(hash));
        }
        for (&(hash, first), &position) in firsts.iter().zip(round.positions()) {
            search.learn(position, probe(position, hash, first));
        }
    }
}

/// Blocks of the largest tier for each hint: shorter chains need none.
const BLOCKS_A_HINT: usize = 256;
/// The fewest hints, and the most: 1.3 MB.
const RANGE: (usize, usize) = (64, 1 << 16);
/// A search of a shorter chain takes one or two rounds anyway. Tests have short chains, and hints
/// for them.
const LEAST_BLOCKS: usize = if cfg!(test) { 4 } else { 32 };

/// By tier: how many leading blocks it had.
type TierBoundaries = [u32; Tier::COUNT];

/// Where the boundaries of chains were at their last lease: the next search begins there. A table
/// with one place for each hash: a later entry displaces an earlier one.
///
/// Most prompts continue an earlier one, and most of what that one found is still there. Then a
/// search takes one round, instead of four or five rounds of cache misses. A hint may be wrong or
/// another chain's: what it says is looked up, so it costs only time.
#[derive(Debug)]
pub(super) struct BoundaryHints(Box<[BoundaryHint]>);

#[derive(Clone, Copy, Debug, Default)]
struct BoundaryHint {
    tag: u32,
    boundaries: TierBoundaries,
}

impl BoundaryHints {
    /// For tiers of `blocks` blocks.
    pub(super) fn with_room_for(blocks: usize) -> Self {
        let hints = (blocks / BLOCKS_A_HINT).next_power_of_two().clamp(RANGE.0, RANGE.1);
        Self(vec![BoundaryHint::default(); hints].into_boxed_slice())
    }

    /// Where the boundaries of such a chain were.
    pub(super) fn find(&self, chain: Chain<'_>) -> Option<TierBoundaries> {
        let (place, tag) = anchor(chain)?.halves();
        let hint = self.0[self.place(place)];
        (hint.tag == tag).then_some(hint.boundaries)
    }

    pub(super) fn note(&mut self, chain: Chain<'_>, boundaries: TierBoundaries) {
        if let Some((place, tag)) = anchor(chain).map(KeyHash::halves) {
            let place = self.place(place);
            self.0[place] = BoundaryHint { tag, boundaries };
        }
    }

    fn place(&self, hash: u32) -> usize {
        hash as usize & (self.0.len() - 1)
    }
}

/// The block that identifies a chain after it has grown: between a quarter and half of the way, and
/// the same one until the chain is twice as long. The root would not do, since many prompts share
/// it.
fn anchor(chain: Chain<'_>) -> Option<KeyHash> {
    let is_long = chain.len() >= LEAST_BLOCKS;
    is_long.then(|| KeyHash::of(chain.key((1 << chain.len().ilog2()) / 2)))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use kvbm_policies::EvictionKind;
    use kvbm_tiers::FramePool;
    use proptest::prelude::*;

    use super::super::TierSpec;
    use super::super::testing::chain;
    use super::*;
    use crate::names::hash::BlockHash;

    #[test]
    fn the_plan_reads_each_block_once_from_the_fastest_tier() {
        let held = Match::new([2, 5, 4, 9]);
        let plan: Vec<_> = held.plan().collect();
        assert_eq!(plan, [(Tier::Device, 0..2), (Tier::Host, 2..5), (Tier::Object, 5..9)]);
        assert_eq!(held.longest(), 9);
        assert_eq!(Match::default().plan().count(), 0);
    }

    /// What a search that begins with a hint finds of a chain of which tiers hold these numbers of
    /// blocks, and its probes.
    fn search(
        blocks: u32,
        held: TierBoundaries,
        hint: Option<TierBoundaries>,
    ) -> (TierBoundaries, usize) {
        let spec = |tier| TierSpec {
            pool: FramePool::new(tier, 4),
            policy: EvictionKind::Lru.build(4),
            flush_to: None,
            admission: None,
        };
        let table = Table::new(Tier::ALL.map(spec));
        let hashes: Vec<_> = (0..blocks.into()).map(BlockHash::from_u128).collect();
        let probes = Cell::new(0);
        let probe = |position, _, _| {
            probes.set(probes.get() + 1);
            let holds = |tier: &Tier| held[tier.index()] > position;
            Tier::ALL.into_iter().filter(holds).fold(TierSet::default(), TierSet::with)
        };
        (table.search(Chain::from(&hashes), hint, probe), probes.get())
    }

    fn boundaries() -> impl Strategy<Value = TierBoundaries> {
        // Some equal, as when tiers keep copies.
        prop::array::uniform4(prop_oneof![Just(0_u32), Just(64_u32), 0_u32..3_000])
    }

    proptest! {
        #[test]
        fn the_boundaries_are_found_wherever_the_search_begins(
            blocks in 0_u32..3_000,
            held in boundaries(),
            hint in prop::option::of(boundaries()),
        ) {
            let held = held.map(|held| held.min(blocks));
            prop_assert_eq!(search(blocks, held, hint).0, held);
            let (found, probes) = search(blocks, held, Some(held));
            prop_assert!(found == held && probes <= 2 * Tier::COUNT, "{probes} probes");
        }
    }

    #[test]
    fn a_grown_chain_is_known_again_another_is_not() {
        let mut hints = BoundaryHints::with_room_for(1_000_000);
        let (before, after, other) = (chain(1, 300), chain(1, 500), chain(2, 300));
        hints.note(Chain::from(&before), [7, 250, 0, 0]);
        assert_eq!(hints.find(Chain::from(&after)), Some([7, 250, 0, 0]));
        assert_eq!(hints.find(Chain::from(&other)), None);
    }

    #[test]
    fn short_chains_have_none() {
        let mut hints = BoundaryHints::with_room_for(0);
        let short = chain(1, LEAST_BLOCKS as u32 - 1);
        hints.note(Chain::from(&short), [1, 1, 1, 1]);
        assert_eq!(hints.find(Chain::from(&short)), None);
    }
}
