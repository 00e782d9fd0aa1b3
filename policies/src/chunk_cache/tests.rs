use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::eviction::EvictionKind;

const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);

/// The `index`-th chunk of a chain.
fn key(chain: u128, index: u128) -> ChunkKey {
    ChunkKey(chain << 64 | index)
}

fn keys(chain: u128, indices: std::ops::Range<u128>) -> Vec<ChunkKey> {
    indices.map(|index| key(chain, index)).collect()
}

fn lru() -> ChunkCache {
    ChunkCache::new(EvictionKind::Lru.build(16))
}

/// `request` stores these, and their copies end.
fn store(cache: &mut ChunkCache, request: RequestId, keys: &[ChunkKey], now_ms: u64) {
    cache.offer(request, 0, keys.iter().copied(), now_ms);
    keys.iter().for_each(|&key| cache.insert(key));
    keys.iter().for_each(|&key| cache.idle(key));
}

#[test]
fn the_tail_of_what_was_used_longest_ago_goes_first() {
    let mut cache = lru();
    for (request, chain, now) in [(A, 7, 0), (B, 8, 10)] {
        cache.follow(request, 0, keys(chain, 0..3));
        store(&mut cache, request, &keys(chain, 0..3), now);
        cache.finish(request, 1, now + 5);
    }
    assert_eq!(cache.evict(2, []), Some(vec![key(7, 2), key(7, 1)]));
    // A request that finds all of its prompt uses it at its end.
    let again = RequestId(3);
    cache.follow(again, 0, keys(7, 0..1));
    cache.finish(again, 1, 30);
    assert_eq!(cache.evict(4, []), Some(vec![key(8, 2), key(8, 1), key(8, 0), key(7, 0)]));
    assert_eq!(cache.resident(), 0);
    assert!(cache.requests.is_empty());
}

#[test]
fn what_is_busy_or_kept_stays_and_then_all_stays() {
    let mut cache = lru();
    cache.follow(A, 0, keys(7, 0..3));
    store(&mut cache, A, &keys(7, 0..3), 0);
    cache.busy(key(7, 2));
    assert_eq!(cache.evict(1, []), None, "what lies above a busy chunk cannot go");
    cache.idle(key(7, 2));
    assert_eq!(cache.evict(1, [key(7, 2)]), None);
    assert_eq!(cache.evict(4, []), None);
    assert_eq!(cache.resident(), 3);
    assert_eq!(cache.evict(3, []).map(|gone| gone.len()), Some(3), "and then it is as it was");
}

#[test]
fn an_orphan_goes_first_unless_its_chain_comes_back() {
    let mut cache = lru();
    cache.follow(A, 0, keys(7, 0..4));
    store(&mut cache, A, &keys(7, 0..2), 0);
    cache.finish(A, 1, 1);
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 1)]));
    // Chunk 1 is gone when the chunks behind it come. It is not offered, so it is not expected
    // either: nothing leads to them, and policies are to judge only what a look-up can find.
    cache.follow(B, 0, keys(7, 0..4));
    store(&mut cache, B, &keys(7, 2..4), 2);
    cache.finish(B, 1, 3);
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 2)]), "the oldest orphan");
    let third = RequestId(3);
    cache.follow(third, 0, keys(7, 0..4));
    store(&mut cache, third, &keys(7, 1..3), 4);
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 3)]), "a leaf again, no orphan");
    assert_eq!(cache.evict(3, []), Some(vec![key(7, 2), key(7, 1), key(7, 0)]));
}

#[test]
fn what_was_declined_and_comes_all_the_same_goes_first() {
    let mut cache = lru();
    store(&mut cache, A, &keys(8, 0..1), 0);
    cache.busy(key(8, 0));
    // The rest of the prompt is judged with its beginning, and leaves before it.
    cache.follow(B, 0, keys(7, 0..3));
    store(&mut cache, B, &keys(7, 0..1), 1);
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 0)]));
    store(&mut cache, B, &keys(7, 1..3), 1);
    cache.idle(key(8, 0));
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 1)]), "nothing leads to it");
    cache.finish(B, 1, 2);
    assert_eq!(cache.evict(2, []), Some(vec![key(7, 2), key(8, 0)]));
}

#[test]
fn a_prompt_longer_than_its_room_keeps_its_beginning() {
    let mut cache = lru();
    cache.follow(A, 0, keys(7, 0..6));
    store(&mut cache, A, &keys(7, 0..2), 0);
    cache.offer(A, 0, keys(7, 2..4), 0);
    assert_eq!(cache.evict(2, keys(7, 2..4)), None, "what they hang on stays");
    cache.finish(A, 1, 1);
    assert_eq!(cache.evict(2, []), Some(vec![key(7, 1), key(7, 0)]));
}

#[test]
fn what_did_not_come_is_expected_until_its_request_ends() {
    let mut cache = lru();
    for request in [A, B] {
        cache.follow(request, 0, keys(7, 0..4));
        store(&mut cache, request, &keys(7, 0..1), 0);
    }
    cache.finish(A, 1, 1);
    assert_eq!(cache.resident(), 1);
    assert!(cache.forest.id(key(7, 1)).is_none());
    // Other requests that expected it need not.
    store(&mut cache, B, &keys(7, 1..2), 2);
    cache.finish(B, 1, 3);
    assert_eq!(
        cache.evict(2, []),
        Some(vec![key(7, 1), key(7, 0)]),
        "it hangs on what came before"
    );
    // What came behind one that did not keeps its place, as behind a copy that failed.
    cache.follow(A, 0, keys(7, 0..4));
    cache.offer(A, 0, keys(7, 0..4), 4);
    cache.insert(key(7, 2));
    cache.idle(key(7, 2));
    cache.finish(A, 1, 5);
    assert_eq!(cache.resident(), 1);
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 2)]));
    assert!((0..4).all(|index| cache.forest.id(key(7, index)).is_none()), "and nothing is left");
}

#[test]
fn a_copy_that_failed_leaves_no_trace_whatever_the_order() {
    let mut cache = lru();
    cache.follow(A, 0, keys(7, 0..3));
    cache.offer(A, 0, keys(7, 0..3), 0);
    keys(7, 0..3).into_iter().for_each(|key| cache.insert(key));
    [0, 2, 1].into_iter().for_each(|index| cache.remove(key(7, index)));
    assert_eq!((cache.resident(), cache.evict(1, [])), (0, None));
    store(&mut cache, A, &keys(7, 0..3), 1);
    cache.remove(key(7, 1));
    assert_eq!(cache.resident(), 2);
    assert_eq!(cache.evict(2, []), Some(vec![key(7, 2), key(7, 0)]));
}

#[test]
fn a_window_hangs_on_nothing_and_is_no_orphan() {
    let mut cache = lru();
    for group in [0, 1] {
        cache.follow(A, group, keys(7 + u128::from(group), 0..4));
    }
    store(&mut cache, A, &keys(7, 0..4), 0);
    cache.offer(A, 1, keys(8, 2..4), 0);
    keys(8, 2..4).into_iter().for_each(|key| cache.insert(key));
    keys(8, 2..4).into_iter().for_each(|key| cache.idle(key));
    assert_eq!(cache.evict(1, []), Some(vec![key(7, 3)]), "it came later than what it belongs to");
}

/// What an owner may do.
#[derive(Clone, Debug)]
enum Step {
    /// A request for a number of chunks of a chain: the missing ones come, if there is room, in
    /// pieces.
    Request {
        chain: u8,
        chunks: u8,
        piece: u8,
        ends: bool,
    },
    Busy(u8, u8),
    Idle(u8, u8),
    Fail(u8, u8),
    Evict(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_u8, 1..9_u8, 1..5_u8, any::<bool>())
            .prop_map(|(chain, chunks, piece, ends)| Step::Request { chain, chunks, piece, ends }),
        1 => (0..4_u8, 0..8_u8).prop_map(|(chain, index)| Step::Busy(chain, index)),
        2 => (0..4_u8, 0..8_u8).prop_map(|(chain, index)| Step::Idle(chain, index)),
        1 => (0..4_u8, 0..8_u8).prop_map(|(chain, index)| Step::Fail(chain, index)),
        1 => (1..6_u8).prop_map(Step::Evict),
    ]
}

/// The owner: what is there, and whether it is busy.
struct Owner {
    cache: ChunkCache,
    there: HashMap<ChunkKey, bool>,
    capacity: usize,
    requests: u64,
}

impl Owner {
    fn evict(&mut self, count: usize, keep: &[ChunkKey]) -> bool {
        let gone = self.cache.evict(count, keep.iter().copied());
        let Some(gone) = gone else { return false };
        assert_eq!(gone.len(), count);
        for key in gone {
            assert_eq!(self.there.remove(&key), Some(false), "it was there, once, and not busy");
            assert!(!keep.contains(&key));
        }
        true
    }

    fn request(&mut self, chain: u8, chunks: u8, piece: usize, ends: bool, now_ms: u64) {
        self.requests += 1;
        let request = RequestId(self.requests);
        let all = keys(chain.into(), 0..chunks.into());
        self.cache.follow(request, 0, all.iter().copied());
        for piece in all.chunks(piece) {
            let missing: Vec<_> =
                piece.iter().copied().filter(|key| !self.there.contains_key(key)).collect();
            self.cache.offer(request, 0, missing.iter().copied(), now_ms);
            let short = (self.there.len() + missing.len()).saturating_sub(self.capacity);
            if short > 0 && !self.evict(short, piece) {
                continue;
            }
            for &key in &missing {
                self.cache.insert(key);
                self.there.insert(key, true);
            }
            missing.iter().for_each(|&key| self.idle(key));
        }
        if ends {
            self.cache.finish(request, 100, now_ms + 50);
        }
    }

    fn idle(&mut self, key: ChunkKey) {
        if let Some(is_busy) = self.there.get_mut(&key) {
            *is_busy = false;
            self.cache.idle(key);
        }
    }

    fn apply(&mut self, step: &Step, now_ms: u64) {
        match *step {
            Step::Request { chain, chunks, piece, ends } => {
                self.request(chain, chunks, piece.into(), ends, now_ms);
            }
            Step::Busy(chain, index) => {
                let key = key(chain.into(), index.into());
                if let Some(is_busy) = self.there.get_mut(&key) {
                    *is_busy = true;
                    self.cache.busy(key);
                }
            }
            Step::Idle(chain, index) => self.idle(key(chain.into(), index.into())),
            Step::Fail(chain, index) => {
                let key = key(chain.into(), index.into());
                if self.there.remove(&key).is_some() {
                    self.cache.remove(key);
                }
            }
            Step::Evict(count) => {
                self.evict(count.into(), &[]);
            }
        }
    }
}

proptest! {
    #[test]
    fn it_agrees_with_its_owner_and_all_can_go(
        kind in prop::sample::select(EvictionKind::ALL.to_vec()),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let capacity = 12;
        let cache = ChunkCache::new(kind.build(capacity as u32));
        let mut owner = Owner { cache, there: HashMap::new(), capacity, requests: 0 };
        for (step, now) in steps.iter().zip((0..).step_by(1000)) {
            owner.apply(step, now);
            prop_assert_eq!(owner.cache.resident(), owner.there.len());
        }
        let all: Vec<_> = owner.there.keys().copied().collect();
        all.iter().for_each(|&key| owner.idle(key));
        prop_assert!(owner.evict(all.len(), &[]), "what is not in use can go");
    }
}
