use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvbm_tiers::nixl::{Agent, Library, NixlBackend};
use kvbm_tiers::object::{
    Budgets, OPERATION_LIMIT, ObjectBackend, ObjectOptions, Store, StoreOptions,
};
use kvbm_tiers::testing::conformance::{self, Pair};
use kvbm_tiers::testing::{disk, disk_options, host, skip};
use kvbm_tiers::{
    Backend, Checksums, DiskOptions, DiskRegion, DramOptions, DramRegion, Geometry, MemcpyBackend,
    Memory, SetupError, ThreadsBackend, Tier, UringBackend, Verified,
};

/// Makes the backend between a host region and a disk region.
type Connect = fn(Arc<dyn Memory>, Arc<DiskRegion>) -> Result<Arc<dyn Backend>, SetupError>;

#[test]
fn memory_to_emulated_device() {
    conformance::check(|slots, block_bytes| {
        let geometry = Geometry::new(slots, block_bytes).unwrap();
        let options = DramOptions { geometry, huge_pages: true, fault_threads: 2 };
        let device = Arc::new(DramRegion::emulated_device(options).unwrap());
        let memory = Arc::new(host(slots, block_bytes));
        let regions = vec![device as Arc<dyn Memory>, Arc::clone(&memory) as _];
        Pair {
            memory,
            other: Tier::Device,
            backend: Arc::new(MemcpyBackend::new(regions, 2).unwrap()),
        }
    });
}

#[test]
fn disk_through_threads() {
    check_disk(|memory, disk| Ok(Arc::new(ThreadsBackend::new(memory, disk, 4)?)));
}

#[test]
fn disk_through_io_uring() {
    let connect: Connect = |memory, disk| Ok(Arc::new(UringBackend::new(memory, disk, 32)?));
    let probe = disk(&[tempfile::tempdir().unwrap().path()], 1, 4096);
    match connect(Arc::new(host(1, 4096)), probe) {
        Ok(_) => check_disk(connect),
        Err(error) => skip("uring", &error),
    }
}

#[test]
fn disk_through_nixl_posix() {
    match Library::load(None) {
        Ok(_) => check_disk(|memory, disk| {
            static AGENTS: AtomicU32 = AtomicU32::new(0);
            let name = format!("conformance-{}", AGENTS.fetch_add(1, Ordering::Relaxed));
            let parameters = [("use_uring".to_owned(), "true".to_owned())].into();
            let posix = Agent::new(Library::load(None)?, &name)?.backend("POSIX", &parameters)?;
            Ok(Arc::new(NixlBackend::disk(&Arc::new(posix), memory, disk, 32)?))
        }),
        Err(error) => skip("nixl", &error),
    }
}

/// In one directory and striped over three, past the page cache and through it.
fn check_disk(connect: Connect) {
    for (dirs, o_direct) in [(1, true), (3, true), (1, false)] {
        conformance::check(|slots, block_bytes| {
            let homes: Vec<_> = (0..dirs).map(|_| tempfile::tempdir().unwrap()).collect();
            let homes: Vec<_> = homes.iter().map(|home| home.path().to_owned()).collect();
            let memory = Arc::new(host(slots, block_bytes));
            let options = DiskOptions { o_direct, ..disk_options(&homes, slots, block_bytes) };
            let region = Arc::new(DiskRegion::open(&options).unwrap());
            let backend = connect(Arc::clone(&memory) as _, region).unwrap();
            Pair { backend: verified(backend, &memory, Arc::default()), memory, other: Tier::Disk }
        });
    }
}

#[test]
fn objects_in_a_directory() {
    check_objects(|home| format!("file://{}/objects", home.display()));
}

#[test]
fn objects_in_memory() {
    check_objects(|_| "memory:///".to_owned());
}

fn check_objects(url: fn(&std::path::Path) -> String) {
    let home = tempfile::tempdir().unwrap();
    conformance::check(|slots, block_bytes| {
        let store = Store::open(&url(home.path()), &StoreOptions::default()).unwrap();
        let memory = Arc::new(host(slots, block_bytes));
        let options = ObjectOptions {
            namespace: format!("conformance-{block_bytes}-{slots}"),
            segment_bytes: 4 << 20,
            concurrency: 4,
            operation_limit: OPERATION_LIMIT,
            budgets: Budgets::default(),
            keep: false,
            keys: None,
            sharing: None,
        };
        let checksums = Arc::new(Checksums::new());
        let (ours, known) = (Arc::clone(&memory) as _, Some(Arc::clone(&checksums)));
        let backend = ObjectBackend::new(store, ours, known, &options).unwrap();
        Pair { backend: verified(backend, &memory, checksums), memory, other: Tier::Object }
    });
}

fn verified(
    backend: impl Backend + 'static,
    memory: &Arc<DramRegion>,
    checksums: Arc<Checksums>,
) -> Arc<dyn Backend> {
    Arc::new(Verified::new(backend, Arc::clone(memory) as _, checksums).unwrap())
}
