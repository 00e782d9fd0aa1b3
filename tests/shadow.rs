//! Shadow verification: an engine computes some of its hits again.

use std::time::Duration;

use kvbm::{BlockHash, Elements, Lease, Manager, ShadowVerdict, Tier};
use kvbm_settings::Settings;
use kvbm_tests::engine;
use kvbm_tests::rig::hash;
use prometheus::Registry;

const BLOCK: usize = 4096;
const BLOCKS: u32 = 6;
const LIMIT: Duration = Duration::from_mins(1);

fn settings(share: f64) -> Settings {
    let mut settings = engine::settings(BLOCK as u64, 8, 2_000);
    settings.transfer.shadow_share = share;
    settings
}

fn open(share: f64) -> Manager {
    engine::open(settings(share), &Registry::new()).unwrap()
}

fn chain(number: u32) -> Vec<BlockHash> {
    (0..BLOCKS).map(|block| hash(1_000 * number + block)).collect()
}

/// The keys and values of a block, as chunks of some size give them.
fn computed(seed: u32, noise: f32) -> Vec<u8> {
    let value = |at: u32| ((at * 7 + seed * 13) as f32 * 0.61).sin() * (1.0 + noise * (at % 3) as f32);
    (0..BLOCK as u32 / 4).flat_map(|at| value(at).to_le_bytes()).collect()
}

/// An engine that takes `wrong` blocks for those of the same name of the next chain: it hashes too little.
fn fill(manager: &Manager, number: u32, wrong: &[usize]) {
    let chain = chain(number);
    let mut allocation = manager.allocate(&chain, manager.lease(&chain)).unwrap();
    for position in allocation.blocks() {
        let seed = 100 * (number + u32::from(wrong.contains(&position))) + position as u32;
        assert!(allocation.fill(position, |block| block.copy_from_slice(&computed(seed, 0.0))));
    }
    let published = allocation.publish().unwrap().wait().unwrap();
    assert_eq!(manager.save(published.lease).wait().unwrap().blocks, BLOCKS as usize);
    manager.evict(Tier::Device, BLOCKS as usize);
}

/// Computes what is sampled of a chain again; returns how many were compared, and which were wrong.
fn verify(manager: &Manager, number: u32, noise: f32) -> (usize, Vec<usize>) {
    let chain = chain(number);
    let lease = manager.lease(&chain);
    let samples = manager.shadow_sample(&lease);
    let loaded: Lease = manager.load(lease).wait().unwrap().lease;
    let mut wrong = Vec::new();
    let held = loaded.blocks(Tier::Device);
    for sample in samples.iter().filter(|sample| sample.position < held) {
        assert_eq!(sample.tier, Tier::Host);
        // Behind a block that was wrong there is nothing any more.
        let Some(served) = manager.read_device(&loaded, &chain, sample.position, <[u8]>::to_vec) else {
            break;
        };
        let again = computed(100 * number + sample.position as u32, noise);
        match manager.shadow_compare(&chain, sample, Elements::F32, (&served, &again)).unwrap() {
            ShadowVerdict::Same => {}
            ShadowVerdict::Wrong { distance } => {
                assert!(distance > 0.1, "{distance}");
                wrong.push(sample.position);
            }
        }
    }
    drop(loaded);
    manager.evict(Tier::Device, BLOCKS as usize);
    (samples.len(), wrong)
}

#[test]
fn what_differs_in_its_lowest_bits_stays() {
    let manager = open(1.0);
    for number in 0..20 {
        fill(&manager, number, &[]);
        assert_eq!(verify(&manager, number, 1e-5), (BLOCKS as usize, vec![]));
        assert_eq!(manager.matches(&chain(number)).blocks(Tier::Host), BLOCKS as usize);
    }
    let counts = manager.shadow_counts(Tier::Host);
    assert_eq!((counts.compared, counts.wrong, counts.is_withdrawn), (120, 0, false));
    assert!((counts.upper_bound() - 0.0247).abs() < 1e-3, "{}", counts.upper_bound());
    assert_eq!(manager.audit(), []);
}

#[test]
fn a_block_that_is_another_s_is_found_out_and_gone() {
    let registry = Registry::new();
    let manager = engine::open(settings(1.0), &registry).unwrap();
    fill(&manager, 1, &[3]);
    fill(&manager, 2, &[]);
    assert_eq!(verify(&manager, 1, 0.0).1, [3]);
    let left = manager.matches(&chain(1));
    assert_eq!((left.blocks(Tier::Host), left.blocks(Tier::Device)), (3, 0), "it and what followed it");
    assert_eq!(manager.matches(&chain(2)).blocks(Tier::Host), BLOCKS as usize);
    assert!(!manager.shadow_counts(Tier::Host).is_withdrawn, "once may be chance");
    let families = registry.gather();
    assert!(families.iter().any(|family| family.name() == "kvbm_shadow_wrong_rate_bound"));
    // And it heals: computed and saved anew, all is served, and right.
    fill_rest(&manager);
    assert_eq!(verify(&manager, 1, 0.0), (BLOCKS as usize, vec![]));
    assert_eq!(manager.audit(), []);
}

/// Saves anew what chain 1 lost.
fn fill_rest(manager: &Manager) {
    let chain = chain(1);
    let loaded = manager.load(manager.lease(&chain)).wait().unwrap().lease;
    let mut allocation = manager.allocate(&chain, loaded).unwrap();
    for position in allocation.blocks() {
        assert!(
            allocation.fill(position, |block| block.copy_from_slice(&computed(100 + position as u32, 0.0)))
        );
    }
    let published = allocation.publish().unwrap().wait().unwrap();
    assert_eq!(manager.save(published.lease).wait().unwrap().blocks, BLOCKS as usize);
    manager.evict(Tier::Device, BLOCKS as usize);
}

#[test]
fn a_tier_that_is_wrong_too_often_gives_nothing_until_a_reset() {
    let manager = open(1.0);
    for number in 0..4 {
        fill(&manager, number * 2, &[0]);
        assert_eq!(verify(&manager, number * 2, 0.0).1.first(), (number < 3).then_some(&0), "{number}");
    }
    assert!(manager.shadow_counts(Tier::Host).is_withdrawn);
    let chain = chain(6);
    assert_eq!(manager.load(manager.lease(&chain)).wait().unwrap().lease.blocks(Tier::Device), 0);
    manager.reset(1).unwrap();
    fill(&manager, 20, &[]);
    assert_eq!(verify(&manager, 20, 1e-5), (BLOCKS as usize, vec![]));
    assert!(!manager.shadow_counts(Tier::Host).is_withdrawn);
    assert!(manager.drain(LIMIT).is_complete());
    assert_eq!(manager.audit(), []);
}

#[test]
fn nothing_is_asked_for_unless_it_is_wanted() {
    let manager = open(0.0);
    fill(&manager, 1, &[]);
    assert_eq!(verify(&manager, 1, 0.0), (0, vec![]));
    let some = open(0.5);
    let asked: usize = (0..20)
        .map(|number| {
            fill(&some, number, &[]);
            verify(&some, number, 0.0).0
        })
        .sum();
    assert!((55..=65).contains(&asked), "{asked} of 120");
}
