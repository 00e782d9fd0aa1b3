//! Wrapped keys in files beside what they sealed, one in each directory.
//!
//! Each file has all keys, so that a directory that is gone takes none along. A key that is destroyed leaves its name in
//! its place: where a directory was away meanwhile, the name in the others says that its copy is dead.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use super::tenants::{KeyId, KeyStore, RECORD_BYTES, WrappedKey};
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{LockedFile, Patience, Site, checked_namespace, make_dir, open_kept};

/// `KVBMkeys`, the version 1, and zeros.
const HEADER: [u8; RECORD_BYTES] = {
    let mut header = [0; RECORD_BYTES];
    let (magic, mut at) = (*b"KVBMkeys\x01", 0);
    while at < magic.len() {
        header[at] = magic[at];
        at += 1;
    }
    header
};
/// Half a million keys. Nothing larger is read.
const MAX_FILE_BYTES: u64 = 64 << 20;
const EXTENSION: &str = "keys";

/// Files of wrapped keys, of one namespace, that this process has locked.
#[derive(Debug)]
pub struct KeyFiles(Mutex<Vec<KeyFile>>);

#[derive(Debug)]
struct KeyFile {
    site: Site,
    file: LockedFile,
}

impl KeyFiles {
    /// Opens or makes `kvbm-<namespace>.keys` in each directory.
    ///
    /// # Errors
    /// As for slot files. `Invalid`: what lies there is no file of keys.
    pub fn open(dirs: &[PathBuf], namespace: &str, patience: Duration) -> Result<Self, SetupError> {
        let namespace = checked_namespace(namespace)?;
        let mut patience = Patience::new(patience);
        let (mut files, mut failed) = (Vec::new(), None);
        for dir in dirs {
            match KeyFile::open_in(dir, namespace, &mut patience) {
                Ok(file) => files.push(file),
                // One directory that is gone takes no more than its share.
                Err(error) if error.kind() == SetupErrorKind::Io => {
                    tracing::warn!(%error, "keys of tenants are kept in the other directories");
                    failed = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failed.filter(|_| files.is_empty()) {
            Some(error) => Err(error),
            None => Ok(Self(Mutex::new(files))),
        }
    }

    /// Those of all namespaces that lie in these directories, while nobody works with them.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_all(dirs: &[PathBuf], patience: Duration) -> Result<Vec<Self>, SetupError> {
        let mut patience = Patience::new(patience);
        // Of one namespace together: what one says is destroyed is so in all.
        let mut namespaces: BTreeMap<_, Vec<KeyFile>> = BTreeMap::new();
        for dir in dirs {
            let site = Site::new(dir, &crate::disk::SETTINGS);
            for entry in fs::read_dir(dir).map_err(|error| site.failed(&error))? {
                let path = entry.map_err(|error| site.failed(&error))?.path();
                if let Some(name) = key_file_name(&path) {
                    namespaces.entry(name).or_default().push(KeyFile::open(site.at(path), &mut patience)?);
                }
            }
        }
        Ok(namespaces.into_values().map(|files| Self(Mutex::new(files))).collect())
    }
}

fn key_file_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    (name.starts_with("kvbm-") && path.extension()? == EXTENSION).then(|| name.to_owned())
}

impl KeyStore for KeyFiles {
    fn load(&self) -> io::Result<Vec<WrappedKey>> {
        let files = self.0.lock();
        let all = files.iter().map(KeyFile::read).collect::<io::Result<Vec<_>>>()?;
        let dead: HashSet<KeyId> =
            all.iter().flat_map(|file| file.iter().filter_map(WrappedKey::destroyed)).collect();
        let mut keys = BTreeMap::new();
        for (file, records) in files.iter().zip(&all) {
            for (record, at) in records.iter().zip(1..) {
                match WrappedKey::parse(*record) {
                    // It was away when the key was destroyed.
                    Some(key) if dead.contains(&key.id()) => file.destroy(at, key.id())?,
                    Some(key) => drop(keys.insert(key.id(), key)),
                    None => {}
                }
            }
        }
        for (file, records) in files.iter().zip(&all) {
            let has: HashSet<_> =
                records.iter().filter_map(|&record| Some(WrappedKey::parse(record)?.id())).collect();
            // It was away when the key was made, or is new.
            keys.values()
                .filter(|key| !has.contains(&key.id()))
                .try_for_each(|key| file.append(key.bytes()))?;
        }
        Ok(keys.into_values().collect())
    }

    fn add(&self, key: &WrappedKey) -> io::Result<()> {
        let files = self.0.lock();
        let kept: Vec<_> = files.iter().map(|file| file.append(key.bytes())).collect();
        // One copy is enough to read what it seals; the others get it at the next start.
        if kept.iter().any(Result::is_ok) { Ok(()) } else { kept.into_iter().collect() }
    }

    fn destroy(&self, tenant: u32) -> io::Result<usize> {
        let files = self.0.lock();
        let (mut gone, mut failure) = (HashSet::new(), Ok(()));
        for file in &*files {
            let destroyed = file.destroy_of(tenant, &mut gone);
            // All, also where one fails.
            failure = failure.and(destroyed.map_err(|error| {
                let path = file.site.path.display();
                io::Error::new(
                    error.kind(),
                    format!("{path} may still hold keys of tenant {tenant}: {error}"),
                )
            }));
        }
        failure.map(|()| gone.len())
    }
}

impl KeyFile {
    fn open_in(dir: &Path, namespace: &str, patience: &mut Patience) -> Result<Self, SetupError> {
        make_dir(dir, &crate::disk::SETTINGS)?;
        let path = dir.join(format!("kvbm-{namespace}.{EXTENSION}"));
        Self::open(Site::new(path, &crate::disk::SETTINGS), patience)
    }

    fn open(site: Site, patience: &mut Patience) -> Result<Self, SetupError> {
        let fill = |file: &File| {
            let written = file.write_all_at(&HEADER, 0).and_then(|()| file.sync_all());
            written.map_err(|error| site.failed(&error))
        };
        let kept = open_kept(&site, patience, fill)?;
        if !kept.was_there {
            let dir = site.path.parent().unwrap_or(Path::new("."));
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(|error| site.failed(&error))?;
        }
        let mut header = [0; RECORD_BYTES];
        let read = kept.file.read_exact_at(&mut header, 0);
        if read.is_err() || header != HEADER {
            let what = "is no file of keys that this program reads: move it elsewhere, or use the program that wrote it";
            return Err(site.error(SetupErrorKind::Invalid, what));
        }
        Ok(Self { site, file: kept.file })
    }

    /// All records, destroyed ones too. A torn end is none.
    fn read(&self) -> io::Result<Vec<[u8; RECORD_BYTES]>> {
        let bytes = self.file.metadata()?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("{} is too large", self.site.path.display())));
        }
        let mut all = vec![0; bytes as usize];
        self.file.read_exact_at(&mut all, 0)?;
        Ok(all.as_chunks().0.iter().skip(1).copied().collect())
    }

    fn append(&self, record: &[u8; RECORD_BYTES]) -> io::Result<()> {
        let records = self.file.metadata()?.len() / RECORD_BYTES as u64;
        self.file.write_all_at(record, records * RECORD_BYTES as u64)?;
        self.file.sync_data()
    }

    fn destroy_of(&self, tenant: u32, gone: &mut HashSet<KeyId>) -> io::Result<()> {
        for (record, at) in self.read()?.into_iter().zip(1..) {
            if let Some(key) = WrappedKey::parse(record).filter(|key| key.tenant() == Some(tenant)) {
                self.destroy(at, key.id())?;
                gone.insert(key.id());
            }
        }
        Ok(())
    }

    /// In its place: no copy of it is left in the file.
    fn destroy(&self, at: u64, id: KeyId) -> io::Result<()> {
        self.file.write_all_at(&WrappedKey::tombstone(id), at * RECORD_BYTES as u64)?;
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use super::super::{KeyRing, TenantKeys};
    use super::*;
    use crate::copy::Owner;

    fn open(dirs: &[PathBuf]) -> TenantKeys {
        let ring = Arc::new(KeyRing::parse(&format!("1:{}", "0123456789abcdef".repeat(4))).unwrap());
        let files = KeyFiles::open(dirs, "ns", Duration::ZERO).unwrap();
        TenantKeys::open(ring, "ns", Box::new(files)).unwrap()
    }

    #[expect(clippy::unnecessary_wraps, reason = "as a copy has it")]
    fn owner(tenant: u32) -> Option<Owner> {
        Some(Owner { tenant, life: 0 })
    }

    fn path(dir: &Path) -> PathBuf {
        dir.join("kvbm-ns.keys")
    }

    #[test]
    fn keys_outlive_their_process_and_one_of_two_directories() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let id = open(&dirs).to_seal(owner(7)).unwrap().0;
        assert_eq!(path(a.path()).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        for dir in &dirs {
            fs::remove_file(path(dir)).unwrap();
            assert!(open(&dirs).to_open(id).unwrap().is_some());
        }
    }

    #[test]
    fn a_directory_that_was_away_brings_no_key_back() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let [gone, kept] = {
            let keys = open(&dirs);
            [7, 8].map(|tenant| keys.to_seal(owner(tenant)).unwrap().0)
        };
        let before = fs::read(path(b.path())).unwrap();
        open(&dirs[..1]).forget(7, 1).unwrap();
        assert_eq!(fs::read(path(b.path())).unwrap(), before, "it was away");
        let keys = open(&dirs);
        assert!(keys.to_open(gone).unwrap().is_none() && keys.to_open(kept).unwrap().is_some());
        drop(keys);
        let wrapped = |bytes: &[u8]| bytes.windows(4).filter(|magic| *magic == b"KVK1").count();
        assert_eq!((wrapped(&before), wrapped(&fs::read(path(b.path())).unwrap())), (2, 1));
    }

    #[test]
    fn a_torn_end_costs_only_what_was_never_used() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        let id = open(&dirs).to_seal(owner(7)).unwrap().0;
        let bytes = fs::read(path(dir.path())).unwrap();
        for cut in 1..RECORD_BYTES {
            let torn = [&bytes[..], &bytes[RECORD_BYTES..RECORD_BYTES + cut]].concat();
            fs::write(path(dir.path()), torn).unwrap();
            let keys = open(&dirs);
            assert!(keys.to_open(id).unwrap().is_some());
            let new = keys.to_seal(owner(8)).unwrap().0;
            drop(keys);
            assert!(open(&dirs).to_open(new).unwrap().is_some());
        }
    }

    #[test]
    fn what_is_no_file_of_keys_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        drop(open(&dirs));
        fs::write(path(dir.path()), b"KVBMkeys\x02").unwrap();
        let error = KeyFiles::open(&dirs, "ns", Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
        assert_eq!(fs::read(path(dir.path())).unwrap(), b"KVBMkeys\x02");
    }

    #[test]
    fn whoever_is_forgotten_while_nobody_works_is_so_in_all_namespaces() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        let id = open(&dirs).to_seal(owner(7)).unwrap().0;
        let gone: usize = KeyFiles::open_all(&dirs, Duration::ZERO)
            .unwrap()
            .iter()
            .map(|files| files.destroy(7).unwrap())
            .sum();
        assert_eq!(gone, 1);
        assert!(open(&dirs).to_open(id).unwrap().is_none());
        let in_use = open(&dirs);
        let error = KeyFiles::open_all(&dirs, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::InUse, "{error}");
        drop(in_use);
    }
}
