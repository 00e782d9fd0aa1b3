//! Finding and loading NIXL.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{self as dl, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use super::sys::{NixlApi, SINCE_1_5};
use crate::error::{SetupError, SetupErrorKind};

/// How to get NIXL, for messages.
pub const REMEDY: &str = "pip install nixl-cu12 (or nixl-cu13) 1.5 or later, \
     or name the library in nixl.library (DYN_KVBM_NIXL_LIBRARY)";

const FILE_NAME: &str = "libnixl_capi.so";

/// NIXL's C interface. Once loaded it stays for the rest of the process: the plugins run threads of
/// their own.
pub struct Library {
    pub(super) api: NixlApi,
    path: PathBuf,
}

impl Library {
    /// Loads the library at `path`, or the one that [`find`] finds. Takes 30 to 250 ms the first
    /// time.
    ///
    /// # Errors
    /// `Unavailable`: there is none, it cannot be loaded, it lacks a function that is needed, or it
    /// is older than 1.5. The message says how to get one.
    pub fn load(path: Option<&Path>) -> Result<&'static Self, SetupError> {
        static LOADED: Mutex<BTreeMap<PathBuf, &'static Library>> = Mutex::new(BTreeMap::new());
        let path = path.map_or_else(find, |path| Ok(path.to_owned()))?;
        let mut loaded = LOADED.lock();
        if let Some(library) = loaded.get(&path) {
            return Ok(library);
        }
        let library: &'static Self = Box::leak(Box::new(Self::open(&path)?));
        loaded.insert(path, library);
        Ok(library)
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the package that it belongs to, if it lies in one.
    pub fn version(&self) -> Option<String> {
        package_version(&self.path)
    }

    pub(super) fn open(path: &Path) -> Result<Self, SetupError> {
        let flags = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: what the file does when it is loaded is up to the user who named or installed it;
        // it is never unloaded.
        let library = unsafe { dl::Library::open(Some(path), flags) }.map_err(|error| {
            let message = format!("cannot load NIXL from {}: {error}; {REMEDY}", path.display());
            SetupError::caused(SetupErrorKind::Unavailable, message, error)
        })?;
        // SAFETY: a library of this name is NIXL's C interface, and `NODELETE` keeps it.
        let api = unsafe { NixlApi::resolve(&library) }.map_err(|missing| {
            let message = format!(
                "{} has no function {missing}: not NIXL 1.5 or later; {REMEDY}",
                path.display()
            );
            SetupError::new(SetupErrorKind::Unavailable, message)
        })?;
        // SAFETY: the symbol is looked up, and not used.
        if unsafe { library.get::<*const ()>(SINCE_1_5) }.is_err() {
            return Err(too_old(path));
        }
        // SAFETY: takes nothing and touches nothing.
        if unsafe { (api.is_stub)() } {
            let message = format!("{} is a stub without NIXL behind it; {REMEDY}", path.display());
            return Err(SetupError::new(SetupErrorKind::Unavailable, message));
        }
        Ok(Self { api, path: path.to_owned() })
    }
}

/// An older library answers for its plugin POSIX that a request has failed, or is complete, while
/// parts of it are in flight: into memory that has another owner by then.
fn too_old(path: &Path) -> SetupError {
    let version = package_version(path).unwrap_or_else(|| "a version before 1.5".to_owned());
    let message = format!(
        "{} is NIXL {version}: 1.5 or later is needed, since earlier ones may write to memory after they reported the \
         end of a transfer; upgrade it with: pip install 'nixl-cu12>=1.5' (or nixl-cu13), or name another library in \
         nixl.library (DYN_KVBM_NIXL_LIBRARY)",
        path.display()
    );
    SetupError::new(SetupErrorKind::Unavailable, message)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Where NIXL is installed: in the Python packages of the active environment, of those on the
/// `PATH` or of the system, else where the system's loader looks.
///
/// # Errors
/// `Unavailable`: nowhere; the message lists the places.
pub fn find() -> Result<PathBuf, SetupError> {
    let prefixes = prefixes();
    let loader_path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let listed =
        env::split_paths(&loader_path).map(|dir| dir.join(FILE_NAME)).filter(|file| file.is_file());
    let found = prefixes.iter().flat_map(|prefix| in_prefix(prefix)).chain(listed).next();
    found.or_else(known_to_loader).ok_or_else(|| {
        let places: Vec<_> = prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        let message = format!(
            "NIXL is not installed: no {FILE_NAME} in the Python packages of {}, nor on the loader's path; \
             {REMEDY}",
            places.join(", ")
        );
        SetupError::new(SetupErrorKind::Unavailable, message)
    })
}

/// Python installations, in the order of their precedence: the active environment, those on the
/// `PATH`, and where the system keeps its own.
fn prefixes() -> Vec<PathBuf> {
    let active = env::var_os("VIRTUAL_ENV").filter(|value| !value.is_empty()).map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path)
        .filter(|dir| dir.join("python3").exists())
        .filter_map(|bin| bin.parent().map(Path::to_owned));
    let system = ["/usr/local", "/usr"].map(PathBuf::from);
    let mut prefixes = Vec::new();
    for prefix in active.into_iter().chain(on_path).chain(system) {
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    }
    prefixes
}

/// `lib*/python3*/*-packages/.nixl_cu1?.mesonpy.libs/libnixl_capi.so`, the latest of each first.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let libs = ["lib", "lib64"].map(|lib| prefix.join(lib));
    let pythons = libs.iter().flat_map(|lib| children(lib, |name| name.starts_with("python3")));
    let packages = pythons.flat_map(|python| children(&python, |name| name.ends_with("-packages")));
    packages
        .flat_map(|packages| children(&packages, is_wheel_folder))
        .map(|folder| folder.join(FILE_NAME))
        .filter(|file| file.is_file())
        .collect()
}

fn is_wheel_folder(name: &str) -> bool {
    name.starts_with(".nixl_cu1") && name.ends_with(".mesonpy.libs")
}

fn children(dir: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
        .map(|entry| entry.path())
        .collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    names
}

/// The bare name, if the system's loader knows a file for it.
fn known_to_loader() -> Option<PathBuf> {
    let cache = fs::read("/etc/ld.so.cache").ok()?;
    let is_listed = cache.windows(FILE_NAME.len()).any(|window| window == FILE_NAME.as_bytes());
    is_listed.then(|| PathBuf::from(FILE_NAME))
}

/// `…/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so` belongs to
/// `…/site-packages/nixl_cu12-<version>.dist-info`.
fn package_version(library: &Path) -> Option<String> {
    let folder = library.parent()?;
    let package = folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
    let is_info = |name: &str| name.strip_prefix(package).is_some_and(|rest| rest.starts_with('-'));
    let infos = children(folder.parent()?, |name| is_info(name) && name.ends_with(".dist-info"));
    let name = infos.first()?.file_stem().and_then(OsStr::to_str)?;
    name.rsplit_once('-').map(|(_, version)| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"not a library").unwrap();
    }

    #[test]
    fn a_wheel_is_found_and_its_version_read() {
        let prefix = tempfile::tempdir().unwrap();
        let packages = prefix.path().join("lib/python3.11/site-packages");
        let library = packages.join(".nixl_cu12.mesonpy.libs").join(FILE_NAME);
        touch(&library);
        touch(&packages.join("nixl_cu12-1.5.1.dist-info/METADATA"));
        touch(&packages.join("nixl_cu12_extra-9.dist-info/METADATA"));
        assert_eq!(in_prefix(prefix.path()), std::slice::from_ref(&library));
        assert_eq!(package_version(&library).as_deref(), Some("1.5.1"));
        assert_eq!(package_version(Path::new("/usr/lib/libnixl_capi.so")), None);
    }

    #[test]
    fn a_missing_or_broken_library_is_a_remediable_error() {
        let home = tempfile::tempdir().unwrap();
        let broken = home.path().join(FILE_NAME);
        touch(&broken);
        for path in [broken, home.path().join("absent.so")] {
            let error = Library::load(Some(&path)).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Unavailable);
            assert!(error.to_string().contains("pip install"), "{error}");
        }
    }

    #[test]
    fn a_library_without_the_functions_is_another_version() {
        let error = Library::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Unavailable);
        assert!(error.to_string().contains("nixl_capi_create_configured_agent"), "{error}");
    }
}
