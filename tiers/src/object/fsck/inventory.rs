//! Which object is what, by its name.

use std::collections::BTreeMap;

use futures::TryStreamExt;
use object_store::ObjectMeta;
use object_store::path::Path;
use tokio::time::timeout;

use super::super::discover::{parse_epoch, segment_name};
use super::super::error::StoreError;
use super::super::files::staged;
use super::super::keys::is_key;
use super::super::names::SegmentName;
use super::super::open::Store;
use super::super::share::worker_of;

/// How long a listing may take until the next of its objects comes.
const LISTING_LIMIT: std::time::Duration = super::OPERATION_LIMIT;

/// All objects of a bucket.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    pub(super) namespaces: BTreeMap<Path, Namespace>,
    /// Objects that are no namespace's.
    pub(super) strangers: u64,
}

/// The objects of one namespace.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    pub(super) path: Path,
    pub(super) segments: Vec<(SegmentName, ObjectMeta)>,
    pub(super) manifests: Vec<ObjectMeta>,
    /// Files that were not finished, and when each was last written to, in milliseconds since 1970.
    pub(super) leftovers: Vec<(Path, i64)>,
    /// What is something else.
    pub(super) foreign: Vec<Path>,
}

/// The directories of a namespace.
const SEGMENTS: &str = "segments";
const MANIFESTS: &str = "manifests";
const EPOCHS: &str = "epochs";
const KEYS: &str = "keys";
const NIXL: &str = "nixl";

impl Inventory {
    pub(super) async fn take(store: &Store) -> Result<Self, StoreError> {
        let mut inventory = Self::default();
        let mut listing = store.client.list(Some(&store.root));
        while let Some(meta) = next(store, &mut listing).await? {
            inventory.sort_in(&store.root, meta);
        }
        for (path, namespace) in &mut inventory.namespaces {
            for directory in [SEGMENTS, MANIFESTS, EPOCHS] {
                namespace.leftovers.extend(leftovers(store, &path.clone().join(directory)));
            }
        }
        Ok(inventory)
    }

    /// Bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        let segments = self.namespaces.values().flat_map(|namespace| &namespace.segments);
        segments.map(|(_, meta)| meta.size).sum()
    }

    fn sort_in(&mut self, root: &Path, meta: ObjectMeta) {
        let below: Vec<_> = meta.location.parts().skip(root.parts().count()).collect();
        let is_kind = |name: &str| [SEGMENTS, MANIFESTS, EPOCHS, KEYS, NIXL].contains(&name);
        let Some(at) = below.iter().rposition(|part| is_kind(part.as_ref())).filter(|&at| at > 0) else {
            self.strangers += 1;
            return;
        };
        let path: Path = root.parts().chain(below[..at].iter().cloned()).collect();
        let kind = below[at].as_ref().to_owned();
        let is_direct = at + 2 == below.len();
        let namespace = self.namespaces.entry(path.clone()).or_default();
        namespace.path = path;
        namespace.sort_in(&kind, is_direct, meta);
    }
}

impl Namespace {
    fn sort_in(&mut self, kind: &str, is_direct: bool, meta: ObjectMeta) {
        let name = segment_name(&meta).filter(|_| kind == SEGMENTS && is_direct);
        match (kind, name) {
            (SEGMENTS, Some(name)) => self.segments.push((name, meta)),
            (MANIFESTS, _) if is_direct && worker_of(&meta.location).is_some() => self.manifests.push(meta),
            (EPOCHS, _) if is_direct && parse_epoch(&meta.location).is_some() => {}
            // What blocks are encrypted with: whoever removes one makes them unreadable.
            (KEYS, _) if is_key(&meta.location) => {}
            // Slots of a tier on NIXL: nobody but the process that wrote them knows what they mean.
            (NIXL, _) if !is_direct => {}
            _ => self.foreign.push(meta.location),
        }
    }
}

/// The client takes the names of these for none.
fn leftovers(store: &Store, directory: &Path) -> Vec<(Path, i64)> {
    let files = store.files_below(directory).map(|files| staged(&files)).unwrap_or_default();
    let named = files.into_iter().filter_map(|(path, written)| {
        let name = path.file_name()?.to_str()?;
        // As it is: `join` would write the sign at its end in another way.
        Some((Path::parse(format!("{directory}/{name}")).ok()?, written.saturating_mul(1_000)))
    });
    named.collect()
}

async fn next(
    store: &Store,
    listing: &mut (impl futures::TryStream<Ok = ObjectMeta, Error = object_store::Error> + Unpin),
) -> Result<Option<ObjectMeta>, StoreError> {
    timeout(LISTING_LIMIT, listing.try_next()).await?.map_err(|error| store.secrets.scrub(&error))
}
