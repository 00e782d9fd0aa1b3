//! A small tier for tests: it keeps every stamp that the policies avoid keeping, and checks what
//! any policy must hold to.

use proptest::prelude::*;

use super::Eviction;
use crate::reuse::ReuseModel;
use crate::seam::{Access, BlockId, Forest, Hints, RequestId, Standing};

/// One step of a test. A number picks among the blocks that qualify, modulo their count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// A request whose path ends at a resident block (or nowhere, the last choice), `grown` new
    /// blocks on.
    Request { known: usize, grown: usize },
    /// Evict one block.
    Evict,
    /// Remove a leaf that the policy did not name, busy or not: a corrupt block, say.
    Drop(usize),
    /// Make a leaf busy.
    Hold(usize),
    /// Make a busy block idle.
    Release(usize),
}

/// Any history of a tier.
pub(crate) fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => request(),
        4 => Just(Op::Evict),
        1 => any::<usize>().prop_map(Op::Drop),
        2 => any::<usize>().prop_map(Op::Hold),
        2 => any::<usize>().prop_map(Op::Release),
    ];
    prop::collection::vec(op, 0..200)
}

/// A history in which no block is ever busy and only victims leave.
pub(crate) fn ops_in_turn() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(prop_oneof![request(), Just(Op::Evict)], 0..200)
}

fn request() -> impl Strategy<Value = Op> {
    (any::<usize>(), 0_usize..4).prop_map(|(known, grown)| Op::Request { known, grown })
}

/// A block that a policy chose, beside the best choice there was.
pub(crate) struct Victim {
    pub(crate) last_use: u64,
    pub(crate) oldest_use: u64,
    pub(crate) arrival: u64,
    pub(crate) oldest_arrival: u64,
    /// A search met this block or one below it while it was busy, or one below it was dropped, and
    /// no request has used this block since.
    pub(crate) out_of_turn: bool,
}

#[derive(Clone, Copy)]
struct Block {
    parent: Option<BlockId>,
    children: usize,
    busy: bool,
    arrival: u64,
    last_use: u64,
    out_of_turn: bool,
}

/// A tier and its requests' time, which is their number.
#[derive(Default)]
pub(crate) struct Tree {
    reuse: ReuseModel,
    blocks: Vec<Option<Block>>,
    now: u64,
    has_tenants: bool,
}

impl Tree {
    /// A tier that three tenants share, and requests without a tenant, at two priorities.
    pub(crate) fn with_tenants() -> Self {
        Self { has_tenants: true, ..Self::default() }
    }

    fn hints(&self) -> Hints {
        if !self.has_tenants {
            return Hints::default();
        }
        let tenant = (self.now % 4) as u32;
        let priority = self.now.is_multiple_of(3).then_some(80);
        Hints { tenant: Some(tenant).filter(|&tenant| tenant < 3), priority, ..Hints::default() }
    }

    /// Plays `op` to the tree and to `policy`. Returns what left the tier.
    ///
    /// Panics where the policy names a block that may not go, or none though one may.
    pub(crate) fn apply(&mut self, op: Op, policy: &mut dyn Eviction) -> Option<Victim> {
        match op {
            Op::Request { known, grown } => self.request(known, grown, policy),
            Op::Evict => return self.evict(policy),
            Op::Drop(choice) => {
                if let Some(leaf) = self.choose(choice, |block| block.children == 0) {
                    self.block_mut(leaf).out_of_turn = true;
                    self.remove(leaf, policy);
                }
            }
            Op::Hold(choice) => {
                if let Some(leaf) = self.choose(choice, |block| block.children == 0) {
                    self.block_mut(leaf).busy = true;
                }
            }
            Op::Release(choice) => self.release(choice, policy),
        }
        None
    }

    fn request(&mut self, known: usize, grown: usize, policy: &mut dyn Eviction) {
        self.now += 1;
        let resident = self.ids(|_| true);
        let mut deepest = resident.get(known % (resident.len() + 1)).copied();
        for _ in 0..grown {
            deepest = Some(self.insert(deepest));
        }
        let Some(deepest) = deepest else { return };
        let path: Vec<_> =
            std::iter::successors(Some(deepest), |&block| self.parent(block)).collect();
        for &block in &path {
            self.block_mut(block).last_use = self.now;
            self.block_mut(block).out_of_turn = false;
        }
        let depth = path.len() as u32;
        let access = Access {
            now_ms: self.now,
            request: Some(RequestId(self.now)),
            deepest,
            depth,
            inserted: grown as u32,
            path: depth,
            hints: self.hints(),
        };
        let mut reuse = std::mem::replace(&mut self.reuse, ReuseModel::idle());
        reuse.touch(&access, self);
        policy.touch(&access, self, &reuse);
        self.reuse = reuse;
    }

    fn insert(&mut self, parent: Option<BlockId>) -> BlockId {
        let block = Block {
            parent,
            children: 0,
            busy: false,
            arrival: self.now,
            last_use: self.now,
            out_of_turn: false,
        };
        if let Some(parent) = parent {
            self.block_mut(parent).children += 1;
        }
        let free = self.blocks.iter().position(Option::is_none).unwrap_or(self.blocks.len());
        if free == self.blocks.len() {
            self.blocks.push(None);
        }
        self.blocks[free] = Some(block);
        BlockId(free as u32)
    }

    fn evict(&mut self, policy: &mut dyn Eviction) -> Option<Victim> {
        let choice = policy.victim(self, &self.reuse);
        let candidates = self.ids(|block| block.children == 0 && !block.busy);
        assert_eq!(choice.is_some(), !candidates.is_empty(), "{choice:?} of {candidates:?}");
        for leaf in self.ids(|block| block.children == 0 && block.busy) {
            self.block_mut(leaf).out_of_turn = true;
        }
        let choice = choice.inspect(|choice| assert!(candidates.contains(choice)))?;
        let oldest =
            |age: fn(&Block) -> u64| candidates.iter().map(|&id| age(self.block(id))).min();
        let (oldest_use, oldest_arrival) =
            (oldest(|block| block.last_use)?, oldest(|block| block.arrival)?);
        let Block { last_use, arrival, out_of_turn, .. } = *self.block(choice);
        self.remove(choice, policy);
        Some(Victim { last_use, oldest_use, arrival, oldest_arrival, out_of_turn })
    }

    fn remove(&mut self, id: BlockId, policy: &mut dyn Eviction) {
        let key = self.key(id);
        let block = self.blocks[id.0 as usize].take().expect("only resident blocks leave");
        let exposed = block.parent.filter(|&parent| {
            let parent = self.block_mut(parent);
            parent.children -= 1;
            parent.out_of_turn |= block.out_of_turn;
            parent.children == 0
        });
        self.reuse.removed(id, key);
        policy.removed(id, exposed, &self.reuse);
    }

    fn release(&mut self, choice: usize, policy: &mut dyn Eviction) {
        if let Some(id) = self.choose(choice, |block| block.busy) {
            self.block_mut(id).busy = false;
            if self.block(id).children == 0 {
                policy.released(id, &self.reuse);
            }
        }
    }

    fn choose(&self, choice: usize, qualifies: impl Fn(&Block) -> bool) -> Option<BlockId> {
        let ids = self.ids(qualifies);
        ids.get(choice.checked_rem(ids.len())?).copied()
    }

    fn ids(&self, qualifies: impl Fn(&Block) -> bool) -> Vec<BlockId> {
        let qualifies = |id: &u32| self.blocks[*id as usize].as_ref().is_some_and(&qualifies);
        (0..self.blocks.len() as u32).filter(qualifies).map(BlockId).collect()
    }

    fn block(&self, id: BlockId) -> &Block {
        self.blocks[id.0 as usize].as_ref().expect("only resident blocks are named")
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        self.blocks[id.0 as usize].as_mut().expect("only resident blocks are named")
    }
}

impl Forest for Tree {
    fn standing(&self, id: BlockId) -> Standing {
        let block = self.block(id);
        match (block.children, block.busy) {
            (1.., _) => Standing::Interior,
            (0, true) => Standing::Busy,
            (0, false) => Standing::Evictable,
        }
    }

    fn parent(&self, id: BlockId) -> Option<BlockId> {
        self.block(id).parent
    }

    /// Few, so that blocks return.
    fn key(&self, id: BlockId) -> u64 {
        self.block(id).arrival % 16
    }
}
