//! Where the bytes of a host tier's blocks are, and how those of ranks come: the leader leases slots
//! and their lives at the other leader, and has its ranks bring them, each from the rank of its
//! number there, or from those that have its heads.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::ranks::{Leader, MAX_OPS, PeerSeat, PullOrder};
use kvbm_tiers::sealed::HostSeal;
use kvbm_tiers::{
    Completion, CopyError, CopyErrorKind, CopyOp, Done, DramRegion, Frame, Memory, Owner, SlotRef,
    Tier,
};
use tokio::time::{Instant, timeout_at};

use super::conversion::Conversion;
use super::link::{NamedBlocks, PeerFault};
use super::parts;
use super::protocol::LeaseEnd;
use crate::api::filling::{FillingSlots, FramesBack};
use crate::names::hash::Chain;
use crate::sync::Mutex;

/// Blocks that ranks are told of together, by the bytes of a slice, and how many times at once.
const PULL_BYTES: usize = 16 << 20;
const PULLS: usize = 2;
/// Ranks give up by themselves in time. Their answer has this time more.
const GRACE: Duration = Duration::from_secs(1);

/// Where the bytes of the host tier's blocks are.
#[derive(Clone, Debug)]
pub(crate) enum HostBytes {
    /// In this process; and how blocks travel where they lie sealed, if there are keys.
    Here(Arc<DramRegion>, Option<Arc<HostSeal>>),
    /// In the ranks, each of which has its slices.
    InRanks(Weak<Leader>),
}

impl HostBytes {
    pub(super) const fn memory(&self) -> Option<&Arc<DramRegion>> {
        match self {
            Self::Here(memory, _) => Some(memory),
            Self::InRanks(_) => None,
        }
    }

    /// What to do with blocks that lie sealed, here or where they come from. `None`: no key is given.
    pub(super) const fn seal(&self) -> Option<&Arc<HostSeal>> {
        match self {
            Self::Here(_, seal) => seal.as_ref(),
            Self::InRanks(_) => None,
        }
    }

    /// What blocks lie sealed with here; `None`: they lie in the clear.
    pub(super) fn sealed(&self) -> Option<&Arc<HostSeal>> {
        self.seal().filter(|seal| seal.is_of_memory())
    }

    /// Bytes of a block in the clear. `None`: the ranks know.
    pub(super) fn block_bytes(&self) -> Option<usize> {
        let sealed = self.sealed().map(|seal| seal.block_bytes());
        sealed.or_else(|| Some(self.memory()?.block_bytes()))
    }

    /// Where ranks serve those of other workers. `None`: there are none, one is away or serves none.
    pub(super) fn seats(&self) -> Option<Vec<PeerSeat>> {
        match self {
            Self::Here(..) => None,
            Self::InRanks(leader) => leader.upgrade()?.seats(),
        }
    }
}

/// What ranks are to bring.
pub(super) struct WantedSlices<'a> {
    pub(super) named: &'a NamedBlocks,
    /// The chain with the names that its blocks have now.
    pub(super) chain: Chain<'a>,
    /// Whose they will be.
    pub(super) owner: Option<Owner>,
    /// Tokens of a block there.
    pub(super) block_tokens: u64,
    /// How many blocks there make how many of ours; `None`: one makes one.
    pub(super) conversion: Option<&'a Conversion>,
}

/// Brings blocks into the slots of the ranks, and keeps those that have come to all of them as their
/// checksums say. Everything behind one that has not is left.
pub(super) async fn bring(
    leader: &Weak<Leader>,
    host: &str,
    wanted: &WantedSlices<'_>,
    until: Instant,
    filling: &mut FillingSlots<'_>,
    block_bytes: usize,
) -> Result<(), PeerFault> {
    let named = wanted.named;
    if wanted.there(filling.kept()).start < named.before {
        return Err(PeerFault::Behind);
    }
    let why = Arc::<Mutex<Option<CopyError>>>::default();
    let brought = async {
        let all = filling.kept()..filling.kept() + filling.left();
        let copies = wanted.there(0).len();
        debug_assert!(copies <= MAX_OPS, "a block is made of {copies}");
        let at_once = (PULL_BYTES / block_bytes.max(1)).min(MAX_OPS / copies).max(1);
        let mut parts = parts(all, at_once);
        loop {
            while filling.lent() < PULLS
                && let Some(part) = parts.next()
            {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(PeerFault::Ended(LeaseEnd::Expired));
                }
                let leader = leader.upgrade().ok_or_else(|| gone("the manager is closed"))?;
                let (frames, back) = filling.lend_unsummed(part.len());
                let limit_ms = left.as_millis().try_into().unwrap_or(u32::MAX);
                let (host, seats) = (host.to_owned(), named.seats.clone());
                let (renamed, block_tokens) = (named.renamed, wanted.block_tokens);
                let first = part.start as u32;
                let from = PullOrder { host, seats, limit_ms, renamed, first, block_tokens };
                let ops: Option<Vec<_>> = part
                    .zip(&frames)
                    .flat_map(|(at, frame)| wanted.there(at).map(move |there| (at, there, frame)))
                    .map(|(at, there, frame)| wanted.op(at, there, frame))
                    .collect();
                let Some(ops) = ops else {
                    back(frames, Ok(Vec::new()));
                    return Err(gone("its leader does not say where a block lies"));
                };
                let pulled = PulledPart::new(frames, back, copies, Arc::clone(&why));
                leader.pull(&from, &ops, pulled.done());
            }
            if filling.lent() == 0 {
                return Ok(());
            }
            let came = match timeout_at(until + GRACE, filling.regain()).await {
                Ok(Some(Ok(came))) => came,
                Ok(_) => return Err(gone("its slots do not come back")),
                Err(_) => return Err(gone("a rank here does not answer in time")),
            };
            for came in came {
                if came.is_none() {
                    let why = why.lock();
                    let missing = || gone("a block did not come");
                    // A wrong checksum after the lease's end says nothing: the slot may be in use again.
                    let fault = |why: &CopyError| fault(why).expired_if_over(until);
                    return Err(why.as_ref().map_or_else(missing, fault));
                }
                filling.keep();
            }
        }
    };
    let brought = brought.await;
    if brought.is_err() {
        // What ranks still write is not given to others: those slots are lost until they come back.
        let _ = timeout_at(until + GRACE, filling.regain_all()).await;
    }
    brought
}

fn gone(why: &str) -> PeerFault {
    PeerFault::Ranks(why.to_owned())
}

fn fault(error: &CopyError) -> PeerFault {
    match error.kind() {
        CopyErrorKind::Corrupt => PeerFault::Wrong,
        _ => PeerFault::Ranks(error.to_string()),
    }
}

impl WantedSlices<'_> {
    /// The blocks there that the one at a position of our chain is made of.
    fn there(&self, at: usize) -> Range<usize> {
        self.conversion.map_or(at..at + 1, |conversion| conversion.sources_of(at))
    }

    /// The copy of a block there to the one at a position of our chain.
    fn op(&self, at: usize, there: usize, to: &Frame) -> Option<CopyOp> {
        let behind = there.checked_sub(self.named.before)?;
        let (slots, lives) = (&self.named.slots, &self.named.checksums);
        let (slot, generation) = (*slots.get(behind)?, *lives.get(behind)?);
        Some(CopyOp {
            block: self.chain.key(at),
            parent: at.checked_sub(1).map(|before| self.chain.key(before).hash),
            owner: self.owner,
            from: SlotRef { tier: Tier::Host, slot, generation },
            to: to.slot_ref(),
        })
    }
}

/// What ranks were told to bring together. Its slots come back when the last block has ended.
#[derive(Clone)]
struct PulledPart {
    state: Arc<Mutex<PartState>>,
    /// Why the first block of all parts that did not come did not.
    why: Arc<Mutex<Option<CopyError>>>,
}

struct PartState {
    /// By block, whether none of its copies failed in a rank.
    came: Vec<Option<u32>>,
    /// Of each block.
    copies: usize,
    /// Copies that have not ended.
    left: usize,
    back: Option<(Vec<Frame>, FramesBack)>,
}

impl PulledPart {
    fn new(
        frames: Vec<Frame>,
        back: FramesBack,
        copies: usize,
        why: Arc<Mutex<Option<CopyError>>>,
    ) -> Self {
        let blocks = frames.len();
        let (came, left) = (vec![Some(0); blocks], blocks * copies);
        let state = PartState { came, copies, left, back: Some((frames, back)) };
        Self { state: Arc::new(Mutex::new(state)), why }
    }

    fn done(&self) -> Done {
        let part = self.clone();
        Done::new(move |ended| {
            if let Some((frames, back, came)) = part.ended(&ended) {
                back(frames, Ok(came));
            }
        })
    }

    /// What to give back, once all have ended.
    fn ended(&self, ended: &[Completion]) -> Option<(Vec<Frame>, FramesBack, Vec<Option<u32>>)> {
        let failure = ended.iter().find_map(|(_, result)| result.as_ref().err());
        if let Some(failure) = failure {
            self.why.lock().get_or_insert_with(|| failure.clone());
        }
        let mut state = self.state.lock();
        state.left -= ended.len();
        for (copy, _) in ended.iter().filter(|(_, result)| result.is_err()) {
            let block = copy / state.copies;
            state.came[block] = None;
        }
        if state.left > 0 {
            return None;
        }
        let (frames, back) = state.back.take()?;
        Some((frames, back, std::mem::take(&mut state.came)))
    }
}
