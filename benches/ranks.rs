//! What ranks cost: the leader's CPU time for a batch that four processes copy, and their bytes per
//! second in sum against one process that copies whole blocks.
//!
//! `cargo bench -p kvbm-bench --bench ranks` prints one JSON object. Copies go from an emulated
//! device to DRAM.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{env, process};

use kvbm_tiers::ranks::{JoinOptions, Leader, LeaderOptions, Member, Membership};
use kvbm_tiers::{
    Backend, BlockKey, CopyOp, Done, DramOptions, DramRegion, Geometry, MemcpyBackend, Route,
    SlotId, SlotRef, Tier,
};
use rustix::time::{ClockId, clock_gettime};

const WORLD: u16 = 4;
const BATCH: u32 = 64;
/// As many batches as a scheduler has under way on a route.
const IN_FLIGHT: usize = 4;
/// Larger than the processor's caches, together with where it is copied to.
const WORKING_SET: usize = 256 << 20;
/// How often a turn copies all of it.
const PASSES: usize = 4;
const TURNS: usize = 25;
/// As `transfer.copy_threads`.
const THREADS: usize = 2;
const SAVE: Route = Route::new(Tier::Device, Tier::Host);
/// A rank's number and the bytes of its slice, for a process of this executable.
const ROLE: &str = "KVBM_BENCH_RANK";
const PLACE: &str = "KVBM_BENCH_PLACE";

fn main() {
    if let (Ok(role), Ok(place)) = (env::var(ROLE), env::var(PLACE)) {
        return be_a_rank(&role, Path::new(&place));
    }
    let small = Ranks::start(4 << 10);
    small.leader_cpu_us(IN_FLIGHT);
    let (alone, together) = (small.leader_cpu_us(1), small.leader_cpu_us(IN_FLIGHT));
    drop(small);
    let figures: Vec<_> = [256 << 10, 1 << 20, 4 << 20].into_iter().map(throughput).collect();
    println!(
        "{{\"leader_cpu_us_per_batch\": {together:.1}, \"one_batch_at_a_time\": {alone:.1}, \"throughput\": [{}]}}",
        figures.join(", ")
    );
}

/// Blocks of `block_bytes`, in one process and in slices, in turns: what else uses the machine's
/// memory changes within less than a second. The median of the turns' ratios, and their quartiles.
fn throughput(block_bytes: usize) -> String {
    let slots = (WORKING_SET / block_bytes) as u32;
    let one: Arc<dyn Backend> = Arc::new(memcpy(slots, block_bytes));
    let ranks = Ranks::start_with(slots, block_bytes / usize::from(WORLD));
    let batches = slots.div_ceil(BATCH) as usize;
    let rate = |backend: &Arc<dyn Backend>| {
        let started = Instant::now();
        run(backend, PASSES * batches, slots, IN_FLIGHT);
        (PASSES * WORKING_SET) as f64 / started.elapsed().as_secs_f64() / 1e9
    };
    let turn = |number: usize| {
        if number.is_multiple_of(2) {
            let one = rate(&one);
            (one, rate(&ranks.leader))
        } else {
            let all = rate(&ranks.leader);
            (rate(&one), all)
        }
    };
    turn(0);
    let turns: Vec<_> = (0..TURNS).map(turn).collect();
    let [_, one, _] = quartiles(turns.iter().map(|&(one, _)| one));
    let [_, all, _] = quartiles(turns.iter().map(|&(_, all)| all));
    let [lower, ratio, upper] = quartiles(turns.iter().map(|&(one, all)| all / one));
    format!(
        "{{\"block_bytes\": {block_bytes}, \"one_process_gb_s\": {one:.2}, \"ranks_gb_s\": {all:.2}, \
         \"ratio\": {ratio:.2}, \"quartiles\": [{lower:.2}, {upper:.2}]}}"
    )
}

fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut sorted: Vec<_> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| sorted[(sorted.len() - 1) * quarter / 4])
}

/// A leader and its ranks, which are processes.
struct Ranks {
    leader: Arc<dyn Backend>,
    slots: u32,
    processes: Vec<Child>,
}

impl Ranks {
    fn start(slice_bytes: usize) -> Self {
        Self::start_with(BATCH * IN_FLIGHT as u32, slice_bytes)
    }

    fn start_with(slots: u32, slice_bytes: usize) -> Self {
        let dir = tempfile::tempdir().expect("a directory to meet in");
        let own = env::current_exe().expect("the path of the bench");
        let start = |rank| {
            let role = format!("{rank} {slots} {slice_bytes}");
            Command::new(&own).env(ROLE, role).env(PLACE, dir.path()).spawn().expect("a process")
        };
        let processes = (0..WORLD).map(start).collect();
        let options = LeaderOptions {
            dir: dir.path().to_owned(),
            world: WORLD,
            slots: [slots, slots, 0, 0],
            block_bytes: slice_bytes as u64,
            fingerprint: String::new(),
            limit: Duration::from_mins(1),
            debts: None,
        };
        let leader = Leader::open(options, |_| ()).expect("all ranks");
        Self { leader: Arc::new(leader), slots, processes }
    }

    /// For a batch, of all threads of this process; the least of several runs, since others use the
    /// machine.
    fn leader_cpu_us(&self, in_flight: usize) -> f64 {
        let batches = 1_000;
        let measure = |_| {
            let before = cpu_time();
            run(&self.leader, batches, self.slots, in_flight);
            cpu_time().saturating_sub(before).as_secs_f64() * 1e6 / batches as f64
        };
        (0..10).map(measure).fold(f64::INFINITY, f64::min)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // Bench processes hold nothing that wants an orderly end.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn be_a_rank(role: &str, place: &Path) {
    let numbers: Vec<usize> = role.split(' ').map(|word| word.parse().expect("a number")).collect();
    let (rank, slots, bytes) = (numbers[0] as u16, numbers[1] as u32, numbers[2]);
    let backend: Arc<dyn Backend> = Arc::new(memcpy(slots, bytes));
    let member = Membership {
        rank,
        world: WORLD,
        slots: [slots, slots, 0, 0],
        block_bytes: bytes as u64,
        fingerprint: String::new(),
        routes: Vec::new(),
        peers: None,
    };
    let options = JoinOptions {
        dir: place.to_owned(),
        member,
        kept: Vec::new(),
        limit: Duration::from_mins(1),
    };
    let member = Member::join(options, HashMap::from([(SAVE, backend)])).expect("a leader");
    process::exit(i32::from(member.serve().is_err()));
}

fn memcpy(slots: u32, block_bytes: usize) -> MemcpyBackend {
    let options = || DramOptions {
        geometry: Geometry::new(slots, block_bytes).expect("a valid geometry"),
        huge_pages: true,
        fault_threads: 1,
    };
    let device = DramRegion::emulated_device(options()).expect("memory for the device");
    let host = DramRegion::host(options()).expect("memory for the host");
    MemcpyBackend::new(vec![Arc::new(device), Arc::new(host)], THREADS).expect("threads")
}

/// Copies `batches` batches, `in_flight` of them at a time. Completions start the next ones, so
/// that this thread costs nothing.
fn run(backend: &Arc<dyn Backend>, batches: usize, slots: u32, in_flight: usize) {
    let (ended, end) = mpsc::channel();
    let ops: Arc<[CopyOp]> = (0..slots).map(op).collect();
    for first in 0..in_flight {
        let (backend, ops) = (Arc::clone(backend), Arc::clone(&ops));
        let turns = Turns { backend, ops, in_flight, batches, ended: ended.clone() };
        Arc::new(turns).start(first);
    }
    drop(ended);
    (0..in_flight).for_each(|_| end.recv().expect("the last batch of each"));
}

/// Every `in_flight`-th batch.
struct Turns {
    backend: Arc<dyn Backend>,
    /// One for each slot. Who makes them is not what is measured.
    ops: Arc<[CopyOp]>,
    in_flight: usize,
    batches: usize,
    ended: mpsc::Sender<()>,
}

impl Turns {
    fn start(self: Arc<Self>, batch: usize) {
        if batch >= self.batches {
            return self.ended.send(()).expect("the bench waits");
        }
        let first = (batch * BATCH as usize) % self.ops.len();
        let ops: Vec<_> = self.ops[first..].iter().take(BATCH as usize).copied().collect();
        let left = AtomicUsize::new(ops.len());
        let turns = Arc::clone(&self);
        let done = Done::new(move |ended| {
            assert!(ended.iter().all(|(_, result)| result.is_ok()), "the copies succeed");
            if left.fetch_sub(ended.len(), Ordering::AcqRel) == ended.len() {
                Arc::clone(&turns).start(batch + turns.in_flight);
            }
        });
        self.backend.submit(ops, done);
    }
}

fn op(slot: u32) -> CopyOp {
    let at = |tier| SlotRef { tier, slot: SlotId(slot), generation: 1 << 20 };
    let hash = u128::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    CopyOp {
        block: BlockKey { hash, group: 0 },
        parent: None,
        owner: None,
        from: at(SAVE.from),
        to: at(SAVE.to),
    }
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
