//! Opening the store that a URL names.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "nixl")]
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use tokio::time::{Instant, timeout, timeout_at};
use url::Url;

use super::address::{ENDPOINT, FORMS, StoreOptions, URL, open_s3, parse, path_of, secrets};
use super::error::{StoreError, UrlSecrets, is_an_answer, local_kind, remote_kind};
use super::executor::StoreRuntime;
use super::files::{PrivateFiles, Trust, make_directory};
use super::names::SegmentNames;
use crate::copy::{CopyError, CopyErrorKind};
use crate::error::{SetupError, SetupErrorKind};

/// Objects are deleted one by one, and at the end only.
#[cfg(feature = "nixl")]
const DELETION_LIMIT: Duration = Duration::from_mins(1);
/// At start-up an engine waits for the answer.
const PROBE_LIMIT: Duration = Duration::from_secs(8);

/// An object store that answered and lets us write, and the threads that talk to it.
pub struct Store {
    pub(super) client: Arc<dyn ObjectStore>,
    /// Where in the store our objects live.
    pub(super) root: Path,
    pub(super) executor: StoreRuntime,
    pub(super) secrets: UrlSecrets,
    place: StorePlace,
    /// As the user wrote it. It holds no credentials: such URLs are refused.
    url: String,
}

enum StorePlace {
    Memory,
    /// The directory, and whether it is ours to remove.
    Directory {
        path: PathBuf,
        created: bool,
    },
    Service,
}

impl Store {
    /// Opens the store at `url` and writes, then deletes, a small object to see that it works.
    ///
    /// `file:///directory` (created with mode 0700 if missing), `s3://bucket/prefix` or
    /// `memory:///`.
    ///
    /// # Errors
    /// `Invalid`: the URL or an option is malformed. `NotWritable`: the directory cannot be created
    /// or written. `Unavailable`: the store does not answer or refuses us. The message names the
    /// setting to change.
    pub fn open(url: &str, options: &StoreOptions) -> Result<Self, SetupError> {
        let store = Self::reach(&parse(url, URL)?, url, options, true)?;
        store.probe()?;
        Ok(store)
    }

    /// The store at `url` as it is: nothing is created or written.
    ///
    /// # Errors
    /// `Invalid`: the URL or an option is malformed. `NotWritable`: there is no such directory.
    pub(super) fn attach(url: &str, options: &StoreOptions) -> Result<Self, SetupError> {
        let parsed = parse(url, "the URL")?;
        if parsed.scheme() == "memory" {
            return Err(SetupError::invalid(format!(
                "'{url}' ends with the process that writes there: {FORMS}"
            )));
        }
        Self::reach(&parsed, url, options, false)
    }

    fn reach(
        parsed: &Url,
        url: &str,
        options: &StoreOptions,
        make: bool,
    ) -> Result<Self, SetupError> {
        let executor = StoreRuntime::start()?;
        let (client, root, place): (Arc<dyn ObjectStore>, _, _) =
            match (parsed.scheme(), parsed.host()) {
                ("file", None) => {
                    let (files, place) = open_directory(parsed, make)?;
                    (Arc::new(files), Path::default(), place)
                }
                ("memory", None) => {
                    (Arc::new(InMemory::new()), path_of(parsed)?, StorePlace::Memory)
                }
                ("s3", Some(_)) => {
                    (Arc::new(open_s3(parsed, options)?), path_of(parsed)?, StorePlace::Service)
                }
                _ => {
                    return Err(SetupError::invalid(format!(
                        "{URL} is '{url}', which names no object store: {FORMS}"
                    )));
                }
            };
        Ok(Self { client, root, executor, secrets: secrets(options), place, url: url.to_owned() })
    }

    /// A store that the caller made, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_client(client: Arc<dyn ObjectStore>) -> Result<Self, SetupError> {
        Ok(Self {
            client,
            root: Path::default(),
            executor: StoreRuntime::start()?,
            secrets: UrlSecrets::default(),
            place: StorePlace::Memory,
            url: "test:///".to_owned(),
        })
    }

    /// The same store, reached through what `wrap` makes of its client.
    pub(crate) fn map_client(
        mut self,
        wrap: impl FnOnce(Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore>,
    ) -> Self {
        self.client = wrap(self.client);
        self
    }

    /// How many objects there are.
    #[cfg(all(test, feature = "nixl"))]
    pub(crate) fn count_objects(&self) -> usize {
        let listing = self.client.list(Some(&self.root)).try_collect::<Vec<_>>();
        self.executor.wait(PROBE_LIMIT, listing).and_then(Result::ok).map_or(0, |all| all.len())
    }

    /// Whether a network lies between.
    pub(super) const fn is_remote(&self) -> bool {
        matches!(self.place, StorePlace::Service)
    }

    /// Whether objects are listed by their names, and those behind a name without those before it.
    pub(super) const fn lists_in_order(&self) -> bool {
        !matches!(self.place, StorePlace::Directory { .. })
    }

    /// Where the objects of a directory lie as files; `None`: they do not.
    pub(super) fn files_below(&self, directory: &Path) -> Option<PathBuf> {
        match &self.place {
            StorePlace::Directory { path, .. } => Some(path.join(directory.as_ref())),
            StorePlace::Memory | StorePlace::Service => None,
        }
    }

    /// An object's name below the URL.
    pub(super) fn relative(&self, path: &Path) -> String {
        let below: Path = path.parts().skip(self.root.parts().count()).collect();
        below.to_string()
    }

    /// The store's own time, in milliseconds since 1970: that of an object which is written for it,
    /// and deleted.
    pub(super) async fn time_ms(&self, limit: Duration) -> Result<i64, StoreError> {
        let path = self.probe_path();
        let ask = async {
            self.client.put_opts(&path, "kvbm".into(), PutMode::Create.into()).await?;
            let written = self.client.head(&path).await;
            self.client.delete(&path).await?;
            written.map(|meta| meta.last_modified.timestamp_millis())
        };
        timeout(limit, ask).await?.map_err(|error| self.secrets.scrub(&error))
    }

    /// A name of its own: many workers start on one store at a time, and a probe creates
    /// conditionally.
    fn probe_path(&self) -> Path {
        self.root.clone().join(format!(".probe-{}", SegmentNames::new().next()))
    }

    /// Removes the directory that [`open`](Self::open) made, if nothing is left in it.
    pub(super) fn remove_directory(&self) {
        if let StorePlace::Directory { path, created: true } = &self.place {
            let _ = std::fs::remove_dir(path);
        }
    }

    /// A place for objects that no other process uses.
    #[cfg(feature = "nixl")]
    pub(crate) fn fresh_directory(&self, namespace: &str, kind: &str) -> Path {
        let unique = format!("{:032x}", SegmentNames::new().next().0);
        let namespace = Path::from(namespace);
        self.root.parts().chain(namespace.parts()).collect::<Path>().join(kind).join(unique)
    }

    /// Deletes everything in a directory. What cannot be deleted in a minute is left, and logged.
    #[cfg(feature = "nixl")]
    pub(crate) fn delete_directory(&self, directory: &Path) {
        let client = Arc::clone(&self.client);
        let names = client.list(Some(directory)).map_ok(|object| object.location).boxed();
        let deletion = async move { client.delete_stream(names).try_collect::<Vec<_>>().await };
        let error = match self.executor.wait(DELETION_LIMIT, deletion) {
            Some(Ok(_)) => return self.remove_directory(),
            Some(Err(error)) => self.secrets.scrub(&error).to_string(),
            None => "no answer".to_owned(),
        };
        tracing::warn!(store = %self, %directory, error, "objects are left in the object store");
    }

    fn probe(&self) -> Result<(), SetupError> {
        let path = self.probe_path();
        let client = Arc::clone(&self.client);
        // A file that is written may still be another user's, as on a network drive, and then it
        // cannot be read.
        let reads = !self.is_remote();
        let write_and_delete = async move {
            client.put_opts(&path, "kvbm".into(), PutMode::Create.into()).await?;
            let read = if reads { client.head(&path).await.map(drop) } else { Ok(()) };
            client.delete(&path).await?;
            read
        };
        match self.executor.wait(PROBE_LIMIT, write_and_delete) {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => {
                let kind = match self.place {
                    StorePlace::Directory { .. } => SetupErrorKind::NotWritable,
                    StorePlace::Memory | StorePlace::Service => SetupErrorKind::Unavailable,
                };
                Err(SetupError::caused(
                    kind,
                    self.unusable("did not take a test object"),
                    self.secrets.scrub(&e),
                ))
            }
            None => {
                let what = format!("did not answer within {} s", PROBE_LIMIT.as_secs());
                Err(SetupError::unavailable(self.unusable(&what)))
            }
        }
    }

    fn unusable(&self, what: &str) -> String {
        let more =
            if self.is_remote() { format!(", {ENDPOINT} and the keys") } else { String::new() };
        format!("the object store '{}' {what}: check {URL}{more}", self.url)
    }
}

impl Store {
    /// `message` says what was being done.
    pub(super) fn copy_error(&self, message: String, error: &object_store::Error) -> CopyError {
        let kind = if self.is_remote() { remote_kind(error) } else { local_kind(error) };
        CopyError::caused(kind, message, self.secrets.scrub(error))
    }

    /// What the failure of a request for a range up to `end` means. The client does not tell an
    /// object that is shorter from a service that refuses, so we look.
    pub(super) async fn read_error(
        &self,
        path: &Path,
        end: u64,
        message: String,
        error: &object_store::Error,
        deadline: Instant,
    ) -> CopyError {
        let result = self.copy_error(message.clone(), error);
        if result.kind() != CopyErrorKind::Unavailable || !is_an_answer(error) {
            return result;
        }
        match timeout_at(deadline, self.client.head(path)).await {
            Ok(Ok(meta)) if meta.size < end => {
                CopyError::caused(CopyErrorKind::Io, message, self.secrets.scrub(error))
            }
            _ => result,
        }
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.url).finish()
    }
}

fn open_directory(url: &Url, make: bool) -> Result<(PrivateFiles, StorePlace), SetupError> {
    let path = url.to_file_path().map_err(|()| {
        SetupError::invalid(format!("{URL} is '{url}', which is not an absolute path: {FORMS}"))
    })?;
    let created = !path.exists();
    let fail = |e: Box<dyn std::error::Error + Send + Sync>| {
        let verb = if make { "create" } else { "open" };
        let message = format!("cannot {verb} the directory {}: check {URL}", path.display());
        SetupError::caused(SetupErrorKind::NotWritable, message, std::io::Error::other(e))
    };
    if make {
        make_directory(&path).map_err(|e| fail(e.into()))?;
    }
    let trust = if make { Trust::OwnOnly } else { Trust::Anybody };
    let files = PrivateFiles::open(&path, trust).map_err(|e| fail(e.into()))?;
    Ok((files, StorePlace::Directory { path, created }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn open_error(url: &str, options: &StoreOptions) -> SetupError {
        Store::open(url, options).expect_err(url)
    }

    fn texts(error: &SetupError) -> String {
        let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
        format!("{error} {cause} {error:?}")
    }

    #[test]
    fn urls_that_name_no_store_are_refused() {
        let urls = [
            "",
            "/tmp/x",
            "ftp://host/x",
            "file://host/x",
            "s3:///prefix",
            "memory://host/",
            "s3://b/x?y=z",
        ];
        for url in urls {
            let error = open_error(url, &StoreOptions::default());
            assert_eq!(error.kind(), SetupErrorKind::Invalid, "{url}");
            assert!(error.to_string().contains("DYN_KVBM_OBJECT_URL"), "{error}");
        }
    }

    #[test]
    fn credentials_never_show() {
        let options = StoreOptions {
            endpoint: Some("http://127.0.0.1:9".into()),
            access_key: Some("AKIAEXAMPLE".into()),
            secret_key: Some("s3cr3t".into()),
            ..StoreOptions::default()
        };
        let endpoint = Some("http://AKIAEXAMPLE:s3cr3t@127.0.0.1".into());
        let lone = StoreOptions { secret_key: None, ..options.clone() };
        let shown = [
            format!("{options:?}"),
            texts(&open_error("s3://bucket/prefix", &options)),
            texts(&open_error("s3://bucket", &lone)),
            texts(&open_error("s3://bucket", &StoreOptions { endpoint, ..options })),
            texts(&open_error("s3://AKIAEXAMPLE:s3cr3t@bucket", &lone)),
            texts(&open_error("://AKIAEXAMPLE:s3cr3t@bucket", &lone)),
            texts(&open_error("s3://AKIAEXAMPLE:s3cr3t", &lone)),
            texts(&open_error("s3://AKIAEXAMPLE:12345", &lone)),
        ];
        for text in shown {
            assert!(!text.contains("AKIAEXAMPLE") && !text.contains("s3cr3t"), "{text}");
        }
    }

    #[test]
    fn a_store_that_is_down_is_reported_soon() {
        let options = StoreOptions {
            endpoint: Some("http://127.0.0.1:9".into()),
            access_key: Some("key".into()),
            secret_key: Some("secret".into()),
            ..StoreOptions::default()
        };
        let error = open_error("s3://bucket/prefix", &options);
        assert_eq!(error.kind(), SetupErrorKind::Unavailable);
        assert!(error.to_string().contains("DYN_KVBM_OBJECT_ENDPOINT"), "{error}");
    }

    #[test]
    fn a_directory_is_made_for_the_owner_alone() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("a dir/objects");
        let url = Url::from_file_path(&dir).unwrap();
        let store = Store::open(url.as_str(), &StoreOptions::default()).unwrap();
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "the probe is gone");
        store.remove_directory();
        assert!(!dir.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_names_the_setting() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let url = Url::from_file_path(file.path().join("below")).unwrap();
        let error = open_error(url.as_str(), &StoreOptions::default());
        assert_eq!(error.kind(), SetupErrorKind::NotWritable);
        assert!(error.to_string().contains("DYN_KVBM_OBJECT_URL"), "{error}");
    }

    #[tokio::test]
    async fn stores_open_and_close_inside_another_runtime() {
        drop(Store::open("memory:///some/prefix", &StoreOptions::default()).unwrap());
    }
}
