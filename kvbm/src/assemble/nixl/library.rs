//! NIXL's library, where it is compiled in.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use kvbm_settings::Settings;
use kvbm_tiers::nixl::peer::NixlPeers;
use kvbm_tiers::nixl::{
    self, Agent, BackendHandle, NixlBackend, NixlObjectOptions, check_plugin_directory, find,
    installed_plugins, object_parameters,
};
use kvbm_tiers::object::Store;
use kvbm_tiers::{Backend, DiskRegion, DramRegion, Memory, OneSided, SetupError, UringBackend};

use super::super::{setup, store_options};
use super::{Library, NixlPlugin, UCX};
use crate::error::Result;

/// The library, and the agent that its plugins run in.
struct LoadedLibrary {
    library: &'static nixl::Library,
    /// Made with the first plugin: without one nothing is started.
    agent: Option<Agent>,
}

/// Loads the library that the settings name, or the one that is installed.
pub(super) fn load(settings: &Settings) -> Result<Box<dyn Library>, SetupError> {
    let path = library_path(settings).map_or_else(find, |path| Ok(path.to_owned()))?;
    Ok(Box::new(LoadedLibrary { library: nixl::Library::load(Some(&path))?, agent: None }))
}

/// Plugins that lie beside the library as files.
pub(in crate::assemble) fn installed(library: Option<&str>) -> Vec<String> {
    installed_plugins(library.map(Path::new))
}

impl Library for LoadedLibrary {
    fn describe(&self) -> String {
        let version =
            self.library.version().map_or_else(String::new, |version| format!("NIXL {version}, "));
        format!("{version}{}", self.library.path().display())
    }

    fn start(
        &mut self,
        plugin: &str,
        settings: &Settings,
    ) -> Result<Option<Box<dyn NixlPlugin>>, SetupError> {
        let agent = match &self.agent {
            Some(agent) => agent.clone(),
            None => self.agent.insert(new_agent(self.library, settings)?).clone(),
        };
        match parameters(plugin, settings)? {
            Some(parameters) => {
                let handle = Arc::new(agent.backend(plugin, &parameters)?);
                Ok(Some(Box::new(RunningPlugin(handle))))
            }
            None => agent.probe(plugin).map(|()| None),
        }
    }

    fn peers(
        &self,
        settings: &Settings,
        name: &str,
        memory: &Arc<DramRegion>,
    ) -> Result<Arc<dyn OneSided>, SetupError> {
        check_plugin_directory(library_path(settings), &[UCX])?;
        let parameters = settings.nixl.parameters.get(UCX).cloned().unwrap_or_default();
        Ok(Arc::new(NixlPeers::new(self.library, parameters, Arc::clone(memory), name)?))
    }
}

/// A plugin of an agent of ours.
#[derive(Debug)]
struct RunningPlugin(Arc<BackendHandle>);

impl NixlPlugin for RunningPlugin {
    fn disk(
        &self,
        memory: Arc<dyn Memory>,
        region: Arc<DiskRegion>,
        depth: u32,
    ) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(NixlBackend::disk(&self.0, memory, region, depth).map_err(setup)?))
    }

    fn objects(
        &self,
        memory: Arc<dyn Memory>,
        store: Store,
        slots: u32,
        namespace: String,
        concurrency: u32,
    ) -> Result<Arc<dyn Backend>> {
        let options = NixlObjectOptions { namespace, slots, concurrency };
        Ok(Arc::new(NixlBackend::objects(&self.0, memory, store, &options).map_err(setup)?))
    }
}

/// An agent with a name that is unique on this machine.
fn new_agent(library: &'static nixl::Library, settings: &Settings) -> Result<Agent, SetupError> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    check_plugin_directory(library_path(settings), &settings.nixl.enabled())?;
    let name = format!("kvbm-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    Agent::new(library, &name)
}

fn library_path(settings: &Settings) -> Option<&Path> {
    settings.nixl.library.as_deref().map(Path::new)
}

/// Those of the settings, and those derived from other settings. `None`: the plugin needs a
/// destination, and there is none.
fn parameters(
    name: &str,
    settings: &Settings,
) -> Result<Option<BTreeMap<String, String>>, SetupError> {
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

fn chooses_queue(settings: &Settings) -> bool {
    let chosen = |key: &String| key.starts_with("use_");
    settings.nixl.parameters.get("POSIX").is_some_and(|given| given.keys().any(chosen))
}

/// NIXL was not asked for, so its absence is no error; but an operator who counts on it is told.
pub(super) fn say_once_if_missing() {
    static SAID: Once = Once::new();
    if let Err(error) = find() {
        SAID.call_once(|| tracing::info!("{error}. Blocks move natively"));
    }
}
