//! What there is for a host tier that survives its process.

use std::fs;
use std::path::Path;

use kvbm_settings::Settings;
use kvbm_tiers::geometry::ALIGNMENT;
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::{Mount, MountKind};

use super::DoctorCheck;
use crate::failure::with_causes;
use crate::output;

const NAME: &str = "persistent DRAM";
/// Where there is shared memory, if there is.
const USUAL: &str = "/dev/shm";
/// What containers get unless they ask for more.
const CONTAINER: u64 = 64 << 20;

pub(super) fn check(settings: &Settings) -> DoctorCheck {
    let Some(dir) = &settings.host.persist else {
        return match Mount::of(Path::new(USUAL)) {
            Ok(mount) => {
                let there = describe(&mount);
                DoctorCheck::disabled(
                    NAME,
                    format!("unless DYN_KVBM_CPU_CACHE_PERSIST={USUAL}/kvbm: {there}"),
                )
            }
            Err(_) => DoctorCheck::disabled(
                NAME,
                "unless DYN_KVBM_CPU_CACHE_PERSIST names a directory on tmpfs",
            ),
        };
    };
    match Mount::of(dir) {
        Ok(mount) => {
            let found = format!("{}: {}", dir.display(), describe(&mount));
            DoctorCheck::of(NAME, lacks(settings, dir, &mount).map_or(Ok(found), Err))
        }
        Err(error) => DoctorCheck::unavailable(NAME, with_causes(&error)),
    }
}

fn describe(mount: &Mount) -> String {
    let room = match mount.limit {
        Some(limit) => format!("{} free of {}", output::bytes(mount.free), output::bytes(limit)),
        None => "no limit of its own".to_owned(),
    };
    let (kind, pages) = match mount.kind {
        MountKind::Tmpfs { huge_pages: true } => {
            ("tmpfs", "huge pages where the tier asks for them".to_owned())
        }
        MountKind::Tmpfs { huge_pages: false } => {
            ("tmpfs", "4 KiB pages (`mount -o remount,huge=advise` gives huge ones)".to_owned())
        }
        MountKind::Hugetlbfs => {
            ("hugetlbfs", format!("pages of {}", output::bytes(mount.page_bytes as u64)))
        }
    };
    format!("{kind}, {room}, {pages}")
}

/// Why the tier cannot be had there, and what to do.
fn lacks(settings: &Settings, dir: &Path, mount: &Mount) -> Option<String> {
    let place = dir.display();
    if mount.kind == MountKind::Hugetlbfs && settings.host.persist_index.is_none() {
        return Some(format!(
            "{place}: hugetlbfs holds no index; name a directory on tmpfs with host.persist_index \
             (DYN_KVBM_CPU_CACHE_PERSIST_INDEX)"
        ));
    }
    let block_bytes = settings.block_bytes.unwrap_or_default();
    // What seals a block takes a page where the block fills its slot.
    let seal_bytes = if settings.encryption.is_on() { SEAL_BYTES as u64 } else { 0 };
    let slot_bytes = block_bytes.saturating_add(seal_bytes).next_multiple_of(ALIGNMENT as u64);
    let wanted = settings.host.capacity?.blocks(block_bytes).saturating_mul(slot_bytes);
    let limit = mount.limit?;
    if wanted <= mount.free.saturating_add(kept(dir)) {
        return None;
    }
    let why = if limit == CONTAINER { ", what containers get by default" } else { "" };
    let (wanted, there) = (output::bytes(wanted), describe(mount));
    Some(format!(
        "{place}: {there}{why}; {wanted} wanted: make it larger (--shm-size of the container, a volume of `medium: \
         Memory` in the pod, `mount -o remount,size=…`), or lower host.capacity (DYN_KVBM_CPU_CACHE_GB)"
    ))
}

/// Bytes that files of earlier processes have already.
fn kept(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let is_memory = |name: &str| name.starts_with("kvbm-") && name.ends_with(".memory");
    let ours = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_memory));
    ours.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum()
}

#[cfg(test)]
mod tests {
    use kvbm_settings::{Capacity, EncryptionSettings};

    use super::*;

    fn mount(limit: u64, huge_pages: bool) -> Mount {
        Mount {
            kind: MountKind::Tmpfs { huge_pages },
            page_bytes: 4096,
            limit: Some(limit),
            free: limit,
        }
    }

    fn wanting(blocks: u64) -> Settings {
        let mut settings = Settings { block_bytes: Some(1 << 20), ..Settings::default() };
        settings.host.capacity = Some(Capacity::Blocks(blocks));
        settings
    }

    #[test]
    fn a_container_s_limit_is_named_with_what_lifts_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(lacks(&wanting(64), dir.path(), &mount(CONTAINER, false)), None);
        let lacking = lacks(&wanting(65), dir.path(), &mount(CONTAINER, false)).unwrap();
        for part in ["64.0 MiB", "65.0 MiB wanted", "containers get by default", "--shm-size"] {
            assert!(lacking.contains(part), "{part}: {lacking}");
        }
        let file = fs::File::create(dir.path().join("kvbm-x.memory")).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(
            lacks(&wanting(65), dir.path(), &mount(CONTAINER, false)),
            None,
            "it has some already"
        );
        let sealed = EncryptionSettings { key: Some("1:x".to_owned()), key_file: None };
        let lacking = lacks(
            &Settings { encryption: sealed, ..wanting(65) },
            dir.path(),
            &mount(CONTAINER, false),
        );
        assert!(lacking.unwrap().contains("65.3 MiB wanted"), "a page for each seal");
    }

    #[test]
    fn huge_pages_and_their_lack_are_told() {
        assert!(describe(&mount(1 << 30, true)).contains("huge pages where"));
        assert!(describe(&mount(1 << 30, false)).contains("huge=advise"));
        let pages = Mount { kind: MountKind::Hugetlbfs, page_bytes: 2 << 20, limit: None, free: 0 };
        let lacking = lacks(&wanting(1), Path::new("/x"), &pages).unwrap();
        assert!(lacking.contains("DYN_KVBM_CPU_CACHE_PERSIST_INDEX"), "{lacking}");
    }
}
