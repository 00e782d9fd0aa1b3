//! Faults around the client of an object store.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

use super::{Chaos, Direction, EpisodeHit, Kind, Medium};
use crate::clock;

/// A store whose requests are hit: listings as reads are, each of them once, and deletions as
/// writes.
#[derive(Debug)]
pub(super) struct ChaosStore {
    inner: Arc<dyn ObjectStore>,
    chaos: Chaos,
}

/// How often a request that hangs looks whether all is well again.
const LOOK: Duration = Duration::from_millis(10);

impl ChaosStore {
    pub(super) const fn new(inner: Arc<dyn ObjectStore>, chaos: Chaos) -> Self {
        Self { inner, chaos }
    }

    /// What becomes of a request: an error, or after a while the kind of fault that spoils its
    /// content, if any.
    async fn meet(&self, direction: Direction, location: &Path) -> Result<Option<Kind>> {
        let Some(hit) = self.chaos.hit(Medium::Object, direction) else { return Ok(None) };
        match hit.kind {
            Kind::Hang => self.wait_until(hit.until).await,
            Kind::Delay => self.wait_until(clock::now() + Kind::DELAY).await,
            _ => {}
        }
        match hit.error(direction, location) {
            Some(error) => Err(error),
            None => Ok(Some(hit.kind)),
        }
    }

    /// An answer in part is the first half of the names, and then an error.
    fn list_hit(
        &self,
        prefix: Option<&Path>,
        names: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let store = Self::new(Arc::clone(&self.inner), self.chaos.clone());
        let prefix = prefix.cloned().unwrap_or_default();
        let listing = async move {
            match store.meet(Direction::Read, &prefix).await {
                Ok(Some(Kind::Short)) => {
                    let mut all: Vec<_> = names.collect().await;
                    all.truncate(all.len() / 2);
                    let source = "injected: connection reset".into();
                    let cut = Err(Error::Generic { store: "chaos", source });
                    futures::stream::iter(all.into_iter().chain([cut])).boxed()
                }
                Ok(_) => names,
                Err(error) => futures::stream::iter([Err(error)]).boxed(),
            }
        };
        futures::stream::once(listing).flatten().boxed()
    }

    async fn wait_until(&self, when: Instant) {
        while !self.chaos.is_healed() && clock::now() < when {
            tokio::time::sleep(LOOK.min(when.saturating_duration_since(clock::now()))).await;
        }
    }
}

impl EpisodeHit {
    fn error(self, direction: Direction, location: &Path) -> Option<Error> {
        let generic = |source| Some(Error::Generic { store: "chaos", source });
        match self.kind {
            Kind::Http500 => generic("injected: 500 Internal Server Error".into()),
            Kind::Http503 => generic("injected: 503 Service Unavailable".into()),
            Kind::Http403 => {
                let source = "injected: 403 Forbidden".into();
                Some(Error::PermissionDenied { path: location.to_string(), source })
            }
            Kind::NoSpace => generic(io::Error::from_raw_os_error(libc::ENOSPC).into()),
            // An object is there as a whole or not at all.
            Kind::Short if direction == Direction::Write => {
                generic("injected: connection reset".into())
            }
            _ => None,
        }
    }
}

/// The body of an answer as the fault leaves it.
fn spoilt(kind: Kind, body: Bytes) -> Bytes {
    match kind {
        Kind::Short => body.slice(..body.len() / 2),
        Kind::Corrupt => flip_a_bit(body.to_vec()).into(),
        _ => body,
    }
}

fn flip_a_bit(mut bytes: Vec<u8>) -> Vec<u8> {
    // Not near an end, where a footer may be that is never read.
    let place = bytes.len() / 3;
    bytes.get_mut(place).into_iter().for_each(|byte| *byte ^= 0x10);
    bytes
}

#[async_trait]
impl ObjectStore for ChaosStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        match self.meet(Direction::Write, location).await? {
            Some(Kind::Corrupt) => {
                let bytes = payload.iter().flat_map(|part| part.iter().copied()).collect();
                self.inner.put_opts(location, flip_a_bit(bytes).into(), opts).await
            }
            _ => self.inner.put_opts(location, payload, opts).await,
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.meet(Direction::Write, location).await?;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let kind = self.meet(Direction::Read, location).await?;
        let answer = self.inner.get_opts(location, options).await?;
        let Some(kind @ (Kind::Short | Kind::Corrupt)) = kind else { return Ok(answer) };
        let GetResult { meta, range, attributes, extensions, .. } = &answer;
        let (meta, range) = (meta.clone(), range.clone());
        let (attributes, extensions) = (attributes.clone(), extensions.clone());
        let body = spoilt(kind, answer.bytes().await?);
        let payload = GetResultPayload::Stream(futures::stream::iter([Ok(body)]).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (inner, chaos) = (Arc::clone(&self.inner), self.chaos.clone());
        let deleted = locations.then(move |location| {
            let store = Self::new(Arc::clone(&inner), chaos.clone());
            async move {
                let location = location?;
                store.meet(Direction::Write, &location).await?;
                store.inner.delete(&location).await.map(|()| location)
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_hit(prefix, self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_hit(prefix, self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.meet(Direction::Read, prefix.unwrap_or(&Path::default())).await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

impl fmt::Display for ChaosStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;
    use object_store::memory::InMemory;

    use super::*;
    use crate::chaos::Schedule;

    const BYTES: &[u8] = b"sixteen bytes ok";

    fn store(script: &str) -> (Chaos, ChaosStore, Path) {
        let chaos = Chaos::new(Schedule::scripted([script.parse().unwrap()]));
        (chaos.clone(), ChaosStore::new(Arc::new(InMemory::new()), chaos), Path::from("object"))
    }

    /// And then it heals, and everything works again.
    async fn assert_heals((chaos, store, path): (Chaos, ChaosStore, Path), kind: Kind, times: u64) {
        chaos.heal();
        store.put(&path, BYTES.into()).await.unwrap();
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), BYTES);
        assert_eq!(chaos.injected().into_iter().collect::<Vec<_>>(), [(kind, times)]);
    }

    #[tokio::test]
    async fn a_service_that_fails_fails_reads_and_writes() {
        for kind in [Kind::Http500, Kind::Http503, Kind::Http403, Kind::NoSpace] {
            let (chaos, store, path) = store(&format!("object:{kind}@0s+1h"));
            store.put(&path, BYTES.into()).await.unwrap();
            chaos.start();
            let error = store.get(&path).await.unwrap_err();
            assert_eq!(
                matches!(error, Error::PermissionDenied { .. }),
                kind == Kind::Http403,
                "{error}"
            );
            store.put(&path, BYTES.into()).await.unwrap_err();
            assert_heals((chaos, store, path), kind, 2).await;
        }
    }

    #[tokio::test]
    async fn an_answer_may_be_part_of_what_it_claims() {
        let (chaos, store, path) = store("object.read:short@0s+1h");
        chaos.start();
        store.put(&path, BYTES.into()).await.unwrap();
        let answer =
            store.get_opts(&path, GetOptions::new().with_range(Some(4..12_u64))).await.unwrap();
        assert_eq!(answer.range, 4..12);
        assert_eq!(answer.bytes().await.unwrap(), BYTES[4..8]);
        assert_heals((chaos, store, path), Kind::Short, 1).await;
    }

    #[tokio::test]
    async fn listings_and_deletions_fail_and_listings_may_end_early() {
        let (chaos, store, path) = store("object.read:short@0s+1h x1");
        for name in ["a", "b", "c"] {
            store.put(&Path::from(name), BYTES.into()).await.unwrap();
        }
        chaos.start();
        chaos.spare(2);
        let count = || async { store.list(None).collect::<Vec<_>>().await };
        assert_eq!(count().await.len(), 3);
        assert!(store.list(None).try_collect::<Vec<_>>().await.is_ok());
        let cut = count().await;
        assert!(cut.len() == 2 && cut[0].is_ok() && cut[1].is_err(), "{cut:?}");
        assert_eq!(count().await.len(), 3);
        assert_heals((chaos, store, path), Kind::Short, 1).await;
        let (chaos, store, path) = self::store("object.write:503@0s+1h");
        store.put(&path, BYTES.into()).await.unwrap();
        chaos.start();
        store.delete(&path).await.unwrap_err();
        assert_heals((chaos, store, path), Kind::Http503, 1).await;
    }

    #[tokio::test]
    async fn one_bit_is_wrong_in_reads_or_lastingly_in_writes() {
        for direction in ["read", "write"] {
            let (chaos, store, path) = store(&format!("object.{direction}:corrupt@0s+1h x1"));
            chaos.start();
            store.put(&path, BYTES.into()).await.unwrap();
            let read = store.get(&path).await.unwrap().bytes().await.unwrap();
            let wrong: u32 = read.iter().zip(BYTES).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert_eq!((read.len(), wrong), (BYTES.len(), 1), "{direction}");
            let again = store.get(&path).await.unwrap().bytes().await.unwrap();
            assert_eq!(again == BYTES, direction == "read");
            assert_heals((chaos, store, path), Kind::Corrupt, 1).await;
        }
    }

    #[tokio::test]
    async fn silence_ends_with_the_episode_or_with_all_faults() {
        let (chaos, store, path) = store("object:hang@0s+20ms");
        let began = Instant::now();
        chaos.start();
        store.put(&path, BYTES.into()).await.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(19));
        assert_heals((chaos, store, path), Kind::Hang, 1).await;
        let (chaos, store, path) = self::store("object:hang@0s+1h");
        chaos.start();
        let healing = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            chaos.heal();
        };
        let (put, ()) = tokio::join!(store.put(&path, BYTES.into()), healing);
        put.unwrap();
    }
}
