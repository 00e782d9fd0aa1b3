//! What ranks have yet to forget, on the medium: it must survive a leader that ends before a rank
//! is back.
//!
//! A line of text for each rank and tenant, between one that says what the file is and one that
//! says how many there are:
//!
//! ```text
//! kvbm debts 1
//! 2 7
//! end 1
//! ```

use std::fmt::Write;
use std::fs::{self, DirBuilder};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use crate::error::{SetupError, SetupErrorKind};
use crate::files::{OwnDirectory, open_ours, replace};

const FIRST_LINE: &str = "kvbm debts 1";
/// Half a million debts. Nothing larger is read.
const MAX_BYTES: u64 = 8 << 20;

/// A rank, and a tenant whose keys it is to destroy.
pub(super) type RankAndTenant = (u16, u32);

/// Where debts are written down.
#[derive(Debug)]
pub(super) struct DebtFile(OwnDirectory);

impl DebtFile {
    /// The file, and what an earlier leader left in it.
    ///
    /// # Errors
    /// `Invalid`: it is damaged. `NotWritable`: it is not a file of this user's that is closed to
    /// all others. `Io`: the medium.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<RankAndTenant>), SetupError> {
        let site = OwnDirectory::new(path, &crate::disk::SETTINGS);
        let mut text = String::new();
        if let Some(file) = open_ours(&site)? {
            let read = file.take(MAX_BYTES).read_to_string(&mut text);
            read.map_err(|error| site.failed(&error))?;
        } else {
            return Ok((Self(site), Vec::new()));
        }
        let debts = parse(&text).ok_or_else(|| {
            let what = "is damaged: it said which ranks have yet to destroy which tenants' keys. Forget these tenants again \
                        (kvbm forget, with each rank's settings), and remove it";
            site.error(SetupErrorKind::Invalid, what)
        })?;
        Ok((Self(site), debts))
    }

    /// Replaces what is written there: on the medium when it returns.
    pub(super) fn write(
        &self,
        debts: impl Iterator<Item = RankAndTenant>,
    ) -> Result<(), SetupError> {
        let Self(site) = self;
        let Some(text) = written(debts) else { return self.remove() };
        if let Some(dir) = site.path.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|error| site.failed(&error))?;
        }
        replace(site, text.as_bytes())
    }

    fn remove(&self) -> Result<(), SetupError> {
        let Self(site) = self;
        match fs::remove_file(&site.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(site.failed(&error)),
            _ => Ok(()),
        }
    }
}

/// `None`: there are none.
fn written(debts: impl Iterator<Item = RankAndTenant>) -> Option<String> {
    let (mut text, mut count) = (format!("{FIRST_LINE}\n"), 0);
    for (rank, tenant) in debts {
        count += 1;
        let _ = writeln!(text, "{rank} {tenant}");
    }
    let _ = writeln!(text, "end {count}");
    (count > 0).then_some(text)
}

/// `None`: that is not what was written.
fn parse(text: &str) -> Option<Vec<RankAndTenant>> {
    let mut lines = text.strip_suffix('\n')?.lines();
    let is_ours = lines.next()? == FIRST_LINE;
    let count: usize = lines.next_back()?.strip_prefix("end ")?.parse().ok()?;
    let debt = |line: &str| {
        let (rank, tenant) = line.split_once(' ')?;
        Some((rank.parse().ok()?, tenant.parse().ok()?))
    };
    let debts: Vec<_> = lines.map(debt).collect::<Option<_>>()?;
    (is_ours && debts.len() == count).then_some(debts)
}

/// Reads a file, as it is and between a first and a last line that fit. For fuzzing: whatever the
/// bytes are, it answers.
///
/// # Panics
/// If writing again what was understood, and reading that, gives other debts.
#[cfg(any(test, feature = "testing"))]
pub fn read_debts(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines = text.lines().count();
    for text in [text, &format!("{FIRST_LINE}\n{text}\nend {lines}\n")] {
        if let Some(debts) = parse(text)
            && let Some(again) = written(debts.iter().copied())
        {
            assert_eq!(parse(&again), Some(debts));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::files::{LockWait, create_locked, partial, remove_abandoned};

    proptest! {
        #[test]
        fn debts_are_read_as_they_were_written(debts in prop::collection::vec(any::<RankAndTenant>(), 1..20), cut: usize) {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("made").join("kvbm-test.debts");
            let (file, found) = DebtFile::open(&path).unwrap();
            prop_assert_eq!(found, vec![]);
            for _ in 0..2 {
                file.write(debts.iter().copied()).unwrap();
                prop_assert_eq!(&DebtFile::open(&path).unwrap().1, &debts);
            }
            prop_assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            // Whatever part of it is lost, it is not read as another list.
            let text = fs::read_to_string(&path).unwrap();
            prop_assert_eq!(parse(&text[..cut % text.len()]), None);
            fs::write(&path, &text[..cut % text.len()]).unwrap();
            prop_assert_eq!(DebtFile::open(&path).unwrap_err().kind(), SetupErrorKind::Invalid);
            file.write(std::iter::empty()).unwrap();
            prop_assert!(!path.exists());
        }

        #[test]
        fn whatever_lies_there_is_read_without_panic(text: String) {
            read_debts(text.as_bytes());
        }
    }

    #[test]
    fn debts_are_locked_while_they_are_written() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("kvbm-test.debts");
        let (file, _) = DebtFile::open(&path).unwrap();
        let site = OwnDirectory::new(&path, &crate::disk::SETTINGS);
        // Another leader is half-way.
        let theirs = create_locked(&partial(&site), &mut LockWait::new(Duration::ZERO)).unwrap();
        remove_abandoned(home.path(), &crate::disk::SETTINGS);
        assert!(partial(&site).path.exists(), "who starts leaves it alone");
        assert_eq!(file.write([(1, 7)].into_iter()).unwrap_err().kind(), SetupErrorKind::InUse);
        drop(theirs);
        // Killed there, it left a name that forbids nothing.
        file.write([(1, 7)].into_iter()).unwrap();
        assert_eq!(DebtFile::open(&path).unwrap().1, [(1, 7)]);
        assert!(!partial(&site).path.exists());
        // A link that a stranger made is not written through.
        let precious = home.path().join("precious");
        fs::write(&precious, "kept").unwrap();
        std::os::unix::fs::symlink(&precious, partial(&site).path).unwrap();
        assert_eq!(
            file.write([(2, 8)].into_iter()).unwrap_err().kind(),
            SetupErrorKind::NotWritable
        );
        assert_eq!(fs::read_to_string(&precious).unwrap(), "kept");
        fs::remove_file(partial(&site).path).unwrap();
        file.write([(2, 8)].into_iter()).unwrap();
        assert_eq!(DebtFile::open(&path).unwrap().1, [(2, 8)]);
    }
}
