//! Wrapped keys in a store, which all workers of a namespace share.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use super::error::Secrets;
use super::executor::Caller;
use super::open::Store;
use crate::sealed::{KeyId, KeyStore, RECORD_BYTES, WrappedKey};

/// A start, and whoever forgets a tenant, waits so long at most.
const LIMIT: Duration = Duration::from_secs(10);
/// Requests at a time.
const CONCURRENCY: usize = 32;
/// Keys that a start looks at. What is sealed with others is found when it is read.
const MAX_KEYS: usize = 1 << 16;
pub(super) const EXTENSION: &str = ".kvkey";

/// Objects `<url>/<namespace>/keys/<tenant>-<id>.kvkey`: the tenant in 8 hexadecimal digits or `shared`, the key's name
/// in 32.
pub struct ObjectKeys {
    client: Arc<dyn ObjectStore>,
    directory: Path,
    caller: Caller,
    secrets: Secrets,
}

impl fmt::Debug for ObjectKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectKeys").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Store {
    /// The keys of a namespace.
    pub fn keys(&self, namespace: &str) -> ObjectKeys {
        let namespace = Path::from(namespace);
        let namespace = self.root.parts().chain(namespace.parts()).collect::<Path>();
        self.keys_in(&namespace)
    }

    fn keys_in(&self, namespace: &Path) -> ObjectKeys {
        ObjectKeys {
            client: Arc::clone(&self.client),
            directory: namespace.clone().join("keys"),
            caller: self.executor.caller(),
            secrets: self.secrets.clone(),
        }
    }

    /// Those of all namespaces.
    ///
    /// # Errors
    /// The store.
    pub fn all_keys(&self) -> io::Result<Vec<ObjectKeys>> {
        let (client, root) = (Arc::clone(&self.client), self.root.clone());
        let listing = async move { client.list_with_delimiter(Some(&root)).await };
        let listed = self.executor.caller().wait(LIMIT, listing).ok_or_else(no_answer)?;
        let listed = listed.map_err(|error| io::Error::other(self.secrets.scrub(&error)))?;
        Ok(listed.common_prefixes.iter().map(|namespace| self.keys_in(namespace)).collect())
    }
}

/// Whether an object is a wrapped key, by its name.
pub(super) fn is_key(path: &Path) -> bool {
    path.filename().is_some_and(|name| name.ends_with(EXTENSION))
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the object store does not answer")
}

fn prefix(tenant: Option<u32>) -> String {
    tenant.map_or_else(|| "shared-".to_owned(), |tenant| format!("{tenant:08x}-"))
}

impl ObjectKeys {
    fn wait<T: Send + 'static>(
        &self,
        task: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let answer = self.caller.wait(LIMIT, task).ok_or_else(no_answer)?;
        answer.map_err(|error| match error {
            object_store::Error::NotFound { .. } => io::Error::from(io::ErrorKind::NotFound),
            error => io::Error::other(self.secrets.scrub(&error)),
        })
    }

    /// Those objects whose name passes.
    fn list(&self, is_one: impl Fn(&str) -> bool + Send + Sync + 'static) -> io::Result<Vec<Path>> {
        let (client, directory) = (Arc::clone(&self.client), self.directory.clone());
        self.wait(async move {
            let all = client.list(Some(&directory)).map_ok(|meta| meta.location);
            let passes =
                |path: &Path| path.filename().is_some_and(|name| name.ends_with(EXTENSION) && is_one(name));
            let passing = all.try_filter(|path| std::future::ready(passes(path)));
            passing.take(MAX_KEYS).try_collect().await
        })
    }

    fn read(&self, paths: Vec<Path>) -> io::Result<Vec<WrappedKey>> {
        let client = Arc::clone(&self.client);
        let read = move |path: Path| {
            let client = Arc::clone(&client);
            // Larger things are no keys.
            async move { client.get_range(&path, 0..RECORD_BYTES as u64).await }
        };
        let objects = self.wait(async move {
            let objects = futures::stream::iter(paths.into_iter().map(read)).buffer_unordered(CONCURRENCY);
            // Another worker may destroy some meanwhile.
            let there = objects.filter_map(|object| std::future::ready(object.ok()));
            Ok(there.collect::<Vec<_>>().await)
        })?;
        Ok(objects.iter().filter_map(|bytes| WrappedKey::parse(bytes.as_ref().try_into().ok()?)).collect())
    }
}

impl KeyStore for ObjectKeys {
    /// A store that fails has none: the tier starts cold and works, and what there is is asked for when it is needed.
    fn load(&self) -> io::Result<Vec<WrappedKey>> {
        let keys = self.list(|_| true).and_then(|paths| self.read(paths));
        Ok(keys.unwrap_or_else(|error| {
            tracing::warn!(%error, "the keys of tenants could not be read from the object store");
            Vec::new()
        }))
    }

    fn find(&self, id: KeyId) -> io::Result<Option<WrappedKey>> {
        let end = format!("-{}{EXTENSION}", hex::encode(id));
        let paths = self.list(move |name| name.ends_with(&end))?;
        Ok(self.read(paths)?.pop())
    }

    fn add(&self, key: &WrappedKey) -> io::Result<()> {
        let name = format!("{}{}{EXTENSION}", prefix(key.tenant()), hex::encode(key.id()));
        let (client, path) = (Arc::clone(&self.client), self.directory.clone().join(name));
        let bytes = key.bytes().to_vec();
        self.wait(async move { client.put_opts(&path, bytes.into(), PutMode::Create.into()).await }).map(drop)
    }

    fn destroy(&self, tenant: u32) -> io::Result<usize> {
        let begin = prefix(Some(tenant));
        let paths = self.list(move |name| name.starts_with(&begin))?;
        let keys = paths.len();
        let client = Arc::clone(&self.client);
        let names = futures::stream::iter(paths.into_iter().map(Ok)).boxed();
        self.wait(async move { client.delete_stream(names).try_collect::<Vec<_>>().await })?;
        Ok(keys)
    }
}
