//! Which files of some directories belong together.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::CommandFailure;

/// What lies in the directories.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FoundFiles {
    /// Indices with the files of slots that they tell of.
    pub(super) pairs: Vec<(PathBuf, PathBuf)>,
    pub(super) without_index: Vec<PathBuf>,
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
        (index, slots.unwrap_or(missing))
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
            pairs: vec![(index, blocks), (other_index, memory)],
            without_index: vec![alone],
        };
        assert_eq!(find(&dirs).unwrap(), expected);
        assert!(find(&["/no/such/dir".into()]).is_err());
    }
}
