//! Workers of a hybrid model that read each other: what one could load from its own tiers, the other
//! can, once it has pulled.

use kvbm::NewEpoch;
use kvbm_settings::PeerNixl;
use kvbm_tests::engine::{address, peer_name};
use kvbm_tests::rig::has_nixl;
use kvbm_tiers::testing::main_key;

use super::*;

const UNUSED_PORT: &str = "127.0.0.1:1";

fn worker(window: usize, reads_at: &str, set: impl FnOnce(&mut Settings)) -> Engine {
    let mut settings = with_checkpoints();
    engine::add_peers(&mut settings, reads_at);
    settings.peers.lease_ttl_ms = 2_000;
    // All of a tier of 64 blocks, of which full attention has a part.
    settings.peers.lease_share = 1.0;
    set(&mut settings);
    Engine::opened(window, settings, engine::model(engine::fingerprint("1")))
}

struct Pair {
    there: Engine,
    here: Engine,
    peer: String,
}

impl Pair {
    fn open(window: usize) -> Self {
        Self::set(window, |_| ())
    }

    fn set(window: usize, set: fn(&mut Settings)) -> Self {
        let there = worker(window, UNUSED_PORT, set);
        let at = address(&there.manager);
        Self { there, here: worker(window, &at, set), peer: peer_name(&at) }
    }

    fn at_peer(&self, chain: &[BlockHash]) -> kvbm::PeerLease {
        let peers = self.here.manager.peers().unwrap();
        peers.lease(&self.peer, chain, RequestInfo::default()).wait().unwrap()
    }

    fn pull(&self, lease: kvbm::PeerLease) -> kvbm::Pulled {
        self.here.manager.peers().unwrap().pull(lease).wait().unwrap()
    }

    /// What is there is here then, and right.
    #[track_caller]
    fn assert_reads(&self, chain: &[BlockHash]) {
        let there = self.there.lease(chain).usable();
        let lease = self.at_peer(chain);
        assert_eq!(lease.blocks(), there);
        let pulled = self.pull(lease);
        assert_eq!((pulled.fault.as_deref(), pulled.lease.usable()), (None, there));
        let loaded = self.here.load(pulled.lease);
        assert!(loaded.is_whole && loaded.usable == there, "{loaded:?}");
        drop(loaded);
        self.here.assert_loads(chain, there);
    }

    #[track_caller]
    fn assert_well(&self) {
        let peers = self.there.manager.peers().unwrap();
        kvbm_tests::rig::wait_until(SOON, "leases are left", || peers.leased() == 0);
        self.there.assert_well();
        self.here.assert_well();
    }
}

#[test]
fn every_group_comes_from_a_neighbours_memory() {
    every_group_comes("shared_memory", |_| ());
}

#[test]
fn every_group_comes_over_connections() {
    every_group_comes("tcp", |settings| {
        settings.peers.shared_memory = false;
        settings.peers.nixl = PeerNixl::Off;
    });
}

#[test]
fn every_group_comes_by_nixl() {
    if has_nixl() {
        every_group_comes("nixl", |settings| {
            settings.peers.shared_memory = false;
            settings.peers.nixl = PeerNixl::Required;
        });
    }
}

fn every_group_comes(way: &str, set: fn(&mut Settings)) {
    for window in [1, 3, 4, 6, 11] {
        let pair = Pair::set(window, set);
        let all = chain(1, 18);
        pair.there.prefill(&all, 4);
        // On the grid, behind it, and at the end.
        for blocks in [3, 5, 11, 17, 18] {
            pair.assert_reads(&all[..blocks]);
        }
        let longer: Vec<_> = all.iter().copied().chain(chain(2, 9)).collect();
        pair.assert_reads(&longer);
        pair.assert_well();
        let received = |labels: &[(&str, &str)]| {
            let labels = [&[("direction", "received")], labels].concat();
            metric(&pair.here.registry, "kvbm_peer_blocks_total", &labels)
        };
        assert!(received(&[]) > 18, "blocks of all groups");
        assert_eq!(received(&[]), received(&[("way", way)]));
    }
}

#[test]
fn checkpoints_come_for_blocks_that_are_here_without_them() {
    let pair = Pair::open(6);
    let all = chain(1, 16);
    pair.there.prefill(&all, 4);
    pair.assert_reads(&all);
    for group in [1, 2] {
        let of_group = pair.here.resident(Tier::Host)[usize::from(group)] as usize;
        assert_eq!(pair.here.manager.admin().evict_of(group, Tier::Host, of_group), of_group);
        assert_eq!(pair.here.lease(&all).usable(), 0);
        pair.assert_reads(&all);
    }
    pair.assert_well();
}

#[test]
fn a_checkpoint_that_a_peer_lacks_shortens_what_it_leases() {
    let pair = Pair::open(6);
    let all = chain(1, 20);
    // One chunk: but for its end, the engine had no state.
    pair.there.prefill(&all, 20);
    assert_eq!(pair.at_peer(&all[..19]).only_there(), 0);
    pair.assert_reads(&all);
    let other = chain(2, 20);
    pair.there.prefill(&other[..16], 4);
    pair.assert_reads(&other);
    assert_eq!(pair.at_peer(&other).blocks(), 16);
    // All states leave that may, while it is leased.
    let last = chain(3, 8);
    pair.there.prefill(&last, 4);
    let lease = pair.at_peer(&last);
    assert_eq!(lease.blocks(), 8);
    let states = pair.there.resident(Tier::Host)[STATE] as usize;
    assert!(pair.there.manager.admin().evict_of(2, Tier::Host, states) < states);
    assert_eq!(pair.pull(lease).lease.usable(), 8, "what is leased stays");
    pair.here.assert_loads(&last, 8);
    pair.assert_well();
}

#[test]
fn a_reset_amid_a_pull_leaves_every_group_right() {
    let pair = Pair::open(6);
    for number in 1..4 {
        let all = chain(number, 16);
        pair.there.prefill(&all, 4);
        let lease = pair.at_peer(&all);
        let first = if number % 2 == 0 { &pair.here } else { &pair.there };
        first.manager.reset(NewEpoch::of_weights(number.into(), "new")).unwrap();
        let peers = pair.here.manager.peers().unwrap();
        if let Ok(pulled) = peers.pull(lease).wait() {
            let usable = pulled.lease.usable();
            drop(pulled);
            pair.here.assert_loads(&all, usable);
        }
        for engine in [&pair.there, &pair.here] {
            if engine.manager.admin().epoch() < number.into() {
                engine.manager.reset(NewEpoch::of_weights(number.into(), "new")).unwrap();
            }
        }
        pair.there.prefill(&all, 4);
        pair.assert_reads(&all);
    }
    pair.assert_well();
}

#[test]
fn other_cache_groups_are_refused_and_named() {
    let there = worker(3, UNUSED_PORT, |_| ());
    let all = chain(1, 8);
    there.prefill(&all, 4);
    let at = address(&there.manager);
    let name = peer_name(&at);
    let said = |here: &Engine| {
        let peers = here.manager.peers().unwrap();
        peers.lease(&name, &all, RequestInfo::default()).wait().unwrap_err().to_string()
    };
    let other_window = said(&worker(4, &at, |_| ()));
    for part in ["list of cache groups is", "sliding: window of 3", "sliding: window of 4"] {
        assert!(other_window.contains(part), "{other_window}");
    }
    let other_grid = said(&worker(3, &at, |settings| settings.hybrid.checkpoint_blocks = 8));
    assert!(other_grid.contains("a checkpoint every 8 blocks"), "{other_grid}");
}

#[test]
fn loading_all_groups_from_a_peer_says_what_to_do() {
    let pair = Pair::open(3);
    let all = chain(1, 8);
    pair.there.prefill(&all, 4);
    let slots: Vec<_> = (0..8).map(SlotId).collect();
    let named = [GroupSlots::full(0, &slots)];
    let loading = pair.here.manager.load_into(pair.at_peer(&all), &named, &Fence::Done);
    let error = loading.wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("Peers::pull"), "{error}");
    pair.assert_reads(&all);
    pair.assert_well();
}

/// A pull may take longer than a lease lasts without a read, and connections are few.
#[test]
fn checkpoints_are_leased_behind_blocks_over_one_connection_a_group() {
    let pair = Pair::open(11);
    let all = chain(1, 18);
    pair.there.prefill(&all, 4);
    let there = |what: fn(&kvbm::PeerState) -> usize| {
        let peers = pair.there.manager.admin().state().peers.unwrap().peers;
        peers.iter().map(what).sum::<usize>()
    };
    let open_leases = || {
        let sent = [("direction", "sent")];
        kvbm_tests::rig::metric(&pair.there.registry, "kvbm_peer_open_leases", &sent)
    };
    let lease = pair.at_peer(&all);
    assert_eq!((there(|peer| peer.readers), open_leases()), (1, 1));
    drop(pair.pull(lease));
    assert_eq!(there(|peer| peer.readers), 3);
    pair.assert_reads(&all);
    pair.assert_well();
}

#[test]
fn what_leases_keep_of_checkpoints_counts_once_in_their_share() {
    let pair = Pair::open(6);
    let all = chain(1, 16);
    pair.there.prefill(&all, 4);
    let leased = || pair.there.manager.peers().unwrap().leased();
    // Of the window the last checkpoint and the one before, of the state one.
    let checkpoints = 2 * EVERY + 1;
    let lease = pair.at_peer(&all);
    assert_eq!(leased(), 16 + checkpoints);
    let again = pair.at_peer(&all);
    assert_eq!(leased(), 32 + checkpoints);
    drop(again);
    assert_eq!(pair.pull(lease).lease.usable(), 16);
    pair.assert_well();
}

#[test]
fn a_group_whose_share_is_leased_gives_no_more() {
    let states = |settings: &mut Settings| settings.peers.lease_share = 0.1;
    let there = worker(3, UNUSED_PORT, states);
    let at = address(&there.manager);
    let pair = Pair { there, here: worker(3, &at, |_| ()), peer: peer_name(&at) };
    let chains = [1, 2, 3, 4, 5, 6, 7, 8].map(|n| chain(n, 1));
    chains.iter().for_each(|chain| pair.there.prefill(chain, 1));
    let peers = pair.here.manager.peers().unwrap();
    let lease = |chain: &[BlockHash]| peers.lease(&pair.peer, chain, RequestInfo::default()).wait();
    let mut leases = Vec::new();
    let refused = chains.iter().find_map(|chain| match lease(chain) {
        Ok(lease) => {
            leases.push(lease);
            None
        }
        Err(error) => Some((chain, error)),
    });
    let (chain, error) = refused.expect("there is no share");
    assert_eq!(error.kind(), ErrorKind::Full);
    let slots = |group| pair.there.manager.admin().counts_of(group, Tier::Host).total;
    assert_eq!(leases.len(), slots(2) as usize / 10, "of states");
    assert!(slots(0) > slots(2));
    drop(leases);
    kvbm_tests::rig::wait_until(SOON, "leases are left", || {
        pair.there.manager.peers().unwrap().leased() == 0
    });
    pair.assert_reads(chain);
    pair.assert_well();
}

#[test]
fn no_checkpoint_comes_for_blocks_that_find_no_room() {
    let pair = Pair::open(6);
    let all = chain(1, 16);
    pair.there.prefill(&all, 4);
    // All that is here is read.
    let slots = pair.here.manager.admin().counts_of(0, Tier::Host).total;
    let own = chain(2, slots - 3);
    drop(pair.here.save(&own, 0..own.len(), true));
    let held = pair.here.lease(&own);
    let pulled = pair.pull(pair.at_peer(&all));
    assert!(pulled.blocks < 16, "{pulled:?}");
    let came = [("direction", "received")];
    let came = kvbm_tests::rig::metric(&pair.here.registry, "kvbm_peer_blocks_total", &came);
    assert_eq!(came, pulled.copied as u64);
    drop((held, pulled));
    pair.assert_reads(&all);
    pair.assert_well();
}

#[test]
fn encrypted_groups_read_each_other() {
    let Some(home) = kvbm_tests::kept::shm() else { return };
    let sealed = |name: &str| {
        let place = home.path().join(name);
        move |settings: &mut Settings| {
            settings.host.persist = Some(place);
            settings.encryption.key = Some(main_key(1, "0123456789abcdef"));
        }
    };
    let there = worker(6, UNUSED_PORT, sealed("there"));
    let at = address(&there.manager);
    let pair = Pair { there, here: worker(6, &at, sealed("here")), peer: peer_name(&at) };
    let all = chain(1, 16);
    pair.there.prefill(&all, 4);
    pair.assert_reads(&all);
    pair.assert_well();
}
