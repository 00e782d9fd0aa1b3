//! What a call costs: as much as it changes, not as much as a chain is long or the table is large.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm::scheduler::Core;
use kvbm::table::Unflushed;
use kvbm::{BlockHash, Chain, RequestInfo, Tier};
use kvbm_tests::rig::{MEMORY, Sizes, TIGHT, bare_core, hash, seed};
use kvbm_tiers::testing::ParkedBackend;

fn core(slots: u32) -> Arc<Core> {
    let parked =
        Arc::new(ParkedBackend::new(Vec::new(), MEMORY.to_vec()).expect("no regions, no conflict"));
    let sizes = Sizes { tiers: [1, slots, 1, 1], staging: 0 };
    bare_core(sizes, TIGHT, &(parked as _))
}

/// The median time of a lease and its release.
fn time_of_a_lease(core: &Arc<Core>, chain: &[BlockHash]) -> Duration {
    let mut times: Vec<_> = (0..400)
        .map(|_| {
            let start = Instant::now();
            drop(core.lease(Chain::from(chain), RequestInfo::default()));
            let time = start.elapsed();
            // What the background thread does between leases; here nothing else is due.
            core.estimated_hit_rate(1);
            time
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn leasing_a_long_chain_takes_no_pass_over_it() {
    let chains = [64, 8_192, 65_536].map(|blocks: u32| {
        let first = 100_000 * blocks.ilog2();
        (first..first + blocks).map(hash).collect::<Vec<_>>()
    });
    let core = core(80_000);
    let times = chains.each_ref().map(|chain| {
        seed(&core, Tier::Host, Chain::from(&chain[..]));
        assert_eq!(core.matches(Chain::from(&chain[..])).longest(), chain.len());
        time_of_a_lease(&core, chain)
    });
    eprintln!("lease and release of 64, 8,192 and 65,536 blocks: {times:?}");
    // A pass takes a millisecond for the last one.
    assert!(times[2] < 40 * times[0].max(Duration::from_micros(5)), "{times:?}");
}

/// How long the table is locked for a reset, at best: of `blocks` dirty blocks in one tier.
fn time_of_a_reset(blocks: u32) -> Duration {
    let core = core(blocks);
    let chain: Vec<_> = (1..=blocks).map(hash).collect();
    let times = (1..4).map(|epoch| {
        seed(&core, Tier::Host, Chain::from(&chain));
        let mut table = core.table();
        let start = Instant::now();
        let effects = table.reset(epoch).expect("a greater epoch");
        let time = start.elapsed();
        drop(table);
        assert_eq!(effects.unflushed.iter().map(Unflushed::blocks).sum::<usize>(), chain.len());
        assert_eq!(core.table().counts(Tier::Host).forgotten, blocks);
        time
    });
    times.min().expect("three times")
}

#[test]
fn a_reset_takes_no_pass_over_the_table() {
    let times = [64, 400_000].map(time_of_a_reset);
    eprintln!("reset of 64 and of 400,000 blocks: {times:?}");
    // A pass takes milliseconds for the last one.
    assert!(times[1] < 40 * times[0].max(Duration::from_micros(5)), "{times:?}");
}

#[test]
fn background_work_has_memory_ready_before_the_table_needs_it() {
    let core = core(1_000);
    let chain: Vec<_> = (1..1_000).map(hash).collect();
    seed(&core, Tier::Host, Chain::from(&chain[..]));
    let wants_more = || core.table().wanted_memory().provide().is_some();
    assert!(wants_more(), "the index has room for a few more");
    core.tick();
    assert!(!wants_more(), "the array into which it grows next is there");
}
