//! In the place of NIXL where it is not compiled in.

use std::sync::Arc;

use kvbm_settings::Settings;
use kvbm_tiers::object::Store;
use kvbm_tiers::{Backend, DiskRegion, Memory};

use super::report::{NixlReport, PluginReport};
use crate::error::{Error, ErrorKind, Result};

const ABSENT: &str = "this build has no NIXL: build it with the feature `nixl`";

/// No plugin.
#[derive(Debug)]
pub(super) struct Nixl;

impl Nixl {
    /// An error if anyone asked for a plugin.
    pub(super) fn start(settings: &Settings) -> Result<Self> {
        if settings.nixl.is_default() || settings.nixl.enabled().is_empty() {
            return Ok(Self);
        }
        Err(absent())
    }

    #[expect(clippy::unused_self, reason = "as with NIXL")]
    pub(super) fn disk(&self, _: Arc<dyn Memory>, _: Arc<DiskRegion>, _: u32) -> Result<Arc<dyn Backend>> {
        Err(absent())
    }

    #[expect(clippy::unused_self, reason = "as with NIXL")]
    pub(super) fn objects(
        &self,
        _: Arc<dyn Memory>,
        _: Store,
        _: u32,
        _: &Settings,
    ) -> Result<Arc<dyn Backend>> {
        Err(absent())
    }
}

fn absent() -> Error {
    Error::new(ErrorKind::Unavailable, ABSENT)
}

pub(super) fn installed(_: Option<&str>) -> Vec<String> {
    Vec::new()
}

pub(super) fn probe(settings: &Settings) -> NixlReport {
    let plugin = |name: &str| PluginReport { name: name.to_owned(), state: Err(ABSENT.to_owned()) };
    let plugins = settings.nixl.enabled().into_iter().map(plugin).collect();
    NixlReport { library: Err(ABSENT.to_owned()), installed: Vec::new(), plugins }
}
