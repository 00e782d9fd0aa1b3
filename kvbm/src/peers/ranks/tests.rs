use std::sync::Arc;

use kvbm_tiers::checksum::checksum;
use kvbm_tiers::{SlotId, Tier};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_util::codec::FramedRead;

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

fn slots(generation: impl Fn(u32) -> u32) -> (VecDeque<TestSlot>, Ends) {
    let ends = Ends::default();
    let slot = |slot| {
        let from = SlotRef { tier: Tier::Host, slot: SlotId(slot), generation: generation(slot) };
        TestSlot { from, bytes: vec![0; BYTES], ends: Arc::clone(&ends) }
    };
    ((0..SLOTS).map(slot).collect(), ends)
}

/// Serves slices, as a rank does that has all slots in one life.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, of: impl Fn(SlotId) -> Vec<u8>) {
    let mut link = FramedRead::new(stream, requests());
    let copy = |(slot, life), to: &mut Vec<u8>| {
        *to = of(slot);
        (life == LIFE).then(|| checksum(&slice(slot)))
    };
    while let Some(Ok(frame)) = link.next().await {
        let Ok(ToHolder::Slices(lives)) = decode(&frame) else { panic!("another message") };
        assert!(lives.len() <= MAX_SLICES);
        if give(link.get_mut(), &lives, copy, Duration::from_secs(1)).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn slices_come_as_they_are_and_those_of_other_lives_do_not() {
    // Requests fit in it, as they do in what a socket holds.
    let (mut here, there) = duplex(1 << 14);
    let (mut wanted, ends) = slots(|slot| if slot % 100 == 0 { LIFE + 1 } else { LIFE });
    tokio::select! {
        taken = take(&mut here, &mut wanted) => taken.unwrap(),
        () = serve(there, slice) => panic!("it left"),
    }
    let ends = ends.lock();
    assert_eq!(ends.len(), SLOTS as usize);
    for (slot, end) in &*ends {
        let is_stale = slot.0 % 100 == 0;
        assert_eq!(*end, is_stale.then_some(CopyErrorKind::Unavailable), "{slot:?}");
    }
}

#[tokio::test]
async fn a_slice_that_is_not_what_its_checksum_says_is_corrupt() {
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
    let broken = take(&mut here, &mut wanted).await.unwrap_err();
    assert!(matches!(broken, BrokenLink::Closed(_)), "{broken}");
    assert_eq!(*ends.lock(), [(SlotId(0), None)]);
    assert_eq!(wanted.len(), SLOTS as usize - 1);
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
    assert!(ends.lock().is_empty());
}

#[test]
fn ranks_serve_on_the_ports_behind_their_leaders() {
    assert_eq!(port(6_890, 0).unwrap(), 6_891);
    assert_eq!(port(6_890, 3).unwrap(), 6_894);
    assert_eq!(port(0, 3).unwrap(), 0);
    let error = port(u16::MAX - 1, 1).unwrap_err().to_string();
    assert!(error.contains("peers.port") && error.contains("+ 2"), "{error}");
}
