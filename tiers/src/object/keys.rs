//! Wrapped keys in a store, which all workers of a namespace share.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use tokio::time::{Instant, timeout_at};

use super::error::Secrets;
use super::executor::Caller;
use super::open::Store;
use crate::sealed::{
    FoundKey, KeyId, KeyStore, RECORD_BYTES, TENANT_BYTES, WrappedKey, id_prefix, tenant_prefix,
};

/// A start, and whoever forgets a tenant, waits so long at most.
const LIMIT: Duration = Duration::from_secs(10);
/// Requests at a time.
const CONCURRENCY: usize = 32;
/// Keys of one tenant that are looked at to find one to go on with. Each worker may have made one, under each main key.
const MAX_OF_TENANT: usize = 64;
const EXTENSION: &str = ".kvkey";

/// Objects `<url>/<namespace>/keys/<tenant>/<name>.kvkey`: the key's name in 32 hexadecimal digits, of which the first 10 are
/// the tenant. So one key, and the keys of one tenant, are found without a look at all.
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

impl ObjectKeys {
    /// Where the keys of a tenant lie.
    fn directory_of(&self, tenant: [u8; TENANT_BYTES]) -> Path {
        self.directory.clone().join(hex::encode(tenant))
    }

    fn path_of(&self, id: KeyId) -> Path {
        self.directory_of(tenant_prefix(&id)).join(format!("{}{EXTENSION}", hex::encode(id)))
    }

    fn wait<T: Send + 'static>(
        &self,
        task: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let answer = self.caller.wait(LIMIT, task).ok_or_else(no_answer)?;
        answer.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &object_store::Error) -> io::Error {
        io::Error::other(self.secrets.scrub(error))
    }
}

/// The keys in a directory, by their names.
async fn list(client: &dyn ObjectStore, directory: &Path, most: usize) -> object_store::Result<Vec<Path>> {
    let all = client.list(Some(directory)).map_ok(|meta| meta.location);
    all.try_filter(|path| std::future::ready(is_key(path))).take(most).try_collect().await
}

/// What lies there; `None`: nothing, or no key.
async fn read(client: &dyn ObjectStore, path: &Path) -> object_store::Result<Option<WrappedKey>> {
    let object = match client.get(path).await {
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        found => found?,
    };
    // Larger things are no keys.
    if object.meta.size != RECORD_BYTES as u64 {
        return Ok(None);
    }
    let bytes = object.bytes().await?;
    Ok(bytes.as_ref().try_into().ok().and_then(WrappedKey::parse))
}

async fn read_all(client: &dyn ObjectStore, directory: &Path) -> object_store::Result<Vec<WrappedKey>> {
    let paths = list(client, directory, MAX_OF_TENANT).await?;
    let keys = futures::stream::iter(&paths).then(|path| read(client, path));
    keys.try_filter_map(|key| std::future::ready(Ok(key))).try_collect().await
}

impl KeyStore for ObjectKeys {
    fn find(&self, id: KeyId) -> io::Result<FoundKey> {
        let (client, path) = (Arc::clone(&self.client), self.path_of(id));
        let found = self.wait(async move { read(&*client, &path).await })?;
        Ok(found.map_or(FoundKey::Absent, |key| FoundKey::Live(vec![key])))
    }

    /// All within one limit: of those that the store did not come to nobody knows.
    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        let client = Arc::clone(&self.client);
        let directories: Vec<_> =
            tenants.iter().map(|&tenant| self.directory_of(id_prefix(tenant))).collect();
        let answers = self.caller.wait(2 * LIMIT, async move {
            let deadline = Instant::now() + LIMIT;
            let client = &*client;
            let ask = |directory| async move { timeout_at(deadline, read_all(client, &directory)).await };
            futures::stream::iter(directories.into_iter().map(ask))
                .buffered(CONCURRENCY)
                .collect::<Vec<_>>()
                .await
        });
        let Some(answers) = answers else { return tenants.iter().map(|_| Err(no_answer())).collect() };
        let answer = |answer: Result<object_store::Result<_>, _>| {
            answer.map_err(|_| no_answer())?.map_err(|error| self.failed(&error))
        };
        answers.into_iter().map(answer).collect()
    }

    fn add(&self, key: &WrappedKey) -> io::Result<()> {
        let (client, path) = (Arc::clone(&self.client), self.path_of(key.id()));
        let bytes = key.bytes().to_vec();
        self.wait(async move { client.put_opts(&path, bytes.into(), PutMode::Create.into()).await }).map(drop)
    }

    fn destroy(&self, tenant: u32, spared: &[KeyId]) -> io::Result<usize> {
        let (client, directory) = (Arc::clone(&self.client), self.directory_of(id_prefix(Some(tenant))));
        let spared: Vec<_> = spared.iter().map(|&id| self.path_of(id)).collect();
        self.wait(async move {
            let mut paths = list(&*client, &directory, usize::MAX).await?;
            paths.retain(|path| !spared.contains(path));
            let names = futures::stream::iter(paths.into_iter().map(Ok)).boxed();
            Ok(client.delete_stream(names).try_collect::<Vec<_>>().await?.len())
        })
    }
}
