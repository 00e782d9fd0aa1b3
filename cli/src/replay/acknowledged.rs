//! What was acknowledged as durable, in a log that outlives the process, and whether it is still to
//! be had.
//!
//! A line of the log is `+ HASH TIER PARENT` once a block is where a process that is started later
//! finds it, and `- HASH TIER` once it has left; `PARENT` is `-` for the first block of a chain,
//! and `- * TIER` means all of a tier. A line without its end was being written when the process
//! was killed, and counts for nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvbm::{BlockHash, CachedBlock, DurableEvent, OnDurable, Tier};
use serde::Serialize;

use crate::engine::SimulatedEngine;
use crate::output::CommandFailure;

/// The open log.
#[derive(Clone, Debug)]
pub(super) struct AckLog {
    path: PathBuf,
    file: Arc<File>,
}

/// What an earlier run was told and was not taken back.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct AcknowledgedBlocks {
    blocks: HashSet<(Tier, BlockHash)>,
    /// Of all blocks that the log ever named.
    parents: HashMap<BlockHash, Option<BlockHash>>,
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcknowledgedLine {
    Stored { tier: Tier, hash: BlockHash, parent: Option<BlockHash> },
    Removed { tier: Tier, hash: BlockHash },
    Cleared { tier: Tier },
}

impl AckLog {
    /// Goes on with the log at `path`, and returns what it says so far.
    pub(super) fn open(path: &Path) -> Result<(Self, AcknowledgedBlocks), CommandFailure> {
        let unusable = |error: io::Error| {
            CommandFailure::unusable(format!(
                "cannot use {} as a log (--ack-log): {error}",
                path.display()
            ))
        };
        let file =
            OpenOptions::new().read(true).append(true).create(true).open(path).map_err(unusable)?;
        let mut text = io::read_to_string(&file).map_err(unusable)?;
        if !text.is_empty() && !text.ends_with('\n') {
            // What comes next must not make a whole line of half a one.
            text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
            file.set_len(text.len() as u64).map_err(unusable)?;
        }
        let mut acknowledged = AcknowledgedBlocks::default();
        for (number, line) in text.lines().enumerate() {
            let line = AcknowledgedLine::parse(line).ok_or_else(|| {
                let (path, number) = (path.display(), number + 1);
                CommandFailure::unusable(format!(
                    "{path}:{number} is no line of an --ack-log: name another file"
                ))
            })?;
            acknowledged.note(line);
        }
        Ok((Self { path: path.to_owned(), file: Arc::new(file) }, acknowledged))
    }

    /// Has everything noted that becomes durable.
    pub(super) fn listener(&self) -> OnDurable {
        let log = self.clone();
        OnDurable::new(move |events| {
            log.append_or_warn(events.iter().filter_map(AcknowledgedLine::of));
        })
    }

    /// Appends lines in one write, so that a process that is killed has written them or not.
    fn append(&self, lines: impl IntoIterator<Item = AcknowledgedLine>) -> io::Result<()> {
        let mut text = String::new();
        for line in lines {
            let _ = writeln!(text, "{line}");
        }
        (&*self.file).write_all(text.as_bytes())
    }

    /// [`append`](Self::append) where nothing waits for the answer.
    fn append_or_warn(&self, lines: impl IntoIterator<Item = AcknowledgedLine>) {
        if let Err(error) = self.append(lines) {
            tracing::error!(%error, path = %self.path.display(), "cannot write the log of what is durable");
        }
    }
}

impl AcknowledgedLine {
    fn of(event: &DurableEvent) -> Option<Self> {
        match *event {
            DurableEvent::Stored(CachedBlock { tier, hash, parent, .. }) => {
                Some(Self::Stored { tier, hash, parent })
            }
            DurableEvent::Removed(CachedBlock { tier, hash, .. }) => {
                Some(Self::Removed { tier, hash })
            }
            DurableEvent::Cleared(tier) => Some(Self::Cleared { tier }),
            // There are no others yet.
            _ => None,
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["+", block, tier, parent] => {
                let parent = if parent == "-" { None } else { Some(hash(parent)?) };
                Some(Self::Stored { tier: named(tier)?, hash: hash(block)?, parent })
            }
            ["-", "*", tier] => Some(Self::Cleared { tier: named(tier)? }),
            ["-", block, tier] => Some(Self::Removed { tier: named(tier)?, hash: hash(block)? }),
            _ => None,
        }
    }
}

impl fmt::Display for AcknowledgedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored { tier, hash, parent: None } => {
                write!(f, "+ {:032x} {} -", hash.get(), tier.name())
            }
            Self::Stored { tier, hash, parent: Some(parent) } => {
                write!(f, "+ {:032x} {} {:032x}", hash.get(), tier.name(), parent.get())
            }
            Self::Removed { tier, hash } => write!(f, "- {:032x} {}", hash.get(), tier.name()),
            Self::Cleared { tier } => write!(f, "- * {}", tier.name()),
        }
    }
}

fn hash(text: &str) -> Option<BlockHash> {
    u128::from_str_radix(text, 16).ok().map(BlockHash::from_u128)
}

fn named(text: &str) -> Option<Tier> {
    Tier::ALL.into_iter().find(|tier| tier.name() == text)
}

impl AcknowledgedBlocks {
    fn note(&mut self, line: AcknowledgedLine) {
        match line {
            AcknowledgedLine::Stored { tier, hash, parent } => {
                self.blocks.insert((tier, hash));
                self.parents.insert(hash, parent);
            }
            AcknowledgedLine::Removed { tier, hash } => drop(self.blocks.remove(&(tier, hash))),
            AcknowledgedLine::Cleared { tier } => self.blocks.retain(|(other, _)| *other != tier),
        }
    }

    /// The chains of a tier's blocks from their roots, as far as each is known, so that every block
    /// is in one of them.
    fn chains(&self, tier: Tier) -> Vec<Vec<BlockHash>> {
        let blocks: HashSet<_> =
            self.blocks.iter().filter(|(other, _)| *other == tier).map(|(_, hash)| *hash).collect();
        let inner: HashSet<_> = blocks.iter().filter_map(|hash| self.parents[hash]).collect();
        blocks.difference(&inner).map(|&leaf| self.chain(leaf)).collect()
    }

    fn chain(&self, leaf: BlockHash) -> Vec<BlockHash> {
        let above = |hash: &BlockHash| self.parents.get(hash).copied().flatten();
        let mut chain: Vec<_> =
            std::iter::successors(Some(leaf), above).take(self.parents.len() + 1).collect();
        chain.reverse();
        chain
    }

    /// Loads every block and compares its bytes. What is not there any more is taken back in `log`.
    pub(super) fn check(
        &self,
        engine: &SimulatedEngine,
        log: &AckLog,
    ) -> Result<FoundBlocks, CommandFailure> {
        let mut found = FoundBlocks::default();
        let mut served = HashMap::new();
        // What is in the host tier comes first: loading what is not would push it out.
        for tier in Tier::ALL {
            for chain in self.chains(tier) {
                let read = engine.read_back(&chain)?;
                found.wrong += read.wrong;
                for (from, hash) in read.sources.into_iter().zip(chain) {
                    served.entry(hash).or_insert(from);
                }
            }
        }
        for &(tier, hash) in &self.blocks {
            let count = found.tiers.entry(tier.name()).or_default();
            count.acknowledged += 1;
            count.served += u64::from(served.contains_key(&hash));
            count.from_there += u64::from(served.get(&hash) == Some(&tier));
        }
        let lost = self.blocks.iter().filter(|(_, hash)| !served.contains_key(hash));
        log.append_or_warn(lost.map(|&(tier, hash)| AcknowledgedLine::Removed { tier, hash }));
        Ok(found)
    }
}

/// What of the acknowledged blocks was there.
#[derive(Debug, Default, Serialize)]
pub(super) struct FoundBlocks {
    /// Blocks whose bytes were wrong.
    pub(super) wrong: u64,
    #[serde(flatten)]
    tiers: BTreeMap<&'static str, TierCount>,
}

impl FoundBlocks {
    /// For people.
    pub(super) fn summary(&self) -> String {
        let tier = |(tier, count): (&&str, &TierCount)| {
            let TierCount { acknowledged, served, from_there } = *count;
            format!(
                "{served} of {acknowledged} in the {tier} tier were there, {from_there} of them in that tier"
            )
        };
        let tiers: Vec<_> = self.tiers.iter().map(tier).collect();
        let tiers = if tiers.is_empty() { "none".to_owned() } else { tiers.join("; ") };
        format!(
            "blocks that an earlier run was told are durable: {tiers}; {} had wrong bytes.",
            self.wrong
        )
    }
}

/// Blocks of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct TierCount {
    acknowledged: u64,
    /// From whichever tier.
    served: u64,
    /// From this one.
    from_there: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u128) -> BlockHash {
        BlockHash::from_u128(number)
    }

    fn stored(tier: Tier, number: u128, parent: Option<u128>) -> AcknowledgedLine {
        AcknowledgedLine::Stored { tier, hash: block(number), parent: parent.map(block) }
    }

    #[test]
    fn a_log_is_continued_and_half_lines_count_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let (log, nothing) = AckLog::open(&path).unwrap();
        assert_eq!(nothing, AcknowledgedBlocks::default());
        let taken_back = AcknowledgedLine::Removed { tier: Tier::Disk, hash: block(2) };
        log.append([stored(Tier::Disk, 1, None), stored(Tier::Disk, 2, Some(1)), taken_back])
            .unwrap();
        log.append([stored(Tier::Host, 3, Some(1)), stored(Tier::Object, 9, None)]).unwrap();
        log.append([AcknowledgedLine::Cleared { tier: Tier::Object }]).unwrap();
        (&*log.file).write_all(b"- 0000").unwrap();
        let (log, acknowledged) = AckLog::open(&path).unwrap();
        assert_eq!(
            acknowledged.blocks,
            HashSet::from([(Tier::Disk, block(1)), (Tier::Host, block(3))])
        );
        assert_eq!(acknowledged.chains(Tier::Host), [[block(1), block(3)]]);
        log.append([AcknowledgedLine::Removed { tier: Tier::Disk, hash: block(1) }]).unwrap();
        let (_, acknowledged) = AckLog::open(&path).unwrap();
        assert_eq!(acknowledged.blocks, HashSet::from([(Tier::Host, block(3))]));
    }

    #[test]
    fn what_is_no_log_is_refused_and_left_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "+ 1 disk -\nsomething else\n").unwrap();
        let failure = AckLog::open(file.path()).unwrap_err().to_string();
        assert!(failure.contains(":2 is no line of an --ack-log"), "{failure}");
        assert!(AckLog::open(Path::new("/no/such/log")).is_err());
    }

    #[test]
    fn every_block_is_in_one_chain_from_its_root() {
        let mut acknowledged = AcknowledgedBlocks::default();
        for (number, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2)), (5, None)] {
            acknowledged.note(stored(Tier::Disk, number, parent));
        }
        let mut chains = acknowledged.chains(Tier::Disk);
        chains.sort();
        assert_eq!(
            chains,
            [
                vec![block(1), block(2), block(3)],
                vec![block(1), block(2), block(4)],
                vec![block(5)]
            ]
        );
    }
}
