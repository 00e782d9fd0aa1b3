//! Finds what is wrong with indices and slots, and puts it right.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvbm_tiers::sealed::KeyRing;
use kvbm_tiers::{BlockKey, IndexEntry, KeptIndex, SetupError, SlotId};
use serde::Serialize;

use crate::failure::{CommandFailure, with_causes};

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
    pub(super) orphans: Option<u64>,
    /// Entries that had changed.
    pub(super) damaged: u64,
    /// At the end, of an entry that was being written.
    pub(super) torn_bytes: u64,
    pub(super) header_is_whole: bool,
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
    pairs: &[(PathBuf, PathBuf)],
    keys: Option<&Arc<KeyRing>>,
    repair: bool,
) -> Result<Vec<IndexFinding>, CommandFailure> {
    let open = |(index, slots): &(PathBuf, PathBuf)| {
        KeptIndex::open(index, slots, keys).map_err(|error| unusable(&error))
    };
    let kept = pairs.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let bar = bar(kept.iter().map(|kept| kept.found().entries.len() as u64).sum());
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

fn bar(blocks: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} blocks read ({eta} left)");
    ProgressBar::with_draw_target(Some(blocks), ProgressDrawTarget::stderr_with_hz(10))
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
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
