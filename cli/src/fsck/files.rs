//! Directories: which files in them belong together, what is wrong with indices and slots, and
//! putting it right.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::ProgressBar;
use kvbm_tiers::sealed::KeyRing;
use kvbm_tiers::{BlockKey, IndexEntry, KeptIndex, SetupError, SlotId};
use serde::Serialize;

use crate::output::{self, CommandFailure, with_causes};

/// What lies in the directories.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FoundFiles {
    pub(super) pairs: Vec<IndexFiles>,
    pub(super) without_index: Vec<PathBuf>,
}

/// An index, and the file of slots that it tells of.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct IndexFiles {
    index: PathBuf,
    slots: PathBuf,
}

/// Finds them by their names: an index is called as its slots are, and may lie in another
/// directory.
pub(super) fn find(dirs: &[PathBuf]) -> Result<FoundFiles, CommandFailure> {
    let mut indices = Vec::new();
    let mut slots = BTreeMap::new();
    for dir in dirs {
        for path in ours(dir)? {
            match path.extension().and_then(OsStr::to_str) {
                Some("index") => indices.push(path),
                Some("blocks" | "memory") => {
                    drop(slots.insert(path.file_stem().map(OsStr::to_owned), path));
                }
                // What is not finished the next start removes.
                _ => {}
            }
        }
    }
    indices.sort();
    let with_slots = |index: PathBuf| {
        let slots = slots.remove(&index.file_stem().map(OsStr::to_owned));
        let missing = index.with_extension("blocks");
        IndexFiles { index, slots: slots.unwrap_or(missing) }
    };
    let pairs: Vec<_> = indices.into_iter().map(with_slots).collect();
    Ok(FoundFiles { pairs, without_index: slots.into_values().collect() })
}

fn ours(dir: &Path) -> Result<impl Iterator<Item = PathBuf> + use<>, CommandFailure> {
    let unreadable = |error| {
        CommandFailure::unusable(format!("cannot read the directory {}: {error}", dir.display()))
    };
    let entries = fs::read_dir(dir).map_err(unreadable)?;
    let is_ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"kvbm-"))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_ours))
}

/// What was found of one index.
#[derive(Debug, Serialize)]
pub(super) struct IndexFinding {
    pub(super) index: PathBuf,
    pub(super) tier: &'static str,
    /// That it tells of.
    pub(super) blocks: u64,
    /// Of these, with other bytes than were stored.
    pub(super) wrong: u64,
    /// Sound blocks without those before them; `None`: not all files of their tier are here.
    orphans: Option<u64>,
    /// Entries that had changed.
    pub(super) damaged: u64,
    /// At the end, of an entry that was being written.
    torn_bytes: u64,
    header_is_whole: bool,
}

impl IndexFinding {
    /// Whether a start would drop nothing.
    pub(super) fn is_sound(&self) -> bool {
        let Self { wrong, orphans, damaged, torn_bytes, header_is_whole, .. } = self;
        [*wrong, orphans.unwrap_or_default(), *damaged, *torn_bytes] == [0; 4] && *header_is_whole
    }
}

/// An index, and which of its entries are of no use.
struct CheckedIndex {
    kept: KeptIndex,
    wrong: HashSet<SlotId>,
    orphans: Option<Vec<SlotId>>,
}

/// Checks indices and their slots, and drops what is wrong if that is wanted. All are locked before
/// any is changed.
pub(super) fn check(
    pairs: &[IndexFiles],
    keys: Option<&Arc<KeyRing>>,
    repair: bool,
) -> Result<Vec<IndexFinding>, CommandFailure> {
    let open = |IndexFiles { index, slots }: &IndexFiles| {
        KeptIndex::open(index, slots, keys).map_err(|error| unusable(&error))
    };
    let kept = pairs.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let blocks = kept.iter().map(|kept| kept.found().entries.len() as u64).sum();
    let bar = output::bar(Some(blocks), "{bar:30} {pos}/{len} blocks read ({eta} left)");
    let mut all: Vec<_> = kept.into_iter().map(|kept| read(kept, &bar)).collect();
    bar.finish_and_clear();
    find_orphans(&mut all);
    let findings = all.iter().map(CheckedIndex::finding).collect();
    if repair {
        all.into_iter()
            .filter(|checked| !checked.finding().is_sound())
            .try_for_each(CheckedIndex::repair)?;
    }
    Ok(findings)
}

fn unusable(error: &SetupError) -> CommandFailure {
    CommandFailure::unusable(with_causes(error))
}

fn read(kept: KeptIndex, bar: &ProgressBar) -> CheckedIndex {
    let bad = |entry: &&IndexEntry| {
        bar.inc(1);
        !kept.is_sound(entry)
    };
    let wrong = kept.found().entries.iter().filter(bad).map(|entry| entry.slot).collect();
    CheckedIndex { kept, wrong, orphans: None }
}

pub(super) fn table(findings: &[IndexFinding]) -> String {
    let titles =
        ["index", "tier", "blocks", "wrong bytes", "no root", "bad entries", "torn", "header"];
    let mut table = output::table(&titles, 2);
    for finding in findings {
        let IndexFinding {
            index,
            tier,
            blocks,
            wrong,
            orphans,
            damaged,
            torn_bytes,
            header_is_whole,
        } = finding;
        let orphans = orphans.map_or("?".to_owned(), output::count);
        let header = if *header_is_whole { "sound" } else { "one copy bad" };
        let [blocks, wrong, damaged] =
            [blocks, wrong, damaged].map(|&number| output::count(number));
        let torn = output::bytes(*torn_bytes);
        let name = index.display().to_string();
        table.add_row([&name, *tier, &blocks, &wrong, &orphans, &damaged, &torn, header]);
    }
    table.trim_fmt()
}

/// The files of one tier are looked at together: a chain may lie in all of them.
fn find_orphans(all: &mut [CheckedIndex]) {
    let mut tiers: BTreeMap<_, Vec<&mut CheckedIndex>> = BTreeMap::new();
    for checked in all {
        let options = checked.kept.options();
        let tier =
            (options.namespace.clone(), options.identity, options.tier, checked.kept.found().epoch);
        tiers.entry(tier).or_default().push(checked);
    }
    for mut tier in tiers.into_values().filter(|tier| is_complete(tier)) {
        let rooted = rooted(tier.iter().flat_map(|checked| checked.sound()));
        for checked in &mut tier {
            let lost = |entry: &&IndexEntry| !rooted.contains(&entry.block);
            let orphans = checked.sound().filter(lost).map(|entry| entry.slot).collect();
            checked.orphans = Some(orphans);
        }
    }
}

fn is_complete(tier: &[&mut CheckedIndex]) -> bool {
    tier.first().is_some_and(|first| first.kept.options().parts as usize == tier.len())
}

/// Blocks whose chains are there from their roots.
fn rooted<'e>(entries: impl Iterator<Item = &'e IndexEntry>) -> HashSet<BlockKey> {
    let mut children: HashMap<(u8, Option<u128>), Vec<BlockKey>> = HashMap::new();
    for IndexEntry { block, parent, .. } in entries {
        children.entry((block.group, *parent)).or_default().push(*block);
    }
    let mut parents: Vec<_> =
        children.keys().filter(|(_, parent)| parent.is_none()).copied().collect();
    let mut rooted = HashSet::new();
    while let Some(parent) = parents.pop() {
        for block in children.remove(&parent).unwrap_or_default() {
            parents.push((block.group, Some(block.hash)));
            rooted.insert(block);
        }
    }
    rooted
}

impl CheckedIndex {
    fn sound(&self) -> impl Iterator<Item = &IndexEntry> {
        self.kept.found().entries.iter().filter(|entry| !self.wrong.contains(&entry.slot))
    }

    fn finding(&self) -> IndexFinding {
        let (options, found) = (self.kept.options(), self.kept.found());
        IndexFinding {
            index: options.path.clone(),
            tier: options.tier.name(),
            blocks: found.entries.len() as u64,
            wrong: self.wrong.len() as u64,
            orphans: self.orphans.as_ref().map(|slots| slots.len() as u64),
            damaged: found.damaged,
            torn_bytes: found.torn,
            header_is_whole: self.kept.has_whole_header(),
        }
    }

    fn repair(self) -> Result<(), CommandFailure> {
        let bad: Vec<_> =
            self.wrong.into_iter().chain(self.orphans.into_iter().flatten()).collect();
        self.kept.repair(&bad).map_err(|error| unusable(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_and_its_slots_find_each_other_across_directories() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let paths = [
            a.path().join("kvbm-x.index"),
            a.path().join("kvbm-x.blocks"),
            a.path().join("kvbm-y.index"),
            b.path().join("kvbm-y.memory"),
            b.path().join("kvbm-z.memory"),
            a.path().join("kvbm-w.blocks.partial"),
            a.path().join("somebody-else.index"),
        ];
        paths.iter().for_each(|path| fs::write(path, "").unwrap());
        let [index, blocks, other_index, memory, alone, ..] = paths;
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let expected = FoundFiles {
            pairs: vec![
                IndexFiles { index, slots: blocks },
                IndexFiles { index: other_index, slots: memory },
            ],
            without_index: vec![alone],
        };
        assert_eq!(find(&dirs).unwrap(), expected);
        assert!(find(&["/no/such/dir".into()]).is_err());
    }
}
