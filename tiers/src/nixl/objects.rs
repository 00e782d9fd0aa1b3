//! Objects through NIXL, one for each slot.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::agent::BackendHandle;
use super::backend::{MoverEnds, NixlBackend, near};
use super::registration::{RegisteredRange, Registration};
use super::request::SegmentList;
use super::spans::SlotLists;
use crate::copy::Tier;
use crate::error::{SetupError, SetupErrorKind};
use crate::memory::Memory;
use crate::object::{Store, StoreOptions};

/// Objects that are registered together.
const SPAN: u32 = 1 << 10;

/// How blocks are laid out in the store.
#[derive(Clone, Debug)]
pub struct NixlObjectOptions {
    /// Part of all objects' names, `/` allowed.
    pub namespace: String,
    /// Slots of the tier.
    pub slots: u32,
    /// The most blocks in flight, each way.
    pub concurrency: u32,
}

impl NixlBackend {
    /// Between `memory` and one object for each slot in the store that `plugin` was started for,
    /// with [`object_parameters`]. `store` is the same store, reached without NIXL: what NIXL
    /// cannot do, deleting, goes through it.
    ///
    /// The objects are called `<root>/<namespace>/nixl/<process>/<slot>`, where `<process>` is 128
    /// bits that no other process has, and hold the bytes of a block and nothing else. A slot that
    /// is written again replaces its object; all are deleted at the end.
    ///
    /// NIXL takes an object that is too short for a whole one. No other process writes these
    /// objects, and [`Verified`](crate::Verified) notices it.
    ///
    /// # Errors
    /// `Unavailable`: the plugin does not take memory or objects, or there is no thread.
    pub fn objects(
        plugin: &Arc<BackendHandle>,
        memory: Arc<dyn Memory>,
        store: Store,
        options: &NixlObjectOptions,
    ) -> Result<Self, SetupError> {
        let bytes = memory.block_bytes();
        let directory = store.fresh_directory(&options.namespace, "nixl");
        let (backend, parent) = (Arc::clone(plugin), directory.clone());
        let prepare = move |slots: std::ops::Range<u32>| {
            let key = |slot: u32| {
                (u64::from(slot), parent.clone().join(format!("{slot:08x}")).to_string())
            };
            let objects = Registration::objects(&backend, bytes, slots.clone().map(key))?;
            let segment =
                |slot: u32| RegisteredRange { address: 0, bytes, device: u64::from(slot) };
            SegmentList::far(&objects, slots.map(segment))
        };
        let far = SlotLists::new(options.slots, SPAN, Box::new(prepare));
        let near = near(plugin, &memory, bytes)?;
        let ends = MoverEnds { memory, near, other: Tier::Object, far };
        Self::start(plugin, ends, options.concurrency, move || store.delete_directory(&directory))
    }
}

/// Parameters of the plugin `OBJ` for the store at `url`, `s3://bucket/prefix`. What is not given,
/// the plugin takes from the `AWS_*` variables or the instance that this runs on.
///
/// # Errors
/// `Invalid`: another kind of store, or a malformed URL.
pub fn object_parameters(
    url: &str,
    options: &StoreOptions,
    concurrency: u32,
) -> Result<BTreeMap<String, String>, SetupError> {
    let bucket = url::Url::parse(url).ok().filter(|url| url.scheme() == "s3");
    let Some(bucket) = bucket.as_ref().and_then(url::Url::host_str) else {
        let message = "NIXL reaches S3-compatible stores only: set object.url (DYN_KVBM_OBJECT_URL) to \
             s3://bucket/prefix, or object.backend (DYN_KVBM_OBJECT_BACKEND) to native";
        return Err(SetupError::new(SetupErrorKind::Invalid, message));
    };
    let scheme =
        options.endpoint.as_ref().and_then(|endpoint| endpoint.split_once("://")).map(|(s, _)| s);
    let optional = [
        ("endpoint_override", options.endpoint.as_deref()),
        ("scheme", scheme),
        ("region", options.region.as_deref()),
        ("access_key", options.access_key.as_deref()),
        ("secret_key", options.secret_key.as_deref()),
    ];
    // A thread moves one object at a time: those that write must leave as many for those that read.
    let threads = concurrency.max(1).saturating_mul(2).to_string();
    let fixed = [
        ("bucket", bucket),
        ("num_threads", &threads),
        // Works with every S3-compatible store.
        ("use_virtual_addressing", "false"),
        // Every block has a checksum of its own, and not every store knows Amazon's.
        ("req_checksum", "required"),
        ("resp_checksum", "required"),
    ];
    let given = optional.into_iter().filter_map(|(key, value)| Some((key, value?)));
    Ok(fixed
        .into_iter()
        .chain(given)
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_come_from_url_and_options() {
        let options = StoreOptions {
            endpoint: Some("http://127.0.0.1:9000".into()),
            access_key: Some("key".into()),
            secret_key: Some("secret".into()),
            region: None,
        };
        let parameters = object_parameters("s3://bucket/some/prefix", &options, 8).unwrap();
        let get = |key: &str| parameters.get(key).map(String::as_str);
        assert_eq!(
            (get("bucket"), get("scheme"), get("region")),
            (Some("bucket"), Some("http"), None)
        );
        assert_eq!((get("access_key"), get("num_threads")), (Some("key"), Some("16")));
        for url in ["file:///tmp/objects", "memory:///", "s3://", "nonsense"] {
            let error = object_parameters(url, &options, 8).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Invalid);
        }
    }
}
