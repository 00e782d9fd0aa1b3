//! The backends under criterion, without the manager: copies between memory tiers, and a ring with
//! checksums. `kvbm bench tiers` compares the whole with the bare media.
//!
//! `cargo bench -p kvbm-bench --bench tiers`; slot files are made in the directory for temporary
//! files.

use std::sync::{Arc, mpsc};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbm_tiers::testing::each;
use kvbm_tiers::{
    Backend, BlockKey, Checksums, CopyOp, DiskOptions, DiskRegion, DramOptions, DramRegion,
    Geometry, MemcpyBackend, Memory, Route, SlotId, SlotRef, Tier, UringBackend, Verified,
};

/// Larger than the processor's second-level caches.
const WORKING_SET: usize = 256 << 20;
const SIZES: [usize; 3] = [64 << 10, 1 << 20, 4 << 20];

fn memory(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memory");
    for size in SIZES {
        let device =
            Arc::new(DramRegion::emulated_device(options(size)).expect("memory for the device"));
        let host = Arc::new(DramRegion::host(options(size)).expect("memory for the host"));
        let backend = MemcpyBackend::new(vec![device, host], 2).expect("two threads");
        for (name, route) in [
            ("save", Route::new(Tier::Device, Tier::Host)),
            ("load", Route::new(Tier::Host, Tier::Device)),
        ] {
            group.throughput(Throughput::Bytes(WORKING_SET as u64));
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter(|| move_all(&backend, route, size));
            });
        }
    }
}

fn disk(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("disk");
    for size in SIZES {
        let host: Arc<dyn Memory> =
            Arc::new(DramRegion::host(options(size)).expect("memory for the host"));
        let disk = DiskRegion::open(&DiskOptions {
            geometry: options(size).geometry,
            dirs: vec![std::env::temp_dir()],
            o_direct: true,
            zerofill_fallback: true,
            keep: None,
        });
        let disk = Arc::new(disk.expect("room in the directory for temporary files"));
        let ring = match UringBackend::new(Arc::clone(&host), disk, 32) {
            Ok(ring) => ring,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let backend =
            Verified::new(ring, host, Arc::new(Checksums::new())).expect("a memory and a disk");
        // Whatever is read must have been written.
        move_all(&backend, Route::new(Tier::Host, Tier::Disk), size);
        for (name, route) in [
            ("write", Route::new(Tier::Host, Tier::Disk)),
            ("read", Route::new(Tier::Disk, Tier::Host)),
        ] {
            group.throughput(Throughput::Bytes(WORKING_SET as u64));
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter(|| move_all(&backend, route, size));
            });
        }
    }
}

fn options(size: usize) -> DramOptions {
    let geometry = Geometry::new((WORKING_SET / size) as u32, size).expect("a valid geometry");
    DramOptions { geometry, huge_pages: true, fault_threads: 2 }
}

/// Copies every slot to its counterpart and waits for the end.
fn move_all(backend: &dyn Backend, Route { from, to }: Route, size: usize) {
    let at = |tier, slot| SlotRef { tier, slot: SlotId(slot), generation: 1 };
    let order = |slot| CopyOp {
        block: BlockKey { hash: u128::from(slot), group: 0 },
        parent: None,
        owner: None,
        from: at(from, slot),
        to: at(to, slot),
    };
    let (report, reports) = mpsc::channel();
    let done = each(move |_, result| report.send(result).expect("the bench listens"));
    backend.submit((0..(WORKING_SET / size) as u32).map(order).collect(), done);
    reports.iter().for_each(|result| result.expect("the copy succeeds"));
}

criterion_group! {
    name = tiers;
    config = Criterion::default().sample_size(10).measurement_time(std::time::Duration::from_secs(3));
    targets = memory, disk
}
criterion_main!(tiers);
