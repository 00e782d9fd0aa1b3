use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{SlotId, Tier};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_util::codec::FramedRead;

use super::super::TIDY_PAUSE;
use super::super::greeting::PeerProofs;
use super::super::greeting::tests::member;
use super::super::protocol::requests;
use super::*;

const BYTES: usize = 64;
/// More than two requests have.
const SLOTS: u32 = 3 * MAX_SLICES as u32;
/// Every slot's.
const LIFE: u32 = 7;

type Ends = Arc<Mutex<Vec<(SlotId, Option<CopyErrorKind>)>>>;

/// A slot that a slice comes into.
struct TestSlot {
    from: SlotRef,
    bytes: Vec<u8>,
    ends: Ends,
}

impl SliceSlot for TestSlot {
    fn from(&self) -> SlotRef {
        self.from
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn written(&mut self) -> u32 {
        checksum(&self.bytes)
    }

    fn end(self, result: Result<(), CopyError>) {
        assert!(result.is_err() || self.bytes == slice(self.from.slot), "a wrong slice counts");
        self.ends.lock().push((self.from.slot, result.err().map(|error| error.kind())));
    }
}

fn slice(slot: SlotId) -> Vec<u8> {
    (0..BYTES).map(|at| (slot.0 as usize * 31 + at) as u8).collect()
}

fn slots(generation: impl Fn(u32) -> u32) -> (ComingSlots<TestSlot>, Ends) {
    let ends = Ends::default();
    let slot = |slot| {
        let from = SlotRef { tier: Tier::Host, slot: SlotId(slot), generation: generation(slot) };
        TestSlot { from, bytes: vec![0; BYTES], ends: Arc::clone(&ends) }
    };
    let left = (0..SLOTS).map(slot).collect();
    (ComingSlots { left, came: VecDeque::new(), heads: None }, ends)
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
    let copy = |(slot, life), to: &mut Vec<u8>| {
        *to = of(slot);
        (life == LIFE).then(|| checksum(&slice(slot)))
    };
    while let Some(Ok(frame)) = link.next().await {
        let Ok(ToHolder::Slices(HeadShare::WHOLE, lives)) = decode(&frame) else {
            panic!("another message")
        };
        assert!(lives.len() <= MAX_SLICES);
        if give(link.get_mut(), &lives, copy, Duration::from_secs(1)).await.is_err() {
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
        taken = take(&mut here, &SOURCE, &mut wanted) => taken.unwrap(),
        () = serve(there, slice) => panic!("it left"),
    }
    wanted.end();
    let ends = ends.lock();
    assert_eq!(ends.len(), SLOTS as usize);
    for (slot, end) in &*ends {
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
        taken = take(&mut here, &SOURCE, &mut wanted) => taken.unwrap(),
        () = serve(there, flipped) => panic!("it left"),
    }
    wanted.end();
    let wrong: Vec<_> = ends.lock().iter().filter(|(_, end)| end.is_some()).copied().collect();
    assert_eq!(wrong, [(SlotId(1_000), Some(CopyErrorKind::Corrupt))]);
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
    let broken = take(&mut here, &SOURCE, &mut wanted).await.unwrap_err();
    assert!(matches!(broken, BrokenLink::Closed(_)), "{broken}");
    assert_eq!((wanted.came.len(), wanted.left.len()), (1, SLOTS as usize - 1));
    wanted.fail(&CopyError::refused("the link broke"));
    assert!(ends.lock().iter().all(|(_, end)| end.is_some()));
    let mut rest = Vec::new();
    drop(here);
    there.read_to_end(&mut rest).await.unwrap();
}

#[tokio::test]
async fn what_is_no_slice_ends_it() {
    let (mut here, mut there) = duplex(1 << 20);
    let (mut wanted, ends) = slots(|_| LIFE);
    send(&mut there, &ToReader::Between(1)).await.unwrap();
    let broken = take(&mut here, &SOURCE, &mut wanted).await.unwrap_err();
    assert!(matches!(broken, BrokenLink::Unexpected(_)), "{broken}");
    assert!(ends.lock().is_empty());
}

/// Two ranks of another worker have the heads of each slice, one of which has another slot by now.
#[tokio::test]
async fn a_slice_comes_in_shares_from_ranks_with_fewer_heads() {
    let heads = HeadLayout::new(8, 2, BYTES).unwrap();
    let (mut wanted, ends) = slots(|_| LIFE);
    wanted.heads = Some(heads);
    for (rank, stale, flipped) in [(0, 7, 9), (1, 8, 10)] {
        let share = HeadShare::new(rank, 2).unwrap();
        let (mut here, there) = duplex(1 << 14);
        let serve = async {
            let mut link = FramedRead::new(there, requests());
            while let Some(Ok(frame)) = link.next().await {
                let Ok(ToHolder::Slices(HeadShare::WHOLE, lives)) = decode(&frame) else {
                    panic!()
                };
                let copy = |(slot, _), to: &mut Vec<u8>| {
                    *to = slice(slot);
                    heads.cut(share, to).unwrap();
                    let crc = checksum(to);
                    to[0] ^= u8::from(slot == SlotId(flipped));
                    (slot != SlotId(stale)).then_some(crc)
                };
                let given = give(link.get_mut(), &lives, copy, Duration::from_secs(1)).await;
                given.unwrap();
            }
        };
        let source = PullSource { into: share, ..SOURCE };
        tokio::select! {
            taken = take(&mut here, &source, &mut wanted) => taken.unwrap(),
            () = serve => panic!("it left"),
        }
    }
    wanted.end();
    let mut wrong: Vec<_> = ends.lock().iter().filter(|(_, end)| end.is_some()).copied().collect();
    wrong.sort_unstable_by_key(|(slot, _)| *slot);
    let [gone, corrupt] = [CopyErrorKind::Unavailable, CopyErrorKind::Corrupt].map(Some);
    let expected = [(7, gone), (8, gone), (9, corrupt), (10, corrupt)];
    assert_eq!(wrong, expected.map(|(slot, end)| (SlotId(slot), end)));
    assert_eq!(ends.lock().len(), SLOTS as usize);
}

#[test]
fn a_share_has_its_own_checksum() {
    let whole = slice(SlotId(3));
    let cut = |share, heads: Option<HeadLayout>| {
        let mut part = whole.clone();
        super::cut(1, share, heads, &mut part).map(|crc| (crc, part))
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

fn reader() -> SliceReader {
    let credentials = Credentials {
        member: member("rank 0", 1),
        proofs: PeerProofs::default(),
        converts_types: false,
    };
    SliceReader { credentials: Arc::new(credentials), waiting: Mutex::default() }
}

/// A rank that takes a connection, and says nothing.
#[tokio::test(start_paused = true)]
async fn what_does_not_come_within_the_limit_does_not_come() {
    const LIMIT: Duration = Duration::from_secs(7);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let seat = PeerSeat { port: silent.local_addr().unwrap().port(), incarnation: 1 };
    let (slots, ends) = slots(|_| LIFE);
    let sources = vec![PullSource { seat, ..SOURCE }];
    let from = PullFrom { host: "127.0.0.1".to_owned(), sources, limit: LIMIT };
    let began = Instant::now();
    reader().bring(from, slots.left).await;
    assert!(began.elapsed() >= LIMIT && began.elapsed() < 2 * LIMIT, "{:?}", began.elapsed());
    let ends = ends.lock();
    assert_eq!(ends.len(), SLOTS as usize);
    assert!(ends.iter().all(|(_, end)| *end == Some(CopyErrorKind::Unavailable)));
}

#[tokio::test(start_paused = true)]
async fn connections_that_nobody_uses_are_let_go() {
    let reader = Arc::new(reader());
    let place = |port| ("there".to_owned(), PeerSeat { port, incarnation: 1 });
    let tidied = Arc::clone(&reader);
    let tidying = tokio::spawn(tidy(move || tidied.tidy()));
    let (stream, mut other_end) = duplex(1);
    reader.keep(place(1), Box::new(stream));
    tokio::time::sleep(MAX_WAIT / 2).await;
    reader.keep(place(2), Box::new(duplex(1).0));
    tokio::time::sleep(MAX_WAIT / 2 + TIDY_PAUSE).await;
    assert_eq!(other_end.read(&mut [0]).await.unwrap(), 0, "it is still open");
    let waiting = reader.waiting.lock();
    assert!(waiting.len() == 1 && waiting.contains_key(&place(2)));
    tidying.abort();
}
