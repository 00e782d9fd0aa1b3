//! The GPU that an engine is on reads a neighbour's host tier itself. Each test does nothing but in a
//! child that finds a simulated driver.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use kvbm::{EngineMemory, Fence, GroupSlots, Loaded, Manager, Options, Tier, Transfer};
use kvbm_tests::engine::{assert_sound, fingerprint, model, open_with};
use kvbm_tests::rig::{chain, wait_until};
use kvbm_tiers::Geometry;
use kvbm_tiers::cuda::Gpu;
use kvbm_tiers::testing::has_pattern;

use super::{
    BLOCK, BlockHash, Duration, LIMIT, SLOTS, Worker, last_slots, lease_at, pattern, settings,
    spoil,
};

#[allow(dead_code, reason = "tests of kvbm_tiers ask it for more")]
#[path = "../../tiers/tests/gpu/simulation.rs"]
mod simulation;

/// More than a GPU copies at once.
const BLOCKS: u32 = 20;

/// An engine on a GPU whose memory is the CPU's.
struct GpuWorker {
    manager: Manager,
    /// Where its slots begin.
    base: u64,
}

impl GpuWorker {
    fn new(peers: &[&Worker]) -> Self {
        let names: Vec<_> = peers.iter().map(|peer| peer.address().to_string()).collect();
        let geometry = Geometry::new(SLOTS, BLOCK).expect("slots");
        let region = Gpu::open(0).and_then(|gpu| gpu.allocate(geometry)).expect("it is simulated");
        let base = region.segments().parts()[0].base as u64;
        let engine = EngineMemory::new(region, 1).expect("one layer");
        let options = Options { engine: Some(engine), ..model(fingerprint("some")) };
        let manager = open_with(settings(&names.join(",")), options).expect("it opens");
        Self { manager, base }
    }

    /// And a neighbour whose memory the GPU reads.
    fn with_neighbour() -> (Worker, Self) {
        let there = Worker::new(0, None, true);
        let here = Self::new(&[&there]);
        here.await_gpu(&there, 1..1000);
        (there, here)
    }

    fn begin(&self, peer: &Worker, chain: &[BlockHash]) -> Transfer<Loaded> {
        let slots = last_slots(chain.len());
        let lease = lease_at(peer.address(), &self.manager, chain).expect("it is there");
        self.manager.load_into(lease, &[GroupSlots::full(0, &slots)], &Fence::Done)
    }

    /// Loads what the peer has of `chain`, and checks what arrived.
    fn load(&self, peer: &Worker, chain: &[BlockHash]) -> Loaded {
        self.check(self.begin(peer, chain), chain)
    }

    fn check(&self, mut load: Transfer<Loaded>, chain: &[BlockHash]) -> Loaded {
        let loaded = load.wait_for(LIMIT).expect("it ends").expect("the manager is open");
        let memory = File::open("/proc/self/mem").expect("it is ours");
        let mut block = vec![0; BLOCK];
        for (&hash, slot) in chain.iter().zip(last_slots(chain.len())).take(loaded.arrived) {
            let at = self.base + u64::from(slot.0) * BLOCK as u64;
            memory.read_exact_at(&mut block, at).expect("it is the GPU's");
            assert!(has_pattern(pattern(hash, 0), &block), "a wrong block in {slot:?}");
        }
        loaded
    }

    /// Whether the GPU reads this peer, seen by a prompt that it has not loaded before.
    fn reads(&self, peer: &Worker, prompt: u32) -> bool {
        let prompt = computed(peer, prompt);
        assert!(self.load(peer, &prompt).is_whole);
        self.manager.matches(&prompt).longest() == 0
    }

    /// The first loads come by way of the host tier, while the peer's memory is locked.
    fn await_gpu(&self, peer: &Worker, mut prompts: Range<u32>) {
        wait_until(LIMIT, "the GPU does not read the peer", || {
            self.reads(peer, prompts.next().expect("prompts enough"))
        });
    }
}

/// A prompt that the peer has in its host tier, and no other.
fn computed(peer: &Worker, prompt: u32) -> Vec<BlockHash> {
    let prompt = chain(prompt, BLOCKS);
    peer.manager.admin().evict(Tier::Host, SLOTS as usize);
    peer.compute(&prompt, 0);
    prompt
}

#[test]
fn a_neighbours_blocks_come_straight_to_a_gpu() {
    let name = "peer_loads::gpu::a_neighbours_blocks_come_straight_to_a_gpu";
    if simulation::is("no-fault") {
        let (there, here) = GpuWorker::with_neighbour();
        let prompt = computed(&there, 1000);
        spoil(prompt[17], 0);
        let loaded = here.load(&there, &prompt);
        assert_eq!((loaded.arrived, loaded.failed), (17, 3));
        assert!(loaded.fault.is_some_and(|fault| fault.contains("checksum")));
        assert!(here.reads(&there, 1001));
        assert_sound(&here.manager);
    }
    simulation::run_one_test("no-fault", "", name);
}

#[test]
fn a_gpu_that_hangs_amid_a_load_keeps_its_slots() {
    let name = "peer_loads::gpu::a_gpu_that_hangs_amid_a_load_keeps_its_slots";
    if simulation::is("no-fault") {
        let (there, here) = GpuWorker::with_neighbour();
        let hangs = |prompt| {
            let prompt = computed(&there, prompt);
            simulation::set(c"streams-hang");
            let mut load = here.begin(&there, &prompt);
            wait_until(LIMIT, "no copy begins", || simulation::streams_hanging() > 0);
            load.cancel();
            let loaded = here.check(load, &prompt);
            assert_eq!((loaded.arrived, loaded.failed), (0, BLOCKS as usize));
            assert!(!loaded.writers.are_gone(), "the GPU may write the slots");
            loaded
        };
        let loaded = hangs(1000);
        simulation::set(c"no-fault");
        assert!(loaded.writers.wait(LIMIT));
        assert!(here.reads(&there, 1001));
        assert_sound(&here.manager);

        let loaded = hangs(1002);
        assert!(!here.manager.close(Duration::ZERO).is_complete());
        simulation::set(c"no-fault");
        assert!(here.manager.close(LIMIT).is_complete() && loaded.writers.are_gone());
    }
    simulation::run_one_test("no-fault", "", name);
}

#[test]
fn what_a_gpu_may_not_read_takes_another_way() {
    let name = "peer_loads::gpu::what_a_gpu_may_not_read_takes_another_way";
    if simulation::is("no-lock-to-read") {
        let [refused, read] = [(); 2].map(|()| Worker::new(0, None, true));
        let here = GpuWorker::new(&[&refused, &read]);
        let not_read =
            |mut prompts: Range<u32>| prompts.all(|prompt| !here.reads(&refused, prompt));
        // Before and after it was refused.
        assert!(not_read(1..20));
        simulation::set(c"no-fault");
        here.await_gpu(&read, 100..1000);
        assert!(not_read(20..40), "it is not asked again");
        assert_sound(&here.manager);
    }
    simulation::run_one_test("no-lock-to-read", "", name);
}
