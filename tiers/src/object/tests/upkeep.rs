//! What workers do to a bucket beside storing: markers, deletions, looks, compactions, and the end
//! of forked children.

use super::sharing::{TakeAll, TakeNone, Worker, seeds, shared};
use super::*;
use crate::copy::Owner;
use crate::object::segment::{FooterKeys, encode_footer};
use crate::object::{RequestKind, RequestOutcome, Sharing};
use crate::testing::{holds_in_a_child, key_ring};

/// What no worker relies on stays for the length of a test.
pub(super) fn lasting(blocks_per_segment: usize) -> ObjectOptions {
    let options = shared(blocks_per_segment);
    let sharing = options
        .sharing
        .clone()
        .map(|sharing| Sharing { collect_after: Duration::from_hours(1), ..sharing });
    ObjectOptions { sharing, ..options }
}

#[test]
fn a_half_written_marker_of_a_killed_writer_blocks_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &shared(4));
    let epochs = dir.path().join("model/tp0/epochs");
    std::fs::create_dir_all(&epochs).unwrap();
    std::fs::write(epochs.join("0000000000000009.kvepoch#1"), b"kv").unwrap();
    first.object.begin_epoch(9, 0).unwrap();
    assert!(epochs.join("0000000000000009.kvepoch").exists());
    assert!(all_ok(&first.write(0, &seeds(1..5))), "and it works there");
}

#[test]
fn four_workers_begin_one_epoch_together_without_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let workers: Vec<_> =
        (0..4).map(|_| Worker::start(open_directory(dir.path()), &shared(4))).collect();
    for epoch in 10..40 {
        let together = std::sync::Barrier::new(workers.len());
        std::thread::scope(|scope| {
            for worker in &workers {
                scope.spawn(|| {
                    together.wait();
                    worker.object.begin_epoch(epoch, 0).unwrap();
                });
            }
        });
    }
}

#[test]
fn a_truncated_segment_costs_its_blocks_and_panics_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let heap = Heap::new();
    let backend = backend(open_directory(dir.path()), &heap, &options(4));
    assert!(all_ok(&write(&backend, &heap, &[(0, 1), (1, 2), (2, 3), (3, 4)])));
    let file = segment_files(dir.path()).remove(0);
    // What is left is a footer that speaks of four blocks, and two of them.
    let bytes = std::fs::read(&file).unwrap();
    let entries = decode_footer(&bytes, bytes.len() as u64).unwrap().entries;
    let footer = encode_footer(&crate::object::segment::Provenance::default(), &entries);
    std::fs::write(&file, [&bytes[..2 * BLOCK], &footer[..]].concat()).unwrap();
    // Two slots are written again, which makes the segment worth a compaction.
    assert!(all_ok(&write(&backend, &heap, &[(0, 5), (1, 6)])), "the write that came by goes on");
    assert!(all_ok(&read(&backend, &heap, &[(0, 5), (1, 6)])));
    assert!(all_ok(&write(&backend, &heap, &[(2, 7), (3, 8)])), "and it heals");
    assert!(all_ok(&read(&backend, &heap, &[(0, 5), (1, 6), (2, 7), (3, 8)])));
}

#[test]
fn a_forked_child_drops_the_backend_without_waiting() {
    let (dir, heap) = (tempfile::tempdir().unwrap(), Heap::new());
    let mut backend = Some(backend(open_directory(dir.path()), &heap, &options(4)));
    assert!(all_ok(&write(backend.as_ref().unwrap(), &heap, &[(0, 1), (1, 2)])));
    assert!(holds_in_a_child(|| {
        // A wait for the parent's threads looks for their end twenty times, and sleeps between.
        let before = sleeps();
        drop(backend.take());
        sleeps() - before < 10
    }));
    assert!(all_ok(&read(backend.as_ref().unwrap(), &heap, &[(0, 1), (1, 2)])));
}

/// How often this thread gave up its processor of its own accord.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn a_repeated_deletion_asks_again_who_relies_on_it() {
    let store = Faulty::new(Fault::KeepsAll);
    let open = || Store::with_client(Arc::clone(&store) as _).unwrap();
    let options = lasting(4);
    // No worker is taken for gone, however busy the machine.
    let sharing =
        options.sharing.map(|sharing| Sharing { renewal: Duration::from_hours(1), ..sharing });
    let limited = ObjectOptions { operation_limit: Duration::from_secs(4), sharing, ..options };
    let first = Worker::start(open(), &limited);
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    let dead = store.names(".kvseg").remove(0);
    // Its slots get other blocks: no worker relies on it, and it cannot be deleted.
    first.write(0, &seeds(21..25));
    eventually("it was not deleted", || first.object.stats().undeleted == 1);
    let tried = || first.object.traffic().requests(RequestKind::Delete, RequestOutcome::Failed);
    eventually("it was not deleted", || tried() > 0);
    // Now a worker does.
    let second = Worker::start(open(), &limited);
    eventually("it does not say so", || store.names(".kvman").len() == 2);
    delete_all_dead(&first.object);
    store.heal();
    assert!(store.names(".kvseg").contains(&dead), "it is left to the one that relies on it");
    assert_eq!(second.read_found(), second.found().blocks.len());
}

#[test]
fn a_forgotten_tenants_new_blocks_have_no_forgotten_links() {
    let ring = key_ring(1, "0123456789abcdef");
    let keys = Some(FooterKeys::new(ring, "model/tp0"));
    let options = ObjectOptions { keys, ..lasting(2) };
    let objects = Arc::new(InMemory::new());
    let start = || Worker::start(Store::with_client(Arc::clone(&objects) as _).unwrap(), &options);
    let (first, second) = (start(), start());
    second.object.keep_looking(Arc::new(TakeNone));
    let tenant = |tenant, life| Owner { tenant, life };
    let linked = || second.object.stats().linked_blocks;
    // A block of a tenant that stays tells when what lies beside it is known.
    let meets = |seed, slot, links| {
        eventually("nothing is linked", || {
            assert!(all_ok(&second.write_owned(slot, &[(seed, tenant(8, 0))])));
            linked() == links
        });
    };
    assert!(all_ok(&first.write_owned(0, &[(42, tenant(7, 0)), (43, tenant(8, 0))])));
    meets(43, 0, 1);
    assert!(all_ok(&second.write_owned(1, &[(42, tenant(7, 1))])));
    assert_eq!(linked(), 1, "it is stored");
    // Nor to what is found later, and may be of that time.
    assert!(all_ok(&first.write_owned(2, &[(44, tenant(7, 0)), (45, tenant(8, 0))])));
    meets(45, 2, 2);
    assert!(all_ok(&second.write_owned(3, &[(44, tenant(7, 1))])));
    assert_eq!(linked(), 2, "it is stored");
    assert!(all_ok(&second.read(&[(0, 43), (1, 42), (2, 45), (3, 44)])));
    // And a worker that was told before it stored anything knows as much.
    second.object.forget_tenant(8, 1);
    assert!(all_ok(&first.write_owned(4, &[(46, tenant(8, 0)), (47, tenant(9, 0))])));
    eventually("nothing is linked", || {
        assert!(all_ok(&second.write_owned(5, &[(47, tenant(9, 0))])));
        linked() == 3
    });
    assert!(all_ok(&second.write_owned(6, &[(46, tenant(8, 1))])));
    assert_eq!(linked(), 3);
}

#[test]
fn one_worker_collects_and_another_takes_over_from_it() {
    let objects = Arc::new(InMemory::new());
    let start = |options: &ObjectOptions| {
        Worker::start(Store::with_client(Arc::clone(&objects) as _).unwrap(), options)
    };
    let leases = || {
        let all: Vec<_> = objects
            .list(Some(&Path::from("model/tp0/collector")))
            .collect()
            .now_or_never()
            .unwrap();
        all.into_iter().map(|meta| meta.unwrap().location.to_string()).collect::<Vec<_>>()
    };
    let first = start(&shared(4));
    eventually("no worker collects", || leases().len() == 1);
    let second = start(&shared(4));
    // Its holder goes on as long as it lives.
    let before = leases();
    eventually("the lease is not renewed", || leases().iter().all(|term| !before.contains(term)));
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    drop(first);
    // What it stored is garbage once it is taken for gone.
    eventually("no worker takes over", || second.object.stats().collected == 1);
    assert!(all_ok(&second.write(0, &seeds(1..5))));
}

#[test]
fn a_name_from_the_future_hides_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let first = Worker::start(open_directory(dir.path()), &lasting(4));
    assert!(all_ok(&first.write(0, &seeds(1..5))));
    let second = Worker::start(open_directory(dir.path()), &lasting(4));
    let early = Arc::new(TakeAll::default());
    second.object.keep_looking(Arc::clone(&early) as Arc<dyn crate::object::TakeIn>);
    let future =
        segment_files(dir.path())[0].with_file_name("ffffffffffff00000000000000000000.kvseg");
    std::fs::write(future, b"nonsense").unwrap();
    // A worker that starts now sees it at once.
    let third = Worker::start(open_directory(dir.path()), &lasting(4));
    let late = Arc::new(TakeAll::default());
    third.object.keep_looking(Arc::clone(&late) as Arc<dyn crate::object::TakeIn>);
    for part in 1..4 {
        assert!(all_ok(&first.write(part * 10, &seeds(part * 10 + 1..part * 10 + 5))));
        let all = part as usize * 4;
        eventually("what is new is not found", || {
            early.0.lock().len() == all && late.0.lock().len() == all
        });
    }
}
