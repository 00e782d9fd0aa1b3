//! A store in files that nobody but their owner may read: prompts can be guessed from KV blocks.

use std::fmt;
use std::fs::{DirBuilder, DirEntry, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, Extensions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use crate::clock;

/// Directories vanish with their last file, possibly between our making one and a file in it; on a busy machine many
/// times in a row.
const MAX_ATTEMPTS: u32 = 256;

/// Ends names that [`LocalFileSystem`] takes for no object.
pub(super) const STAGED: &str = "#1";

/// Makes a directory and those above it, unless they are there, for the owner alone.
pub(super) fn make_directory(path: &FilePath) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Makes files with mode 0600 in directories with mode 0700, wherever the first of them lies. All else is left
/// to [`LocalFileSystem`], which does not make files here.
#[derive(Debug)]
pub(super) struct PrivateFiles {
    files: LocalFileSystem,
}

impl PrivateFiles {
    /// Below a directory that exists.
    pub(super) fn open(directory: &FilePath) -> Result<Self> {
        let files = LocalFileSystem::new_with_prefix(directory)?.with_automatic_cleanup(true);
        Ok(Self { files })
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
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let replaces = match opts.mode {
            PutMode::Create => false,
            PutMode::Overwrite => true,
            PutMode::Update(_) => return Err(unsupported("PutMode::Update")),
        };
        let path = self.files.path_to_filesystem(location)?;
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let write =
            tokio::task::spawn_blocking(move || write_whole(&path, &payload, replaces, &still_wanted));
        write.await??;
        drop(wanted);
        Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() })
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(unsupported("put_multipart"))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.files.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.files.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.files.delete_stream(locations)
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
    Error::NotImplemented { operation: operation.to_owned(), implementer: "PrivateFiles".to_owned() }
}

/// Writes under a temporary name, then publishes, so that nobody finds half a file. Whatever happens, the
/// temporary name goes; a new file goes too once nobody wants it.
fn write_whole(path: &FilePath, payload: &PutPayload, replaces: bool, wanted: &Weak<()>) -> Result<()> {
    let (mut file, staged) = stage(path).map_err(generic)?;
    let mut write = || {
        for part in payload {
            check(wanted)?;
            file.write_all(part)?;
        }
        if replaces { std::fs::rename(&staged, path) } else { std::fs::hard_link(&staged, path) }
    };
    let published = write();
    // That it stays is worth no error: it is as private as the file.
    let _ = std::fs::remove_file(&staged);
    published.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Error::AlreadyExists { path: path.display().to_string(), source: Box::new(error) }
        }
        _ => generic(error),
    })?;
    // Whoever replaces a file does so again; else whoever gives up after this deletes it.
    if replaces {
        return Ok(());
    }
    check(wanted).map_err(|error| {
        let _ = std::fs::remove_file(path);
        generic(error)
    })
}

/// Removes what writers that were killed have left in a directory: files under temporary names that nobody has written
/// to for so long.
pub(super) fn remove_staged(directory: &FilePath, grace: Duration) {
    for (path, written) in staged(directory) {
        let age = clock::since_1970().as_secs().saturating_sub(u64::try_from(written).unwrap_or(0));
        if age > grace.as_secs() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The files under temporary names in a directory, and when each was last written to, in seconds since 1970.
pub(super) fn staged(directory: &FilePath) -> Vec<(PathBuf, i64)> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let is_staged = |entry: &DirEntry| entry.file_name().as_encoded_bytes().ends_with(STAGED.as_bytes());
    let staged = entries.flatten().filter(is_staged);
    staged.map(|entry| (entry.path(), entry.metadata().map_or(0, |metadata| metadata.mtime()))).collect()
}

/// A new file beside `path`, under a name that [`LocalFileSystem`] takes for no object.
fn stage(path: &FilePath) -> io::Result<(File, PathBuf)> {
    let mut staged = path.as_os_str().to_owned();
    staged.push(STAGED);
    let staged = PathBuf::from(staged);
    let mut attempt = 0;
    loop {
        attempt += 1;
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&staged) {
            Ok(file) => return Ok((file, staged)),
            Err(e) if e.kind() == io::ErrorKind::NotFound && attempt < MAX_ATTEMPTS => {
                match path.parent().map_or(Ok(()), make_directory) {
                    // One above was there when we came to make it, and was gone when we looked, or before we made the next.
                    Err(e) if !matches!(e.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => {
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

    use futures::FutureExt;
    use object_store::ObjectStoreExt;

    use super::*;

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
        let files = PrivateFiles::open(home.path()).unwrap();
        let create = || PutOptions::from(PutMode::Create);
        files.put_opts(&Path::from("a/b/object"), "text".into(), create()).await.unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o700, 0o600]);
        let mode = home.path().metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o777, "it is not ours");
        let again = files.put_opts(&Path::from("a/b/object"), "other".into(), create()).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })));
        let stored = files.get(&Path::from("a/b/object")).await.unwrap().bytes().await.unwrap();
        assert_eq!(stored, "text");
        files.put_opts(&Path::from("a/b/object"), "new".into(), PutOptions::default()).await.unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o700, 0o600]);
        assert_eq!(files.get(&Path::from("a/b/object")).await.unwrap().bytes().await.unwrap(), "new");
        files.delete(&Path::from("a/b/object")).await.unwrap();
        assert!(modes(home.path()).is_empty());
    }

    #[test]
    fn a_file_is_private_before_it_has_its_name() {
        let home = tempfile::tempdir().unwrap();
        let (_, staged) = stage(&home.path().join("directory/object")).unwrap();
        assert_eq!(modes(home.path()), [0o700, 0o600]);
        assert_eq!(staged.file_name().unwrap(), "object#1");
    }

    #[test]
    fn what_nobody_waits_for_any_more_leaves_no_file() {
        let home = tempfile::tempdir().unwrap();
        let files = PrivateFiles::open(home.path()).unwrap();
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
        assert!(write_whole(&path, &"text".into(), false, &Weak::new()).is_err());
        let wanted = Arc::new(());
        write_whole(&path, &"text".into(), false, &Arc::downgrade(&wanted)).unwrap();
        assert!(path.exists());
        assert_eq!(modes(home.path()), [0o600]);
    }

    #[test]
    fn a_file_is_written_though_its_directory_goes_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a/b/c");
        let remover = place.clone();
        // As the store does with the last file of a directory, and with those above.
        let remover = std::thread::spawn(move || {
            for _ in 0..500 {
                remover.ancestors().take(3).for_each(|directory| _ = std::fs::remove_dir(directory));
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
    fn what_a_killed_writer_left_goes_after_a_while_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let paths = ["a.kvseg", "a.kvseg#1", "b.kvseg#1"].map(|name| home.path().join(name));
        paths.iter().for_each(|path| std::fs::write(path, "text").unwrap());
        let old = File::options().write(true).open(&paths[1]).unwrap();
        old.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_000_000)).unwrap();
        remove_staged(home.path(), Duration::from_mins(10));
        assert_eq!(paths.map(|path| path.exists()), [true, false, true]);
    }
}
