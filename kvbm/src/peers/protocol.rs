//! What two workers say to each other: frames on a stream.
//!
//! A frame is a length (four bytes, least first) and that many bytes: one message, as `postcard`
//! writes it. Behind [`ToReader::Blocks`] the bytes of its blocks follow as they are, in no frame:
//! so the reader takes them from the socket straight into slots.
//!
//! **What stays the same in all versions**: the length, that a hello is variant 0 and begins with
//! [`MAGIC`] and the version, and that a refusal is variant 0 as well and is a text. So two workers
//! of different versions understand each other well enough to say that they do not.
//!
//! What comes from the stream is not trusted: it may end anywhere and hold anything. A frame is
//! refused by its length before memory is set aside for it.

use kvbm_tiers::ranks::{HeadShare, PeerSeat};
use kvbm_tiers::sealed::RECORD_BYTES;
use kvbm_tiers::{SlotId, SlotRef, Tier};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::codec::LengthDelimitedCodec;

#[cfg(feature = "testing")]
use super::nixl::HolderPlace;
use super::nixl::NixlMessage;
use crate::names::epoch::EpochDigest;
use crate::names::fingerprint::Fingerprint;
use crate::names::hash::BlockHash;
use crate::traces::TraceParent;

/// What both sides must agree on. Raise it with every change of a message.
pub(super) const VERSION: u16 = 9;
/// `kvbp`, least byte first: what connects here by mistake is told so.
const MAGIC: u32 = u32::from_le_bytes(*b"kvbp");

/// Bytes of the longest message to a holder.
pub(super) const MAX_REQUEST: usize = 16 << 10;
/// Bytes of the longest message to a reader: an answer that names 2^18 blocks, each in a run of its
/// own, and the seats of all ranks, or as many keys as there may be.
const MAX_ANSWER: usize = (3 << 20) + (3 << 10);
/// Blocks of the longest chain that is leased at a time.
pub(super) const MAX_BLOCKS: u32 = 1 << 18;
/// Hashes in one request: with them it stays below 256 bytes.
pub(super) const MAX_PROBES: usize = 12;
/// The longest wait for a first block: a request stays below 256 bytes.
pub(super) const MAX_WAIT_MS: u16 = 16_000;
/// Keys in one answer: one for each tenant that saved some of a chain's blocks, and main key.
pub(super) const MAX_KEYS: usize = 16;
/// Slices in one request: it has 4 KiB then.
pub(super) const MAX_SLICES: usize = 512;
/// What is kept of a text.
const MAX_TEXT: usize = 1_024;

/// Bytes that are no message, or a message that makes no sense here. Their sender cannot be
/// understood any further.
#[derive(Debug, thiserror::Error)]
pub(super) enum BrokenLink {
    #[error("the connection broke: {0}")]
    Closed(#[from] std::io::Error),
    #[error("bytes that are no message: {0}")]
    Undecodable(#[from] postcard::Error),
    #[error("a message of {0} bytes, of {1} at most")]
    TooLong(usize, usize),
    #[error("{0}")]
    Unexpected(&'static str),
    /// By the other side.
    #[error("{0}")]
    Refused(String),
    #[error(
        "the two do not know the same secret: give all workers one peers.secret_file \
         (DYN_KVBM_PEERS_SECRET_FILE)"
    )]
    OtherSecret,
    /// What to do about certificates.
    #[error("{0}")]
    Tls(String),
    #[error("their blocks differ: {0}")]
    OtherBlocks(String),
    #[error("it is the same worker")]
    Itself,
    #[error("it speaks version {0} of the protocol, this worker version {VERSION}")]
    OtherVersion(u16),
    #[error("it did not answer in time")]
    Late,
}

impl BrokenLink {
    /// For a reason that comes from the other side: one line, of bounded length.
    pub(super) fn refused(why: &str) -> Self {
        let on_a_line = |letter: char| if letter.is_control() { ' ' } else { letter };
        Self::Refused(shortened(why).chars().map(on_a_line).collect())
    }
}

/// Messages to a holder of blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToHolder {
    Hello(Hello),
    Join(Box<Join>),
    Lease(LeaseRequest),
    Read(ReadRequest),
    /// The lease is not needed any more.
    Release(ReadEnd),
    /// In place of a join: who knows the secret may see who this is, whatever its own blocks are.
    Look(Option<Proof>),
    /// Before a request for a lease, if the reader sends spans to a collector: whose part it is.
    Trace(TraceParent),
    /// The reader has NIXL, and says what its agent is: it asks for the holder's, for the host tier of
    /// this cache group.
    Nixl(u8, NixlMessage),
    /// To a rank, by a rank: what lies in these slots, in these lives of them? This share of the
    /// heads is wanted.
    Slices(HeadShare, Vec<SlotLife>),
    /// The next layers of blocks that are leased while they are saved.
    Layers(LayersRequest),
    /// To a rank, by one that copies them out of its memory: what are the checksums of what they hold
    /// in these lives?
    SliceSums(Vec<SlotLife>),
}

/// Messages to a reader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToReader {
    Refused(String),
    Challenge(Challenge),
    Welcome(Box<Member>),
    /// The length of the longest probe that is here. The next one is not: ask between them. Nothing
    /// is leased yet.
    Between(u32),
    Leased(LeaseAnswer),
    /// The bytes of these blocks follow.
    Blocks(ReadRequest),
    /// There is no lease any more, and why.
    Ended(LeaseEnd),
    /// Where the host tier lies, for reads by NIXL.
    Nixl(NixlMessage),
    /// Why it cannot be read by NIXL.
    NoNixl(String),
    /// By a rank, for each slot that was asked for: the crc32c of a slice, whose bytes follow; none:
    /// the slot is in another life.
    Slice(Option<[u8; 4]>),
    /// Layers of all leased blocks; their bytes follow, if that was asked for.
    Layers(LayersAnswer),
    /// The blocks of which all layers were given are resident there, and leased as any others.
    Landed,
    /// By a rank, as `Slice`, where slices lie sealed: the bytes that follow, and are summed, have
    /// their seal. Its key, unless an earlier slice of the same request needed it: its `first` is
    /// the slice's place in the request.
    SealedSlice([u8; 4], Option<NamedKey>),
    /// By a rank, for each slot that was asked for: the crc32c of its slice; none: as for `Slice`.
    SliceSums(Vec<Option<[u8; 4]>>),
}

/// What a reader says first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    magic: u32,
    version: u16,
    pub(super) nonce: Nonce,
}

/// What a holder answers: it proves that it knows the secret, if there is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Challenge {
    pub(super) nonce: Nonce,
    pub(super) proof: Option<Proof>,
}

/// So does the reader, and says who it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Join {
    pub(super) proof: Option<Proof>,
    pub(super) member: Member,
}

/// Random bytes that are used once.
pub(super) type Nonce = [u8; 32];
/// An HMAC over a side, both nonces, and the reader's member.
pub(super) type Proof = [u8; 32];

/// Who a worker is, and what its blocks are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) name: String,
    /// Random, and another after each start.
    pub(super) incarnation: u64,
    /// With ranks: of each one's slice.
    pub(super) block_bytes: u64,
    pub(super) fingerprint: Fingerprint,
    /// Processes that have a slice of each block; 0: this one has the blocks.
    pub(super) ranks: u16,
    /// Which of them it is; none: it leads them, or has none.
    pub(super) rank: Option<u16>,
    /// Its cache groups beside full attention, if it has any: what must be alike.
    pub(super) groups: String,
}

/// How much of a chain is there?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseRequest {
    pub(super) epoch: EpochDigest,
    pub(super) tenant: Option<u32>,
    /// Leading blocks that the reader has: the answer names those behind.
    pub(super) held: u32,
    /// Prefixes of the chain, shorter ones first.
    pub(super) probes: Vec<Probe>,
    pub(super) form: LeaseForm,
    /// Of a cache group other than full attention: the last probe is a checkpoint, by the blocks
    /// that it keeps and the block that it hangs on.
    pub(super) group: u8,
    /// How long the reader waits for the first probe to be there, in ms, if it is not yet.
    pub(super) wait_ms: u16,
}

/// What a request for a lease says with a bit each: it stays below 256 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u8", into = "u8")]
pub(super) struct LeaseForm {
    /// Lease the longest of the probes that is there, even if it could be a longer one.
    pub(super) is_last: bool,
    /// The reader copies from the holder's memory by itself, and asks where in it they lie.
    pub(super) wants_slots: bool,
    /// Where nothing behind what the reader has is there, it takes what is being saved, layer by
    /// layer.
    pub(super) takes_layers: bool,
}

impl From<u8> for LeaseForm {
    fn from(bits: u8) -> Self {
        let has = |bit: u8| bits & bit != 0;
        Self { is_last: has(1), wants_slots: has(2), takes_layers: has(4) }
    }
}

impl From<LeaseForm> for u8 {
    fn from(form: LeaseForm) -> Self {
        let bit = |holds: bool, bit: Self| if holds { bit } else { 0 };
        bit(form.is_last, 1) | bit(form.wants_slots, 2) | bit(form.takes_layers, 4)
    }
}

/// A prefix of a chain: its length in blocks, and the hash of its last block, which commits to all
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Probe {
    pub(super) blocks: u32,
    /// Not a number: that would take 19 bytes.
    hash: [u8; 16],
}

/// What is leased.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseAnswer {
    pub(super) epoch: EpochDigest,
    /// Leading blocks of the chain; not more than the reader has: nothing is leased.
    pub(super) blocks: u32,
    /// How long it lasts without a read, in ms, from when it was asked for.
    pub(super) ttl_ms: u32,
    /// The crc32c of each block behind those that the reader has. With ranks, whose checksums come
    /// with their slices: the life of the slot that it lies in.
    pub(super) checksums: Vec<[u8; 4]>,
    /// Where they lie, if that was asked for.
    pub(super) slots: Vec<SlotRun>,
    /// More is there, and what others have leased leaves it no room.
    pub(super) is_cut: bool,
    /// Where the ranks are, by their numbers, if there are any.
    pub(super) seats: Vec<PeerSeat>,
    /// Leading blocks of the chain at whose end all cache groups have a checkpoint.
    pub(super) usable: u32,
    /// What opens them, if they lie sealed in the holder's host tier, and so travel: [`MAX_KEYS`] at
    /// most, in the order of the blocks that need them first.
    pub(super) keys: Option<Vec<NamedKey>>,
    /// Layers of each block behind those that the reader has, which are still being saved: they and
    /// their checksums are asked for as they come. 0: the blocks are there.
    pub(super) layers: u16,
    /// How often everything was forgotten in the epoch: blocks are called otherwise since, and are
    /// sealed under these names.
    pub(super) forgotten: u64,
}

/// Layers of blocks that are leased while they are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayersRequest {
    /// Layers that the reader has. Once it has all, it asks whether the blocks have landed.
    pub(super) first: u16,
    /// How long it waits for the next one, in ms, if it is not there yet.
    pub(super) wait_ms: u16,
    /// It does not copy from the holder's memory by itself.
    pub(super) wants_bytes: bool,
}

/// Successive layers of leased blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayersAnswer {
    /// 0: the reader's time is over.
    pub(super) count: u16,
    /// Layer by layer, of each block: the crc32c of its bytes up to the end of the layer.
    pub(super) checksums: Vec<[u8; 4]>,
}

/// A tenant's key, wrapped by a main key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamedKey {
    /// The first of the named blocks, or slices, that is sealed with it.
    pub(super) first: [u8; 4],
    record: [[u8; 32]; 4],
}

impl NamedKey {
    pub(super) fn new(first: u32, record: &[u8; RECORD_BYTES]) -> Self {
        let part = |part: usize| std::array::from_fn(|byte| record[32 * part + byte]);
        Self { first: first.to_le_bytes(), record: std::array::from_fn(part) }
    }

    pub(super) fn record(&self) -> [u8; RECORD_BYTES] {
        std::array::from_fn(|byte| self.record[byte / 32][byte % 32])
    }
}

/// A slot of the host tier, and the number of a life of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SlotLife([u8; 4], [u8; 4]);

/// Blocks that lie in successive slots: the first slot, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SlotRun([u8; 4], [u8; 4]);

/// Blocks of the lease that are wanted now, by their positions in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReadRequest {
    pub(super) first: u32,
    pub(super) count: u32,
}

/// How a lease ends that is not needed any more, as its reader saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ReadEnd {
    /// What was wanted has arrived.
    Whole,
    /// It was given up.
    GivenUp,
    /// A block was not what its checksum says.
    Wrong,
}

/// Why a holder ended a lease, or gave none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(super) enum LeaseEnd {
    #[error("its time is over")]
    Expired,
    #[error("a reset, a forgotten tenant or a damaged block ended it")]
    Void,
    #[error(
        "the two workers are in different epochs, or nothing says that both have the same weights: \
         reset the one that is behind, and name the weights when you reset (NewEpoch)"
    )]
    OtherEpoch,
    #[error("as much is leased there as peers.lease_share allows")]
    Busy,
    #[error("a rank of it is away")]
    RankAway,
    #[error("its engine has given up the blocks before they were whole")]
    Unfinished,
}

impl Hello {
    pub(super) const fn new(nonce: Nonce) -> Self {
        Self { magic: MAGIC, version: VERSION, nonce }
    }

    /// The hello in a first message; an error says who it is that cannot be talked to.
    pub(super) fn parse(message: &[u8]) -> Result<Nonce, BrokenLink> {
        // Read on their own: what follows may be another version's.
        let ((variant, magic, version), _) = postcard::take_from_bytes::<(u8, u32, u16)>(message)?;
        if (variant, magic) != (0, MAGIC) {
            return Err(BrokenLink::Unexpected("it is no kvbm worker"));
        }
        if version != VERSION {
            return Err(BrokenLink::OtherVersion(version));
        }
        match postcard::from_bytes(message)? {
            ToHolder::Hello(hello) => Ok(hello.nonce),
            _ => Err(BrokenLink::Unexpected("it asks before it says who it is")),
        }
    }
}

impl SlotLife {
    pub(super) const fn of(slot: SlotRef) -> Self {
        Self(slot.slot.0.to_le_bytes(), slot.generation.to_le_bytes())
    }

    pub(super) const fn get(self) -> SlotRef {
        let [slot, generation] = [u32::from_le_bytes(self.0), u32::from_le_bytes(self.1)];
        SlotRef { tier: Tier::Host, slot: SlotId(slot), generation }
    }
}

impl SlotRun {
    pub(super) fn all(slots: impl Iterator<Item = SlotId>) -> Vec<Self> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for SlotId(slot) in slots {
            match runs.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(slot) => *count += 1,
                _ => runs.push((slot, 1)),
            }
        }
        runs.into_iter()
            .map(|(first, count)| Self(first.to_le_bytes(), count.to_le_bytes()))
            .collect()
    }

    /// The slots of several runs, `most` at most.
    pub(super) fn slots(runs: &[Self], most: usize) -> Vec<SlotId> {
        let slots = runs.iter().flat_map(|Self(first, count)| {
            let first = u32::from_le_bytes(*first);
            first..first.saturating_add(u32::from_le_bytes(*count))
        });
        slots.take(most).map(SlotId).collect()
    }
}

impl Probe {
    pub(super) fn new(blocks: usize, last: BlockHash) -> Self {
        Self { blocks: blocks as u32, hash: last.get().to_le_bytes() }
    }

    pub(super) const fn last(&self) -> BlockHash {
        BlockHash::from_u128(u128::from_le_bytes(self.hash))
    }
}

/// As much of a text as is kept.
pub(super) fn shortened(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

/// Cuts a stream into messages to a holder.
pub(super) fn requests() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().little_endian().max_frame_length(MAX_REQUEST).new_codec()
}

/// A message to a holder.
pub(super) fn decode(frame: &[u8]) -> Result<ToHolder, BrokenLink> {
    Ok(postcard::from_bytes(frame)?)
}

/// Sends a message with its length before it.
pub(super) async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> Result<(), BrokenLink> {
    let mut frame = postcard::to_extend(message, vec![0; 4])?;
    let bytes = (frame.len() - 4) as u32;
    frame[..4].copy_from_slice(&bytes.to_le_bytes());
    stream.write_all(&frame).await?;
    Ok(stream.flush().await?)
}

/// The next message to a reader.
pub(super) async fn receive<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<T, BrokenLink> {
    let bytes = stream.read_u32_le().await? as usize;
    if bytes > MAX_ANSWER {
        return Err(BrokenLink::TooLong(bytes, MAX_ANSWER));
    }
    let mut frame = vec![0; bytes];
    stream.read_exact(&mut frame).await?;
    Ok(postcard::from_bytes(&frame)?)
}

/// Reads bytes as each kind of message; what it understood is written and read again.
///
/// # Panics
/// If that is something else.
#[cfg(feature = "testing")]
pub fn read_in_every_way(bytes: &[u8]) {
    // Compared as bytes: a number that is none equals nothing.
    fn again<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
        let Ok(message) = postcard::from_bytes::<T>(bytes) else { return };
        let written = postcard::to_allocvec(&message).expect("memory takes any of our messages");
        let read: T = postcard::from_bytes(&written).expect("what we write can be read");
        assert_eq!(postcard::to_allocvec(&read).as_deref(), Ok(&written[..]));
    }
    again::<ToHolder>(bytes);
    again::<ToReader>(bytes);
    again::<HolderPlace>(bytes);
    if let Ok(nonce) = Hello::parse(bytes) {
        let again = postcard::to_allocvec(&ToHolder::Hello(Hello::new(nonce)));
        assert_eq!(again.ok().and_then(|again| Hello::parse(&again).ok()), Some(nonce));
    }
}

#[cfg(test)]
mod tests {
    use super::super::greeting::tests::member;
    use super::*;
    use crate::names::fingerprint::MAX_SCALES;

    fn request(probes: usize) -> ToHolder {
        let probe = |n| Probe::new(n << 14, BlockHash::from_u128(u128::MAX - n as u128));
        ToHolder::Lease(LeaseRequest {
            epoch: EpochDigest::default(),
            tenant: Some(u32::MAX),
            held: MAX_BLOCKS,
            probes: (1..=probes).map(probe).collect(),
            form: LeaseForm { is_last: true, wants_slots: true, takes_layers: true },
            group: u8::MAX,
            wait_ms: MAX_WAIT_MS,
        })
    }

    #[test]
    fn a_member_with_all_scales_leaves_room_in_a_request() {
        let mut member = member("a", 1);
        member.fingerprint.scales = vec![1.0; MAX_SCALES];
        let join = ToHolder::Join(Box::new(Join { proof: Some([255; 32]), member }));
        let bytes = postcard::to_allocvec(&join).unwrap();
        assert!(bytes.len() <= MAX_REQUEST / 4 * 3, "{}", bytes.len());
    }

    #[test]
    fn a_request_for_a_lease_has_256_bytes_at_most() {
        let bytes = postcard::to_extend(&request(MAX_PROBES), vec![0; 4]).unwrap();
        assert!(bytes.len() <= 256, "{}", bytes.len());
    }

    #[test]
    fn an_answer_takes_few_bytes_a_block_and_a_run() {
        let answer = |blocks: u32| {
            let checksums = vec![[255; 4]; blocks as usize];
            let slots = SlotRun::all((0..blocks).map(|n| SlotId((1 << 30) - 2 * n)));
            assert_eq!(SlotRun::slots(&slots, usize::MAX).len(), blocks as usize);
            let (epoch, ttl_ms) = (EpochDigest::default(), u32::MAX);
            let is_cut = true;
            let seats = vec![PeerSeat { port: u16::MAX, incarnation: u64::MAX }; 64];
            let keys = Some(vec![NamedKey::new(u32::MAX, &[255; RECORD_BYTES]); MAX_KEYS]);
            let leased = LeaseAnswer {
                epoch,
                blocks,
                ttl_ms,
                checksums,
                slots,
                is_cut,
                seats,
                usable: blocks,
                keys,
                layers: u16::MAX,
                forgotten: u64::MAX,
            };
            postcard::to_extend(&ToReader::Leased(leased), vec![0; 4]).unwrap().len()
        };
        assert!(answer(512) <= 256 + 13 * 64 + 132 * MAX_KEYS + (4 + 8) * 512);
        assert!(answer(MAX_BLOCKS) <= MAX_ANSWER);
    }

    #[test]
    fn a_named_key_is_as_it_was() {
        let record = std::array::from_fn(|byte| byte as u8);
        let named = NamedKey::new(7, &record);
        assert_eq!((u32::from_le_bytes(named.first), named.record()), (7, record));
        assert_eq!(postcard::to_allocvec(&named).unwrap().len(), 132);
    }

    #[tokio::test]
    async fn messages_come_back_as_sent_and_long_ones_are_refused() {
        let (mut here, mut there) = tokio::io::duplex(64);
        let sent = request(MAX_PROBES);
        let (told, heard) = tokio::join!(send(&mut here, &sent), receive::<ToHolder>(&mut there));
        told.unwrap();
        assert_eq!(heard.unwrap(), sent);
        here.write_all(&u32::MAX.to_le_bytes()).await.unwrap();
        let error = receive::<ToHolder>(&mut there).await.unwrap_err();
        assert!(error.to_string().starts_with("a message of 4294967295 bytes"), "{error}");
    }

    #[test]
    fn who_cannot_be_talked_to_is_named() {
        let hello = |hello: &Hello| postcard::to_allocvec(&ToHolder::Hello(hello.clone())).unwrap();
        let ours = Hello::new([7; 32]);
        assert_eq!(Hello::parse(&hello(&ours)).unwrap(), [7; 32]);
        let (later, speaks) = (VERSION + 1, format!("it speaks version {}", VERSION + 1));
        for (message, said) in [
            (Vec::new(), "bytes that are no message"),
            (b"GET / HTTP/1.1".to_vec(), "it is no kvbm worker"),
            (hello(&Hello { version: later, ..ours.clone() }), &speaks),
            (hello(&Hello { magic: 1, ..ours }), "it is no kvbm worker"),
        ] {
            let error = Hello::parse(&message).unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
