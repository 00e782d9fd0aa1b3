//! NIXL's part of the tiers: which plugins run, and the backends on them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use kvbm_settings::{DiskBackend, ObjectBackend, Settings};
use kvbm_tiers::nixl::{
    Agent, BackendHandle, Library, NixlBackend, NixlObjectOptions, REMEDY, check_plugin_directory, find,
    installed_plugins, object_parameters,
};
use kvbm_tiers::object::Store;
use kvbm_tiers::{Backend, DiskRegion, Memory, SetupError, SetupErrorKind, UringBackend};

use super::report::{NixlReport, PluginReport};
use super::{namespace, setup, store_options};
use crate::error::{Error, ErrorKind, Result};

/// The plugins that were started for a manager.
#[derive(Debug, Default)]
pub(super) struct Nixl {
    plugins: BTreeMap<String, Arc<BackendHandle>>,
}

impl Nixl {
    /// Starts the plugins that are on. The one that is on by default may be missing, and has nothing to move
    /// within one process: it is not started. Who names a library asks for it.
    pub(super) fn start(settings: &Settings) -> Result<Self> {
        if settings.nixl.is_default() && settings.nixl.library.is_none() {
            say_once_if_missing();
            return Ok(Self::default());
        }
        let enabled = settings.nixl.enabled();
        if enabled.is_empty() {
            return Ok(Self::default());
        }
        let agent = agent(settings).map_err(|error| asked_for(&enabled.join(", "), &error))?;
        let mut plugins = BTreeMap::new();
        for name in enabled {
            if let Some(why) = idle(name, settings) {
                tracing::warn!("{why}");
            }
            let started = start(&agent, name, settings).map_err(|error| asked_for(name, &error))?;
            plugins.extend(started.map(|handle| (name.to_owned(), Arc::new(handle))));
        }
        Ok(Self { plugins })
    }

    /// Between `memory` and `region`.
    pub(super) fn disk(
        &self,
        memory: Arc<dyn Memory>,
        region: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Arc<dyn Backend>> {
        let backend = NixlBackend::disk(self.plugin("POSIX")?, memory, region, depth);
        Ok(Arc::new(backend.map_err(setup)?))
    }

    /// Between `memory` and `slots` objects of `store`.
    pub(super) fn objects(
        &self,
        memory: Arc<dyn Memory>,
        store: Store,
        slots: u32,
        settings: &Settings,
    ) -> Result<Arc<dyn Backend>> {
        let (namespace, concurrency) = (namespace(settings), settings.object.concurrency);
        let options = NixlObjectOptions { namespace, slots, concurrency };
        let backend = NixlBackend::objects(self.plugin("OBJ")?, memory, store, &options);
        Ok(Arc::new(backend.map_err(setup)?))
    }

    fn plugin(&self, name: &str) -> Result<&Arc<BackendHandle>> {
        self.plugins
            .get(name)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("the NIXL plugin {name} was not started")))
    }
}

/// Plugins that lie beside the library as files.
pub(super) fn installed(library: Option<&str>) -> Vec<String> {
    installed_plugins(library.map(Path::new))
}

/// What became of each plugin that is on, and of the library.
pub(super) fn probe(settings: &Settings) -> NixlReport {
    let enabled = settings.nixl.enabled();
    let library = library_path(settings).map_or_else(find, |path| Ok(path.to_owned())).and_then(|path| {
        let library = Library::load(Some(&path))?;
        let version = library.version().map_or_else(String::new, |version| format!("NIXL {version}, "));
        Ok(format!("{version}{}", library.path().display()))
    });
    let installed = installed(settings.nixl.library.as_deref());
    let agent =
        library.as_ref().map_err(|_| format!("no NIXL here that can be used; {REMEDY}")).and_then(|_| {
            // Nothing is started where nothing is asked for.
            let agent = (!enabled.is_empty()).then(|| agent(settings)).transpose();
            agent.map_err(|error| error.to_string())
        });
    let plugins = enabled.into_iter().map(|name| {
        let state = match &agent {
            Ok(Some(agent)) => start(agent, name, settings).map_err(|error| error.to_string()),
            Ok(None) => Ok(None),
            Err(why) => Err(why.clone()),
        };
        let told = |started: Option<BackendHandle>| {
            let state = if started.is_some() { "started" } else { "loaded" };
            idle(name, settings).map_or_else(|| state.to_owned(), |why| format!("{state}, but {why}"))
        };
        PluginReport { name: name.to_owned(), state: state.map(told) }
    });
    NixlReport { plugins: plugins.collect(), library: library.map_err(|error| error.to_string()), installed }
}

/// An agent whose name no other of this machine has.
fn agent(settings: &Settings) -> std::result::Result<Agent, SetupError> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let path = library_path(settings);
    check_plugin_directory(path, &settings.nixl.enabled())?;
    let name = format!("kvbm-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    Agent::new(Library::load(path)?, &name)
}

fn library_path(settings: &Settings) -> Option<&Path> {
    settings.nixl.library.as_deref().map(Path::new)
}

/// `None`: it could be loaded, but has no place to go to.
fn start(
    agent: &Agent,
    name: &str,
    settings: &Settings,
) -> std::result::Result<Option<BackendHandle>, SetupError> {
    match parameters(name, settings)? {
        Some(parameters) => agent.backend(name, &parameters).map(Some),
        None => agent.probe(name).map(|()| None),
    }
}

/// Those of the settings, and what follows from others. `None`: the plugin needs to know a place, and there is
/// none.
fn parameters(
    name: &str,
    settings: &Settings,
) -> std::result::Result<Option<BTreeMap<String, String>>, SetupError> {
    let mut parameters = BTreeMap::new();
    match (name, settings.object.place()) {
        // Twice as fast as the plugin's own choice.
        ("POSIX", _) if !chooses_queue(settings) && UringBackend::probe().is_ok() => {
            parameters.insert("use_uring".to_owned(), "true".to_owned());
        }
        ("OBJ", Some(url)) if url.starts_with("s3://") => {
            let object = &settings.object;
            parameters = object_parameters(url, &store_options(object), object.concurrency)?;
        }
        ("OBJ", _) => return Ok(None),
        _ => {}
    }
    parameters.extend(settings.nixl.parameters.get(name).cloned().unwrap_or_default());
    Ok(Some(parameters))
}

/// That a plugin is on and nothing uses it, and what to set; `None`: something does.
fn idle(name: &str, settings: &Settings) -> Option<String> {
    let (disk, object) = (&settings.disk, &settings.object);
    let to_use_it = match name {
        "POSIX" if disk.backend == DiskBackend::Nixl && disk.capacity.is_some() => return None,
        "OBJ" if object.backend == ObjectBackend::Nixl && object.place().is_some() => return None,
        "POSIX" => {
            "give the disk tier a size (DYN_KVBM_DISK_CACHE_GB) and set disk.backend (DYN_KVBM_DISK_BACKEND) to nixl, or "
        }
        "OBJ" => {
            "set object.url (DYN_KVBM_OBJECT_URL) to s3://… and object.backend (DYN_KVBM_OBJECT_BACKEND) to nixl, or "
        }
        _ => "no tier has a use for it; ",
    };
    Some(format!(
        "{name} is on and nothing uses it: {to_use_it}turn it off (nixl.backends.{name}, DYN_KVBM_NIXL_BACKEND_{name}=false)"
    ))
}

fn chooses_queue(settings: &Settings) -> bool {
    let chosen = |key: &String| key.starts_with("use_");
    settings.nixl.parameters.get("POSIX").is_some_and(|given| given.keys().any(chosen))
}

/// Nobody asked for NIXL, so its absence is no error; but who counts on it is told.
fn say_once_if_missing() {
    static SAID: Once = Once::new();
    if let Err(error) = find() {
        SAID.call_once(|| tracing::info!("{error}. Blocks move natively"));
    }
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
    fn a_plugin_that_nothing_uses_is_told_with_what_to_set() {
        let mut settings = Settings::default();
        for (name, setting) in [("POSIX", "DYN_KVBM_DISK_BACKEND"), ("OBJ", "DYN_KVBM_OBJECT_BACKEND")] {
            let why = idle(name, &settings).expect(name);
            assert!(
                why.contains(setting) && why.contains(&format!("DYN_KVBM_NIXL_BACKEND_{name}=false")),
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
    }
}
