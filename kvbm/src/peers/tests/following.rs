//! A pull that follows what its peer computes.

use super::*;
use crate::api::filling::FillingSlots;
use crate::names::hash::Chain;
use crate::peers::reader::Pulled;

pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// Its followers come over one connection, which is made before.
pub(super) async fn pair() -> Pair {
    let mut pair = Pair::new().await;
    assert!(pair.connect(Fault::None).await);
    pair
}

/// Follows a chain while `meanwhile` goes on at the holder.
pub(super) async fn follow(
    pair: &Pair,
    chain: &[BlockHash],
    meanwhile: impl Future<Output = ()>,
) -> Pulled {
    let never = CancellationToken::new();
    let following = pair.reader.follow(asked(chain, RequestInfo::default(), PATIENCE), &never);
    tokio::join!(following, meanwhile).0.unwrap()
}

#[test]
fn what_a_peer_computes_comes_as_it_lands() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 12);
        let meanwhile = async {
            for blocks in [1, 2, 7, 12] {
                // Longer in all than one is waited for.
                tokio::time::sleep(PATIENCE / 2).await;
                pair.there.compute(&wanted[..blocks]);
                tokio::time::sleep(PATIENCE / 8).await;
                assert_eq!(pair.here.check(&wanted), blocks, "they come when they have landed");
            }
        };
        let Pulled { blocks, copied, fault, .. } = follow(&pair, &wanted, meanwhile).await;
        assert_eq!((blocks, copied, fault), (12, 12, None));
        let asked = pair.there.counted("kvbm_peer_leases_total", &[("direction", "sent")]);
        assert!(asked <= 8, "it is told, and need not ask: {asked} leases");
        pair.heals().await;
    });
}

#[test]
fn a_block_on_its_way_to_the_tier_is_absent() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 4);
        let there = Arc::clone(pair.there.blocks.manager());
        let (core, memory) = there.host_tier().unwrap();
        let filling =
            FillingSlots::take(core, memory, Chain::from(&*wanted), RequestInfo::default());
        let before = Instant::now();
        let Pulled { blocks, fault, .. } = follow(&pair, &wanted, async {}).await;
        assert_eq!((blocks, fault), (0, None));
        assert_eq!(before.elapsed(), PATIENCE);
        let asked = pair.there.counted("kvbm_peer_leases_total", &[("direction", "sent")]);
        assert!(asked <= 4, "it asks again and again: {asked} leases");
        drop(filling);
        pair.heals().await;
    });
}

#[test]
fn it_ends_with_what_is_there_where_no_more_comes() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 12);
        pair.there.compute(&wanted[..5]);
        let before = Instant::now();
        let Pulled { blocks, copied, fault, .. } = follow(&pair, &wanted, async {}).await;
        assert_eq!((blocks, copied, fault), (5, 5, None));
        assert!(before.elapsed() <= PATIENCE + Duration::from_millis(10));
        pair.heals().await;
    });
}

#[test]
fn a_peer_that_hangs_is_waited_for_no_longer() {
    for at in [600, 4 * BLOCK] {
        simulated(async {
            let mut pair = Pair::new().await;
            pair.connect(Fault::Hang(at)).await;
            let wanted = chain(0, 12);
            pair.there.compute(&wanted);
            let before = Instant::now();
            let Pulled { blocks, .. } = follow(&pair, &wanted, async {}).await;
            assert!(blocks < 12);
            assert!(before.elapsed() <= PATIENCE + TTL);
            pair.heals().await;
        });
    }
}

#[test]
fn slow_answers_may_take_longer_than_the_wait_for_blocks() {
    // Somewhere there the greeting ends, then the lease, then the first block.
    for at in (0..2 * BLOCK).step_by(32) {
        simulated(async {
            let mut pair = Pair::new().await;
            pair.connect(Fault::Pause(at)).await;
            let wanted = chain(0, 12);
            pair.there.compute(&wanted);
            let (never, info, patience) =
                (CancellationToken::new(), RequestInfo::default(), PAUSE / 4);
            let following = pair.reader.follow(asked(&wanted, info, patience), &never);
            let Pulled { blocks, fault, .. } = following.await.unwrap();
            assert_eq!((blocks, fault), (12, None), "{at}");
            pair.heals().await;
        });
    }
}

#[test]
fn a_reader_that_goes_away_is_not_waited_for() {
    simulated(async {
        let mut pair = pair().await;
        let (wanted, cancelled) = (chain(0, 12), CancellationToken::new());
        let info = RequestInfo::default();
        let following = pair.reader.follow(asked(&wanted, info, PATIENCE), &cancelled);
        let gone = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            cancelled.cancel();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(pair.tasks.iter().all(AbortHandle::is_finished), "the holder still waits");
        };
        let Pulled { blocks, .. } = tokio::join!(following, gone).0.unwrap();
        assert_eq!(blocks, 0);
        pair.heals().await;
    });
}

#[test]
fn new_weights_at_the_peer_are_told_at_once() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 12);
        pair.there.compute(&wanted[..2]);
        let before = Instant::now();
        let meanwhile = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            pair.there.reset_again(None);
        };
        let Pulled { blocks, fault, .. } = follow(&pair, &wanted, meanwhile).await;
        assert_eq!(blocks, 2);
        assert!(fault.unwrap().contains("different epochs"));
        assert!(before.elapsed() < PATIENCE / 2);
        pair.heals().await;
    });
}

#[test]
fn what_is_leased_to_others_is_waited_for() {
    simulated(async {
        let mut pair = pair().await;
        let (others, wanted) = (chain(3, 12), chain(0, 6));
        pair.there.compute(&others);
        pair.there.compute(&wanted);
        // All that may be leased at a time.
        let all = pair.leased.take(usize::MAX);
        let meanwhile = async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(all);
        };
        let Pulled { blocks, copied, fault, .. } = follow(&pair, &wanted, meanwhile).await;
        assert_eq!((blocks, copied, fault), (6, 6, None));
        pair.heals().await;
    });
}

#[test]
fn without_patience_it_brings_what_is_there() {
    simulated(async {
        let mut pair = pair().await;
        let wanted = chain(0, 12);
        pair.there.compute(&wanted[..5]);
        let (never, before) = (CancellationToken::new(), Instant::now());
        let (reader, info) = (&pair.reader, RequestInfo::default());
        let taken = reader.follow(asked(&wanted, info, Duration::ZERO), &never).await.unwrap();
        assert_eq!((taken.blocks, taken.fault, before.elapsed()), (5, None, Duration::ZERO));
        pair.heals().await;
    });
}
