//! An engine loads what a peer holds into its own slots: every byte is right, and what does not come
//! is a miss.

mod gpu;

use std::fs::{self, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvbm::{
    BlockHash, EngineMemory, ErrorKind, Fence, FollowRequest, GroupSlots, KvPlace, Loaded, Manager,
    NewEpoch, Options, PeerLease, RequestInfo, Result, SaveRequest, SlotId, Tier, Transfer,
};
use kvbm_settings::{PeerNixl, Settings};
use kvbm_tests::engine::{
    add_peers, assert_sound, fingerprint, model, open_with, peer_name, without_device,
};
use kvbm_tests::rig::{chain, metric, number_of, wait_until};
use kvbm_tests::slots::{load_slots, save_slots};
use kvbm_tiers::testing::{TensorView, Tensors, fill_pattern, has_pattern};
use prometheus::Registry;

/// So large that a prompt comes in several parts.
const BLOCK: usize = 1 << 20;
const SLOTS: u32 = 40;
const LAYERS: u16 = 4;
/// What ends with an event, on a busy machine.
const LIMIT: Duration = Duration::from_mins(1);

struct Worker {
    manager: Manager,
    registry: Registry,
    memory: TensorView,
}

fn settings(peers: &str) -> Settings {
    let mut settings = without_device(BLOCK as u64, SLOTS.into());
    add_peers(&mut settings, peers);
    settings.peers.nixl = PeerNixl::Off;
    settings.peers.lease_share = 1.0;
    settings
}

impl Worker {
    fn new(port: u16, peer: Option<SocketAddr>, shared_memory: bool) -> Self {
        let mut settings = settings(&peer.map_or_else(String::new, |address| address.to_string()));
        settings.peers.port = port;
        settings.peers.shared_memory = shared_memory;
        let (region, memory) = Tensors::new(SLOTS, BLOCK, 2 * usize::from(LAYERS)).shared();
        let engine = EngineMemory::new(region, LAYERS).expect("layers of one size");
        let options = Options { engine: Some(engine), ..model(fingerprint("some")) };
        let registry = options.registry.clone();
        Self { manager: open_with(settings, options).expect("it opens"), registry, memory }
    }

    fn address(&self) -> SocketAddr {
        self.manager.peers().expect("it has peers").address()
    }

    /// Computes and saves a chain, once there is room: other bytes with other weights.
    fn compute(&self, chain: &[BlockHash], weights: usize) {
        wait_until(LIMIT, "old blocks keep their slots", || {
            self.manager.admin().counts(Tier::Host).free as usize >= chain.len()
        });
        let slots: Vec<_> = (0..chain.len() as u32).map(SlotId).collect();
        self.fill(chain, &slots, weights);
        let saved = save_slots(&self.manager, chain, 0, &slots, Fence::Done).wait();
        assert_eq!(saved.expect("the manager is open").blocks, chain.len());
    }

    fn fill(&self, chain: &[BlockHash], slots: &[SlotId], weights: usize) {
        for (&hash, &slot) in chain.iter().zip(slots) {
            let mut block = vec![0; BLOCK];
            fill_pattern(pattern(hash, weights), &mut block);
            self.memory.write(slot, &block);
        }
    }

    fn lease(&self, peer: SocketAddr, chain: &[BlockHash]) -> Result<PeerLease> {
        lease_at(peer, &self.manager, chain)
    }

    /// Loads `chain` into the last slots, and checks what arrived.
    fn load(&self, lease: PeerLease, chain: &[BlockHash], weights: usize) -> Loaded {
        let slots = last_slots(chain.len());
        let named = [GroupSlots::full(0, &slots)];
        self.check(self.manager.load_into(lease, &named, &Fence::Done), chain, weights)
    }

    /// Brings `chain` into the last slots, as it comes to be at the peer.
    fn follow(&self, peer: SocketAddr, chain: &[BlockHash]) -> Transfer<Loaded> {
        let slots = last_slots(chain.len());
        let named = [GroupSlots::full(0, &slots)];
        let name = peer_name(&peer.to_string());
        let asked = FollowRequest { patience: LIMIT, ..FollowRequest::new(&name, chain) };
        self.manager.follow_into(asked, &named, &Fence::Done)
    }

    /// Waits until this number of blocks has come from peers.
    fn wait_for(&self, blocks: u64) {
        wait_until(LIMIT, "blocks do not come", || self.received() == blocks);
    }

    fn received(&self) -> u64 {
        let by = |way| [("direction", "received"), ("way", way)];
        let came = |way| metric(&self.registry, "kvbm_peer_blocks_total", &by(way));
        came("shared_memory") + came("tcp")
    }

    fn check(&self, load: Transfer<Loaded>, chain: &[BlockHash], weights: usize) -> Loaded {
        let slots = last_slots(chain.len());
        let loaded = load.wait().expect("the manager is open");
        for (&hash, &slot) in chain.iter().zip(&slots).take(loaded.arrived) {
            let block = self.memory.read(slot);
            assert!(has_pattern(pattern(hash, weights), &block), "a wrong block in {slot:?}");
        }
        loaded
    }
}

fn lease_at(peer: SocketAddr, manager: &Manager, chain: &[BlockHash]) -> Result<PeerLease> {
    let peers = manager.peers().expect("it has peers");
    peers.lease(&peer_name(&peer.to_string()), chain, RequestInfo::default()).wait()
}

/// Flips a bit of a block where it lies in a host tier, without its worker.
fn spoil(hash: BlockHash, weights: usize) {
    let memory =
        OpenOptions::new().read(true).write(true).open("/proc/self/mem").expect("it is ours");
    let maps = fs::read_to_string("/proc/self/maps").expect("it can be read");
    let mut block = vec![0; BLOCK];
    for map in maps.lines().filter(|map| map.contains(" rw-s ") && map.contains("/memfd:")) {
        let range = map.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let [start, end] = [range.0, range.1].map(|at| u64::from_str_radix(at, 16).expect("hex"));
        for start in (start..end).step_by(BLOCK) {
            let is_read = memory.read_exact_at(&mut block, start).is_ok();
            if is_read && has_pattern(pattern(hash, weights), &block) {
                let at = BLOCK / 3;
                let flipped = [block[at] ^ 4];
                return memory.write_all_at(&flipped, start + at as u64).expect("it is ours");
            }
        }
    }
    panic!("it lies in no host tier");
}

fn pattern(hash: BlockHash, weights: usize) -> usize {
    number_of(hash) + (weights << 16)
}

fn last_slots(blocks: usize) -> Vec<SlotId> {
    (SLOTS - blocks as u32..SLOTS).map(SlotId).collect()
}

#[test]
fn an_engine_loads_what_a_peer_holds_into_its_slots() {
    for shared_memory in [true, false] {
        let there = Worker::new(0, None, shared_memory);
        let here = Worker::new(0, Some(there.address()), shared_memory);
        let prompt = chain(1, 36);
        there.compute(&prompt, 0);
        here.compute(&prompt[..5], 0);
        let lease = here.lease(there.address(), &prompt).expect("it is there");
        assert_eq!((lease.blocks(), lease.only_there()), (36, 31));
        let loaded = here.load(lease, &prompt, 0);
        assert_eq!((loaded.arrived, loaded.failed, loaded.is_whole), (36, 0, true));
        let in_host = if shared_memory { 5 } else { 36 };
        assert_eq!((loaded.lease.blocks(Tier::Host), loaded.usable), (in_host, 36));
        assert!(loaded.writers.are_gone());
        drop(loaded);
        drop(there);
        // What came straight the engine saves; from then on it is here.
        let slots = last_slots(36);
        let saved = save_slots(&here.manager, &prompt[..], 0, &slots, Fence::Done).wait();
        assert_eq!(saved.expect("the manager is open").copied, 36 - in_host);
        here.memory.write(slots[35], &vec![0; BLOCK]);
        let again = load_slots(&here.manager, here.manager.lease(&prompt), 0, &slots, &Fence::Done);
        assert!(here.check(again, &prompt, 0).is_whole);
        assert_sound(&here.manager);
    }
}

#[test]
fn blocks_that_the_engine_has_do_not_come_again() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let prompt = chain(1, 24);
    there.compute(&prompt, 0);
    here.compute(&prompt[..3], 0);
    let lease = here.lease(there.address(), &prompt).expect("it is there");
    let slots = last_slots(16);
    let loaded = here.manager.load_into(lease, &[GroupSlots::full(8, &slots)], &Fence::Done);
    let loaded = here.check(loaded, &prompt[8..], 0);
    assert_eq!((loaded.arrived, loaded.usable, here.received()), (16, 24, 16));
    assert_sound(&here.manager);
}

#[test]
fn what_a_neighbour_overwrote_is_a_miss_until_it_heals() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let (prompt, other) = (chain(1, 36), chain(2, 36));
    there.compute(&prompt, 0);
    here.compute(&prompt[..5], 0);
    let lease = here.lease(there.address(), &prompt).expect("it is there");
    spoil(prompt[20], 0);
    let loaded = here.load(lease, &prompt, 0);
    assert_eq!((loaded.arrived, loaded.failed, loaded.is_whole), (20, 16, false));
    assert!(loaded.writers.are_gone());
    let fault = loaded.fault.expect("it says why");
    assert!(fault.contains("checksum"), "{fault}");
    there.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    there.compute(&other, 1);
    here.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    assert!(here.check(here.follow(there.address(), &other), &other, 1).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn a_neighbour_that_died_gives_what_it_leased() {
    let there = Worker::new(0, None, true);
    let address = there.address();
    let here = Worker::new(0, Some(address), true);
    let (prompt, other) = (chain(1, 36), chain(2, 36));
    there.compute(&prompt, 0);
    let lease = here.lease(address, &prompt).expect("it is there");
    drop(there);
    assert!(here.load(lease, &prompt, 0).is_whole, "its memory stays while it is mapped");
    assert!(here.lease(address, &other).is_err());
    // Another one comes.
    let there = Worker::new(address.port(), None, true);
    there.compute(&other, 0);
    assert!(here.check(here.follow(address, &other), &other, 0).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn a_reset_amid_a_load_ends_it() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let prompt = chain(1, 24);
    there.compute(&prompt[..16], 0);
    let load = here.follow(there.address(), &prompt);
    here.wait_for(16);
    here.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    there.compute(&prompt, 0);
    let loaded = here.check(load, &prompt, 0);
    assert_eq!((loaded.arrived, loaded.is_whole, loaded.fault.is_some()), (16, false, true));
    drop(loaded);
    there.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    there.compute(&prompt, 1);
    assert!(here.check(here.follow(there.address(), &prompt), &prompt, 1).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn what_a_peer_refuses_is_a_miss_until_it_heals() {
    let there = Worker::new(0, None, false);
    let address = there.address();
    let here = Worker::new(0, Some(address), false);
    let prompt = chain(1, 36);
    there.compute(&prompt, 0);
    here.compute(&prompt[..5], 0);
    // New weights: nothing of it may come.
    let lease = here.lease(address, &prompt).expect("it is there");
    there.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    let loaded = here.load(lease, &prompt, 0);
    assert_eq!((loaded.arrived, loaded.failed, loaded.usable), (5, 31, 5));
    drop(loaded);
    there.compute(&prompt, 1);
    here.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    let lease = here.lease(address, &prompt).expect("it is there");
    assert!(here.load(lease, &prompt, 1).is_whole);
    // It goes.
    let other = chain(2, 36);
    here.manager.admin().evict(Tier::Host, SLOTS as usize);
    there.manager.admin().evict(Tier::Host, SLOTS as usize);
    there.compute(&other, 1);
    let lease = here.lease(address, &other).expect("it is there");
    drop(there);
    assert_eq!(here.load(lease, &other, 1).arrived, 0);
    // Another one comes.
    let there = Worker::new(address.port(), None, false);
    there.manager.reset(NewEpoch::of_weights(1, "new")).expect("a greater number");
    there.compute(&other, 1);
    let lease = here.lease(address, &other).expect("it is there");
    assert!(here.load(lease, &other, 1).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn what_a_peer_computes_goes_into_slots_as_it_lands() {
    for shared_memory in [true, false] {
        let there = Worker::new(0, None, shared_memory);
        let here = Worker::new(0, Some(there.address()), shared_memory);
        let prompt = chain(1, 24);
        there.compute(&prompt[..16], 0);
        let mut load = here.follow(there.address(), &prompt);
        here.wait_for(16);
        assert!(load.try_take().is_none(), "the rest is waited for");
        there.compute(&prompt, 0);
        let loaded = here.check(load, &prompt, 0);
        assert_eq!((loaded.arrived, loaded.is_whole, loaded.fault), (24, true, None));
        assert!(loaded.writers.are_gone());
        assert_sound(&here.manager);
    }
}

#[test]
fn layers_go_into_slots_and_travel_once() {
    for (shared_memory, way) in [(true, "shared_memory"), (false, "tcp")] {
        let there = Worker::new(0, None, shared_memory);
        let here = Worker::new(0, Some(there.address()), shared_memory);
        let prompt = chain(1, 24);
        let slots: Vec<_> = (0..24).map(SlotId).collect();
        there.fill(&prompt, &slots, 0);
        let named = [GroupSlots::full(0, &slots)];
        let save = SaveRequest::of(&prompt, &named);
        let mut saving = there.manager.save_in_layers(&save).expect("there is room");
        let load = here.follow(there.address(), &prompt);
        wait_until(LIMIT, "it does not follow", || {
            here.manager.admin().counts(Tier::Host).filling == 24
        });
        for _layer in 0..LAYERS {
            saving.layer_is_ready().expect("it is in memory");
        }
        assert_eq!(saving.finish().expect("all layers are written"), 24);
        assert!(here.check(load, &prompt, 0).is_whole);
        let labels = [("direction", "received"), ("way", way)];
        assert_eq!(metric(&here.registry, "kvbm_peer_blocks_total", &labels), 24);
        let labels = [("direction", "sent"), ("way", "tcp")];
        let sent = metric(&there.registry, "kvbm_peer_blocks_total", &labels);
        assert_eq!(sent, if shared_memory { 0 } else { 24 });
        assert_sound(&here.manager);
    }
}

#[test]
fn layers_come_behind_what_came_straight() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let prompt = chain(1, 24);
    there.compute(&prompt[..8], 0);
    let load = here.follow(there.address(), &prompt);
    here.wait_for(8);
    let slots: Vec<_> = (0..24).map(SlotId).collect();
    there.fill(&prompt, &slots, 0);
    let named = [GroupSlots::full(0, &slots)];
    let save = SaveRequest::of(&prompt, &named);
    let mut saving = there.manager.save_in_layers(&save).expect("there is room");
    // They pass the host tier, which gets what is before them.
    wait_until(LIMIT, "it does not follow", || {
        here.manager.admin().counts(Tier::Host).filling == 16
    });
    for _layer in 0..LAYERS {
        saving.layer_is_ready().expect("it is in memory");
    }
    assert_eq!(saving.finish().expect("all layers are written"), 24);
    assert!(here.check(load, &prompt, 0).is_whole);
    assert_eq!(here.received(), 8 + 24);
    assert_sound(&here.manager);
}

#[test]
fn a_load_that_follows_is_cancelled_and_gives_all_back() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let prompt = chain(1, 24);
    there.compute(&prompt[..16], 0);
    let mut load = here.follow(there.address(), &prompt);
    here.wait_for(16);
    load.cancel();
    let loaded = here.check(load, &prompt, 0);
    assert_eq!((loaded.arrived + loaded.failed, loaded.is_whole), (24, false));
    assert!(loaded.arrived == 16 && loaded.writers.are_gone());
    drop(loaded);
    assert_sound(&here.manager);
    there.compute(&prompt, 0);
    assert!(here.check(here.follow(there.address(), &prompt), &prompt, 0).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn what_is_here_is_loaded_though_the_peer_is_gone() {
    let there = Worker::new(0, None, false);
    let address = there.address();
    let here = Worker::new(0, Some(address), false);
    let prompt = chain(1, 24);
    here.compute(&prompt[..5], 0);
    drop(there);
    let loaded = here.check(here.follow(address, &prompt), &prompt, 0);
    assert_eq!((loaded.arrived, loaded.failed, loaded.usable), (5, 19, 5));
    assert!(loaded.fault.expect("it says why").contains("gives no lease"));
    // Another one comes.
    let there = Worker::new(address.port(), None, false);
    there.compute(&prompt, 0);
    assert!(here.check(here.follow(address, &prompt), &prompt, 0).is_whole);
    assert_sound(&here.manager);
}

#[test]
fn a_senseless_load_from_a_peer_is_refused() {
    let there = Worker::new(0, None, true);
    let here = Worker::new(0, Some(there.address()), true);
    let prompt = chain(1, 2);
    there.compute(&prompt, 0);
    for slots in [[SlotId(0), SlotId(SLOTS)], [SlotId(3), SlotId(3)]] {
        let lease = here.lease(there.address(), &prompt).expect("it is there");
        let named = [GroupSlots::full(0, &slots)];
        let refused = here.manager.load_into(lease, &named, &Fence::Done).wait().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let asked = FollowRequest::new("unlisted", &prompt);
        let refused = here.manager.follow_into(asked, &named, &Fence::Done);
        assert_eq!(refused.wait().unwrap_err().kind(), ErrorKind::Invalid);
    }
    let lease = here.lease(there.address(), &prompt).expect("it is there");
    let named = [GroupSlots::full(0, &[SlotId(0), SlotId(1)])];
    let refused = there.manager.load_into(lease, &named, &Fence::Done).wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "the lease is another manager's");
    assert_sound(&there.manager);
    assert_sound(&here.manager);
}

#[test]
fn one_call_moves_blocks_and_calls_back() {
    let there = Worker::new(0, None, false);
    let here = Worker::new(0, Some(there.address()), false);
    let prompt = chain(1, 36);
    there.compute(&prompt, 0);
    let peer = peer_name(&there.address().to_string());
    let slots = last_slots(36);
    let moved = |source: KvPlace<'_>, destination: KvPlace<'_>| {
        let (tell, told) = channel();
        let on_done = move |moved| tell.send(moved).expect("it is waited for");
        let transfer = here.manager.transfer_kv_cache(source, destination, &prompt, on_done);
        let moved = told.recv().expect("it calls back");
        (transfer.expect("there is a thread").arrived(), moved.map(|moved| moved.blocks))
    };
    let (arrived, all) = moved(KvPlace::Peer(&peer), KvPlace::Slots(&slots));
    assert_eq!((arrived, all.expect("it is there")), (36, 36));
    for (&hash, &slot) in prompt.iter().zip(&slots) {
        assert!(has_pattern(pattern(hash, 0), &here.memory.read(slot)));
    }
    for (source, destination) in [
        (KvPlace::Tiers, KvPlace::Slots(&slots)),
        (KvPlace::Slots(&slots), KvPlace::Tiers),
        (KvPlace::Peer(&peer), KvPlace::Tiers),
    ] {
        assert_eq!(moved(source, destination).1.expect("it is there"), 36);
    }
    for (source, destination) in [
        (KvPlace::Tiers, KvPlace::Tiers),
        (KvPlace::Tiers, KvPlace::Peer(&peer)),
        (KvPlace::Peer("unlisted"), KvPlace::Tiers),
    ] {
        let (arrived, refused) = moved(source, destination);
        assert_eq!((arrived, refused.unwrap_err().kind()), (0, ErrorKind::Invalid));
    }
}

#[test]
fn a_close_amid_a_load_accounts_for_the_slots() {
    let there = Worker::new(0, None, false);
    let prompt = chain(1, 36);
    there.compute(&prompt, 0);
    let slots = last_slots(36);
    // At other points each time: a pull takes some 20 ms.
    for ms in 0..8 {
        let here = Worker::new(0, Some(there.address()), false);
        let lease = here.lease(there.address(), &prompt).expect("it is there");
        let load = here.manager.load_into(lease, &[GroupSlots::full(0, &slots)], &Fence::Done);
        std::thread::sleep(Duration::from_millis(4 * ms));
        assert_eq!(here.manager.close(LIMIT).copies_left, 0);
        // Some of them may have been written: an error would say that none was.
        let loaded = load.wait().expect("it is answered for");
        assert_eq!(loaded.arrived + loaded.failed, 36);
        assert!(loaded.writers.are_gone());
        for (&hash, &slot) in prompt.iter().zip(&slots).take(loaded.arrived) {
            assert!(has_pattern(pattern(hash, 0), &here.memory.read(slot)));
        }
    }
    assert_sound(&there.manager);
}
