//! Which object is what, by its name.

use std::collections::{BTreeMap, BTreeSet};

use object_store::ObjectMeta;
use object_store::path::Path;

use super::super::collect::parse_term;
use super::super::epochs::parse_marker;
use super::super::error::StoreError;
use super::super::files::staged;
use super::super::keys::is_key;
use super::super::names::{SegmentName, epoch_name, parse_epoch_name};
use super::super::open::Store;
use super::super::share::worker_of;

/// How long a listing may take until the next of its objects comes.
const LISTING_LIMIT: std::time::Duration = super::OPERATION_LIMIT;

/// All objects of a bucket.
#[derive(Debug, Default)]
pub(super) struct BucketInventory {
    pub(super) namespaces: BTreeMap<Path, NamespaceObjects>,
    /// Objects that are no namespace's.
    pub(super) strangers: u64,
}

/// The objects of one namespace.
#[derive(Debug, Default)]
pub(super) struct NamespaceObjects {
    pub(super) path: Path,
    pub(super) segments: Vec<(SegmentName, ObjectMeta)>,
    /// Where segments lie, or may.
    pub(super) directories: BTreeSet<Path>,
    pub(super) manifests: Vec<ObjectMeta>,
    /// Files that were not finished, and when each was last written to, in milliseconds since 1970.
    pub(super) leftovers: Vec<(Path, i64)>,
    /// Other objects.
    pub(super) foreign: Vec<Path>,
}

/// The directories of a namespace.
const SEGMENTS: &str = "blocks";
/// Where versions that did not tell epochs apart put theirs.
const FORMER_SEGMENTS: &str = "segments";
const COLLECTOR: &str = "collector";
const MANIFESTS: &str = "manifests";
const EPOCHS: &str = "epochs";
const KEYS: &str = "keys";
const NIXL: &str = "nixl";

impl BucketInventory {
    pub(super) async fn take(store: &Store) -> Result<Self, StoreError> {
        let mut inventory = Self::default();
        let mut listing = store.listing(&store.root, None, LISTING_LIMIT);
        while let Some(meta) = listing.next().await? {
            inventory.sort_in(&store.root, meta);
        }
        for (path, namespace) in &mut inventory.namespaces {
            namespace.leftovers.extend(leftovers(store, path));
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
        let kinds = [SEGMENTS, FORMER_SEGMENTS, MANIFESTS, EPOCHS, COLLECTOR, KEYS, NIXL];
        let is_kind = |name: &str| kinds.contains(&name);
        let Some(at) = below.iter().rposition(|part| is_kind(part.as_ref())).filter(|&at| at > 0)
        else {
            self.strangers += 1;
            return;
        };
        let path: Path = root.parts().chain(below[..at].iter().cloned()).collect();
        let kind = below[at].as_ref().to_owned();
        let place = match &below[at + 1..] {
            [_] => BlockPlace::Direct,
            [epoch, _] => parse_epoch_name(epoch.as_ref())
                .map_or(BlockPlace::Elsewhere, |_| BlockPlace::InEpoch),
            _ => BlockPlace::Elsewhere,
        };
        let namespace = self.namespaces.entry(path.clone()).or_default();
        namespace.path = path;
        namespace.sort_in(&kind, place, meta);
    }
}

/// Where in a namespace's directory an object lies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockPlace {
    Direct,
    /// In the directory of an epoch.
    InEpoch,
    Elsewhere,
}

impl NamespaceObjects {
    fn sort_in(&mut self, kind: &str, place: BlockPlace, meta: ObjectMeta) {
        let is_direct = place == BlockPlace::Direct;
        let is_place = (kind, place) == (SEGMENTS, BlockPlace::InEpoch)
            || (kind, place) == (FORMER_SEGMENTS, BlockPlace::Direct);
        let name = meta.location.filename().and_then(SegmentName::parse).filter(|_| is_place);
        match (kind, name) {
            (_, Some(name)) => {
                let parts = meta.location.parts().count().saturating_sub(1);
                self.directories.insert(meta.location.parts().take(parts).collect());
                self.segments.push((name, meta));
            }
            (MANIFESTS, _) if is_direct && worker_of(&meta.location).is_some() => {
                self.manifests.push(meta);
            }
            (EPOCHS, _) if is_direct && let Some(epoch) = parse_marker(&meta.location) => {
                self.directories.insert(self.path.clone().join(SEGMENTS).join(epoch_name(epoch)));
            }
            (COLLECTOR, _) if is_direct && parse_term(&meta.location).is_some() => {}
            // What blocks are encrypted with: removing one makes them unreadable.
            (KEYS, _) if is_key(&meta.location) => {}
            // Slots of a tier on NIXL: only the process that wrote them knows what they mean.
            (NIXL, _) if !is_direct => {}
            _ => self.foreign.push(meta.location),
        }
    }
}

/// The client takes the names of these for none.
fn leftovers(store: &Store, namespace: &Path) -> Vec<(Path, i64)> {
    let Some(root) = store.files_below(namespace) else { return Vec::new() };
    let named = staged(&root).into_iter().filter_map(|(path, written_ms)| {
        let name = path.strip_prefix(&root).ok()?.to_str()?;
        // As it is: `join` would write the sign in it in another way.
        Some((Path::parse(format!("{namespace}/{name}")).ok()?, written_ms))
    });
    named.collect()
}
