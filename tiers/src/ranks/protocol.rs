//! What a leader and its ranks say to each other: frames on a stream.
//!
//! A frame is a length (four bytes, least first) and that many bytes: one message, as `postcard`
//! writes it. The first thing that a rank says is [`HelloFrame`], the first thing that it hears is
//! [`ToRank::Welcome`] or [`ToRank::Refused`].
//!
//! **What stays the same in all versions**: the length, that a hello is variant 0 and begins with
//! [`MAGIC`] and the version, and that a refusal is variant 0 as well and is a [`RefusalFrame`]. So
//! two processes of different versions understand each other well enough to say that they do not.
//!
//! What comes from the stream is not trusted: it may end anywhere and hold anything. A frame is
//! refused by its length before memory is set aside for it, and a message before any of it is acted
//! upon.

use serde::{Deserialize, Serialize};

use super::loads::RankLoad;
use super::pull::{PeerSeat, PullOrder};
use crate::copy::{BlockKey, CopyErrorKind, CopyOp, Owner, Route, SlotId, SlotRef, Tier};
use crate::fields::{u32_at, u128_at};
use crate::index::IndexEntry;

/// What both sides must agree on. Raise it with every change of a message.
pub const VERSION: u16 = 9;
/// `kvbm`, least byte first: what connects here by mistake is told so.
const MAGIC: u32 = u32::from_le_bytes(*b"kvbm");

/// Bytes of the longest message. The largest batch, a segment of the smallest blocks, is less than
/// half of it.
pub(super) const MAX_MESSAGE: usize = 1 << 20;
/// Bytes of the longest message from a process that has not been welcomed.
pub(super) const MAX_GREETING: usize = 16 << 10;
/// Bytes of the longest fingerprint.
pub(super) const MAX_FINGERPRINT: usize = 4 << 10;
/// Copies in one message. Longer batches go in several; pulls have no more.
pub const MAX_OPS: usize = 8_192;
/// Slots in one message that tells of them: some 800 KiB.
pub(super) const MAX_SLOTS_TOLD: usize = 32 << 10;
/// What is kept of an error's text.
const MAX_TEXT: usize = 256;
const LENGTH_BYTES: usize = 4;

/// Bytes that are no message. Their sender cannot be understood any further.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MalformedFrame {
    #[error("a message of {0} bytes, of {1} at most")]
    TooLong(usize, usize),
    #[error("bytes that are no message: {0}")]
    Undecodable(#[from] postcard::Error),
    #[error("{0} bytes behind a message")]
    Rest(usize),
    #[error("a copy order that names no tier, or half a parent")]
    NoSuchCopy,
    #[error("a list of slots that ends within one")]
    HalfASlot,
}

/// What a rank says first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HelloFrame {
    magic: u32,
    version: u16,
    pub(super) member: Membership,
}

/// Who a rank is, and what it has. All ranks must have the same, but for their number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Its number, from 0.
    pub rank: u16,
    /// How many ranks there are.
    pub world: u16,
    /// Slots by tier; in the host tier with the staging slots.
    pub slots: [u32; Tier::COUNT],
    /// Bytes of its slice of a block.
    pub block_bytes: u64,
    /// What else must be the same: the model, its layout, its version. Opaque here.
    pub fingerprint: String,
    /// The routes that its backends serve.
    pub routes: Vec<Route>,
    /// Where it serves ranks of other workers, if it does.
    pub peers: Option<PeerSeat>,
}

/// Why a process is not let in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RefusalFrame {
    /// Another process has its number; else it is not what the leader expects.
    pub(super) is_taken: bool,
    pub(super) why: String,
}

/// Messages from a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToLeader {
    Hello(HelloFrame),
    Ended(EndedCopies),
    Inventory(InventoryPage),
    Forgot(ForgotTenant),
}

/// The keys of what a tenant stored in earlier lives are destroyed, or why some may be left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ForgotTenant {
    pub(super) tenant: u32,
    pub(super) life: u32,
    pub(super) failed: Option<String>,
}

/// What an earlier process left in a rank's slots of a tier: a page of it, by ascending slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct InventoryPage {
    pub(super) tier: Tier,
    pub(super) held: PackedHoldings,
    /// The slot that the next page is to begin with; `None`: this is the last one.
    pub(super) next: Option<u32>,
}

/// Some copies of a batch have ended: nothing of the rank touches their slots any more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct EndedCopies {
    pub(super) batch: u64,
    pub(super) arrived: Vec<CopyRun>,
    pub(super) failed: Vec<FailedCopy>,
    /// Of pulled blocks: numbers that were too large for the type that they have here, since the
    /// last of these reports.
    pub(super) saturated: u64,
}

/// A run of a batch's copies, from the `first`-th on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CopyRun {
    pub(super) first: u32,
    pub(super) count: u32,
}

/// One that did not arrive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct FailedCopy {
    pub(super) op: u32,
    pub(super) kind: CopyErrorKind,
    pub(super) why: String,
}

/// Messages to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToRank {
    Refused(RefusalFrame),
    Welcome,
    /// `load`: of a load whose layers the rank is to count.
    Copy {
        batch: u64,
        load: Option<RankLoad>,
        ops: PackedOps,
    },
    /// The leader ends, and wants nothing more.
    Goodbye,
    /// What did an earlier process leave in the slots of a tier, from this one on? To be asked
    /// before the first copy.
    TakeInventory {
        tier: Tier,
        from: u32,
    },
    /// What an earlier process left in these slots counts as stored in lives of these numbers.
    Adopt {
        tier: Tier,
        lives: PackedLives,
    },
    /// A tenant is forgotten: the keys of what it stored in earlier lives are to be destroyed.
    Forget {
        tenant: u32,
        life: u32,
    },
    /// Copies like those of `Copy`, but their sources are slots of another worker's ranks, and
    /// successive copies into one slot make one block together.
    Pull {
        batch: u64,
        from: PullOrder,
        ops: PackedOps,
    },
    /// That load has ended: this many leading blocks are there in all ranks, and nothing of it
    /// comes any more.
    LoadEnded {
        load: RankLoad,
        arrived: u32,
    },
}

/// What lies in slots, each in [`HELD_BYTES`]: slot, the life that it was stored in, group and hash
/// of the block; numbers least byte first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PackedHoldings(#[serde(with = "serde_bytes")] Vec<u8>);

/// A block in a slot, as a rank tells of it: the hash commits to all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldSlot {
    pub(super) slot: SlotId,
    pub(super) generation: u32,
    pub(super) block: BlockKey,
}

/// Slots and lives of them, each in [`LIFE_BYTES`]: two numbers, least byte first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PackedLives(#[serde(with = "serde_bytes")] Vec<u8>);

const HELD_BYTES: usize = 4 + 4 + 1 + 16;
const LIFE_BYTES: usize = 4 + 4;

impl HeldSlot {
    pub(super) const fn of(entry: &IndexEntry) -> Self {
        Self { slot: entry.slot, generation: entry.generation, block: entry.block }
    }
}

impl PackedHoldings {
    pub(super) fn of(holdings: impl Iterator<Item = HeldSlot>) -> Self {
        let mut bytes = Vec::new();
        for HeldSlot { slot, generation, block } in holdings {
            bytes.extend_from_slice(&slot.0.to_le_bytes());
            bytes.extend_from_slice(&generation.to_le_bytes());
            bytes.push(block.group);
            bytes.extend_from_slice(&block.hash.to_le_bytes());
        }
        Self(bytes)
    }

    pub(super) fn unpack(&self) -> Result<impl Iterator<Item = HeldSlot>, MalformedFrame> {
        let (holdings, rest) = self.0.as_chunks::<HELD_BYTES>();
        let unpack = |bytes: &[u8; HELD_BYTES]| {
            let [slot, generation] = [0, 4].map(|at| u32_at(bytes, at));
            let block = BlockKey { hash: u128_at(bytes, 9), group: bytes[8] };
            HeldSlot { slot: SlotId(slot), generation, block }
        };
        if rest.is_empty() {
            Ok(holdings.iter().map(unpack))
        } else {
            Err(MalformedFrame::HalfASlot)
        }
    }
}

impl PackedLives {
    pub(super) fn of(lives: &[SlotRef]) -> Self {
        let numbers = lives.iter().flat_map(|life| [life.slot.0, life.generation]);
        Self(numbers.flat_map(u32::to_le_bytes).collect())
    }

    /// Those of slots of `tier`.
    pub(super) fn unpack(
        &self,
        tier: Tier,
    ) -> Result<impl Iterator<Item = SlotRef>, MalformedFrame> {
        let (lives, rest) = self.0.as_chunks::<LIFE_BYTES>();
        let unpack = move |bytes: &[u8; LIFE_BYTES]| {
            let slot = SlotId(u32_at(bytes, 0));
            SlotRef { tier, slot, generation: u32_at(bytes, 4) }
        };
        if rest.is_empty() { Ok(lives.iter().map(unpack)) } else { Err(MalformedFrame::HalfASlot) }
    }
}

/// Copy orders, each in [`OP_BYTES`]: hash, group, whether there is a parent and its hash, whether
/// there is an owner, tenant and life, then tier, slot and generation of the source and of the
/// destination; numbers least byte first. One by one they would take most of a leader's time for a
/// batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PackedOps(#[serde(with = "serde_bytes")] Vec<u8>);

const OP_BYTES: usize = 16 + 1 + 1 + 16 + OWNER_BYTES + 2 * SLOT_BYTES;
const OWNER_BYTES: usize = 1 + 4 + 4;
const SLOT_BYTES: usize = 1 + 4 + 4;

impl PackedOps {
    pub(super) fn of(ops: &[CopyOp]) -> Self {
        let mut bytes = Vec::with_capacity(ops.len() * OP_BYTES);
        for op in ops {
            bytes.extend_from_slice(&op.block.hash.to_le_bytes());
            bytes.push(op.block.group);
            bytes.push(op.parent.is_some().into());
            bytes.extend_from_slice(&op.parent.unwrap_or_default().to_le_bytes());
            bytes.push(op.owner.is_some().into());
            let Owner { tenant, life } = op.owner.unwrap_or(Owner { tenant: 0, life: 0 });
            bytes.extend_from_slice(&tenant.to_le_bytes());
            bytes.extend_from_slice(&life.to_le_bytes());
            for at in [op.from, op.to] {
                bytes.push(at.tier.index() as u8);
                bytes.extend_from_slice(&at.slot.0.to_le_bytes());
                bytes.extend_from_slice(&at.generation.to_le_bytes());
            }
        }
        Self(bytes)
    }

    pub(super) fn unpack(&self) -> Result<Vec<CopyOp>, MalformedFrame> {
        let (ops, rest) = self.0.as_chunks::<OP_BYTES>();
        if !rest.is_empty() {
            return Err(MalformedFrame::Rest(rest.len()));
        }
        ops.iter().map(|op| unpack(op).ok_or(MalformedFrame::NoSuchCopy)).collect()
    }
}

fn unpack(op: &[u8; OP_BYTES]) -> Option<CopyOp> {
    let (hash, rest) = op.split_first_chunk()?;
    let (&group, rest) = rest.split_first()?;
    let (&has_parent, rest) = rest.split_first()?;
    let (parent, rest) = rest.split_first_chunk()?;
    let parent = match (has_parent, u128::from_le_bytes(*parent)) {
        (0, 0) => None,
        (1, parent) => Some(parent),
        _ => return None,
    };
    let (owner, rest) = unpack_owner(rest)?;
    let (from, rest) = unpack_slot(rest)?;
    let (to, _) = unpack_slot(rest)?;
    Some(CopyOp {
        block: BlockKey { hash: u128::from_le_bytes(*hash), group },
        parent,
        owner,
        from,
        to,
    })
}

/// `None`: half an owner.
fn unpack_owner(bytes: &[u8]) -> Option<(Option<Owner>, &[u8])> {
    let (&has_owner, rest) = bytes.split_first()?;
    let (tenant, rest) = rest.split_first_chunk()?;
    let (life, rest) = rest.split_first_chunk()?;
    let owner = Owner { tenant: u32::from_le_bytes(*tenant), life: u32::from_le_bytes(*life) };
    match (has_owner, owner) {
        (0, Owner { tenant: 0, life: 0 }) => Some((None, rest)),
        (1, owner) => Some((Some(owner), rest)),
        _ => None,
    }
}

/// `None`: there is no such tier.
fn unpack_slot(bytes: &[u8]) -> Option<(SlotRef, &[u8])> {
    let (&tier, rest) = bytes.split_first()?;
    let (slot, rest) = rest.split_first_chunk()?;
    let (generation, rest) = rest.split_first_chunk()?;
    let tier = *Tier::ALL.get(usize::from(tier))?;
    let (slot, generation) = (SlotId(u32::from_le_bytes(*slot)), u32::from_le_bytes(*generation));
    Some((SlotRef { tier, slot, generation }, rest))
}

impl HelloFrame {
    pub(super) const fn new(member: Membership) -> Self {
        Self { magic: MAGIC, version: VERSION, member }
    }

    /// The hello in a first message; an error says who it is that cannot be talked to.
    pub(super) fn parse(message: &[u8]) -> Result<Membership, String> {
        // Read on their own: what follows may be another version's.
        let (variant, magic, version) = match postcard::take_from_bytes::<(u8, u32, u16)>(message) {
            Ok((beginning, _)) => beginning,
            Err(error) => return Err(format!("it does not say who it is: {error}")),
        };
        if (variant, magic) != (0, MAGIC) {
            return Err("it is no rank of a block manager".to_owned());
        }
        if version != VERSION {
            return Err(format!(
                "it speaks version {version} of the protocol, this leader version {VERSION}"
            ));
        }
        match decode(message) {
            Ok(ToLeader::Hello(hello)) => Ok(hello.member),
            Ok(ToLeader::Ended(_) | ToLeader::Inventory(_) | ToLeader::Forgot(_)) => {
                Err("it reports before it says who it is".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

impl ForgotTenant {
    pub(super) fn new(owner: Owner, outcome: Result<(), String>) -> Self {
        let Owner { tenant, life } = owner;
        Self { tenant, life, failed: outcome.err().map(|why| shortened(&why)) }
    }
}

/// As much of a text as a message has room for.
fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

impl EndedCopies {
    pub(super) fn new(batch: u64) -> Self {
        Self { batch, ..Self::default() }
    }

    /// Whether it says anything.
    pub(super) fn is_news(&self) -> bool {
        !self.arrived.is_empty() || !self.failed.is_empty()
    }

    /// The `op`-th copy arrived.
    pub(super) fn arrived(&mut self, op: u32) {
        match self.arrived.last_mut() {
            Some(run) if u64::from(run.first) + u64::from(run.count) == u64::from(op) => {
                run.count += 1;
            }
            _ => self.arrived.push(CopyRun { first: op, count: 1 }),
        }
    }

    /// The `op`-th copy failed.
    pub(super) fn failed(&mut self, op: u32, kind: CopyErrorKind, why: &str) {
        self.failed.push(FailedCopy { op, kind, why: shortened(why) });
    }
}

/// A message with its length before it.
pub(super) fn frame(message: &impl Serialize) -> Vec<u8> {
    let room = vec![0; LENGTH_BYTES];
    let mut frame = postcard::to_extend(message, room).expect("memory takes any of our messages");
    let bytes = (frame.len() - LENGTH_BYTES) as u32;
    frame[..LENGTH_BYTES].copy_from_slice(&bytes.to_le_bytes());
    frame
}

/// The message that these bytes are, all of them.
pub(super) fn decode<'de, T: Deserialize<'de>>(message: &'de [u8]) -> Result<T, MalformedFrame> {
    let (decoded, rest) = postcard::take_from_bytes(message)?;
    if rest.is_empty() { Ok(decoded) } else { Err(MalformedFrame::Rest(rest.len())) }
}

/// The first message of `bytes`, without its length; `None`: it is not all there yet.
pub(super) fn first_message(bytes: &[u8], limit: usize) -> Result<Option<&[u8]>, MalformedFrame> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > limit {
        return Err(MalformedFrame::TooLong(length, limit));
    }
    Ok(rest.get(..length))
}

/// Bytes of a message with its length.
pub(super) const fn framed_bytes(message: &[u8]) -> usize {
    LENGTH_BYTES + message.len()
}

/// Reads bytes in each way in which a leader or a rank does. For fuzzing: whatever they are, each
/// way answers.
///
/// # Panics
/// If writing again what was understood, and reading that, gives something else.
#[cfg(any(test, feature = "testing"))]
pub fn read_in_every_way(bytes: &[u8]) {
    for limit in [MAX_GREETING, MAX_MESSAGE] {
        if let Ok(Some(message)) = first_message(bytes, limit) {
            assert!(framed_bytes(message) <= bytes.len() && message.len() <= limit);
        }
    }
    if let Ok(member) = HelloFrame::parse(bytes) {
        let said_again = frame(&ToLeader::Hello(HelloFrame::new(member.clone())));
        assert_eq!(HelloFrame::parse(&said_again[LENGTH_BYTES..]), Ok(member));
    }
    if let Ok(message) = decode::<ToLeader>(bytes) {
        if let ToLeader::Inventory(InventoryPage { held, .. }) = &message
            && let Ok(holdings) = held.unpack()
        {
            assert_eq!(&PackedHoldings::of(holdings), held);
        }
        assert_eq!(decode(&frame(&message)[LENGTH_BYTES..]), Ok(message));
    }
    if let Ok(message) = decode::<ToRank>(bytes) {
        if let ToRank::Copy { ops: packed, .. } = &message
            && let Ok(ops) = packed.unpack()
        {
            assert_eq!(&PackedOps::of(&ops), packed);
        }
        if let ToRank::Adopt { tier, lives: packed } = &message
            && let Ok(lives) = packed.unpack(*tier)
        {
            assert_eq!(&PackedLives::of(&lives.collect::<Vec<_>>()), packed);
        }
        assert_eq!(decode(&frame(&message)[LENGTH_BYTES..]), Ok(message));
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use proptest::prelude::*;

    use super::*;

    fn member() -> Membership {
        Membership {
            rank: 3,
            world: 4,
            slots: [1, 20, 300, 0],
            block_bytes: 4_096,
            fingerprint: "a model".to_owned(),
            routes: Route::new(Tier::Device, Tier::Host).both_ways().to_vec(),
            peers: Some(PeerSeat { port: 6_891, incarnation: u64::MAX }),
        }
    }

    fn body(message: &impl Serialize) -> Vec<u8> {
        let frame = frame(message);
        first_message(&frame, MAX_MESSAGE).unwrap().expect("all of it").to_vec()
    }

    fn tier() -> impl Strategy<Value = Tier> {
        (0..Tier::COUNT).prop_map(|tier| Tier::ALL[tier])
    }

    fn slot() -> impl Strategy<Value = SlotRef> {
        (tier(), any::<u32>(), any::<u32>()).prop_map(|(tier, slot, generation)| SlotRef {
            tier,
            slot: SlotId(slot),
            generation,
        })
    }

    fn op() -> impl Strategy<Value = CopyOp> {
        let owner = prop::option::of((any::<u32>(), any::<u32>()));
        (any::<u128>(), any::<u8>(), any::<Option<u128>>(), owner, slot(), slot()).prop_map(
            |(hash, group, parent, owner, from, to)| {
                let owner = owner.map(|(tenant, life)| Owner { tenant, life });
                CopyOp { block: BlockKey { hash, group }, parent, owner, from, to }
            },
        )
    }

    fn load() -> impl Strategy<Value = Option<RankLoad>> {
        let load = (any::<u64>(), 1..=u16::MAX, any::<u32>());
        prop::option::of(load.prop_map(|(number, layers, blocks)| {
            let layers = layers.try_into().expect("from 1 on");
            RankLoad { number, layers, blocks }
        }))
    }

    fn ended() -> impl Strategy<Value = EndedCopies> {
        let failures = prop::collection::vec((any::<u32>(), "\\PC*"), 0..20);
        let numbers = (any::<u64>(), any::<u64>());
        (numbers, prop::collection::vec(any::<u32>(), 0..50), failures).prop_map(
            |((batch, saturated), arrived, failed)| {
                let mut ended = EndedCopies { saturated, ..EndedCopies::new(batch) };
                arrived.into_iter().for_each(|op| ended.arrived(op));
                failed.iter().for_each(|(op, why)| ended.failed(*op, CopyErrorKind::Io, why));
                ended
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn random_bytes_are_an_error_and_nothing_worse(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            read_in_every_way(&bytes);
        }

        #[test]
        fn copies_arrive_as_sent_and_nothing_else_passes(
            batch: u64,
            load in load(),
            ops in prop::collection::vec(op(), 0..80),
            cut: prop::sample::Index,
            flip: prop::sample::Index,
            bit in 0..8u8,
        ) {
            let mut bytes = body(&ToRank::Copy { batch, load, ops: PackedOps::of(&ops) });
            let ToRank::Copy { batch: same, load: of, ops: packed } = decode(&bytes).unwrap() else {
                panic!("{bytes:?}")
            };
            prop_assert_eq!((same, of, packed.unpack().unwrap()), (batch, load, ops));
            prop_assert!(decode::<ToRank>(&bytes[..cut.index(bytes.len())]).is_err());
            let place = flip.index(bytes.len());
            bytes[place] ^= 1 << bit;
            read_in_every_way(&bytes);
        }

        #[test]
        fn reports_arrive_as_they_were_sent(ended in ended(), cut: prop::sample::Index) {
            let sent = ToLeader::Ended(ended);
            let bytes = body(&sent);
            prop_assert_eq!(decode::<ToLeader>(&bytes).unwrap(), sent);
            prop_assert!(decode::<ToLeader>(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn inventories_and_lives_arrive_as_they_were_sent(
            told in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u8>(), any::<u128>()), 0..80),
            tier in tier(),
            next: Option<u32>,
            cut: prop::sample::Index,
        ) {
            let held: Vec<_> = told.iter().map(|&(slot, generation, group, hash)| {
                HeldSlot { slot: SlotId(slot), generation, block: BlockKey { hash, group } }
            }).collect();
            let lives: Vec<_> = held.iter().map(|&HeldSlot { slot, generation, .. }| {
                SlotRef { tier, slot, generation }
            }).collect();
            let packed = PackedHoldings::of(held.iter().copied());
            let bytes = body(&ToLeader::Inventory(InventoryPage { tier, held: packed, next }));
            let ToLeader::Inventory(same) = decode(&bytes).unwrap() else { panic!("{bytes:?}") };
            prop_assert_eq!((same.tier, same.next), (tier, next));
            prop_assert_eq!(same.held.unpack().unwrap().collect::<Vec<_>>(), held);
            prop_assert!(decode::<ToLeader>(&bytes[..cut.index(bytes.len())]).is_err());
            let bytes = body(&ToRank::Adopt { tier, lives: PackedLives::of(&lives) });
            let ToRank::Adopt { lives: same, .. } = decode(&bytes).unwrap() else { panic!("{bytes:?}") };
            prop_assert_eq!(same.unpack(tier).unwrap().collect::<Vec<_>>(), lives);
        }

        #[test]
        fn arrivals_in_a_row_are_one_run(count in 1..1_000u32) {
            let mut ended = EndedCopies::new(0);
            (0..count).for_each(|op| ended.arrived(op));
            prop_assert_eq!(ended.arrived, vec![CopyRun { first: 0, count }]);
        }
    }

    #[test]
    fn a_message_of_impossible_length_is_refused_before_its_read() {
        let bytes = [0xff, 0xff, 0xff, 0x7f, 0];
        let error = first_message(&bytes, MAX_MESSAGE).unwrap_err();
        assert_eq!(error, MalformedFrame::TooLong(0x7fff_ffff, MAX_MESSAGE));
        // A list that claims more than the message can hold.
        let mut huge = vec![1, 0];
        huge.extend([0xff, 0xff, 0xff, 0xff, 0x0f]);
        assert!(decode::<ToLeader>(&huge).is_err());
    }

    #[test]
    fn the_largest_message_of_either_side_is_within_the_limit() {
        let slot = SlotRef { tier: Tier::Object, slot: SlotId(u32::MAX), generation: u32::MAX };
        let block = BlockKey { hash: u128::MAX, group: u8::MAX };
        let op = CopyOp { block, parent: Some(u128::MAX), owner: None, from: slot, to: slot };
        let load = RankLoad { number: u64::MAX, layers: NonZeroU16::MAX, blocks: u32::MAX };
        let ops = PackedOps::of(&vec![op; MAX_OPS]);
        let copy = ToRank::Copy { batch: u64::MAX, load: Some(load), ops };
        assert!(body(&copy).len() <= MAX_MESSAGE);
        let holding = HeldSlot { slot: slot.slot, generation: u32::MAX, block };
        let held = PackedHoldings::of(std::iter::repeat_n(holding, MAX_SLOTS_TOLD));
        let inventory =
            ToLeader::Inventory(InventoryPage { tier: Tier::Object, held, next: Some(u32::MAX) });
        let lives = PackedLives::of(&vec![slot; MAX_SLOTS_TOLD]);
        let adopt = ToRank::Adopt { tier: Tier::Object, lives };
        assert!(body(&inventory).len() <= MAX_MESSAGE && body(&adopt).len() <= MAX_MESSAGE);
    }

    #[test]
    fn another_version_is_named_whatever_it_says_next() {
        assert_eq!(
            HelloFrame::parse(&body(&ToLeader::Hello(HelloFrame::new(member())))).unwrap(),
            member()
        );
        let other = (0_u8, MAGIC, VERSION + 1, "something that this version does not know");
        let why = HelloFrame::parse(&body(&other)).unwrap_err();
        let (theirs, ours) =
            (format!("speaks version {}", VERSION + 1), format!("this leader version {VERSION}"));
        assert!(why.contains(&theirs) && why.contains(&ours), "{why}");
        let stranger = HelloFrame::parse(b"GET / HTTP/1.1\r\n").unwrap_err();
        assert!(stranger.contains("no rank"), "{stranger}");
    }
}
