//! What encryption costs: blocks to disk and back, sealed and not, and how fast the processor
//! encrypts by itself.
//!
//! `cargo bench -p kvbm-bench --bench sealed` prints one JSON object. `TMPDIR` says where the slot
//! files are made.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use kvbm_tiers::sealed::{Cipher, Scratch, ScratchOptions, TenantKeys};
use kvbm_tiers::testing::{disk, each, key_ring};
use kvbm_tiers::{
    Backend, BlockKey, CopyOp, DramOptions, DramRegion, Geometry, Memory, Route, Sealed, SlotId,
    SlotRef, Tier, UringBackend, Verified,
};

const WORKING_SET: usize = 512 << 20;
const ROUNDS: usize = 9;
/// As the settings have it by default.
const DEPTH: u32 = 32;
const BATCH: usize = 16;
const IN_FLIGHT: u32 = 64;
const WRITE: Route = Route::new(Tier::Host, Tier::Disk);
const READ: Route = Route::new(Tier::Disk, Tier::Host);

/// As many as seal on a machine of two to five cores.
const AES_THREADS: usize = 2;

fn main() {
    let sizes = [64 << 10, 1 << 20];
    let rows: Vec<_> = sizes.into_iter().flat_map(contest).collect();
    println!(
        "{{\"aes_gcm_one_thread_gb_s\": {:.2}, \"disk\": [{}]}}",
        aes_alone(1),
        rows.join(", ")
    );
}

/// Sealed against plain and against encryption in memory, in turns: the medians of all and of the
/// rounds' ratios.
fn contest(block_bytes: usize) -> Vec<String> {
    let (plain, sealed) = (plain(block_bytes), sealed(block_bytes));
    let slots = slots(block_bytes);
    [("write", WRITE), ("read", READ)]
        .map(|(name, route)| {
            move_all(&plain, route, slots);
            move_all(&sealed, route, slots);
            let rounds: Vec<_> = (0..ROUNDS)
                .map(|round| {
                    let first = (round % 2 == 0).then(|| move_all(&plain, route, slots));
                    let sealed = move_all(&sealed, route, slots);
                    let plain = first.unwrap_or_else(|| move_all(&plain, route, slots));
                    Round { plain, sealed, aes: aes_alone(AES_THREADS) }
                })
                .collect();
            let of = |figure: fn(&Round) -> f64| median(rounds.iter().map(figure).collect());
            format!(
                "{{\"op\": \"{name}\", \"block_bytes\": {block_bytes}, \"plain_gb_s\": {:.2}, \
                 \"sealed_gb_s\": {:.2}, \"aes_gcm_two_threads_gb_s\": {:.2}, \"sealed_of_plain\": {:.2}, \
                 \"sealed_of_aes\": {:.2}}}",
                of(|round| round.plain),
                of(|round| round.sealed),
                of(|round| round.aes),
                of(|round| round.sealed / round.plain),
                of(|round| round.sealed / round.aes)
            )
        })
        .into()
}

/// GB/s.
struct Round {
    plain: f64,
    sealed: f64,
    aes: f64,
}

const fn slots(block_bytes: usize) -> u32 {
    (WORKING_SET / block_bytes) as u32
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn plain(block_bytes: usize) -> Arc<dyn Backend> {
    let host = host(block_bytes);
    Arc::new(on_disk(&host, slots(block_bytes)))
}

fn sealed(block_bytes: usize) -> Arc<dyn Backend> {
    let options = ScratchOptions { block_bytes, blocks: IN_FLIGHT, huge_pages: true };
    let scratch = Scratch::open(options).expect("memory for sealed blocks");
    let keys = key_ring(1, "0123456789abcdef");
    let keys = TenantKeys::in_memory(keys, "bench");
    let cipher = Cipher::new(Arc::new(keys), Tier::Disk, "bench", block_bytes);
    // As where it is assembled: what arrives is opened, which tells more than its checksum.
    let inner = on_disk(&scratch.memory(), slots(block_bytes)).of_departures();
    Arc::new(Sealed::new(inner, host(block_bytes), scratch, cipher, 1).expect("threads"))
}

fn host(block_bytes: usize) -> Arc<dyn Memory> {
    let geometry = Geometry::new(slots(block_bytes), block_bytes).expect("a valid geometry");
    let options = DramOptions { geometry, huge_pages: true, fault_threads: 1 };
    let host = DramRegion::host(options).expect("memory for the host");
    let mut pool = host.frames().expect("a region of its own");
    // As in the host tier, whose blocks have checksums from the moment that they came.
    while let Some(mut frame) = pool.take() {
        let content = frame.slot().0 as u8 | 1;
        host.write(&mut frame).expect("our frame").fill(content);
        host.remember_checksum(&frame);
        drop(frame);
    }
    Arc::new(host)
}

fn on_disk(memory: &Arc<dyn Memory>, slots: u32) -> Verified<UringBackend> {
    let disk = disk(&[std::env::temp_dir()], slots, memory.block_bytes());
    let ring = UringBackend::new(Arc::clone(memory), disk, DEPTH).expect("io_uring");
    let verified = Verified::new(ring, Arc::clone(memory), Arc::default()).expect("threads");
    verified.on_threads_of_its_own()
}

/// GB/s.
fn move_all(backend: &Arc<dyn Backend>, route: Route, slots: u32) -> f64 {
    let started = Instant::now();
    let (ended, end) = mpsc::channel();
    let ops: Vec<_> = (0..slots).map(|slot| op(slot, route)).collect();
    let mut under_way = 0;
    for batch in ops.chunks(BATCH) {
        while under_way + batch.len() as u32 > IN_FLIGHT {
            under_way -= ended_one(&end);
        }
        let ended = ended.clone();
        backend.submit(
            batch.to_vec(),
            each(move |_, result| ended.send(result).expect("the bench waits")),
        );
        under_way += batch.len() as u32;
    }
    while under_way > 0 {
        under_way -= ended_one(&end);
    }
    WORKING_SET as f64 / started.elapsed().as_secs_f64() / 1e9
}

fn ended_one(end: &mpsc::Receiver<Result<(), kvbm_tiers::CopyError>>) -> u32 {
    end.recv_timeout(Duration::from_mins(1)).expect("it ends").expect("the copy succeeds");
    1
}

fn op(slot: u32, route: Route) -> CopyOp {
    let at = |tier| SlotRef { tier, slot: SlotId(slot), generation: 1 << 20 };
    let block = BlockKey { hash: u128::from(slot), group: 0 };
    CopyOp { block, parent: None, owner: None, from: at(route.from), to: at(route.to) }
}

/// GB/s of `threads` threads together, on blocks of 1 MiB that lie in memory.
fn aes_alone(threads: usize) -> f64 {
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).expect("32 bytes"));
    // Touched beforehand: the kernel's zeroing of pages is not what is measured.
    let mut blocks = vec![1; threads * PART];
    let started = Instant::now();
    thread::scope(|scope| {
        for part in blocks.chunks_mut(PART) {
            scope.spawn(|| seal_all(&key, part));
        }
    });
    (threads * PART) as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// Bytes for a thread.
const PART: usize = 256 << 20;

fn seal_all(key: &LessSafeKey, blocks: &mut [u8]) {
    for block in blocks.chunks_mut(1 << 20) {
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        key.seal_in_place_separate_tag(nonce, Aad::empty(), block).map(drop).expect("short enough");
    }
}
