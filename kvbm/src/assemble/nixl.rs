//! NIXL's part of the tiers: which plugins run, and which backends use them.

#[cfg(feature = "nixl")]
mod library;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kvbm_settings::{DiskBackend, ObjectBackend, PeerNixl, Settings};
use kvbm_tiers::object::Store;
use kvbm_tiers::{Backend, DiskRegion, DramRegion, Memory, OneSided, SetupError, SetupErrorKind};

use crate::error::{Error, ErrorKind, Result};

/// The state of NIXL under some settings.
#[derive(Clone, Debug)]
pub struct NixlReport {
    /// Version and place of the library, or why there is none and how to get it.
    pub library: Result<String, String>,
    /// Plugins that lie beside it as files.
    pub installed: Vec<String>,
    /// The plugins that the settings turn on.
    pub plugins: Vec<PluginReport>,
}

/// A plugin that is on.
#[derive(Clone, Debug)]
pub struct PluginReport {
    /// Its name.
    pub name: String,
    /// Its state, or why it does not run and what to do.
    pub state: Result<String, String>,
}

/// The library, found and loaded.
trait Library {
    /// Version and place.
    fn describe(&self) -> String;

    /// Starts a plugin. `None`: it could be loaded, but has no destination.
    fn start(
        &mut self,
        plugin: &str,
        settings: &Settings,
    ) -> Result<Option<Box<dyn NixlPlugin>>, SetupError>;

    /// Between `memory` and the host tiers of other workers, through the plugin UCX.
    fn peers(
        &self,
        settings: &Settings,
        name: &str,
        memory: &Arc<DramRegion>,
    ) -> Result<Arc<dyn OneSided>, SetupError>;
}

/// A plugin that runs.
pub(super) trait NixlPlugin: fmt::Debug {
    /// Between `memory` and `region`.
    fn disk(
        &self,
        memory: Arc<dyn Memory>,
        region: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Arc<dyn Backend>>;

    /// Between `memory` and `slots` objects of `store`, `concurrency` requests at a time.
    fn objects(
        &self,
        memory: Arc<dyn Memory>,
        store: Store,
        slots: u32,
        namespace: String,
        concurrency: u32,
    ) -> Result<Arc<dyn Backend>>;
}

/// The plugins that were started for a manager.
#[derive(Debug, Default)]
pub(super) struct NixlChoice {
    plugins: BTreeMap<String, Box<dyn NixlPlugin>>,
}

impl NixlChoice {
    /// Starts the plugins that are on. The default one may be missing, and has nothing to copy
    /// within one process: it is not started. Settings that name a library ask for it.
    pub(super) fn start(settings: &Settings) -> Result<Self> {
        if settings.nixl.is_default() && settings.nixl.library.is_none() {
            #[cfg(feature = "nixl")]
            library::say_once_if_missing();
            return Ok(Self::default());
        }
        let enabled = settings.nixl.enabled();
        if enabled.is_empty() {
            return Ok(Self::default());
        }
        // An explicit choice: its absence is an error, not a reason for a fallback.
        let mut library = load(settings).map_err(|error| asked_for(&enabled.join(", "), &error))?;
        let mut plugins = BTreeMap::new();
        for name in enabled {
            if let Some(why) = idle(name, settings) {
                tracing::warn!("{why}");
            }
            let started = library.start(name, settings).map_err(|error| asked_for(name, &error))?;
            plugins.extend(started.map(|plugin| (name.to_owned(), plugin)));
        }
        Ok(Self { plugins })
    }

    pub(super) fn plugin(&self, name: &str) -> Result<&dyn NixlPlugin> {
        self.plugins
            .get(name)
            .map(|plugin| &**plugin)
            .ok_or_else(|| Error::invalid(format!("the NIXL plugin {name} was not started")))
    }
}

/// What reads the host tiers of other workers, and has them read this one's; `None`: they do it
/// without NIXL. `name` is the agent's.
pub(crate) fn for_peers(
    settings: &Settings,
    name: &str,
    memory: &Arc<DramRegion>,
) -> Result<Option<Arc<dyn OneSided>>> {
    let is_required = settings.peers.nixl == PeerNixl::Required;
    // What NIXL moves is not encrypted.
    let would_bypass_tls = settings.peers.tls_certificate.is_some() && !is_required;
    if settings.peers.nixl == PeerNixl::Off || !settings.nixl.is_enabled(UCX) || would_bypass_tls {
        return Ok(None);
    }
    let started = load(settings).and_then(|library| library.peers(settings, name, memory));
    // Made now: what is required and cannot be had shows at the start.
    let ready =
        started.and_then(|nixl| if is_required { nixl.place().map(|_| nixl) } else { Ok(nixl) });
    match ready {
        Ok(nixl) => Ok(Some(nixl)),
        Err(error) if is_required => {
            let message = format!(
                "peers.nixl (DYN_KVBM_PEERS_NIXL) requires NIXL, which cannot start: {error}; or set it to auto"
            );
            Err(Error::caused(ErrorKind::Unavailable, message, error))
        }
        Err(error) => {
            tracing::info!("{error}. Blocks of other hosts come by TCP");
            Ok(None)
        }
    }
}

const UCX: &str = "UCX";

/// What this machine has of NIXL, and the state of the plugins that `settings` turn on. Starts
/// them, and takes a second.
pub fn probe(settings: &Settings) -> NixlReport {
    let mut library = load(settings).map_err(|error| error.to_string());
    let told = |name: &str, started: Option<Box<dyn NixlPlugin>>| {
        let state = if started.is_some() { "started" } else { "loaded" };
        idle(name, settings).map_or_else(|| state.to_owned(), |why| format!("{state}, but {why}"))
    };
    let plugins = settings.nixl.enabled().into_iter().map(|name| {
        let state = match &mut library {
            Ok(library) => library.start(name, settings).map_err(|error| error.to_string()),
            Err(why) => Err(why.clone()),
        };
        PluginReport { name: name.to_owned(), state: state.map(|started| told(name, started)) }
    });
    let plugins = plugins.collect();
    NixlReport {
        plugins,
        library: library.map(|library| library.describe()),
        installed: installed(settings.nixl.library.as_deref()),
    }
}

#[cfg(feature = "nixl")]
pub(super) use library::installed;
#[cfg(feature = "nixl")]
use library::load;

#[cfg(not(feature = "nixl"))]
fn load(_: &Settings) -> Result<Box<dyn Library>, SetupError> {
    let message = "this build has no NIXL: build it with the feature `nixl`";
    Err(SetupError::unavailable(message))
}

#[cfg(not(feature = "nixl"))]
pub(super) fn installed(_: Option<&str>) -> Vec<String> {
    Vec::new()
}

/// Says that a plugin is on but unused, and what to set; `None`: it is used.
fn idle(name: &str, settings: &Settings) -> Option<String> {
    let (disk, object) = (&settings.disk, &settings.object);
    let to_use_it = match name {
        UCX if settings.peers.enabled && settings.peers.nixl != PeerNixl::Off => return None,
        "POSIX" if disk.backend == DiskBackend::Nixl && disk.capacity.is_some() => return None,
        "OBJ" if object.backend == ObjectBackend::Nixl && object.place().is_some() => return None,
        "POSIX" => {
            "give the disk tier a size (DYN_KVBM_DISK_CACHE_GB) and set disk.backend (DYN_KVBM_DISK_BACKEND) to nixl, or "
        }
        "OBJ" => {
            "set object.url (DYN_KVBM_OBJECT_URL) to s3://… and object.backend (DYN_KVBM_OBJECT_BACKEND) to nixl, or "
        }
        UCX => "set peers.enabled (DYN_KVBM_PEERS) to true, or ",
        _ => "no tier has a use for it; ",
    };
    Some(format!(
        "{name} is on and nothing uses it: {to_use_it}turn it off (nixl.backends.{name}, DYN_KVBM_NIXL_BACKEND_{name}=false)"
    ))
}

fn asked_for(plugins: &str, error: &SetupError) -> Error {
    let kind = match error.kind() {
        SetupErrorKind::Invalid => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    };
    let message = format!(
        "NIXL was asked for ({plugins}) and cannot start: {error}; \
         or turn it off (nixl.backends, DYN_KVBM_NIXL_BACKEND_<NAME>=false)"
    );
    Error::caused(kind, message, error.clone())
}

#[cfg(test)]
mod tests {
    use kvbm_settings::Capacity;

    use super::*;

    #[test]
    fn an_unused_plugin_is_told_with_what_to_set() {
        let mut settings = Settings::default();
        for (name, setting) in
            [("POSIX", "DYN_KVBM_DISK_BACKEND"), ("OBJ", "DYN_KVBM_OBJECT_BACKEND")]
        {
            let why = idle(name, &settings).expect(name);
            assert!(
                why.contains(setting)
                    && why.contains(&format!("DYN_KVBM_NIXL_BACKEND_{name}=false")),
                "{why}"
            );
        }
        settings.disk.capacity = Some(Capacity::Blocks(1));
        assert!(idle("POSIX", &settings).is_some(), "the disk tier is there, on another backend");
        settings.disk.backend = DiskBackend::Nixl;
        settings.object.backend = ObjectBackend::Nixl;
        assert!(idle("OBJ", &settings).is_some(), "there is no object tier");
        settings.object.url = Some("s3://bucket".to_owned());
        assert_eq!((idle("POSIX", &settings), idle("OBJ", &settings)), (None, None));
        settings.object.capacity = Some(Capacity::Blocks(0));
        assert!(idle("OBJ", &settings).is_some(), "there is no object tier again");
        let ucx = idle("UCX", &settings).expect("no tier moves anything with it");
        assert!(ucx.starts_with("UCX is on and nothing uses it"), "{ucx}");
        settings.peers.enabled = true;
        assert_eq!(idle("UCX", &settings), None);
    }
}
