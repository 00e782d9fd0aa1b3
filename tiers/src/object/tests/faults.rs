//! Services that are slow, silent or refuse, and get well again.

use super::server::{Mood, Server};
use super::*;
use crate::testing::{each, host};

/// Short, but many times what a healthy request takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(2);

fn limited(blocks_per_segment: usize) -> ObjectOptions {
    ObjectOptions { operation_limit: LIMIT, ..options(blocks_per_segment) }
}

fn some_blocks(count: u32) -> Vec<(u32, u32)> {
    (0..count).map(|slot| (slot, slot + 1)).collect()
}

#[track_caller]
fn assert_all_unavailable(results: &Results) {
    assert!(
        kinds(results).iter().all(|kind| *kind == Some(CopyErrorKind::Unavailable)),
        "{results:?}"
    );
}

#[test]
fn all_operations_on_a_silent_store_end_within_one_limit() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &limited(1));
    let (old, new) =
        (some_blocks(16), [(20, 70), (21, 71), (22, 72), (23, 73), (24, 74), (25, 75)]);
    assert!(all_ok(&write(&backend, &heap, &old)));

    server.feel(Mood::Silent);
    let puts = server.requests("PUT");
    // They queue: three requests at a time are allowed.
    assert_all_unavailable(&read(&backend, &heap, &old));
    assert_eq!(server.requests("GET"), 3, "those that waited end without a request");
    assert_all_unavailable(&write(&backend, &heap, &new));
    assert_eq!(server.requests("PUT"), puts + 3);

    server.feel(Mood::Well);
    assert!(all_ok(&read(&backend, &heap, &old)));
    assert!(all_ok(&write(&backend, &heap, &new)));
    assert!(all_ok(&read(&backend, &heap, &new)));
    delete_all_dead(&backend);
    assert_eq!(server.objects(), 22, "what came too late was deleted");
}

#[test]
fn a_store_that_reads_nothing_holds_no_slot() {
    // More than the kernel buffers: the client still has most of it when the limit is over.
    let bytes = 64 << 20;
    let (server, memory) = (Server::start(), Arc::new(host(1, bytes)));
    let options = ObjectOptions { segment_bytes: bytes as u64, ..limited(1) };
    let backend =
        ObjectBackend::new(server.open(), Arc::clone(&memory) as _, None, &options).unwrap();
    let put = || run(&backend, vec![op(slot_at(Tier::Host, 0), slot_at(Tier::Object, 0), 1)]);
    server.feel(Mood::Deaf);
    assert_all_unavailable(&put());
    server.feel(Mood::Well);
    drop(backend);
    let options = ObjectOptions { operation_limit: OPERATION_LIMIT, ..options };
    let backend = ObjectBackend::new(server.open(), memory, None, &options).unwrap();
    let results = run(&backend, vec![op(slot_at(Tier::Host, 0), slot_at(Tier::Object, 0), 1)]);
    assert!(all_ok(&results), "{results:?}");
}

#[test]
fn a_store_that_refuses_for_a_while_keeps_its_blocks() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &limited(4));
    let (old, new) = (some_blocks(8), [(20, 70), (21, 71)]);
    assert!(all_ok(&write(&backend, &heap, &old)));
    for status in [503, 500, 429, 403, 401] {
        server.feel(Mood::Refuses(status));
        assert_all_unavailable(&read(&backend, &heap, &old));
        assert_all_unavailable(&write(&backend, &heap, &new));
        server.feel(Mood::Well);
        assert!(all_ok(&read(&backend, &heap, &old)), "after {status}");
    }
    assert!(all_ok(&write(&backend, &heap, &new)));
    assert!(all_ok(&read(&backend, &heap, &new)));
    delete_all_dead(&backend);
    assert_eq!(server.objects(), 3);
}

#[test]
fn a_compaction_that_the_store_refuses_is_made_up_for() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &limited(8));
    let old = some_blocks(40);
    assert!(all_ok(&write(&backend, &heap, &old)));
    server.feel(Mood::Refuses(503));
    // Three slots of each segment, whose content is gone whether or not the new one arrives.
    let new: Vec<_> = (0..40).filter(|slot| slot % 8 < 3).map(|slot| (slot, slot + 100)).collect();
    assert_all_unavailable(&write(&backend, &heap, &new));
    assert_eq!(backend.stats().moved_blocks, 0);
    server.feel(Mood::Well);
    let kept: Vec<_> = old.into_iter().filter(|(slot, _)| slot % 8 >= 3).collect();
    assert!(all_ok(&read(&backend, &heap, &kept)));
    assert!(all_ok(&write(&backend, &heap, &new)));
    let stats = backend.stats();
    assert!(stats.stored_blocks * 10 <= stats.live_blocks * 13, "{stats:?}");
    assert!(stats.moved_blocks > 0);
    assert!(all_ok(&read(&backend, &heap, &kept)));
    assert!(all_ok(&read(&backend, &heap, &new)));
    delete_all_dead(&backend);
    assert_eq!(server.objects() as u64, backend.stats().segments);
}

#[test]
fn an_answer_that_is_cut_off_is_no_loss() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &options(4));
    let blocks = some_blocks(4);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    server.feel(Mood::CutsOff);
    let one = read(&backend, &heap, &blocks[3..]);
    assert_all_unavailable(&one);
    let all = kinds(&read(&backend, &heap, &blocks));
    assert!(all.iter().flatten().all(|kind| *kind == CopyErrorKind::Unavailable), "{all:?}");
    server.feel(Mood::Well);
    assert!(all_ok(&read(&backend, &heap, &blocks)));
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert!(all_ok(&read(&backend, &heap, &blocks)));
}

#[test]
fn a_store_that_is_down_keeps_its_blocks() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &limited(4));
    let blocks = some_blocks(4);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    server.stop();
    assert_all_unavailable(&read(&backend, &heap, &blocks));
    server.restart();
    assert!(all_ok(&read(&backend, &heap, &blocks)));
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert!(all_ok(&read(&backend, &heap, &blocks)));
}

#[test]
fn an_object_gone_or_too_short_is_a_loss() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &options(4));
    let blocks = some_blocks(4);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    let whole = server.take_objects();
    assert_eq!(kinds(&read(&backend, &heap, &blocks)), [Some(CopyErrorKind::Io); 4], "gone");
    server.put_objects(whole.clone());
    server.change_objects(|object| object.truncate(3 * BLOCK + 1));
    let results = kinds(&read(&backend, &heap, &blocks));
    assert_eq!(results, [None, None, None, Some(CopyErrorKind::Io)], "it ends in block 3");
    assert!(all_ok(&read(&backend, &heap, &blocks[..3])));
    server.change_objects(|object| object.truncate(3 * BLOCK));
    assert_eq!(
        kinds(&read(&backend, &heap, &blocks[3..])),
        [Some(CopyErrorKind::Io)],
        "it ends before block 3"
    );
    server.put_objects(whole);
    assert!(all_ok(&read(&backend, &heap, &blocks)));
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert!(all_ok(&read(&backend, &heap, &blocks)));
}

#[test]
fn an_object_that_arrives_too_late_is_deleted() {
    let heap = Heap::new();
    let late = Faulty::new(Fault::TakesLate(LIMIT + LIMIT / 2));
    let backend = backend(Store::with_client(late.clone()).unwrap(), &heap, &limited(4));
    let blocks = some_blocks(8);
    assert_all_unavailable(&write(&backend, &heap, &blocks));
    assert_eq!(backend.stats().undeleted, 2);
    eventually("they did not arrive", || late.sizes().len() == 2);
    delete_all_dead(&backend);
    assert!(late.sizes().is_empty());
    late.heal();
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert!(all_ok(&read(&backend, &heap, &blocks)));
}

#[test]
fn failed_deletions_happen_when_the_store_is_well() {
    let (server, heap) = (Server::start(), Heap::new());
    let backend = backend(server.open(), &heap, &limited(4));
    let blocks = some_blocks(8);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    server.feel(Mood::Refuses(403));
    assert_all_unavailable(&write(&backend, &heap, &blocks));
    eventually("it was not tried", || server.requests("DELETE") > 4);
    assert_eq!(server.objects(), 2);
    server.feel(Mood::Well);
    delete_all_dead(&backend);
    assert_eq!(server.objects(), 0);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    assert!(all_ok(&read(&backend, &heap, &blocks)));
}

#[test]
fn dropping_the_backend_does_not_wait_for_a_silent_store() {
    let (server, heap) = (Server::start(), Heap::new());
    let options = ObjectOptions { operation_limit: Duration::from_secs(8), ..options(1) };
    let backend = backend(server.open(), &heap, &options);
    let blocks = some_blocks(4);
    assert!(all_ok(&write(&backend, &heap, &blocks)));
    server.feel(Mood::Silent);
    let (send, receive) = std::sync::mpsc::channel();
    let ops = (0..4)
        .map(|slot| op(slot_at(Tier::Object, slot), slot_at(Tier::Host, slot), slot))
        .collect();
    backend.submit(ops, each(move |_, result| send.send(result).unwrap()));
    eventually("no request arrived", || server.requests("GET") == 3);

    let region = Arc::downgrade(&heap);
    drop(heap);
    drop(backend);
    assert!(region.upgrade().is_some(), "three requests may still write to it");
    let early = receive.try_iter().count();
    assert!(early <= 1, "three end by themselves");
    assert_eq!(early + receive.iter().count(), 4);
    eventually("the region is still there", || region.upgrade().is_none());
    server.feel(Mood::Well);
    eventually("segments were left", || server.objects() == 0);
}
