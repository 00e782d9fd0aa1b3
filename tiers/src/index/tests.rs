//! What an index tells after whatever happened to its file.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::Index;
use tempfile::TempDir;

use super::format::{HEADER_BYTES, IndexHeader};
use super::*;
use crate::copy::BlockKey;
use crate::error::SetupErrorKind;

const SLOTS: u32 = 64;

fn options(dir: &Path) -> IndexOptions {
    IndexOptions {
        path: dir.join("kvbm-test.index"),
        tier: Tier::Disk,
        namespace: "test".to_owned(),
        identity: 7,
        slots: SLOTS,
        block_bytes: 4096,
        parts: 1,
        epoch: 0,
        patience: Duration::ZERO,
        keys: None,
    }
}

fn entry(slot: u32, block: u128) -> IndexEntry {
    IndexEntry {
        slot: SlotId(slot),
        generation: block as u32 + 9,
        block: BlockKey { hash: block << 64 | block, group: block as u8 % 3 },
        parent: (!block.is_multiple_of(4)).then(|| block - 1),
        checksum: (block as u32).wrapping_mul(31) + 1,
        tenant: None,
    }
}

fn stored(slot: u32, block: u128) -> IndexChange {
    IndexChange::Stored(entry(slot, block))
}

/// What lies in the slots after some changes, oldest first.
fn residents(changes: &[IndexChange]) -> Vec<IndexEntry> {
    let mut latest: BTreeMap<u32, (usize, IndexEntry)> = BTreeMap::new();
    for (at, change) in changes.iter().enumerate() {
        match change {
            IndexChange::Stored(entry) => drop(latest.insert(entry.slot.0, (at, *entry))),
            IndexChange::Removed(slot) => drop(latest.remove(&slot.0)),
        }
    }
    let mut left: Vec<_> = latest.into_values().collect();
    left.sort_by_key(|&(at, _)| at);
    left.into_iter().map(|(_, entry)| entry).collect()
}

fn changes() -> impl Strategy<Value = Vec<IndexChange>> {
    let change = (0..SLOTS, 0..500_u128, 0..4_u8).prop_map(|(slot, block, kind)| match kind {
        0 => IndexChange::Removed(SlotId(slot)),
        _ => stored(slot, block),
    });
    prop::collection::vec(change, 1..200)
}

fn index(dir: &TempDir) -> (TierIndex, Recovered) {
    TierIndex::open(&options(dir.path())).unwrap()
}

fn refused(dir: &TempDir) -> SetupError {
    TierIndex::open(&options(dir.path())).unwrap_err()
}

fn edit(dir: &TempDir, change: impl FnOnce(&mut Vec<u8>)) {
    let path = options(dir.path()).path;
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .unwrap()
        .write_all_at(&bytes, 0)
        .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_was_added_is_found_again(all in changes(), cut: Index, epoch in 0..9_u64) {
        let dir = tempfile::tempdir().unwrap();
        let (mut first, found) = index(&dir);
        prop_assert!(found.entries.is_empty() && found.epoch == TierEpoch::default());
        let (before, after) = all.split_at(cut.index(all.len() + 1));
        first.append(before).unwrap();
        if epoch > 4 {
            first.set_epoch(TierEpoch { epoch, forgotten: 1 }).unwrap();
        } else {
            first.compact().unwrap();
        }
        first.append(after).unwrap();
        drop(first);
        let (second, found) = index(&dir);
        let expected = if epoch > 4 { residents(after) } else { residents(&all) };
        prop_assert_eq!(second.blocks() as usize, expected.len());
        prop_assert_eq!(found.entries, expected);
        let later = TierEpoch { epoch, forgotten: 1 };
        prop_assert_eq!(found.epoch, if epoch > 4 { later } else { TierEpoch::default() });
        prop_assert_eq!((found.damaged, found.torn), (0, 0));
    }

    #[test]
    fn a_torn_end_takes_what_is_behind_it(all in changes(), cut: Index, garbage in prop::collection::vec(any::<u8>(), 0..100)) {
        let dir = tempfile::tempdir().unwrap();
        index(&dir).0.append(&all).unwrap();
        let whole = all.len() * ENTRY_BYTES;
        let left = cut.index(whole + 1);
        edit(&dir, |bytes| {
            bytes.truncate(ENTRIES_AT as usize + left);
            bytes.extend(&garbage);
        });
        let (mut again, found) = index(&dir);
        let sound = left / ENTRY_BYTES;
        // Garbage may put a torn entry right again by chance.
        prop_assert!(found.entries == residents(&all[..sound]) || found.entries == residents(&all[..=sound]));
        // And then it goes on.
        again.append(&[stored(1, 999)]).unwrap();
        drop(again);
        let (_, found) = index(&dir);
        prop_assert_eq!(found.entries.last(), Some(&entry(1, 999)));
        prop_assert_eq!((found.damaged, found.torn), (0, 0));
    }

    #[test]
    fn a_flipped_bit_costs_one_entry_at_most(all in changes(), place: Index, bit in 0..8_u8) {
        let dir = tempfile::tempdir().unwrap();
        index(&dir).0.append(&all).unwrap();
        let mut hit = 0;
        edit(&dir, |bytes| {
            hit = place.index(bytes.len());
            bytes[hit] ^= 1 << bit;
        });
        let (again, found) = index(&dir);
        prop_assert_eq!(found.epoch, TierEpoch::default());
        let mut rest = all.clone();
        if let Some(at) = hit.checked_sub(ENTRIES_AT as usize) {
            rest.remove(at / ENTRY_BYTES);
            let is_last = at / ENTRY_BYTES == rest.len();
            prop_assert_eq!((found.damaged, found.torn), if is_last { (0, 64) } else { (1, 0) });
        }
        prop_assert_eq!(&found.entries, &residents(&rest));
        drop(again);
        // And then it is put right.
        let (_, found) = index(&dir);
        prop_assert_eq!(&found.entries, &residents(&rest));
        prop_assert_eq!((found.damaged, found.torn), (0, 0));
    }

    /// Bytes of another file, or from elsewhere in the same one, are no entries, whatever their
    /// checksums.
    #[test]
    fn entries_of_another_file_or_place_do_not_pass(all in changes()) {
        let [one, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        [&one, &other].into_iter().for_each(|dir| index(dir).0.append(&all).unwrap());
        let theirs = fs::read(options(other.path()).path).unwrap();
        edit(&one, |bytes| {
            bytes.truncate(ENTRIES_AT as usize);
            bytes.extend(&theirs[ENTRIES_AT as usize..]);
        });
        prop_assert!(index(&one).1.entries.is_empty());
        edit(&other, |bytes| {
            let first = bytes[ENTRIES_AT as usize..][..ENTRY_BYTES].to_vec();
            bytes.extend(first);
        });
        prop_assert_eq!(index(&other).1.entries, residents(&all));
    }

    #[test]
    fn whatever_lies_there_is_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..9_000)) {
        let dir = tempfile::tempdir().unwrap();
        drop(index(&dir));
        edit(&dir, |there| there.splice(..bytes.len().min(there.len()), bytes).for_each(drop));
        if let Ok((_, found)) = TierIndex::open(&options(dir.path())) {
            prop_assert!(found.entries.is_empty());
        }
    }
}

#[test]
fn a_file_of_old_entries_is_rewritten_and_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let (mut index, _) = index(&dir);
    let all: Vec<_> = (0..100_000).map(|n| stored(n % SLOTS, u128::from(n))).collect();
    all.chunks(1_000).for_each(|some| index.append(some).unwrap());
    let bytes = fs::metadata(index.path()).unwrap().len();
    assert!(bytes < 2 * SPARE * ENTRY_BYTES as u64, "{bytes}");
    drop(index);
    let (_, found) = TierIndex::open(&options(dir.path())).unwrap();
    assert_eq!(found.entries, residents(&all));
}

#[test]
fn a_failed_new_file_harms_nothing_and_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut index, _) = index(&dir);
    index.append(&[stored(3, 5)]).unwrap();
    // A directory in the way.
    let partial = index.path().with_added_extension("partial");
    fs::create_dir(&partial).unwrap();
    let later = TierEpoch { epoch: 4, forgotten: 0 };
    index.set_epoch(later).unwrap_err();
    index.compact_or_later();
    index.append(&[stored(4, 6)]).unwrap();
    fs::remove_dir(&partial).unwrap();
    drop(index);
    let (mut index, found) = TierIndex::open(&options(dir.path())).unwrap();
    assert_eq!(found.entries, [entry(3, 5), entry(4, 6)]);
    assert_eq!(found.epoch, TierEpoch::default());
    index.set_epoch(later).unwrap();
    drop(index);
    let (_, found) = TierIndex::open(&options(dir.path())).unwrap();
    assert_eq!((found.entries, found.epoch), (vec![], later));
}

#[test]
fn what_is_not_this_index_is_refused_and_left_alone() {
    type Spoil = fn(&mut Vec<u8>);
    let cases: [(Spoil, &str); 4] = [
        (|bytes| [8, HEADER_BYTES + 8].iter().for_each(|&at| bytes[at] = 9), "version 9"),
        (|bytes| [50, HEADER_BYTES + 50].iter().for_each(|&at| bytes[at] ^= 1), "both copies"),
        (|bytes| *bytes = b"a diary".to_vec(), "not an index"),
        (Vec::clear, "not an index"),
    ];
    for (spoil, words) in cases {
        let dir = tempfile::tempdir().unwrap();
        index(&dir).0.append(&[stored(3, 5)]).unwrap();
        edit(&dir, spoil);
        let before = fs::read(options(dir.path()).path).unwrap();
        let error = refused(&dir);
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(fs::read(options(dir.path()).path).unwrap(), before);
    }
}

#[test]
fn an_index_of_something_else_is_refused() {
    let changed: [fn(&mut IndexOptions); 4] = [
        |of| of.tier = Tier::Host,
        |of| of.namespace = "other".to_owned(),
        |of| of.identity = 8,
        |of| of.block_bytes += 1,
    ];
    let dir = tempfile::tempdir().unwrap();
    index(&dir).0.append(&[stored(3, 5)]).unwrap();
    for change in changed {
        let mut other = options(dir.path());
        change(&mut other);
        let error = TierIndex::open(&other).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        assert!(error.to_string().contains("remove it"), "{error}");
    }
    assert_eq!(index(&dir).1.entries, [entry(3, 5)]);
}

#[test]
fn a_resized_tier_keeps_what_lies_in_its_slots() {
    let dir = tempfile::tempdir().unwrap();
    index(&dir).0.append(&[stored(3, 5), stored(40, 6)]).unwrap();
    let open = |slots, parts| {
        TierIndex::open(&IndexOptions { slots, parts, ..options(dir.path()) }).unwrap()
    };
    let (mut larger, found) = open(200, 2);
    assert_eq!(found.entries, [entry(3, 5), entry(40, 6)]);
    larger.append(&[stored(199, 7)]).unwrap();
    drop(larger);
    assert_eq!(open(200, 2).1.entries, [entry(3, 5), entry(40, 6), entry(199, 7)]);
    assert_eq!(open(40, 1).1.entries, [entry(3, 5)]);
    assert_eq!(open(200, 1).1.entries, [entry(3, 5)], "what lay beyond is not there any more");
}

#[test]
fn a_file_has_one_opener_also_when_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (mut first, _) = index(&dir);
    assert_eq!(refused(&dir).kind(), SetupErrorKind::InUse);
    first.set_epoch(TierEpoch { epoch: 1, forgotten: 0 }).unwrap();
    assert_eq!(refused(&dir).kind(), SetupErrorKind::InUse);
    drop(first);
    drop(index(&dir));
    fs::set_permissions(options(dir.path()).path, PermissionsExt::from_mode(0o644)).unwrap();
    assert_eq!(refused(&dir).kind(), SetupErrorKind::NotWritable);
}

#[expect(clippy::unnecessary_wraps, reason = "as an index is opened with them")]
fn keys(text: &str) -> Option<Arc<KeyRing>> {
    let key = |digits: &str| digits.repeat(4);
    let text = text.replace('A', &key("0123456789abcdef")).replace('B', &key("fedcba9876543210"));
    Some(Arc::new(KeyRing::parse(&text).unwrap()))
}

fn sealed(dir: &Path, ring: &str) -> IndexOptions {
    IndexOptions { keys: keys(ring), ..options(dir) }
}

fn of_tenant(slot: u32, block: u128) -> IndexEntry {
    IndexEntry { tenant: Some(u32::MAX - slot), ..entry(slot, block) }
}

/// An authenticated index with some entries, as bytes.
fn sealed_file(dir: &Path, entries: u32) -> Vec<u8> {
    let (mut index, _) = TierIndex::open(&sealed(dir, "1:A")).unwrap();
    let changes: Vec<_> =
        (0..entries).map(|n| IndexChange::Stored(of_tenant(n, n.into()))).collect();
    index.append(&changes).unwrap();
    drop(index);
    fs::read(options(dir).path).unwrap()
}

fn replaced(dir: &Path, bytes: &[u8]) {
    let path = options(dir).path;
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .unwrap()
        .write_all_at(bytes, 0)
        .unwrap();
}

#[test]
fn an_authenticated_index_names_owners_also_under_new_keys() {
    let dir = tempfile::tempdir().unwrap();
    sealed_file(dir.path(), 9);
    let expected: Vec<_> = (0..9).map(|n| of_tenant(n, n.into())).collect();
    // The second start writes it anew under the new key, so that the third needs no other.
    for ring in ["1:A", "2:B,1:A", "2:B"] {
        let (_, found) = TierIndex::open(&sealed(dir.path(), ring)).unwrap();
        assert_eq!((found.entries, found.damaged), (expected.clone(), 0), "{ring}");
    }
    for (ring, why) in [("1:A", "main key 2"), ("2:A", "without its key")] {
        let error = TierIndex::open(&sealed(dir.path(), ring)).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
        assert!(error.to_string().contains(why), "{error}");
    }
    let error = TierIndex::open(&options(dir.path())).unwrap_err();
    assert!(error.to_string().contains("main key 2"), "{error}");
}

#[test]
fn whoever_has_no_key_can_change_or_move_no_entry() {
    let dir = tempfile::tempdir().unwrap();
    let good = sealed_file(dir.path(), 3);
    let at = |entry: usize| ENTRIES_AT as usize + entry * ENTRY_BYTES;
    let found = |bytes: &[u8]| {
        replaced(dir.path(), bytes);
        let (_, found) = TierIndex::open(&sealed(dir.path(), "1:A")).unwrap();
        found.entries.iter().map(|entry| entry.slot.0).collect::<Vec<_>>()
    };
    for bit in 0..8 * ENTRY_BYTES {
        let mut bytes = good.clone();
        bytes[at(1) + bit / 8] ^= 1 << (bit % 8);
        assert_eq!(found(&bytes), [0, 2], "bit {bit}");
    }
    // An entry in another's place, and one with a checksum that fits.
    let mut moved = good.clone();
    moved.copy_within(at(0)..at(1), at(1));
    assert_eq!(found(&moved), [0, 2]);
    let header =
        IndexHeader::decode(good[..HEADER_BYTES].try_into().unwrap(), keys("1:A").as_deref())
            .unwrap();
    let forged =
        IndexChange::Stored(entry(9, 9)).encode(&IndexHeader { key: None, ..header.clone() }, 1);
    let mut bytes = good.clone();
    bytes[at(1)..at(2)].copy_from_slice(&forged);
    assert_eq!(found(&bytes), [0, 2]);
    // One of another file of the same key.
    let other = tempfile::tempdir().unwrap();
    let mut bytes = good.clone();
    bytes[at(1)..at(2)].copy_from_slice(&sealed_file(other.path(), 3)[at(1)..at(2)]);
    assert_eq!(found(&bytes), [0, 2]);
}

#[test]
fn whoever_has_no_key_can_change_no_header() {
    let dir = tempfile::tempdir().unwrap();
    let good = sealed_file(dir.path(), 3);
    let refused = |header: &[u8; HEADER_BYTES]| {
        let bytes = [header.as_slice(), header, &good[2 * HEADER_BYTES..]].concat();
        replaced(dir.path(), &bytes);
        let error = TierIndex::open(&sealed(dir.path(), "1:A")).unwrap_err();
        assert_eq!(fs::read(options(dir.path()).path).unwrap(), bytes, "it is left alone");
        error.to_string()
    };
    let known = keys("1:A");
    let header =
        IndexHeader::decode(good[..HEADER_BYTES].try_into().unwrap(), known.as_deref()).unwrap();
    // The checksum fits, the code does not.
    let later =
        IndexHeader { epoch: TierEpoch { epoch: 9, forgotten: 0 }, ..header.clone() }.encode();
    let mut forged = later;
    let mac = 288..320;
    forged[mac.clone()].copy_from_slice(&good[mac]);
    forged[12..16].fill(0);
    let crc = crate::checksum::checksum(&forged);
    forged[12..16].copy_from_slice(&crc.to_le_bytes());
    assert!(refused(&forged).contains("made without its key"));
    // Nor does one that asks for none.
    assert!(refused(&IndexHeader { key: None, ..header }.encode()).contains("authenticated"));
    replaced(dir.path(), &good);
    assert_eq!(
        TierIndex::open(&sealed(dir.path(), "1:A")).unwrap().1.entries.len(),
        3,
        "and then it heals"
    );
}

/// `cargo nextest run -p kvbm-tiers --lib reading_100_000_entries --run-ignored only --no-capture`
#[test]
#[ignore = "a measurement"]
fn reading_100_000_entries() {
    let dir = tempfile::tempdir().unwrap();
    for ring in [None, Some("1:A")] {
        let options = IndexOptions {
            path: dir.path().join(format!("kvbm-test-{}.index", ring.is_some())),
            slots: 100_000,
            keys: ring.and_then(keys),
            ..options(dir.path())
        };
        let (mut index, _) = TierIndex::open(&options).unwrap();
        index.append(&(0..100_000).map(|n| stored(n, n.into())).collect::<Vec<_>>()).unwrap();
        drop(index);
        for _ in 0..5 {
            let started = crate::clock::now();
            let (index, found) = TierIndex::open(&options).unwrap();
            eprintln!(
                "authenticated: {}, {} entries in {:?}",
                ring.is_some(),
                found.entries.len(),
                started.elapsed()
            );
            drop(index);
        }
    }
}
