//! Where the bytes of a host tier's blocks are, and how those of ranks come: the leader leases slots
//! and their lives at the other leader, and has its ranks bring them, each from the rank of its
//! number there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use kvbm_tiers::ranks::{Leader, PeerSeat, PullOrder};
use kvbm_tiers::sealed::HostSeal;
use kvbm_tiers::{
    Completion, CopyError, CopyErrorKind, CopyOp, Done, DramRegion, Frame, Memory, Owner, SlotRef,
    Tier,
};
use tokio::time::{Instant, timeout_at};

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
    if filling.kept() < named.before {
        return Err(PeerFault::Behind);
    }
    let why = Arc::<Mutex<Option<CopyError>>>::default();
    let brought = async {
        let all = filling.kept()..filling.kept() + filling.left();
        let mut parts = parts(all, (PULL_BYTES / block_bytes.max(1)).max(1));
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
                let from = PullOrder { host, seats, limit_ms, renamed: named.renamed };
                let ops: Option<Vec<_>> =
                    part.zip(&frames).map(|(at, frame)| wanted.op(at, frame)).collect();
                let Some(ops) = ops else {
                    back(frames, Ok(Vec::new()));
                    return Err(gone("its leader does not say where a block lies"));
                };
                let pulled = PulledPart::new((frames, back), Arc::clone(&why));
                leader.pull(&from, &ops, &pulled.done());
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
                    return Err(why.as_ref().map_or_else(|| gone("a block did not come"), fault));
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
    /// The copy of the block at a position of the chain.
    fn op(&self, at: usize, to: &Frame) -> Option<CopyOp> {
        let behind = at - self.named.before;
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
    /// By block, whether all ranks have it.
    came: Vec<Option<u32>>,
    left: usize,
    back: Option<(Vec<Frame>, FramesBack)>,
}

impl PulledPart {
    fn new(back: (Vec<Frame>, FramesBack), why: Arc<Mutex<Option<CopyError>>>) -> Self {
        let blocks = back.0.len();
        let state = PartState { came: vec![None; blocks], left: blocks, back: Some(back) };
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
        for (block, _) in ended.iter().filter(|(_, result)| result.is_ok()) {
            state.came[*block] = Some(0);
        }
        if state.left > 0 {
            return None;
        }
        let (frames, back) = state.back.take()?;
        Some((frames, back, std::mem::take(&mut state.came)))
    }
}
