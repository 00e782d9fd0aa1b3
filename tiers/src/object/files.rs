//! A store in files that only their owner may read: prompts can be guessed from KV blocks.
//!
//! What others may have put into its directory is not read: links, and files of other users.
//! Epochs, keys and the end of a key outlive a loss of power, since they are promised to; segments
//! may not, and are found to be torn then.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, Extensions, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use crate::clock;

/// Directories vanish with their last file, possibly between our making one and a file in it; on a
/// busy machine many times in a row.
const MAX_ATTEMPTS: u32 = 256;

/// Deletions at a time.
const DELETIONS: usize = 16;
/// Ends the names of what must be on the medium when it is said to be stored, or deleted: epochs
/// and keys.
const DURABLE: [&str; 2] = [super::epochs::EXTENSION, super::keys::EXTENSION];

/// Whether a file's name is that of one which is being written: [`LocalFileSystem`] takes it for no
/// object.
pub(super) fn is_staged(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    })
}

/// Makes a directory and those above it, unless they are there, for the owner alone.
pub(super) fn make_directory(path: &FilePath) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Makes files with mode 0600 in directories with mode 0700, wherever the first of them lies. All
/// else is left to [`LocalFileSystem`], which does not make files here.
#[derive(Debug)]
pub(super) struct PrivateFiles {
    files: Arc<LocalFileSystem>,
    root: PathBuf,
    trust: Trust,
}

/// Whose files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// This user's: what is in them is used.
    OwnOnly,
    /// Any user's: it is only looked at.
    Anybody,
}

impl PrivateFiles {
    /// Below a directory that exists.
    pub(super) fn open(directory: &FilePath, trust: Trust) -> Result<Self> {
        let files = LocalFileSystem::new_with_prefix(directory)?.with_automatic_cleanup(true);
        Ok(Self { files: Arc::new(files), root: directory.canonicalize().map_err(generic)?, trust })
    }
}

impl fmt::Display for PrivateFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

#[async_trait::async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for PrivateFiles {
    /// When the future is dropped, the file goes, however far it was.
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let replaces = match opts.mode {
            PutMode::Create => false,
            PutMode::Overwrite => true,
            PutMode::Update(_) => return Err(unsupported("PutMode::Update")),
        };
        let path = self.files.path_to_filesystem(location)?;
        let durable_below = is_durable(location).then(|| self.root.clone());
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let write =
            move || write_whole(&path, &payload, replaces, durable_below.as_deref(), &still_wanted);
        tokio::task::spawn_blocking(write).await??;
        drop(wanted);
        Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() })
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(unsupported("put_multipart"))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let path = self.files.path_to_filesystem(location)?;
        let (root, trust) = (self.root.clone(), self.trust);
        let opened = tokio::task::spawn_blocking(move || {
            open_ours(&root, &path, trust).map(|file| (file, path))
        });
        let (file, path) = opened.await?.map_err(|error| not_read(location, error))?;
        // Conditions and ranges are the client's affair; the content is that of the file which was
        // looked at.
        let GetResult { meta, range, attributes, extensions, .. } =
            self.files.get_opts(location, options).await?;
        Ok(GetResult {
            payload: GetResultPayload::File(file, path),
            meta,
            range,
            attributes,
            extensions,
        })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let ranges = ranges.iter().cloned().map(|range| self.get_range(location, range));
        futures::future::try_join_all(ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (files, root) = (Arc::clone(&self.files), self.root.clone());
        let deleted = locations.map(move |location| {
            let (files, root) = (Arc::clone(&files), root.clone());
            async move {
                let location = location?;
                if is_durable(&location) {
                    let path = files.path_to_filesystem(&location)?;
                    let deletion =
                        tokio::task::spawn_blocking(move || delete_durably(&root, &path));
                    deletion.await?.map_err(|error| not_read(&location, error))?;
                } else {
                    files.delete(&location).await?;
                }
                Ok(location)
            }
        });
        deleted.buffered(DELETIONS).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.files.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.files.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.files.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(unsupported("copy"))
    }

    async fn rename_opts(&self, _: &Path, _: &Path, _: RenameOptions) -> Result<()> {
        Err(unsupported("rename"))
    }
}

/// What would make files or directories that are not private.
fn unsupported(operation: &str) -> Error {
    Error::NotImplemented {
        operation: operation.to_owned(),
        implementer: "PrivateFiles".to_owned(),
    }
}

fn is_durable(location: &Path) -> bool {
    let name = location.filename().unwrap_or_default();
    DURABLE.iter().any(|kind| name.ends_with(kind))
}

/// A file that is not ours counts as absent.
fn not_read(location: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Error::NotFound { path: location.to_string(), source: Box::new(error) }
        }
        _ => generic(error),
    }
}

/// Opens a file below `root` if no link leads to it and, where that matters, all of the way belongs
/// to this user.
fn open_ours(root: &FilePath, path: &FilePath, trust: Trust) -> io::Result<File> {
    let us = rustix::process::geteuid().as_raw();
    let is_trusted = |owner: u32| trust == Trust::Anybody || owner == us;
    let refuse = |what: &FilePath, wrong: &str| {
        tracing::warn!(path = %what.display(), "not read: it {wrong}");
        Err(io::Error::new(io::ErrorKind::NotFound, format!("{} {wrong}", what.display())))
    };
    for directory in path.ancestors().skip(1).take_while(|directory| *directory != root) {
        let found = directory.symlink_metadata()?;
        if !found.is_dir() {
            return refuse(directory, "is no directory");
        }
        if !is_trusted(found.uid()) {
            return refuse(directory, "belongs to another user");
        }
    }
    // O_NONBLOCK: another user may have put a device or a pipe there.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return refuse(path, "is a symbolic link");
        }
        opened => opened?,
    };
    let found = file.metadata()?;
    match found {
        found if !found.is_file() => refuse(path, "is no regular file"),
        found if !is_trusted(found.uid()) => refuse(path, "belongs to another user"),
        _ => Ok(file),
    }
}

/// Removes a file, and returns when the medium knows. One that is gone already may be so in memory
/// only.
fn delete_durably(root: &FilePath, path: &FilePath) -> io::Result<()> {
    let removed = std::fs::remove_file(path);
    if let Some(directory) = path.parent() {
        match sync(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            synced => synced?,
        }
    }
    // As for any other last file of a directory. One that comes back after a loss of power is
    // empty.
    let emptied = path.ancestors().skip(1).take_while(|directory| *directory != root);
    emptied.map_while(|directory| std::fs::remove_dir(directory).ok()).for_each(drop);
    removed
}

/// Has the medium know of a new name: in its directory, and of those in theirs, up to that of
/// `root`.
fn sync_names(root: &FilePath, path: &FilePath) -> io::Result<()> {
    path.ancestors()
        .skip(1)
        .take_while(|directory| directory.starts_with(root))
        .try_for_each(sync)?;
    // The root may be ours, in a directory that we may not open.
    let _ = root.parent().map(sync);
    Ok(())
}

/// A file or a directory.
fn sync(path: &FilePath) -> io::Result<()> {
    let file = File::open(path)?;
    #[cfg(test)]
    tests::note_sync(path);
    file.sync_all()
}

/// Writes under a temporary name, then publishes, so that no reader finds half a file. Whatever
/// happens, the temporary name goes; a new file goes too once its caller has given up.
fn write_whole(
    path: &FilePath,
    payload: &PutPayload,
    replaces: bool,
    durable_below: Option<&FilePath>,
    wanted: &Weak<()>,
) -> Result<()> {
    let (mut file, staged) = stage(path).map_err(generic)?;
    let mut write = || {
        for part in payload {
            check(wanted)?;
            file.write_all(part)?;
        }
        durable_below.map_or(Ok(()), |_| sync(&staged))?;
        if replaces { std::fs::rename(&staged, path) } else { std::fs::hard_link(&staged, path) }
    };
    let published = write();
    // Also where another made it, who may not have come so far.
    let synced = match (&published, durable_below) {
        (Err(error), Some(_)) if error.kind() != io::ErrorKind::AlreadyExists => Ok(()),
        (_, Some(root)) => sync_names(root, path),
        (_, None) => Ok(()),
    };
    // Its staying is worth no error: it is as private as the file.
    let _ = std::fs::remove_file(&staged);
    published.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Error::AlreadyExists { path: path.display().to_string(), source: Box::new(error) }
        }
        _ => generic(error),
    })?;
    synced.map_err(generic)?;
    // A caller that replaces a file does so again; any other that gives up after this deletes it.
    if replaces {
        return Ok(());
    }
    check(wanted).map_err(|error| {
        let _ = std::fs::remove_file(path);
        generic(error)
    })
}

/// Removes what writers that were killed have left in a directory and below it: files under
/// temporary names that were not written to for longer than `grace`.
pub(super) fn remove_staged(directory: &FilePath, grace: Duration) {
    for (path, written_ms) in staged(directory) {
        let written = Duration::from_millis(u64::try_from(written_ms).unwrap_or(0));
        if clock::since_1970().saturating_sub(written) > grace {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The files under temporary names in a directory and below it, and when each was last written to,
/// in milliseconds since 1970.
pub(super) fn staged(directory: &FilePath) -> Vec<(PathBuf, i64)> {
    let (mut staged, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            // Of the entry itself, not of what a link leads to.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            } else if entry.file_name().to_str().is_some_and(is_staged) {
                // One that is gone has its name by now.
                let Ok(metadata) = entry.metadata() else { continue };
                let written_ms =
                    metadata.mtime().saturating_mul(1_000) + metadata.mtime_nsec() / 1_000_000;
                staged.push((entry.path(), written_ms));
            }
        }
    }
    staged
}

/// A new file beside `path`, under a name that [`LocalFileSystem`] takes for no object. Others may
/// be writing the same object, or were killed when they were, so no other writer has the name.
fn stage(path: &FilePath) -> io::Result<(File, PathBuf)> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let mut staged = path.as_os_str().to_owned();
        // Keys of the hasher are random, and differ each time.
        staged.push(format!("#{}", RandomState::new().hash_one((std::process::id(), attempt))));
        let staged = PathBuf::from(staged);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&staged) {
            Ok(file) => return Ok((file, staged)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < MAX_ATTEMPTS => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound && attempt < MAX_ATTEMPTS => {
                match path.parent().map_or(Ok(()), make_directory) {
                    // One above was there when we came to make it, and was gone when we looked, or
                    // before we made the next.
                    Err(e)
                        if !matches!(
                            e.kind(),
                            io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound
                        ) =>
                    {
                        return Err(e);
                    }
                    _ => {}
                }
            }
            Err(e) => return Err(e),
        }
    }
}

fn check(wanted: &Weak<()>) -> io::Result<()> {
    if wanted.strong_count() > 0 { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

fn generic(error: io::Error) -> Error {
    Error::Generic { store: "files", source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use futures::FutureExt;

    fn modes(directory: &FilePath) -> Vec<u32> {
        let mut modes = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            modes.push(path.metadata().unwrap().permissions().mode() & 0o777);
            if path.is_dir() {
                modes.extend(self::modes(&path));
            }
        }
        modes
    }

    #[tokio::test]
    async fn files_are_private_in_a_directory_that_others_may_enter() {
        let home = tempfile::tempdir().unwrap();
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let files = PrivateFiles::open(home.path(), Trust::OwnOnly).unwrap();
        let create = || PutOptions::from(PutMode::Create);
        files.put_opts(&Path::from("a/b/object"), "text".into(), create()).await.unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o700, 0o600]);
        let mode = home.path().metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o777, "it is not ours");
        let again = files.put_opts(&Path::from("a/b/object"), "other".into(), create()).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })));
        let stored = files.get(&Path::from("a/b/object")).await.unwrap().bytes().await.unwrap();
        assert_eq!(stored, "text");
        files
            .put_opts(&Path::from("a/b/object"), "new".into(), PutOptions::default())
            .await
            .unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o700, 0o600]);
        assert_eq!(
            files.get(&Path::from("a/b/object")).await.unwrap().bytes().await.unwrap(),
            "new"
        );
        files.delete(&Path::from("a/b/object")).await.unwrap();
        assert!(modes(home.path()).is_empty());
    }

    #[test]
    fn a_file_is_private_before_it_has_its_name() {
        let home = tempfile::tempdir().unwrap();
        let (_, staged) = stage(&home.path().join("directory/object")).unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o600]);
        let name = staged.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("object#") && is_staged(name), "{name}");
    }

    #[test]
    fn what_nobody_waits_for_any_more_leaves_no_file() {
        let home = tempfile::tempdir().unwrap();
        let files = PrivateFiles::open(home.path(), Trust::OwnOnly).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let parts = (0..64).map(|_| Bytes::from(vec![7; 1 << 20])).collect::<PutPayload>();
        runtime.block_on(async {
            let object = Path::from("object");
            let put = files.put_opts(&object, parts, PutMode::Create.into());
            assert!(put.now_or_never().is_none(), "it takes a while");
        });
        // Waits for the thread that writes.
        runtime.shutdown_timeout(Duration::from_mins(1));
        assert!(modes(home.path()).is_empty());
    }

    #[test]
    fn a_file_that_comes_too_late_goes() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("object");
        assert!(write_whole(&path, &"text".into(), false, None, &Weak::new()).is_err());
        let wanted = Arc::new(());
        write_whole(&path, &"text".into(), false, None, &Arc::downgrade(&wanted)).unwrap();
        assert!(path.exists());
        assert_eq!(modes(home.path()), [0o600]);
    }

    #[test]
    fn a_file_is_written_though_its_directory_keeps_going() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a/b/c");
        let remover = place.clone();
        // As the store does with the last file of a directory, and with those above.
        let remover = std::thread::spawn(move || {
            for _ in 0..500 {
                remover
                    .ancestors()
                    .take(3)
                    .for_each(|directory| _ = std::fs::remove_dir(directory));
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        for n in 0.. {
            let (_, staged) = stage(&place.join(n.to_string())).unwrap();
            std::fs::remove_file(staged).unwrap();
            if remover.is_finished() {
                break;
            }
        }
        remover.join().unwrap();
    }

    #[test]
    fn only_what_a_killed_writer_left_goes_later() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("epochs")).unwrap();
        let paths =
            ["a.kvseg", "epochs/a.kvepoch#12", "b.kvseg#1"].map(|name| home.path().join(name));
        paths.iter().for_each(|path| std::fs::write(path, "text").unwrap());
        let old = File::options().write(true).open(&paths[1]).unwrap();
        old.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_000_000)).unwrap();
        remove_staged(home.path(), Duration::from_mins(10));
        assert_eq!(paths.map(|path| path.exists()), [true, false, true]);
    }

    #[test]
    fn a_file_that_just_got_its_name_is_nobodys_leftover() {
        let home = tempfile::tempdir().unwrap();
        let (root, done) = (home.path().to_owned(), Arc::new(AtomicBool::new(false)));
        let is_done = Arc::clone(&done);
        let writer = std::thread::spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                let (_, path) = stage(&root.join("a.kvman")).unwrap();
                std::fs::rename(path, root.join("a.kvman")).unwrap();
            }
        });
        let began = clock::since_1970().as_millis() as i64 - 1_000;
        let seen: Vec<_> = (0..20_000).flat_map(|_| staged(home.path())).collect();
        done.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        assert!(seen.iter().all(|(_, written_ms)| *written_ms > began), "{seen:?}");
    }

    thread_local! {
        static SYNCED: std::cell::RefCell<Vec<PathBuf>> = const { std::cell::RefCell::new(Vec::new()) };
    }

    /// Remembers what this thread has synced.
    pub(super) fn note_sync(path: &FilePath) {
        SYNCED.with_borrow_mut(|synced| synced.push(path.to_owned()));
    }

    fn synced() -> Vec<PathBuf> {
        SYNCED.take()
    }

    #[test]
    fn epochs_and_keys_are_durable_before_anybody_is_told() {
        let home = tempfile::tempdir().unwrap();
        let (root, wanted) = (home.path().canonicalize().unwrap(), Arc::new(()));
        let directories: Vec<_> = ["ns/epochs", "ns", ""].map(|name| root.join(name)).into();
        let path = root.join("ns/epochs/9.kvepoch");
        let write =
            || write_whole(&path, &"kvbm".into(), false, Some(&root), &Arc::downgrade(&wanted));
        write().unwrap();
        let mut told = synced();
        assert!(
            is_staged(told[0].file_name().unwrap().to_str().unwrap()),
            "the file before it has its name: {told:?}"
        );
        assert_eq!(told.split_off(1)[..3], directories);
        // Its first writer may not have come as far as that.
        assert!(matches!(write(), Err(Error::AlreadyExists { .. })));
        assert_eq!(synced()[1..4], directories);
        delete_durably(&root, &path).unwrap();
        assert_eq!((synced(), path.exists()), (directories[..1].to_vec(), false));
        assert_eq!(delete_durably(&root, &path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn only_epochs_and_keys_pay_for_a_sync() {
        let kinds = ["a/b.kvepoch", "a/b.kvkey", "a/b.kvseg", "a/b.kvman"];
        assert_eq!(kinds.map(|name| is_durable(&Path::from(name))), [true, true, false, false]);
        let home = tempfile::tempdir().unwrap();
        let files = PrivateFiles::open(home.path(), Trust::OwnOnly).unwrap();
        for name in kinds {
            let object = Path::from(name);
            files.put_opts(&object, "text".into(), PutMode::Create.into()).await.unwrap();
            assert_eq!(files.get(&object).await.unwrap().bytes().await.unwrap(), "text");
            files.delete(&object).await.unwrap();
            assert!(matches!(files.get(&object).await, Err(Error::NotFound { .. })));
        }
        assert!(modes(home.path()).is_empty());
    }

    #[tokio::test]
    async fn neither_links_nor_what_they_lead_to_are_read() {
        let home = tempfile::tempdir().unwrap();
        let files = PrivateFiles::open(home.path(), Trust::OwnOnly).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::fs::write(elsewhere.path().join("object"), "somebody's").unwrap();
        std::os::unix::fs::symlink(elsewhere.path().join("object"), home.path().join("link"))
            .unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), home.path().join("directory")).unwrap();
        for planted in ["link", "directory/object"] {
            let read = files.get(&Path::from(planted)).await;
            assert!(matches!(read, Err(Error::NotFound { .. })), "{planted}: {read:?}");
            let part = files.get_range(&Path::from(planted), 0..4).await;
            assert!(matches!(part, Err(Error::NotFound { .. })), "{planted}");
        }
        let replaced =
            files.put_opts(&Path::from("link"), "ours".into(), PutOptions::default()).await;
        replaced.unwrap();
        assert_eq!(files.get(&Path::from("link")).await.unwrap().bytes().await.unwrap(), "ours");
        assert_eq!(std::fs::read_to_string(elsewhere.path().join("object")).unwrap(), "somebody's");
    }

    #[test]
    fn files_of_others_are_read_only_to_look() {
        // Every system has a file of root's; tests that run as root need another user's.
        let root = FilePath::new("/");
        let file = FilePath::new("/etc/passwd");
        let is_ours = file.metadata().unwrap().uid() == rustix::process::geteuid().as_raw();
        assert_eq!(open_ours(root, file, Trust::OwnOnly).is_ok(), is_ours);
        assert!(open_ours(root, file, Trust::Anybody).is_ok());
    }
}
