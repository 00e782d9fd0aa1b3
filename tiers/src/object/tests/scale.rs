//! Buckets with many segments, which are made up as they are asked for: what is listed is listed in
//! pages, and memory does not grow with the bucket. `KVBM_SEGMENTS=1000000 cargo test …
//! a_bucket_of_many_segments -- --nocapture` for a million.

use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use object_store::{GetRange, GetResultPayload};

use super::sharing::{TakeAll, shared};
use super::*;
use crate::object::names::SegmentName;
use crate::object::segment::{ENTRY_BYTES, Provenance, SegmentEntry, TRAILER_BYTES, encode_footer};
use crate::object::{Sharing, TakeIn};

const DIRECTORY: &str = "model/tp0/blocks/0000000000000003";
const BLOCKS: usize = 16;
const FOOTER_BYTES: usize = BLOCKS * ENTRY_BYTES + TRAILER_BYTES;
/// From one segment to the next.
const STEP_MS: u64 = 1_000;
const WRITER: u128 = 7;

/// A store of segments that are not in memory. All else is kept as it is.
#[derive(Debug)]
struct MadeUp {
    rest: InMemory,
    /// Written when it was made: types of times come from there.
    opened: ObjectMeta,
    /// How long before now the first segment was written.
    first_age_ms: u64,
    since_ms: u64,
    segments: AtomicU64,
    deleted: Mutex<Vec<bool>>,
    /// Names of segments that were given out.
    listed: AtomicU64,
}

impl MadeUp {
    fn new(segments: u64) -> Arc<Self> {
        let now_ms = u64::try_from(crate::clock::since_1970().as_millis()).unwrap();
        let first_age_ms = segments * STEP_MS;
        let since_ms = now_ms - first_age_ms;
        let (rest, path) = (InMemory::new(), Path::from("opened"));
        let opened = async {
            rest.put(&path, "now".into()).await?;
            rest.head(&path).await
        };
        let opened = opened.now_or_never().unwrap().unwrap();
        let (segments, deleted) =
            (AtomicU64::new(segments), Mutex::new(vec![false; segments as usize * 2]));
        let listed = AtomicU64::new(0);
        Arc::new(Self { rest, opened, first_age_ms, since_ms, segments, deleted, listed })
    }

    fn name(&self, number: u64) -> SegmentName {
        let time = SegmentName::first_of(self.since_ms + number * STEP_MS);
        SegmentName(time.0 | WRITER << 32 | u128::from(number))
    }

    /// `None`: it is none of these.
    fn number(&self, path: &Path) -> Option<u64> {
        let name =
            SegmentName::parse(path.filename()?).filter(|name| name.writer() == WRITER as u64)?;
        Some(name.0 as u64 & 0xffff_ffff)
            .filter(|number| *number < self.segments.load(Ordering::Relaxed))
    }

    fn meta(&self, number: u64) -> ObjectMeta {
        let age = Duration::from_millis(self.first_age_ms.saturating_sub(number * STEP_MS));
        ObjectMeta {
            location: Path::from(format!("{DIRECTORY}/{}", self.name(number))),
            last_modified: self.opened.last_modified - age,
            size: (BLOCKS * BLOCK + FOOTER_BYTES) as u64,
            e_tag: None,
            version: None,
        }
    }

    fn list_from(
        self: &Arc<Self>,
        first: u64,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let (own, end) = (Arc::clone(self), self.segments.load(Ordering::Relaxed));
        let there = (first..end).filter_map(move |number| {
            let is_deleted = own.deleted.lock()[number as usize];
            own.listed.fetch_add(u64::from(!is_deleted), Ordering::Relaxed);
            (!is_deleted).then(|| Ok(own.meta(number)))
        });
        futures::stream::iter(there).boxed()
    }

    fn left(&self) -> usize {
        let segments = self.segments.load(Ordering::Relaxed) as usize;
        self.deleted.lock()[..segments].iter().filter(|is_deleted| !**is_deleted).count()
    }
}

/// One chain of blocks.
fn footer(segment: u64) -> Bytes {
    let block = |at: usize| key((segment as usize * BLOCKS + at) as u32 + 1);
    let entry = |at: usize| SegmentEntry {
        block: block(at),
        parent: at.checked_sub(1).map(|before| block(before).hash),
        offset: (at * BLOCK) as u64,
        length: BLOCK as u64,
        crc32c: 0,
        tenant: None,
    };
    let provenance = Provenance { fingerprint: 77, epoch: 3, forgotten: 0 };
    encode_footer(&provenance, &(0..BLOCKS).map(entry).collect::<Vec<_>>())
}

/// The store as a client has it.
#[derive(Clone, Debug)]
struct Client(Arc<MadeUp>);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("made up")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Client {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.0.rest.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.0.rest.put_multipart_opts(location, opts).await
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        let Some(number) = self.0.number(location) else {
            return self.0.rest.get_opts(location, options).await;
        };
        let (meta, footer) = (self.0.meta(number), footer(number));
        let Some(GetRange::Bounded(range)) = options.range else { return Err(failure()) };
        // Only the ends of segments are asked for.
        let payload = meta.size - footer.len() as u64;
        let zeroes = vec![0; payload.saturating_sub(range.start) as usize];
        let skipped = range.start.saturating_sub(payload) as usize;
        let body = Bytes::from([&zeroes[..], &footer[skipped..]].concat());
        let payload = GetResultPayload::Stream(futures::stream::iter([Ok(body)]).boxed());
        Ok(GetResult {
            payload,
            meta,
            range,
            attributes: object_store::Attributes::default(),
            extensions: object_store::Extensions::default(),
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        let store = self.clone();
        let deleted = locations.then(move |location| {
            let store = store.clone();
            async move {
                let location = location?;
                match store.0.number(&location) {
                    Some(number) => store.0.deleted.lock()[number as usize] = true,
                    None => store.0.rest.delete(&location).await?,
                }
                Ok(location)
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let is_theirs = prefix.is_some_and(|prefix| DIRECTORY.starts_with(prefix.as_ref()));
        let rest = self.0.rest.list(prefix);
        if is_theirs { self.0.list_from(0).chain(rest).boxed() } else { rest }
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let after = SegmentName::parse(offset.filename().unwrap_or_default()).unwrap();
        let first = after.millis().saturating_sub(self.0.since_ms).div_ceil(STEP_MS);
        let first = first + u64::from(self.0.name(first) <= after);
        self.0.list_from(first).chain(self.0.rest.list_with_offset(prefix, offset)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.0.rest.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.0.rest.copy_opts(from, to, options).await
    }
}

/// Most memory that this process has had, in MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() >> 10
}

fn backend_of(store: &Arc<MadeUp>, sharing: Sharing) -> ObjectBackend {
    let options = ObjectOptions { sharing: Some(sharing), ..shared(BLOCKS) };
    backend(
        Store::with_client(Arc::new(Client(Arc::clone(store)))).unwrap(),
        &Heap::new(),
        &options,
    )
}

#[test]
fn a_bucket_of_many_segments_is_handled_in_pages() {
    let segments = std::env::var("KVBM_SEGMENTS").map_or(20_000, |text| text.parse().unwrap());
    let store = MadeUp::new(segments);
    let (began, before) = (Instant::now(), peak_mib());
    let lasting = shared(BLOCKS)
        .sharing
        .map(|sharing| Sharing { collect_after: Duration::MAX, ..sharing })
        .unwrap();
    let reader = backend_of(&store, lasting.clone());
    let found = reader.discover(4_096);
    let newest = (found.blocks[0].block.hash >> 64) as u64;
    assert_eq!(
        (found.blocks.len(), newest.div_ceil(BLOCKS as u64)),
        (4_096, segments),
        "the newest come first"
    );
    let listed = store.listed.load(Ordering::Relaxed);
    assert!(listed <= segments * 2, "{listed} names listed of {segments}");
    println!(
        "{segments} segments: found {} blocks of {} segments in {:?}, {listed} names listed, peak memory {before} -> {} MiB",
        found.blocks.len(),
        found.segments,
        began.elapsed(),
        peak_mib()
    );

    // What is new is found behind the newest, without listing the rest.
    let all = Arc::new(TakeAll::default());
    reader.keep_looking(Arc::clone(&all) as Arc<dyn TakeIn>);
    let (began, before) = (Instant::now(), store.listed.load(Ordering::Relaxed));
    store.segments.fetch_add(5, Ordering::Relaxed);
    eventually("what is new is not found", || all.0.lock().len() >= 5 * BLOCKS);
    let listed = store.listed.load(Ordering::Relaxed) - before;
    println!("5 more: found in {:?}, {listed} names listed", began.elapsed());
    drop(reader);

    // To another model they mean nothing, and no worker relies on them any more.
    let (began, before) = (Instant::now(), peak_mib());
    let provenance = Provenance { fingerprint: 1, epoch: 3, forgotten: 0 };
    let collector =
        backend_of(&store, Sharing { provenance, collect_after: Duration::ZERO, ..lasting });
    collector.discover(0);
    let limit = Duration::from_secs(60 + segments / 200);
    let collected = || collector.stats().collected;
    while store.left() > 0 {
        assert!(began.elapsed() < limit, "{} of {segments} are left", store.left());
        std::thread::sleep(Duration::from_millis(20));
    }
    println!(
        "{} segments collected in {:?}, peak memory {before} -> {} MiB",
        collected(),
        began.elapsed(),
        peak_mib()
    );
}
