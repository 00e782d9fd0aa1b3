use std::collections::VecDeque;

use futures::StreamExt;
use kvbm_tiers::checksum::checksum;
use kvbm_tiers::ranks::{HeadLayout, HeadShare, PullFrom, PullSource, pulled_slot};
use kvbm_tiers::sealed::{ArrivingBlock, SEAL_BYTES, TenantKeys};
use kvbm_tiers::testing::{host, key_ring};
use kvbm_tiers::{
    BlockKey, CopyError, CopyErrorKind, CopyOp, Done, DramRegion, Owner, SlotId, SlotRef, Tier,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex};
use tokio::time::Instant;
use tokio_util::codec::FramedRead;

use super::super::TIDY_PAUSE;
use super::super::greeting::PeerProofs;
use super::super::greeting::tests::member;
use super::super::link::PeerLink;
use super::super::protocol::{
    BrokenLink, MAX_SLICES, SlotLife, ToHolder, ToReader, decode, receive, requests, send,
};
use super::super::reader::MAX_WAIT;
use super::super::sealed::{NOT_CONVERTED, SliceSeals};
use super::by_connection::{ConnectionSlices, take};
use super::coming::ComingSlots;
use super::holder::{cut, give, say};
use super::reader::RankPlace;
use super::*;

const BYTES: usize = 64;
/// More than two requests have.
const SLOTS: u32 = 3 * MAX_SLICES as u32;
/// Every slot's.
const LIFE: u32 = 7;
const LIMIT: Duration = Duration::from_secs(7);

/// Slots that slices come into, and how each ended.
struct Ends {
    memory: Arc<DramRegion>,
    /// What they are to be sealed with.
    seal: Option<Arc<HostSeal>>,
    told: Arc<Mutex<Vec<SlotEnd>>>,
}

type SlotEnd = (SlotId, Option<CopyErrorKind>);

impl Ends {
    /// In the order in which they came. What counts is right.
    fn all(&self) -> Vec<SlotEnd> {
        let ends = self.told.lock().clone();
        for (slot, end) in &ends {
            assert!(end.is_some() || self.content(*slot) == slice(*slot), "a wrong slice counts");
        }
        ends
    }

    /// What a slot holds in the clear.
    fn content(&self, slot: SlotId) -> Vec<u8> {
        let mut pulled = pulled_slot(&self.memory, op(slot, LIFE), 0, Done::new(|_| ()));
        let Some(seal) = &self.seal else { return pulled.bytes().to_vec() };
        assert!(pulled.bytes().windows(8).all(|bytes| bytes != &slice(slot)[..8]));
        opened(seal, name_of(slot), pulled.bytes())
    }
}

fn slice(slot: SlotId) -> Vec<u8> {
    (0..BYTES).map(|at| (slot.0 as usize * 31 + at) as u8).collect()
}

fn name_of(slot: SlotId) -> BlockKey {
    BlockKey { hash: slot.0.into(), group: 0 }
}

/// Pulls a slot from that of the same number there.
fn op(slot: SlotId, generation: u32) -> CopyOp {
    let at = SlotRef { tier: Tier::Host, slot, generation };
    let (block, owner) = (name_of(slot), Some(Owner { tenant: 5, life: 0 }));
    CopyOp { block, parent: None, owner, from: at, to: at }
}

fn slots(generation: impl Fn(u32) -> u32) -> (ComingSlots, Ends) {
    slots_of(generation, None)
}

/// Of a rank with these keys.
fn slots_of(generation: impl Fn(u32) -> u32, keys: Option<Arc<HostSeal>>) -> (ComingSlots, Ends) {
    let seals = SliceSeals::new(keys, 0);
    let seal = seals.own().cloned();
    let bytes = BYTES + seal.as_ref().map_or(0, |_| SEAL_BYTES);
    let (memory, told) = (Arc::new(host(SLOTS, bytes)), Arc::<Mutex<Vec<_>>>::default());
    let ends = Ends { memory: Arc::clone(&memory), seal, told: Arc::clone(&told) };
    let done = Done::new(move |ended| {
        let end = |(place, result): (usize, Result<(), CopyError>)| {
            (SlotId(place as u32), result.err().map(|error| error.kind()))
        };
        told.lock().extend(ended.into_iter().map(end));
    });
    let slot = |slot| {
        let op = op(SlotId(slot), generation(slot));
        pulled_slot(&memory, op, slot as usize, done.clone())
    };
    let left = (0..SLOTS).map(slot).collect();
    (ComingSlots { left, came: VecDeque::new(), seals, saturated: 0 }, ends)
}

/// What a leader orders to be read at ranks of a worker.
pub(super) fn pull_from(holder: &Member, sources: Vec<PullSource>) -> PullFrom {
    let (ranks, block_tokens) = (holder.ranks, holder.fingerprint.block_tokens);
    let host = "there".to_owned();
    PullFrom { host, sources, limit: LIMIT, renamed: 0, ranks, block_tokens }
}

/// The rank of the same number.
const SOURCE: PullSource = PullSource {
    seat: PeerSeat { port: 1, incarnation: 1 },
    give: HeadShare::WHOLE,
    into: HeadShare::WHOLE,
};

/// Serves slices, as a rank does that has all slots in one life.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, of: impl Fn(SlotId) -> Vec<u8>) {
    let mut link = FramedRead::new(stream, requests());
    let copy = |SlotRef { slot, generation, .. }, to: &mut Vec<u8>| {
        *to = of(slot);
        (generation == LIFE).then(|| checksum(&slice(slot)))
    };
    while let Some(Ok(frame)) = link.next().await {
        let Ok(ToHolder::Slices(HeadShare::WHOLE, lives)) = decode(&frame) else {
            panic!("another message")
        };
        assert!(lives.len() <= MAX_SLICES);
        if give(link.get_mut(), &lives, copy, None, LIMIT).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn slices_arrive_whole_and_not_those_of_other_lives() {
    // Requests fit in it, as they do in what a socket holds.
    let (mut here, there) = duplex(1 << 14);
    let (mut wanted, ends) = slots(|slot| if slot % 100 == 0 { LIFE + 1 } else { LIFE });
    tokio::select! {
        taken = take(&mut here, &mut wanted) => taken.unwrap(),
        () = serve(there, slice) => panic!("it left"),
    }
    wanted.end();
    let ends = ends.all();
    assert_eq!(ends.len(), SLOTS as usize);
    for (slot, end) in &ends {
        let is_stale = slot.0 % 100 == 0;
        assert_eq!(*end, is_stale.then_some(CopyErrorKind::Unavailable), "{slot:?}");
    }
}

#[tokio::test]
async fn a_slice_that_differs_from_its_checksum_is_corrupt() {
    // Requests fit in it, as they do in what a socket holds.
    let (mut here, there) = duplex(1 << 14);
    let (mut wanted, ends) = slots(|_| LIFE);
    let flipped = |slot| {
        let mut bytes = slice(slot);
        bytes[BYTES - 1] ^= u8::from(slot == SlotId(1_000));
        bytes
    };
    tokio::select! {
        taken = take(&mut here, &mut wanted) => taken.unwrap(),
        () = serve(there, flipped) => panic!("it left"),
    }
    wanted.end();
    let wrong: Vec<_> = ends.all().into_iter().filter(|(_, end)| end.is_some()).collect();
    assert_eq!(wrong, [(SlotId(1_000), Some(CopyErrorKind::Corrupt))]);
}

#[tokio::test]
async fn a_part_that_differs_from_its_checksum_does_not_come() {
    let (mut here, there) = duplex(1 << 14);
    let lives: Vec<_> = (0..SLOTS).map(|slot| SlotLife::of(op(SlotId(slot), LIFE).from)).collect();
    let mut slices = ConnectionSlices::new(&mut here, lives, HeadShare::WHOLE, BYTES as u64);
    let flipped = |slot| {
        let mut bytes = slice(slot);
        bytes[BYTES - 1] ^= u8::from(slot == SlotId(1_000));
        bytes
    };
    let take = async {
        slices.begin().await.unwrap();
        for slot in 0..SLOTS {
            match slices.next().await.unwrap() {
                Ok(came) => assert_eq!((came, slot == 1_000), (&mut *slice(SlotId(slot)), false)),
                Err(why) => assert_eq!((why.kind(), slot), (CopyErrorKind::Corrupt, 1_000)),
            }
        }
    };
    tokio::select! {
        () = take => {}
        () = serve(there, flipped) => panic!("it left"),
    }
}

#[tokio::test]
async fn what_has_not_come_when_the_link_breaks_is_left() {
    let (mut here, mut there) = duplex(1 << 20);
    let (mut wanted, ends) = slots(|_| LIFE);
    let crc = checksum(&slice(SlotId(0))).to_le_bytes();
    send(&mut there, &ToReader::Slice(Some(crc))).await.unwrap();
    there.write_all(&slice(SlotId(0))).await.unwrap();
    send(&mut there, &ToReader::Slice(Some(crc))).await.unwrap();
    // Half of the next one.
    there.write_all(&slice(SlotId(1))[..BYTES / 2]).await.unwrap();
    there.shutdown().await.unwrap();
    let broken = take(&mut here, &mut wanted).await.unwrap_err();
    assert!(matches!(broken, BrokenLink::Closed(_)), "{broken}");
    assert_eq!((wanted.came.len(), wanted.left.len()), (1, SLOTS as usize - 1));
    wanted.fail(&CopyError::refused("the link broke"));
    assert!(ends.all().iter().all(|(_, end)| end.is_some()));
    let mut rest = Vec::new();
    drop(here);
    there.read_to_end(&mut rest).await.unwrap();
}

#[tokio::test]
async fn what_is_no_slice_ends_it() {
    let (mut here, mut there) = duplex(1 << 20);
    let (mut wanted, ends) = slots(|_| LIFE);
    send(&mut there, &ToReader::Between(1)).await.unwrap();
    let broken = take(&mut here, &mut wanted).await.unwrap_err();
    assert!(matches!(broken, BrokenLink::Unexpected(_)), "{broken}");
    assert!(ends.all().is_empty());
}

/// What a rank seals with, and the keys of its tenants. `main`: the number of its main key.
pub(super) fn sealing(main: u32) -> (Arc<HostSeal>, Arc<TenantKeys>) {
    let (ring, of) = (key_ring(main, MAIN), HostSeal::keys_namespace("test"));
    let keys = Arc::new(TenantKeys::in_memory(Arc::clone(&ring), &of));
    (Arc::new(HostSeal::new(ring, "test", BYTES, Some(Arc::clone(&keys)))), keys)
}

/// A rank with that main key whose slices lie in the clear.
fn in_the_clear(main: u32) -> Arc<HostSeal> {
    Arc::new(HostSeal::new(key_ring(main, MAIN), "test", BYTES, None))
}

const MAIN: &str = "0123456789abcdef";

/// A slot's slice, as it lies sealed. Two tenants have the slots in turn.
fn lying(seal: &HostSeal, slot: SlotId) -> Vec<u8> {
    let (name, owner) = (name_of(slot), Some(Owner { tenant: slot.0 % 2, life: 0 }));
    let (mut content, mut sealed) = (slice(slot), vec![0; BYTES + SEAL_BYTES]);
    let block = ArrivingBlock { name, owner, crc: checksum(&content) };
    seal.prepare(owner).unwrap();
    seal.take_in(None, block, &mut content, &mut sealed).unwrap();
    sealed
}

fn opened(seal: &HostSeal, name: BlockKey, sealed: &[u8]) -> Vec<u8> {
    let (other, mut content) = (seal.of_other(0), vec![0; BYTES]);
    let key = seal.wrapped(HostSeal::key_of(sealed).unwrap()).unwrap();
    other.take(key.bytes()).unwrap();
    let block = ArrivingBlock { name, owner: None, crc: 0 };
    in_the_clear(1).take_in(Some(&other), block, &mut sealed.to_vec(), &mut content).unwrap();
    content
}

/// Serves slices that lie sealed, as they are when they are given: `by` says with what, by the first
/// slot of a request.
async fn serve_sealed<'a>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    by: impl Fn(SlotId) -> &'a Arc<HostSeal>,
    of: impl Fn(&HostSeal, SlotId) -> Vec<u8>,
) {
    let mut link = FramedRead::new(stream, requests());
    while let Some(Ok(frame)) = link.next().await {
        let Ok(ToHolder::Slices(HeadShare::WHOLE, lives)) = decode(&frame) else {
            panic!("another message")
        };
        let seal = by(lives[0].get().slot);
        let copy = |SlotRef { slot, .. }, to: &mut Vec<u8>| {
            *to = of(seal, slot);
            Some(checksum(to))
        };
        if give(link.get_mut(), &lives, copy, Some(seal), LIMIT).await.is_err() {
            return;
        }
    }
}

fn failures(ends: &Ends) -> Vec<(SlotId, CopyErrorKind)> {
    let ends = ends.all();
    assert_eq!(ends.len(), SLOTS as usize);
    ends.iter().filter_map(|&(slot, end)| Some((slot, end?))).collect()
}

#[tokio::test]
async fn slices_come_from_any_host_tier_to_any() {
    let (there, _) = sealing(1);
    for (is_sealed_there, here) in
        [(true, sealing(1).0), (true, in_the_clear(1)), (false, sealing(1).0)]
    {
        let (mut link, other_end) = duplex(1 << 14);
        let (mut wanted, ends) = slots_of(|_| LIFE, Some(here));
        wanted.prepare().await.unwrap();
        let serve = async {
            if is_sealed_there {
                serve_sealed(other_end, |_| &there, lying).await;
            } else {
                serve(other_end, slice).await;
            }
        };
        tokio::select! {
            taken = take(&mut link, &mut wanted) => taken.unwrap(),
            () = serve => panic!("it left"),
        }
        wanted.end();
        assert_eq!(failures(&ends), []);
    }
}

/// The checksum of what travelled is right: the seal is broken, or another block's.
#[tokio::test]
async fn a_broken_seal_is_corrupt_whatever_its_checksum_says() {
    let (there, _) = sealing(1);
    let broken = |seal: &HostSeal, slot| match slot {
        SlotId(1_000) => {
            let mut sealed = lying(seal, slot);
            sealed[BYTES + 4] ^= 1;
            sealed
        }
        SlotId(1_001) => lying(seal, SlotId(3)),
        _ => lying(seal, slot),
    };
    for here in [sealing(1).0, in_the_clear(1)] {
        let (mut link, other_end) = duplex(1 << 14);
        let (mut wanted, ends) = slots_of(|_| LIFE, Some(here));
        wanted.prepare().await.unwrap();
        tokio::select! {
            taken = take(&mut link, &mut wanted) => taken.unwrap(),
            () = serve_sealed(other_end, |_| &there, broken) => panic!("it left"),
        }
        wanted.end();
        let wrong = [1_000, 1_001].map(|slot| (SlotId(slot), CopyErrorKind::Corrupt));
        assert_eq!(failures(&ends), wrong);
    }
}

#[tokio::test]
async fn slices_before_an_unusable_key_come_and_none_behind() {
    let ([one, two], usable) = ([sealing(1).0, sealing(2).0], MAX_SLICES as u32);
    let by = |first: SlotId| if (usable..2 * usable).contains(&first.0) { &two } else { &one };
    for (here, came) in [(Some(in_the_clear(1)), usable), (None, 0)] {
        let (mut link, other_end) = duplex(1 << 14);
        let (mut wanted, ends) = slots_of(|_| LIFE, here);
        tokio::select! {
            taken = take(&mut link, &mut wanted) => taken.unwrap(),
            () = serve_sealed(other_end, by, lying) => panic!("it left"),
        }
        wanted.end();
        let refused: Vec<_> =
            (came..SLOTS).map(|slot| (SlotId(slot), CopyErrorKind::Refused)).collect();
        assert_eq!(failures(&ends), refused);
    }
}

/// What a rank answers to a request for the first slots: of each whether a key came with it.
async fn given(seal: &Arc<HostSeal>, lying: &[Vec<u8>]) -> Vec<Option<bool>> {
    let (mut here, mut there) = duplex(1 << 14);
    let life = |slot| SlotLife::of(SlotRef { tier: Tier::Host, slot: SlotId(slot), generation: 0 });
    let lives: Vec<_> = (0..lying.len() as u32).map(life).collect();
    let copy = |SlotRef { slot, .. }, to: &mut Vec<u8>| {
        to.clone_from(&lying[slot.0 as usize]);
        Some(checksum(to))
    };
    give(&mut there, &lives, copy, Some(seal), LIMIT).await.unwrap();
    let mut given = Vec::new();
    for at in 0..lying.len() {
        given.push(match receive(&mut here).await.unwrap() {
            ToReader::SealedSlice(_, key) => {
                here.read_exact(&mut [0; BYTES + SEAL_BYTES]).await.unwrap();
                let first = key.map(|key| u32::from_le_bytes(key.first));
                assert!(first.is_none_or(|first| first as usize == at));
                Some(key.is_some())
            }
            ToReader::Slice(None) => None,
            other => panic!("{other:?}"),
        });
    }
    given
}

#[tokio::test]
async fn a_request_has_each_key_once_and_no_forgotten_one() {
    let (seal, keys) = sealing(1);
    let lying: Vec<_> = (0..6).map(|slot| lying(&seal, SlotId(slot))).collect();
    let [first, again] = [true, false].map(Some);
    for _ in 0..2 {
        assert_eq!(given(&seal, &lying).await, [first, first, again, again, again, again]);
    }
    keys.forget(0, 1).unwrap();
    assert_eq!(given(&seal, &lying).await, [None, first, None, again, None, again]);
}

#[tokio::test]
async fn heads_of_sealed_slices_are_not_split() {
    let half = HeadShare::new(0, 2).unwrap();
    let lives: Vec<_> = (0..SLOTS).map(|slot| SlotLife::of(op(SlotId(slot), LIFE).from)).collect();
    let (mut here, mut there) = duplex(1 << 14);
    say(&mut there, &ToReader::Refused(NOT_CONVERTED.to_owned()), LIMIT).await.unwrap();
    let mut slices = ConnectionSlices::new(&mut here, lives.clone(), half, BYTES as u64);
    assert_eq!(slices.next().await.unwrap_err().to_string(), NOT_CONVERTED);
    // One that comes all the same.
    let (mut here, there) = duplex(1 << 14);
    let (seal, _) = sealing(1);
    let mut slices = ConnectionSlices::new(&mut here, lives, HeadShare::WHOLE, BYTES as u64);
    tokio::select! {
        came = slices.next() => assert_eq!(came.unwrap_err().to_string(), NOT_CONVERTED),
        () = serve_sealed(there, |_| &seal, lying) => panic!("it left"),
    }
}

#[test]
fn a_share_has_its_own_checksum() {
    let whole = slice(SlotId(3));
    let cut = |share, heads: Option<HeadLayout>| {
        let mut part = whole.clone();
        cut(1, share, heads, &mut part).map(|crc| (crc, part))
    };
    let heads = HeadLayout::new(8, 2, BYTES);
    assert_eq!(cut(HeadShare::WHOLE, None), Some((1, whole.clone())));
    let (crc, part) = cut(HeadShare::new(1, 2).unwrap(), heads).unwrap();
    assert_eq!((crc, part.len()), (checksum(&part), BYTES / 2));
    assert_eq!(cut(HeadShare::new(1, 2).unwrap(), None), None);
    assert_eq!(cut(HeadShare::new(1, 4).unwrap(), heads), None);
}

#[test]
fn ranks_serve_on_the_ports_behind_their_leaders() {
    assert_eq!(port(6_890, 0).unwrap(), 6_891);
    assert_eq!(port(6_890, 3).unwrap(), 6_894);
    assert_eq!(port(0, 3).unwrap(), 0);
    let error = port(u16::MAX - 1, 1).unwrap_err().to_string();
    assert!(error.contains("peers.port") && error.contains("+ 2"), "{error}");
}

#[test]
fn sealed_ranks_are_not_opened_where_nixl_is_required() {
    let mut settings = Settings::default();
    settings.peers.enabled = true;
    settings.peers.nixl = PeerNixl::Required;
    settings.host.persist = Some("kept".into());
    settings.encryption.key_file = Some("keys".to_owned());
    let fingerprint = member("rank 0", 1).fingerprint;
    let refused = RankListener::bind(&settings, Some(&fingerprint), 0, 2).unwrap_err();
    assert!(refused.to_string().contains("encrypted host tier"), "{refused}");
}

fn reader() -> SliceReader {
    let credentials = Credentials {
        member: member("rank 0", 1),
        proofs: PeerProofs::default(),
        converts_types: false,
    };
    let credentials = Arc::new(credentials);
    let waiting = Mutex::default();
    SliceReader { credentials, waiting, seal: None, neighbours: None, nixl: None }
}

/// A rank that takes a connection, and says nothing.
#[tokio::test(start_paused = true)]
async fn what_does_not_come_within_the_limit_does_not_come() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let seat = PeerSeat { port: silent.local_addr().unwrap().port(), incarnation: 1 };
    let (slots, ends) = slots(|_| LIFE);
    let sources = vec![PullSource { seat, ..SOURCE }];
    let from = PullFrom { host: "127.0.0.1".to_owned(), ..pull_from(&member("b", 2), sources) };
    let began = Instant::now();
    reader().bring(from, slots.left).await;
    assert!(began.elapsed() >= LIMIT && began.elapsed() < 2 * LIMIT, "{:?}", began.elapsed());
    let ends = ends.all();
    assert_eq!(ends.len(), SLOTS as usize);
    assert!(ends.iter().all(|(_, end)| *end == Some(CopyErrorKind::Unavailable)));
}

#[tokio::test(start_paused = true)]
async fn connections_that_nobody_uses_are_let_go() {
    let reader = Arc::new(reader());
    let place = |port| {
        let seat = PeerSeat { port, incarnation: 1 };
        RankPlace { host: "there".to_owned(), seat }
    };
    let tidied = Arc::clone(&reader);
    let tidying = tokio::spawn(tidy(move || tidied.tidy()));
    let (stream, mut other_end) = duplex(1);
    let link = |stream| PeerLink::to(member("there", 2), Box::new(stream));
    reader.keep(place(1), link(stream));
    tokio::time::sleep(MAX_WAIT / 2).await;
    reader.keep(place(2), link(duplex(1).0));
    tokio::time::sleep(MAX_WAIT / 2 + TIDY_PAUSE).await;
    assert_eq!(other_end.read(&mut [0]).await.unwrap(), 0, "it is still open");
    let waiting = reader.waiting.lock();
    assert!(waiting.len() == 1 && waiting.contains_key(&place(2)));
    tidying.abort();
}
