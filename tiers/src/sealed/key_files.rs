//! Wrapped keys in files beside what they sealed, one in each directory.
//!
//! Each file has all keys, so that a directory that is gone takes none along. A key that is
//! destroyed leaves its name in its place: where a directory was away meanwhile, the name in the
//! others says that its copy is dead. These places are used again once no copy can come back: when
//! all files that ever were are there, which each file knows by their own names.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};

use super::tenants::{FoundKey, KeyId, KeyStore, RECORD_BYTES, WrappedKey};
use crate::error::{SetupError, SetupErrorKind};
use crate::files::{
    LockWait, LockedFile, OwnDirectory, checked_namespace, make_dir, open_kept, sync_dir,
};

/// `KVBMkeys`, the version 1, and zeros.
const HEADER: Record = {
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
/// Begins a record that names a file: the first one this, the others those that it met.
const FILE: [u8; 4] = *b"KVKF";

type Record = [u8; RECORD_BYTES];
/// Names a file: random.
type FileId = [u8; 16];

/// Files of wrapped keys, of one namespace, that this process has locked.
#[derive(Debug)]
pub struct KeyFiles(Mutex<Files>);

#[derive(Debug)]
struct Files {
    open: Vec<KeyFile>,
    /// Directories that cannot be used.
    away: Vec<PathBuf>,
    /// All files that ever were are there: the places of destroyed keys are used again.
    are_all: bool,
}

#[derive(Debug)]
struct KeyFile {
    site: OwnDirectory,
    file: LockedFile,
    /// What lies behind the header. Where a write failed it may still be what was there before: a
    /// key is taken to be there until it is known not to be.
    records: Vec<Record>,
    /// Which of them are of destroyed keys that no file has a copy of.
    free: Vec<usize>,
}

impl KeyFiles {
    /// Opens or makes `kvbm-<namespace>.keys` in each directory. One that cannot be used is left
    /// out, as long as there is another.
    ///
    /// # Errors
    /// As for slot files. `Invalid`: what lies there is no file of keys.
    pub fn open(dirs: &[PathBuf], namespace: &str, patience: Duration) -> Result<Self, SetupError> {
        let namespace = checked_namespace(namespace)?;
        let mut patience = LockWait::new(patience);
        let (mut files, mut away, mut failed) = (Vec::new(), Vec::new(), None);
        for dir in dirs {
            match KeyFile::open_in(dir, namespace, &mut patience) {
                Ok(file) => files.push(file),
                Err(error) if is_of_one(&error) => {
                    away.push(dir.clone());
                    failed.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failed {
            Some(error) if files.is_empty() => return Err(error),
            Some(error) => {
                tracing::error!(%error, "keys of tenants are kept in the other directories");
            }
            None => {}
        }
        Ok(Self(Mutex::new(Files::gather(files, away)?)))
    }

    /// Those of all namespaces that lie in these directories, while no process works with them.
    ///
    /// # Errors
    /// As [`open`](Self::open), but for each directory.
    pub fn open_all(dirs: &[PathBuf], patience: Duration) -> Result<Vec<Self>, SetupError> {
        let mut patience = LockWait::new(patience);
        // Of one namespace together: what one says is destroyed is so in all.
        let mut namespaces: BTreeMap<_, Vec<KeyFile>> = BTreeMap::new();
        for dir in dirs {
            let site = OwnDirectory::new(dir, &crate::disk::SETTINGS);
            for entry in fs::read_dir(dir).map_err(|error| site.failed(&error))? {
                let path = entry.map_err(|error| site.failed(&error))?.path();
                if let Some(name) = key_file_name(&path) {
                    namespaces
                        .entry(name)
                        .or_default()
                        .push(KeyFile::open(site.at(path), &mut patience)?);
                }
            }
        }
        let gather = |files| Ok(Self(Mutex::new(Files::gather(files, Vec::new())?)));
        namespaces.into_values().map(gather).collect()
    }
}

/// Whether an error is of one file alone: others may do without it.
fn is_of_one(error: &SetupError) -> bool {
    use SetupErrorKind::{Invalid, Io, NoSpace, NotWritable};
    matches!(error.kind(), Invalid | Io | NoSpace | NotWritable)
}

fn key_file_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    (name.starts_with("kvbm-") && path.extension()? == EXTENSION).then(|| name.to_owned())
}

impl KeyStore for KeyFiles {
    fn find(&self, id: KeyId) -> io::Result<FoundKey> {
        let files = self.0.lock();
        let mut copies: Vec<WrappedKey> = Vec::new();
        for record in files.open.iter().flat_map(|file| &file.records) {
            if WrappedKey::destroyed(record) == Some(id) {
                return Ok(FoundKey::Destroyed);
            }
            let copy =
                WrappedKey::parse(*record).filter(|key| key.id() == id && !copies.contains(key));
            copies.extend(copy);
        }
        Ok(if copies.is_empty() { FoundKey::Absent } else { FoundKey::Live(copies) })
    }

    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        let files = self.0.lock();
        let mut of: HashMap<_, Vec<WrappedKey>> =
            tenants.iter().map(|&tenant| (tenant, Vec::new())).collect();
        let mut seen = HashSet::new();
        for key in files
            .open
            .iter()
            .flat_map(|file| &file.records)
            .filter_map(|record| WrappedKey::parse(*record))
        {
            if let Some(keys) = of.get_mut(&key.tenant())
                && seen.insert(*key.bytes())
            {
                keys.push(key);
            }
        }
        tenants.iter().map(|tenant| Ok(of[tenant].clone())).collect()
    }

    fn add(&self, key: &WrappedKey) -> io::Result<()> {
        let mut files = self.0.lock();
        let kept: Vec<_> = files.open.iter_mut().map(|file| file.add(key)).collect();
        // One copy is enough to read what it seals; the others get it at the next start.
        if kept.iter().any(Result::is_ok) { Ok(()) } else { kept.into_iter().collect() }
    }

    fn repair(&self, good: &WrappedKey) -> io::Result<()> {
        let mut files = self.0.lock();
        let is_damaged = |record: &Record| {
            WrappedKey::parse(*record).is_some_and(|key| key.id() == good.id() && key != *good)
        };
        let repaired =
            files.open.iter_mut().map(|file| file.replace(is_damaged, |_| *good.bytes()));
        repaired.collect::<Vec<_>>().into_iter().collect::<io::Result<Vec<_>>>().map(drop)
    }

    fn destroy(&self, tenant: u32, spared: &[KeyId]) -> io::Result<usize> {
        let mut files = self.0.lock();
        let gone: HashSet<KeyId> = files
            .live()
            .filter(|key| key.tenant() == Some(tenant) && !spared.contains(&key.id()))
            .map(|key| key.id())
            .collect();
        // All, also where one fails.
        let left: Vec<_> =
            files.open.iter_mut().filter_map(|file| file.destroy(&gone).err()).collect();
        files.note_free();
        let away =
            files.away.iter().map(|dir| io::Error::other(format!("{} is away", dir.display())));
        let Some(error) = left.into_iter().chain(away).next() else { return Ok(gone.len()) };
        let message = format!(
            "keys of tenant {tenant} may be left: {error}; forget it again when that is well"
        );
        Err(io::Error::new(error.kind(), message))
    }
}

impl Files {
    /// Brings the files to one state: a key that was destroyed in one is destroyed in all, and all
    /// have all keys.
    fn gather(mut open: Vec<KeyFile>, mut away: Vec<PathBuf>) -> Result<Self, SetupError> {
        let dead: HashSet<KeyId> = records(&open).filter_map(WrappedKey::destroyed).collect();
        let mut copies: BTreeMap<KeyId, Vec<WrappedKey>> = BTreeMap::new();
        for key in live(&open).filter(|key| !dead.contains(&key.id())) {
            let copies = copies.entry(key.id()).or_default();
            if !copies.contains(&key) {
                copies.push(key);
            }
        }
        // Which of two copies is what was written is not known here: the reader of the key repairs
        // the other.
        let whole: Vec<_> =
            copies.into_values().filter(|copies| copies.len() == 1).flatten().collect();
        let met: HashSet<FileId> = records(&open).filter_map(file_id).collect();
        let mut failed = None;
        open.retain_mut(|file| match file.catch_up(&dead, &whole, &met) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, path = %file.site.path.display(), "a file of keys of tenants is left alone");
                away.extend(file.site.path.parent().map(Path::to_owned));
                failed = Some(file.site.failed(&error));
                false
            }
        });
        if let Some(error) = failed.filter(|_| open.is_empty()) {
            return Err(error);
        }
        let there: HashSet<_> = open.iter().filter_map(KeyFile::id).collect();
        let are_all = away.is_empty() && met.is_subset(&there);
        let mut files = Self { open, away, are_all };
        files.note_free();
        Ok(files)
    }

    fn live(&self) -> impl Iterator<Item = WrappedKey> {
        live(&self.open)
    }

    /// Finds the places that are free.
    fn note_free(&mut self) {
        if !self.are_all {
            return;
        }
        let live: HashSet<_> = self.live().map(|key| key.id()).collect();
        for file in &mut self.open {
            let records = file.records.iter().enumerate();
            let is_free = |record: &Record| {
                WrappedKey::destroyed(record).is_some_and(|id| !live.contains(&id))
            };
            file.free = records.filter(|(_, record)| is_free(record)).map(|(at, _)| at).collect();
        }
    }
}

fn records(files: &[KeyFile]) -> impl Iterator<Item = &Record> {
    files.iter().flat_map(|file| &file.records)
}

fn live(files: &[KeyFile]) -> impl Iterator<Item = WrappedKey> {
    records(files).filter_map(|record| WrappedKey::parse(*record))
}

/// The file that a record names; `None`: it is another record.
fn file_id(record: &Record) -> Option<FileId> {
    record.starts_with(&FILE).then(|| std::array::from_fn(|byte| record[16 + byte]))
}

fn file_record(id: FileId) -> Record {
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&FILE);
    record[16..32].copy_from_slice(&id);
    record
}

impl KeyFile {
    fn open_in(dir: &Path, namespace: &str, patience: &mut LockWait) -> Result<Self, SetupError> {
        make_dir(dir, &crate::disk::SETTINGS)?;
        let path = dir.join(format!("kvbm-{namespace}.{EXTENSION}"));
        Self::open(OwnDirectory::new(path, &crate::disk::SETTINGS), patience)
    }

    fn open(site: OwnDirectory, patience: &mut LockWait) -> Result<Self, SetupError> {
        let fill = |file: &File| {
            let written = file.write_all_at(&HEADER, 0).and_then(|()| file.sync_all());
            written.map_err(|error| site.failed(&error))
        };
        let kept = open_kept(&site, patience, fill)?;
        if !kept.was_there {
            sync_dir(&site.path).map_err(|error| site.failed(&error))?;
        }
        let bytes = kept.file.metadata().map_err(|error| site.failed(&error))?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(site.error(
                SetupErrorKind::Invalid,
                "is larger than any file of keys: move it elsewhere",
            ));
        }
        let mut all = vec![0; bytes as usize];
        kept.file.read_exact_at(&mut all, 0).map_err(|error| site.failed(&error))?;
        // A torn end is none.
        let Some((&HEADER, records)) = all.as_chunks().0.split_first() else {
            let what = "is no file of keys that this program reads: move it elsewhere, or use the program that wrote it";
            return Err(site.error(SetupErrorKind::Invalid, what));
        };
        let records = records.to_vec();
        let mut opened = Self { site, file: kept.file, records, free: Vec::new() };
        if opened.id().is_none() {
            let mut id = [0; 16];
            let no_random =
                |_| io::Error::other("the system gives no random bytes to name a file with");
            let named = SystemRandom::new().fill(&mut id).map_err(no_random);
            let named = named.and_then(|()| opened.append(&[file_record(id)]));
            named.map_err(|error| opened.site.failed(&error))?;
        }
        Ok(opened)
    }

    /// Its own name.
    fn id(&self) -> Option<FileId> {
        self.records.iter().find_map(file_id)
    }

    /// Gets what others have: `dead` keys end, those that it lacks come, and so do the names of
    /// files that were `met`.
    fn catch_up(
        &mut self,
        dead: &HashSet<KeyId>,
        keys: &[WrappedKey],
        met: &HashSet<FileId>,
    ) -> io::Result<()> {
        self.destroy(dead)?;
        let has: HashSet<_> = live(std::slice::from_ref(self)).map(|key| key.id()).collect();
        let known: HashSet<_> = self.records.iter().filter_map(file_id).collect();
        let keys = keys.iter().filter(|key| !has.contains(&key.id())).map(|key| *key.bytes());
        let new: Vec<_> = keys.chain(met.difference(&known).map(|&id| file_record(id))).collect();
        self.append(&new)
    }

    fn add(&mut self, key: &WrappedKey) -> io::Result<()> {
        match self.free.pop() {
            Some(at) => {
                self.records[at] = *key.bytes();
                self.write(at, key.bytes()).and_then(|()| self.file.sync_data())
            }
            None => self.append(&[*key.bytes()]),
        }
    }

    fn append(&mut self, new: &[Record]) -> io::Result<()> {
        if new.is_empty() {
            return Ok(());
        }
        let at = self.records.len();
        self.records.extend_from_slice(new);
        self.write(at, new.as_flattened()).and_then(|()| self.file.sync_data())
    }

    /// In their place: no copy of them is left in the file.
    fn destroy(&mut self, gone: &HashSet<KeyId>) -> io::Result<()> {
        let is_gone = |record: &Record| {
            WrappedKey::parse(*record).is_some_and(|key| gone.contains(&key.id()))
        };
        let tombstone = |record: &Record| {
            WrappedKey::parse(*record).map_or(*record, |key| WrappedKey::tombstone(key.id()))
        };
        self.replace(is_gone, tombstone).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", self.site.path.display()))
        })
    }

    /// Writes something else in the place of some records. They count as what they were until it is
    /// on the medium.
    fn replace(
        &mut self,
        is_one: impl Fn(&Record) -> bool,
        by: impl Fn(&Record) -> Record,
    ) -> io::Result<()> {
        let found = self.records.iter().enumerate().filter(|(_, record)| is_one(record));
        let new: Vec<_> = found.map(|(at, record)| (at, by(record))).collect();
        if new.is_empty() {
            return Ok(());
        }
        new.iter().try_for_each(|(at, record)| self.write(*at, record))?;
        self.file.sync_data()?;
        new.into_iter().for_each(|(at, record)| self.records[at] = record);
        Ok(())
    }

    fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, ((at + 1) * RECORD_BYTES) as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::TenantKeys;
    use super::*;
    use crate::copy::Owner;
    use crate::testing::key_ring;

    fn open(dirs: &[PathBuf]) -> TenantKeys {
        let files = KeyFiles::open(dirs, "ns", Duration::ZERO).unwrap();
        TenantKeys::new(key_ring(1, "0123456789abcdef"), "ns", Box::new(files))
    }

    fn has(keys: &TenantKeys, id: KeyId) -> bool {
        keys.to_open(id).is_ok()
    }

    /// Wrapped keys in a file.
    fn copies(dir: &Path) -> usize {
        fs::read(path(dir))
            .unwrap()
            .chunks(RECORD_BYTES)
            .filter(|record| record.starts_with(b"KVK1"))
            .count()
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
            assert!(has(&open(&dirs), id));
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
        assert!(!has(&keys, gone) && has(&keys, kept));
        drop(keys);
        assert_eq!(copies(b.path()), 1);
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
            assert!(has(&keys, id));
            let new = keys.to_seal(owner(8)).unwrap().0;
            drop(keys);
            assert!(has(&open(&dirs), new));
        }
    }

    #[test]
    fn what_is_no_key_file_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        drop(open(&dirs));
        fs::write(path(dir.path()), b"KVBMkeys\x02").unwrap();
        let error = KeyFiles::open(&dirs, "ns", Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
        assert_eq!(fs::read(path(dir.path())).unwrap(), b"KVBMkeys\x02");
    }

    #[test]
    fn who_is_forgotten_offline_is_so_in_all_namespaces() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        let id = open(&dirs).to_seal(owner(7)).unwrap().0;
        let gone: usize = KeyFiles::open_all(&dirs, Duration::ZERO)
            .unwrap()
            .iter()
            .map(|files| files.destroy(7, &[]).unwrap())
            .sum();
        assert_eq!(gone, 1);
        assert!(!has(&open(&dirs), id));
        let in_use = open(&dirs);
        let error = KeyFiles::open_all(&dirs, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::InUse, "{error}");
        drop(in_use);
    }

    #[test]
    fn an_absent_directory_is_named_when_keys_are_destroyed() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().join("mount/kvbm")];
        let keys = open(&dirs);
        let [gone, kept] = [7, 8].map(|tenant| keys.to_seal(owner(tenant)).unwrap().0);
        let error = keys.forget(7, 1).unwrap_err().to_string();
        assert!(error.contains("mount/kvbm is away"), "{error}");
        assert!(!has(&keys, gone) && has(&keys, kept));
        drop(keys);
        // And then it is there.
        fs::create_dir(b.path().join("mount")).unwrap();
        let keys = open(&dirs);
        assert!(!has(&keys, gone) && has(&keys, kept));
        keys.forget(7, 1).unwrap();
        drop(keys);
        assert_eq!(copies(&dirs[1]), 1);
        let none = [b.path().join("no/such")];
        let error = KeyFiles::open(&none, "ns", Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
    }

    #[test]
    fn a_damaged_copy_hides_no_good_one_and_is_repaired() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let id = open(&dirs).to_seal(owner(7)).unwrap().0;
        let good = fs::read(path(a.path())).unwrap();
        let record =
            good.chunks(RECORD_BYTES).position(|record| record.starts_with(b"KVK1")).unwrap();
        for dir in &dirs {
            for byte in 0..RECORD_BYTES - 16 {
                let mut bytes = fs::read(path(dir)).unwrap();
                bytes[record * RECORD_BYTES + byte] ^= 1;
                fs::write(path(dir), bytes).unwrap();
                assert!(has(&open(&dirs), id), "byte {byte}");
                for dir in &dirs {
                    assert!(
                        has(&open(std::slice::from_ref(dir)), id),
                        "byte {byte}: it is not repaired"
                    );
                }
            }
            fs::write(path(a.path()), &good).unwrap();
            fs::write(path(b.path()), &good).unwrap();
        }
        // A header that is no header costs its file.
        fs::write(path(b.path()), [&b"x"[..], &good[1..]].concat()).unwrap();
        assert!(has(&open(&dirs), id));
    }

    #[test]
    fn files_do_not_grow_with_those_who_were_forgotten() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let size = |dir: &Path| path(dir).metadata().unwrap().len();
        let kept = open(&dirs).to_seal(owner(8)).unwrap().0;
        let mut gone = Vec::new();
        let mut sizes = HashSet::new();
        for round in 0..20 {
            let keys = open(&dirs);
            gone.push(keys.to_seal(owner(7)).unwrap().0);
            keys.forget(7, 1).unwrap();
            let life = Owner { tenant: 7, life: 1 };
            gone.push(keys.to_seal(Some(life)).unwrap().0);
            keys.forget(7, 2).unwrap();
            sizes.extend((round > 0).then(|| (size(a.path()), size(b.path()))));
        }
        assert_eq!(sizes.len(), 1, "{sizes:?}");
        // While a known file is missing, no record of its destroyed keys is overwritten.
        let before = fs::read(path(b.path())).unwrap();
        for _ in 0..5 {
            let keys = open(&dirs[..1]);
            gone.push(keys.to_seal(owner(7)).unwrap().0);
            keys.forget(7, 1).unwrap();
        }
        assert_eq!(size(a.path()), sizes.iter().next().unwrap().0 + 5 * RECORD_BYTES as u64);
        assert_eq!(fs::read(path(b.path())).unwrap(), before);
        let keys = open(&dirs);
        assert!(gone.iter().all(|&id| !has(&keys, id)) && has(&keys, kept));
    }

    #[test]
    fn a_copy_of_a_destroyed_key_file_stays_dead() {
        let [a, b, c] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned(), c.path().to_owned()];
        let old = open(&dirs[..2]).to_seal(owner(7)).unwrap().0;
        // The second goes, a third comes, and keys come and go.
        for _ in 0..3 {
            let keys = open(&[dirs[0].clone(), dirs[2].clone()]);
            keys.to_seal(owner(7)).unwrap();
            keys.forget(7, 1).unwrap();
        }
        let new = open(&dirs[2..]).to_seal(owner(9)).unwrap().0;
        let keys = open(&dirs);
        assert!(!has(&keys, old) && has(&keys, new));
        drop(keys);
        assert_eq!(copies(b.path()), 1);
    }
}
