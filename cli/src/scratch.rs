//! Places for tiers that last as long as a command: fresh directories, and a fresh prefix in an
//! object store.

use std::fs;
use std::path::{Path, PathBuf};

use kvbm_settings::{DiskSettings, HostSettings, ObjectSettings, Settings};
use tempfile::TempDir;
use url::Url;

use crate::output::CommandFailure;

/// What a command made and takes away with it, however it ends. Drop the manager first.
#[derive(Debug, Default)]
pub(crate) struct CommandScratch {
    /// Removed with all that is in them, before the directories that held them.
    fresh: Vec<TempDir>,
    /// Directories that were made to hold these; removed if they are empty, the deepest first.
    made: Vec<PathBuf>,
}

impl CommandScratch {
    /// Points the tiers of `settings` that leave this process's memory to fresh places inside those
    /// that they name.
    pub(crate) fn divert(settings: &mut Settings) -> Result<Self, CommandFailure> {
        let mut scratch = Self::default();
        scratch.divert_host(&mut settings.host)?;
        if settings.disk.capacity.is_some() {
            scratch.divert_disk(&mut settings.disk)?;
        }
        scratch.divert_object(&mut settings.object)?;
        Ok(scratch)
    }

    fn divert_host(&mut self, host: &mut HostSettings) -> Result<(), CommandFailure> {
        let places = [
            (&mut host.persist, "host.persist (DYN_KVBM_CPU_CACHE_PERSIST)"),
            (&mut host.persist_index, "host.persist_index (DYN_KVBM_CPU_CACHE_PERSIST_INDEX)"),
        ];
        for (place, setting) in places {
            if let Some(dir) = place {
                *dir = self.fresh_inside(dir, setting)?;
            }
        }
        Ok(())
    }

    fn divert_disk(&mut self, disk: &mut DiskSettings) -> Result<(), CommandFailure> {
        disk.keep = false;
        for dir in &mut disk.dirs {
            *dir = self.fresh_inside(dir, "--disk-dir (disk.dirs, DYN_KVBM_DISK_CACHE_DIR)")?;
        }
        Ok(())
    }

    fn divert_object(&mut self, object: &mut ObjectSettings) -> Result<(), CommandFailure> {
        object.keep = false;
        let Some(url) = &mut object.url else { return Ok(()) };
        // What is no URL is the object tier's to refuse.
        let Ok(parsed) = Url::parse(url) else { return Ok(()) };
        *url = match parsed.to_file_path().ok().filter(|_| parsed.scheme() == "file") {
            Some(dir) => {
                let dir = self.fresh_inside(&dir, "--object (object.url, DYN_KVBM_OBJECT_URL)")?;
                file_url(&dir)?
            }
            None if parsed.scheme() == "memory" => return Ok(()),
            None => format!("{}/{}", url.trim_end_matches('/'), fresh_name()),
        };
        Ok(())
    }

    fn fresh_inside(&mut self, dir: &Path, setting: &str) -> Result<PathBuf, CommandFailure> {
        let unusable = |error: std::io::Error| {
            let dir = dir.display();
            CommandFailure::unusable(format!(
                "cannot write to the directory {dir}: {error}; choose another with {setting}"
            ))
        };
        // What is made is noted one by one, so that a directory that was there before is never
        // removed.
        self.make(dir).map_err(unusable)?;
        let fresh = tempfile::Builder::new().prefix(PREFIX).tempdir_in(dir).map_err(unusable)?;
        // A URL has no working directory.
        let path = std::path::absolute(fresh.path()).map_err(unusable)?;
        self.fresh.push(fresh);
        Ok(path)
    }

    fn make(&mut self, dir: &Path) -> std::io::Result<()> {
        let missing: Vec<_> =
            dir.ancestors().take_while(|dir| !dir.exists()).map(Path::to_owned).collect();
        self.made.extend(missing.into_iter().filter(|dir| !dir.as_os_str().is_empty()));
        fs::create_dir_all(dir)
    }
}

impl Drop for CommandScratch {
    fn drop(&mut self) {
        for fresh in self.fresh.drain(..) {
            let path = fresh.path().to_owned();
            if let Err(error) = fresh.close() {
                tracing::warn!(%error, "cannot remove {}", path.display());
            }
        }
        // Another process may use them by now: then they stay.
        self.made.iter().for_each(|dir| drop(fs::remove_dir(dir)));
    }
}

const PREFIX: &str = "kvbm-run-";

/// A name that no other run uses.
fn fresh_name() -> String {
    format!("{PREFIX}{}-{:x}", std::process::id(), kvbm_tiers::clock::since_1970().as_nanos())
}

/// The URL of an absolute path.
pub(crate) fn file_url(path: &Path) -> Result<String, CommandFailure> {
    Url::from_file_path(path).map(String::from).map_err(|()| {
        CommandFailure::unusable(format!("{} is not an absolute path", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use kvbm_settings::Capacity;

    use super::*;

    #[test]
    fn everything_made_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let (disk, objects) = (root.path().join("a/disk"), root.path().join("objects"));
        let memory = root.path().join("b/memory");
        fs::create_dir(&objects).unwrap();
        let mut settings = Settings::default();
        settings.disk.capacity = Some(Capacity::Blocks(1));
        settings.disk.dirs = vec![disk.clone()];
        settings.host.persist = Some(memory.clone());
        settings.object.url = Some(file_url(&objects).unwrap());
        let scratch = CommandScratch::divert(&mut settings).unwrap();
        assert!(settings.disk.dirs[0].starts_with(&disk) && settings.disk.dirs[0].exists());
        fs::write(settings.disk.dirs[0].join("slots"), "x").unwrap();
        assert!(
            settings
                .host
                .persist
                .as_ref()
                .is_some_and(|dir| dir.starts_with(&memory) && dir.exists())
        );
        drop(scratch);
        assert!(
            objects.exists() && !root.path().join("a").exists() && !root.path().join("b").exists()
        );
        assert_eq!(fs::read_dir(&objects).unwrap().count(), 0);
    }

    #[test]
    fn prefixes_in_a_store_are_fresh_every_time() {
        let fresh = || {
            let mut settings = Settings::default();
            settings.object.url = Some("s3://bucket/prefix/".to_owned());
            drop(CommandScratch::divert(&mut settings).unwrap());
            settings.object.url.unwrap()
        };
        let (a, b) = (fresh(), fresh());
        assert!(a.starts_with("s3://bucket/prefix/kvbm-run-") && a != b, "{a} {b}");
    }

    #[test]
    fn a_directory_that_cannot_be_made_names_the_setting() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut settings = Settings::default();
        settings.disk.capacity = Some(Capacity::Blocks(1));
        settings.disk.dirs = vec![file.path().join("below")];
        let failure = CommandScratch::divert(&mut settings).unwrap_err();
        assert!(failure.to_string().contains("DYN_KVBM_DISK_CACHE_DIR"), "{failure}");
    }
}
