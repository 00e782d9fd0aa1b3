//! Finding and loading NIXL.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fmt, fs};

use libloading::os::unix as dl;
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use super::agent::Agent;
use super::sys::{NixlApi, SINCE_1_5};
use crate::clock;
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
            SetupError::unavailable(message)
        })?;
        // SAFETY: the symbol is looked up, and not used.
        if unsafe { library.get::<*const ()>(SINCE_1_5) }.is_err() {
            return Err(too_old(path));
        }
        // SAFETY: takes nothing and touches nothing.
        if unsafe { (api.is_stub)() } {
            let message = format!("{} is a stub without NIXL behind it; {REMEDY}", path.display());
            return Err(SetupError::unavailable(message));
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
    SetupError::unavailable(message)
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
        SetupError::unavailable(message)
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

/// Names a directory of plugins that comes before the library's own.
const DIRECTORY: &str = "NIXL_PLUGIN_DIR";
/// Loading NIXL and starting some plugins takes a second at most.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// Names of the plugins that are there as files. Whether they work shows when they are started.
pub fn installed_plugins(library: Option<&Path>) -> Vec<String> {
    let own = library
        .map(Path::to_owned)
        .or_else(|| find().ok())
        .and_then(|library| own_directory(&library));
    let entries =
        [foreign_directory(), own].into_iter().flatten().flat_map(fs::read_dir).flatten().flatten();
    let name =
        |file: String| Some(file.strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned());
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok().and_then(name)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn own_directory(library: &Path) -> Option<PathBuf> {
    Some(library.parent()?.join("plugins"))
}

fn foreign_directory() -> Option<PathBuf> {
    env::var_os(DIRECTORY).filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

/// Whether this process survives these plugins. Plugins of another version than the library's crash
/// it, and `NIXL_PLUGIN_DIR` may hold such. A child process tries them first; without that variable
/// there is nothing to try.
///
/// # Errors
/// `Unavailable`: the child crashed or hung. That a plugin merely does not start is no error here.
pub fn check_plugin_directory(library: Option<&Path>, plugins: &[&str]) -> Result<(), SetupError> {
    let Some(directory) = foreign_directory() else { return Ok(()) };
    let path = library.map_or_else(find, |path| Ok(path.to_owned()))?;
    let is_own = |own: PathBuf| {
        own.canonicalize().is_ok_and(|own| directory.canonicalize().is_ok_and(|d| d == own))
    };
    if own_directory(&path).is_some_and(is_own) {
        return Ok(());
    }
    let why = match in_child(|| start_all(&path, plugins)) {
        Ok(ChildEnding::Exited) => return Ok(()),
        Ok(ChildEnding::Crashed(signal)) => format!("crash NIXL (signal {signal})"),
        Ok(ChildEnding::Hung) => format!("were not started within {} s", PROBE_LIMIT.as_secs()),
        Err(error) => format!("could not be tried in a process of their own ({error})"),
    };
    let message = format!(
        "the plugins in {} ({DIRECTORY}) {why}: are they of another version than {}? Unset {DIRECTORY}",
        directory.display(),
        path.display()
    );
    Err(SetupError::unavailable(message))
}

/// What may crash. The library's table of loaded files is left alone: another thread may hold its
/// lock.
fn start_all(library: &Path, plugins: &[&str]) {
    let Ok(library) = Library::open(library) else { return };
    let Ok(agent) = Agent::new(Box::leak(Box::new(library)), "probe") else { return };
    let started: Vec<_> =
        plugins.iter().map(|plugin| agent.backend(plugin, &BTreeMap::new())).collect();
    // No destructor of the library's runs: the process ends.
    std::mem::forget((agent, started));
}

/// How a child process ended.
#[derive(Debug, PartialEq, Eq)]
enum ChildEnding {
    Exited,
    Crashed(i32),
    Hung,
}

/// Runs `risky` in a child process that shares nothing with this one afterwards.
///
/// The child has this thread alone. `risky` must not wait for locks that another thread might have
/// held; if it does, it counts as hung.
fn in_child(risky: impl FnOnce()) -> std::io::Result<ChildEnding> {
    // SAFETY: the child runs `risky` and ends without returning, unwinding or running anyone's exit
    // handlers. The C library makes its own locks usable in the child.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            silence();
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(risky));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) }
        }
        child => await_child(child),
    }
}

/// Hides what the child says and how it dies.
fn silence() {
    // SAFETY: sets a limit of this process, and puts the null device in the place of its outputs.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
        libc::dup2(null, 1);
        libc::dup2(null, 2);
    }
}

fn await_child(child: libc::pid_t) -> std::io::Result<ChildEnding> {
    let deadline = clock::now() + PROBE_LIMIT;
    loop {
        let mut status = 0;
        // SAFETY: the child is ours and nothing else waits for it.
        match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
            0 if clock::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            0 => {
                // SAFETY: as above.
                unsafe {
                    (libc::kill(child, libc::SIGKILL), libc::waitpid(child, &raw mut status, 0))
                };
                return Ok(ChildEnding::Hung);
            }
            ended if ended == child && libc::WIFSIGNALED(status) => {
                return Ok(ChildEnding::Crashed(libc::WTERMSIG(status)));
            }
            ended if ended == child => return Ok(ChildEnding::Exited),
            _ => return Err(std::io::Error::last_os_error()),
        }
    }
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

    #[test]
    fn a_crash_of_the_child_is_noticed_and_survived() {
        assert_eq!(in_child(|| {}).unwrap(), ChildEnding::Exited);
        assert_eq!(
            in_child(|| std::process::abort()).unwrap(),
            ChildEnding::Crashed(libc::SIGABRT)
        );
        assert_eq!(in_child(|| panic!("a panic stays inside")).unwrap(), ChildEnding::Exited);
    }

    #[test]
    fn plugins_are_listed_by_their_files() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("plugins")).unwrap();
        for file in
            ["libplugin_UCX.so", "libplugin_GDS_MT.so", "libtelemetry_exporter_doca.so", "README"]
        {
            fs::write(home.path().join("plugins").join(file), b"").unwrap();
        }
        let listed = installed_plugins(Some(&home.path().join("libnixl_capi.so")));
        assert_eq!(listed, ["GDS_MT", "UCX"]);
    }
}
