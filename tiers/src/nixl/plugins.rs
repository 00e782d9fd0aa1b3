//! The directory of plugins: what lies in it, and whether NIXL survives it.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::agent::Agent;
use super::library::{Library, find};
use crate::clock;
use crate::error::{SetupError, SetupErrorKind};

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
    Err(SetupError::new(SetupErrorKind::Unavailable, message))
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
