//! The requests of a trace, as paths through one forest of blocks, and when each of them ends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::single::ChainSource;
use crate::eviction::belady::NEVER;
use crate::seam::{BlockId, Ended, RequestId};

/// Tokens in a block of a Mooncake trace.
pub const BLOCK_TOKENS: u32 = 512;

/// One request of a trace in the Mooncake format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival, in milliseconds since the trace began.
    pub timestamp_ms: u64,
    /// Prompt tokens.
    pub input_length: u32,
    /// Generated tokens.
    pub output_length: u32,
    /// Chained ids of the prompt's blocks of [`BLOCK_TOKENS`] tokens, the last one perhaps partial.
    pub hash_ids: Vec<u64>,
}

impl Request {
    /// The blocks that a cache may keep: those that the prompt fills.
    pub fn full_blocks(&self) -> &[u64] {
        let full = (self.input_length / BLOCK_TOKENS) as usize;
        &self.hash_ids[..full.min(self.hash_ids.len())]
    }
}

/// A trace made ready for simulation.
///
/// Every distinct block has a dense id, its parent and its depth, so a request is the id of its
/// deepest block and costs the same whatever its length. A block is known by its hash id *and* its
/// parent: a trace that puts one id under two parents, or twice in a path, still yields a forest.
#[derive(Debug, Default)]
pub struct Workload {
    blocks: Vec<TracedBlock>,
    ids: HashMap<(Option<BlockId>, u64), BlockId>,
    visits: Vec<BlockVisit>,
}

#[derive(Clone, Copy, Debug)]
struct TracedBlock {
    parent: Option<BlockId>,
    /// Blocks of the path that ends here, this one included.
    depth: u32,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockVisit {
    pub(crate) timestamp_ms: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
    /// `None` where the prompt fills no block.
    pub(crate) deepest: Option<BlockId>,
}

impl Workload {
    /// Adds a request, which comes after all those before.
    pub fn push(&mut self, request: &Request) {
        let deepest =
            request.full_blocks().iter().fold(None, |parent, &id| Some(self.intern(parent, id)));
        self.visits.push(BlockVisit {
            timestamp_ms: request.timestamp_ms,
            prompt_tokens: request.input_length,
            output_tokens: request.output_length,
            deepest,
        });
    }

    /// Distinct full blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Requests.
    pub fn requests(&self) -> usize {
        self.visits.len()
    }

    /// What [`Belady`](crate::eviction::Belady) needs to know. Touch number k is request number k
    /// among those that fill a block.
    pub fn next_uses(&self) -> Vec<Vec<u32>> {
        let mut next_use = vec![NEVER; self.blocks.len()];
        let touched: Vec<_> = self.visits.iter().filter_map(|visit| visit.deepest).collect();
        // Backwards: what a block's next use is, later requests have said.
        let mut uses: Vec<_> = (0..touched.len() as u32)
            .rev()
            .map(|touch| {
                let path = self.path(touched[touch as usize]);
                let mut uses: Vec<_> =
                    path.map(|id| std::mem::replace(&mut next_use[id.0 as usize], touch)).collect();
                uses.reverse();
                uses
            })
            .collect();
        uses.reverse();
        uses
    }

    pub(crate) fn visits(&self) -> &[BlockVisit] {
        &self.visits
    }

    fn intern(&mut self, parent: Option<BlockId>, hash_id: u64) -> BlockId {
        *self.ids.entry((parent, hash_id)).or_insert_with(|| {
            let depth = 1 + parent.map_or(0, |parent| self.blocks[parent.0 as usize].depth);
            self.blocks.push(TracedBlock { parent, depth });
            BlockId(self.blocks.len() as u32 - 1)
        })
    }
}

impl ChainSource for Workload {
    fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.blocks[block.0 as usize].parent
    }

    fn depth(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].depth
    }

    fn key(&self, block: BlockId) -> u64 {
        u64::from(block.0)
    }
}

impl<'r> FromIterator<&'r Request> for Workload {
    fn from_iter<I: IntoIterator<Item = &'r Request>>(requests: I) -> Self {
        let mut workload = Self::default();
        requests.into_iter().for_each(|request| workload.push(request));
        workload
    }
}

/// From a request's arrival to its first token, in milliseconds.
// These two are those of the published figures, so that ours compare with them.
pub const FIRST_TOKEN_MS: u64 = 500;
/// From one generated token to the next, in milliseconds.
pub const TOKEN_MS: u64 = 20;

/// The requests that have not ended, by the time when they will: [`FIRST_TOKEN_MS`] after their
/// arrival and [`TOKEN_MS`] for each generated token later.
#[derive(Debug, Default)]
pub struct Running(BinaryHeap<Reverse<(u64, RequestId, u32)>>);

impl Running {
    /// `request` arrives at `now_ms` and will generate `output_tokens`.
    pub fn start(&mut self, request: RequestId, now_ms: u64, output_tokens: u32) {
        let end_ms = now_ms
            .saturating_add(FIRST_TOKEN_MS)
            .saturating_add(TOKEN_MS * u64::from(output_tokens));
        self.0.push(Reverse((end_ms, request, output_tokens)));
    }

    /// The next request that has ended by `now_ms`, each once, in the order of their ends.
    pub fn next_ended(&mut self, now_ms: u64) -> Option<Ended> {
        self.0.peek().filter(|&&Reverse((end_ms, ..))| end_ms <= now_ms)?;
        let Reverse((at_ms, request, output_tokens)) = self.0.pop()?;
        Some(Ended { request, output_tokens, will_not_return: false, at_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(input_length: u32, hash_ids: &[u64]) -> Request {
        Request { timestamp_ms: 0, input_length, output_length: 0, hash_ids: hash_ids.to_vec() }
    }

    #[test]
    fn a_partial_block_does_not_count() {
        assert_eq!(request(1023, &[7, 8]).full_blocks(), [7]);
        assert_eq!(request(511, &[7]).full_blocks(), [] as [u64; 0]);
    }

    #[test]
    fn fewer_ids_than_blocks_are_taken_as_they_are() {
        assert_eq!(request(5000, &[7]).full_blocks(), [7]);
    }

    #[test]
    fn an_id_under_two_parents_is_two_blocks() {
        let workload: Workload =
            [request(1024, &[1, 2]), request(1024, &[3, 2]), request(1536, &[1, 1, 1])]
                .iter()
                .collect();
        assert_eq!(workload.blocks(), 6);
    }

    #[test]
    fn next_uses_skip_requests_without_a_full_block() {
        let requests =
            [request(1024, &[1, 2]), request(5, &[9]), request(512, &[1]), request(1024, &[1, 2])];
        let workload: Workload = requests.iter().collect();
        assert_eq!(workload.next_uses(), [vec![1, 2], vec![2], vec![NEVER, NEVER]]);
    }

    #[test]
    fn requests_end_in_order_and_not_before_their_ends() {
        let mut running = Running::default();
        running.start(RequestId(1), 0, 100);
        running.start(RequestId(2), 10, 1);
        assert_eq!(running.next_ended(529), None);
        let ended = |request, output_tokens, at_ms| {
            Some(Ended {
                request: RequestId(request),
                output_tokens,
                will_not_return: false,
                at_ms,
            })
        };
        assert_eq!(running.next_ended(2_500), ended(2, 1, 530));
        assert_eq!(running.next_ended(2_500), ended(1, 100, 2_500));
        assert_eq!(running.next_ended(u64::MAX), None);
    }
}
