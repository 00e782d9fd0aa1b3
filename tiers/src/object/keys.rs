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

use super::error::UrlSecrets;
use super::executor::TaskCaller;
use super::open::Store;
use crate::sealed::{
    FoundKey, KeyId, KeyStore, RECORD_BYTES, TENANT_BYTES, WrappedKey, id_prefix, tenant_prefix,
};

/// The most that a start, or forgetting a tenant, waits.
const LIMIT: Duration = Duration::from_secs(10);
/// Requests at a time.
const CONCURRENCY: usize = 32;
/// Keys of one tenant that are looked at to find one to go on with. Each worker may have made one,
/// under each main key.
const MAX_OF_TENANT: usize = 64;
pub(super) const EXTENSION: &str = ".kvkey";

/// Objects `<url>/<namespace>/keys/<tenant>/<name>.kvkey`: the key's name in 32 hexadecimal digits,
/// of which the first 10 are the tenant. So one key, and the keys of one tenant, are found without
/// listing all.
pub struct ObjectKeys {
    client: Arc<dyn ObjectStore>,
    directory: Path,
    caller: TaskCaller,
    secrets: UrlSecrets,
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
async fn list(
    client: &dyn ObjectStore,
    directory: &Path,
    most: usize,
) -> object_store::Result<Vec<Path>> {
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
    // An answer that is cut off says nothing of the key.
    let record = bytes
        .as_ref()
        .try_into()
        .map_err(|error| object_store::Error::Generic { store: "keys", source: Box::new(error) })?;
    Ok(WrappedKey::parse(record))
}

async fn read_all(
    client: &dyn ObjectStore,
    directory: &Path,
) -> object_store::Result<Vec<WrappedKey>> {
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

    /// All within one limit: those that the store did not come to are unknown.
    fn of_tenants(&self, tenants: &[Option<u32>]) -> Vec<io::Result<Vec<WrappedKey>>> {
        let client = Arc::clone(&self.client);
        let directories: Vec<_> =
            tenants.iter().map(|&tenant| self.directory_of(id_prefix(tenant))).collect();
        let answers = self.caller.wait(2 * LIMIT, async move {
            let deadline = Instant::now() + LIMIT;
            let client = &*client;
            let ask =
                |directory| async move { timeout_at(deadline, read_all(client, &directory)).await };
            futures::stream::iter(directories.into_iter().map(ask))
                .buffered(CONCURRENCY)
                .collect::<Vec<_>>()
                .await
        });
        let Some(answers) = answers else {
            return tenants.iter().map(|_| Err(no_answer())).collect();
        };
        let answer = |answer: Result<object_store::Result<_>, _>| {
            answer.map_err(|_| no_answer())?.map_err(|error| self.failed(&error))
        };
        answers.into_iter().map(answer).collect()
    }

    fn add(&self, key: &WrappedKey) -> io::Result<()> {
        let (client, path) = (Arc::clone(&self.client), self.path_of(key.id()));
        let bytes = key.bytes().to_vec();
        self.wait(async move { client.put_opts(&path, bytes.into(), PutMode::Create.into()).await })
            .map(drop)
    }

    fn destroy(&self, tenant: u32, spared: &[KeyId]) -> io::Result<usize> {
        let (client, directory) =
            (Arc::clone(&self.client), self.directory_of(id_prefix(Some(tenant))));
        let spared: Vec<_> = spared.iter().map(|&id| self.path_of(id)).collect();
        self.wait(async move {
            let mut paths = list(&*client, &directory, usize::MAX).await?;
            paths.retain(|path| !spared.contains(path));
            let names = futures::stream::iter(paths.into_iter().map(Ok)).boxed();
            Ok(client.delete_stream(names).try_collect::<Vec<_>>().await?.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures::FutureExt;
    use futures::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
        PutMultipartOptions, PutOptions, PutPayload, PutResult,
    };
    use parking_lot::Mutex;

    use super::*;
    use crate::copy::{BlockKey, CopyErrorKind, Owner, Tier};
    use crate::index::IndexEntry;
    use crate::sealed::{Cipher, SEAL_BYTES, TenantKeys};
    use crate::testing::key_ring;

    /// A client that records its requests and how many objects it named, and refuses while told to.
    #[derive(Debug, Default)]
    struct Noting {
        inner: InMemory,
        refuses: AtomicBool,
        asked: Mutex<Vec<&'static str>>,
        named: Arc<Mutex<usize>>,
    }

    impl Noting {
        fn ask(&self, what: &'static str) -> object_store::Result<()> {
            self.asked.lock().push(what);
            if self.refuses.load(Ordering::Relaxed) {
                return Err(object_store::Error::Generic { store: "test", source: "503".into() });
            }
            Ok(())
        }

        /// Since it was asked this last.
        fn told(&self) -> (Vec<&'static str>, usize) {
            (std::mem::take(&mut self.asked.lock()), std::mem::take(&mut self.named.lock()))
        }

        fn names(&self) -> usize {
            self.inner.list(None).count().now_or_never().unwrap()
        }
    }

    impl fmt::Display for Noting {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Noting")
        }
    }

    #[async_trait::async_trait]
    impl ObjectStore for Noting {
        async fn put_opts(
            &self,
            at: &Path,
            bytes: PutPayload,
            options: PutOptions,
        ) -> object_store::Result<PutResult> {
            self.ask("put")?;
            self.inner.put_opts(at, bytes, options).await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            options: PutMultipartOptions,
        ) -> object_store::Result<Box<dyn MultipartUpload>> {
            self.inner.put_multipart_opts(at, options).await
        }

        async fn get_opts(
            &self,
            at: &Path,
            options: GetOptions,
        ) -> object_store::Result<GetResult> {
            self.ask("get")?;
            self.inner.get_opts(at, options).await
        }

        fn delete_stream(
            &self,
            all: BoxStream<'static, object_store::Result<Path>>,
        ) -> BoxStream<'static, object_store::Result<Path>> {
            match self.ask("delete") {
                Ok(()) => self.inner.delete_stream(all),
                Err(error) => futures::stream::iter([Err(error)]).boxed(),
            }
        }

        fn list(
            &self,
            prefix: Option<&Path>,
        ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
            if let Err(error) = self.ask("list") {
                return futures::stream::iter([Err(error)]).boxed();
            }
            let named = Arc::clone(&self.named);
            self.inner.list(prefix).inspect(move |_| *named.lock() += 1).boxed()
        }

        async fn list_with_delimiter(
            &self,
            prefix: Option<&Path>,
        ) -> object_store::Result<ListResult> {
            self.inner.list_with_delimiter(prefix).await
        }

        async fn copy_opts(
            &self,
            from: &Path,
            to: &Path,
            options: CopyOptions,
        ) -> object_store::Result<()> {
            self.inner.copy_opts(from, to, options).await
        }
    }

    fn keys(client: &Arc<Noting>) -> (Arc<TenantKeys>, Cipher, Store) {
        let ring = key_ring(1, "0123456789abcdef");
        let store = Store::with_client(Arc::clone(client) as _).unwrap();
        let keys = Arc::new(TenantKeys::new(ring, "ns", Box::new(store.keys("ns"))));
        let cipher = Cipher::new(Arc::clone(&keys), Tier::Object, "ns", 64);
        (keys, cipher, store)
    }

    const BLOCK: BlockKey = BlockKey { hash: 7, group: 0 };

    fn seal(cipher: &Cipher, tenant: u32) -> Result<Vec<u8>, CopyErrorKind> {
        let mut room = vec![0; 64 + SEAL_BYTES];
        let owner = Some(Owner { tenant, life: 0 });
        cipher.seal(BLOCK, owner, &[5; 64], 1, &mut room).map_err(|error| error.kind())?;
        Ok(room)
    }

    fn open(cipher: &Cipher, room: &[u8]) -> Result<u32, CopyErrorKind> {
        cipher.open(BLOCK, &mut room.to_vec()).map_err(|error| error.kind())
    }

    #[test]
    fn a_tenants_keys_are_found_without_reading_others() {
        let client = Arc::new(Noting::default());
        let (_, writer, store) = keys(&client);
        let objects = store.keys("ns");
        // As many as stopped listings once: written as they lie there.
        for other in 100..20_100_u32 {
            let path = objects
                .directory_of(id_prefix(Some(other)))
                .join(format!("{other:032x}{EXTENSION}"));
            client.inner.put(&path, vec![0; RECORD_BYTES].into()).now_or_never().unwrap().unwrap();
        }
        let block = seal(&writer, 7).unwrap();
        assert_eq!(client.told(), (vec!["list", "put"], 0), "there was none");
        let (reader_keys, reader, _store) = keys(&client);
        assert_eq!(open(&reader, &block), Ok(1));
        assert_eq!(client.told(), (vec!["get"], 0));
        assert!(seal(&reader, 7).is_ok());
        assert_eq!(
            client.told(),
            (vec!["list", "get"], 1),
            "it goes on with the key that is there"
        );
        let entry = |tenant| IndexEntry {
            slot: crate::copy::SlotId(0),
            generation: 0,
            block: BLOCK,
            parent: None,
            checksum: 1,
            tenant: Some(tenant),
        };
        let mut entries = vec![entry(7), entry(8), entry(7)];
        reader_keys.retain_readable(&mut entries);
        assert_eq!(entries.len(), 2);
        let (asked, named) = client.told();
        assert_eq!((asked.iter().filter(|what| **what == "list").count(), named), (2, 1));
        reader_keys.forget(7, 1).unwrap();
        assert_eq!(client.told(), (vec!["list", "delete"], 1));
        assert_eq!(client.names(), 20_000);
        assert_eq!(open(&keys(&client).1, &block), Err(CopyErrorKind::Corrupt));
    }

    #[test]
    fn a_store_that_fails_says_nothing_of_any_key() {
        let client = Arc::new(Noting::default());
        let (writer_keys, writer, _store) = keys(&client);
        let block = seal(&writer, 7).unwrap();
        let (_, reader, _other_store) = keys(&client);
        client.refuses.store(true, Ordering::Relaxed);
        for _ in 0..3 {
            assert_eq!(open(&reader, &block), Err(CopyErrorKind::Unavailable), "the block stays");
            assert_eq!(seal(&reader, 7), Err(CopyErrorKind::Unavailable));
        }
        assert_eq!(open(&writer, &block), Ok(1), "a known key is known");
        writer_keys.forget(7, 1).unwrap_err();
        assert_eq!(open(&writer, &block), Err(CopyErrorKind::Corrupt), "it is gone here");
        // And then it is well again.
        client.refuses.store(false, Ordering::Relaxed);
        assert_eq!(open(&reader, &block), Ok(1));
        assert!(seal(&reader, 7).is_ok() && client.names() == 1);
        writer_keys.forget(7, 1).unwrap();
        assert_eq!(client.names(), 0);
        assert_eq!(open(&keys(&client).1, &block), Err(CopyErrorKind::Corrupt));
    }

    #[test]
    fn a_false_key_costs_its_blocks_alone() {
        let client = Arc::new(Noting::default());
        let (_, writer, store) = keys(&client);
        let (block, other) = (seal(&writer, 7).unwrap(), seal(&writer, 8).unwrap());
        let header = &block[64 + 4 + 16 + 4..];
        let path = store.keys("ns").path_of(std::array::from_fn(|byte| header[byte]));
        for garbage in
            [vec![], vec![0; RECORD_BYTES - 1], vec![0; RECORD_BYTES], vec![0; RECORD_BYTES + 1]]
        {
            client.inner.put(&path, garbage.into()).now_or_never().unwrap().unwrap();
            let (_, reader, _store) = keys(&client);
            assert_eq!(open(&reader, &block), Err(CopyErrorKind::Corrupt));
            assert_eq!(open(&reader, &other), Ok(1));
        }
    }
}
