//! What the machine offers: memory and its pages, a host tier that survives its process, rings,
//! NUMA, direct I/O and GPUs.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread::available_parallelism;

use kvbm_settings::Settings;
use kvbm_tiers::geometry::ALIGNMENT;
use kvbm_tiers::sealed::SEAL_BYTES;
use kvbm_tiers::{Mount, MountKind, UringBackend};
use rustix::fs::OFlags;
use rustix::process::{Resource, getrlimit, getuid};

use super::DoctorCheck;
use crate::output::{self, with_causes};

/// Where there is shared memory, if there is.
const USUAL: &str = "/dev/shm";
/// What containers get unless they ask for more.
const CONTAINER: u64 = 64 << 20;

pub(super) fn machine(settings: &Settings) -> Vec<DoctorCheck> {
    let uname = rustix::system::uname();
    let kernel =
        format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let cpus =
        available_parallelism().map_or_else(|error| error.to_string(), |cpus| cpus.to_string());
    let mut checks = vec![
        DoctorCheck::ready("kernel", kernel),
        DoctorCheck::ready("CPUs", cpus),
        memory(settings),
        huge_pages(),
        persistent_memory(settings),
        locked_memory(settings),
        io_uring(),
    ];
    checks.extend(settings.disk.dirs.iter().map(|dir| direct_io(dir)));
    let gpu = kvbm::probe_gpu();
    checks.push(numa(gpu.nodes.get(settings.device.ordinal as usize).copied().flatten()));
    checks.push(DoctorCheck::of("CUDA", gpu.cuda));
    checks.push(DoctorCheck::of("NVRTC", gpu.nvrtc));
    checks.push(DoctorCheck::of("GDS", gpu.gds));
    checks
}

/// Bytes that the tiers in memory will take.
fn memory_wanted(settings: &Settings) -> u64 {
    let block_bytes = settings.block_bytes.unwrap_or_default();
    let tiers = [settings.device.capacity, settings.host.capacity].into_iter().flatten();
    tiers.map(|capacity| capacity.blocks(block_bytes).saturating_mul(block_bytes)).sum()
}

fn memory(settings: &Settings) -> DoctorCheck {
    let wanted = memory_wanted(settings);
    let Some(available) = available_memory() else {
        return DoctorCheck::unavailable("memory", "/proc/meminfo does not tell how much there is");
    };
    let detail = format!(
        "{} available, {} wanted by the settings",
        output::bytes(available),
        output::bytes(wanted)
    );
    if wanted <= available {
        return DoctorCheck::ready("memory", detail);
    }
    let remedy =
        "lower host.capacity (DYN_KVBM_CPU_CACHE_GB) or device.capacity (DYN_KVBM_DEVICE_CACHE_GB)";
    DoctorCheck::unavailable("memory", format!("{detail}; {remedy}"))
}

fn available_memory() -> Option<u64> {
    let report = fs::read_to_string("/proc/meminfo").ok()?;
    let line = report.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

fn huge_pages() -> DoctorCheck {
    const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let remedy = format!("as root: echo madvise > {SWITCH}");
    match fs::read_to_string(SWITCH) {
        Ok(modes) if modes.contains("[never]") => {
            DoctorCheck::unavailable("huge pages", format!("switched off; {remedy}"))
        }
        Ok(modes) => DoctorCheck::ready("huge pages", modes.trim()),
        Err(error) => DoctorCheck::unavailable(
            "huge pages",
            format!("{SWITCH}: {error}; the kernel lacks them"),
        ),
    }
}

fn locked_memory(settings: &Settings) -> DoctorCheck {
    let name = "locked memory";
    let wanted = memory_wanted(settings);
    match getrlimit(Resource::Memlock).current {
        None => DoctorCheck::ready(name, "unlimited"),
        Some(limit) if getuid().is_root() => {
            DoctorCheck::ready(name, format!("{}, which does not bind root", output::bytes(limit)))
        }
        Some(limit) if limit >= wanted => DoctorCheck::ready(name, output::bytes(limit)),
        Some(limit) => {
            let (limit, wanted) = (output::bytes(limit), output::bytes(wanted));
            let remedy = "raise `ulimit -l`, or LimitMEMLOCK of the service";
            DoctorCheck::unavailable(
                name,
                format!("{limit}, less than the {wanted} of the tiers in memory; {remedy}"),
            )
        }
    }
}

fn io_uring() -> DoctorCheck {
    match UringBackend::probe() {
        Ok(()) => DoctorCheck::ready("io_uring", "the kernel grants a ring"),
        Err(error) => DoctorCheck::unavailable("io_uring", with_causes(&error)),
    }
}

/// `gpu`: the node of the GPU, near which host memory is taken where there is a choice.
fn numa(gpu: Option<u32>) -> DoctorCheck {
    match fs::read_to_string("/sys/devices/system/node/online").map(|nodes| nodes.trim().to_owned())
    {
        Ok(nodes) if nodes == "0" => DoctorCheck::ready("NUMA", "one node"),
        Ok(nodes) => {
            let near = gpu.map_or_else(
                || "host memory is taken from any".to_owned(),
                |node| format!("host memory is taken from node {node}, the GPU's"),
            );
            DoctorCheck::ready("NUMA", format!("nodes {nodes}; {near}"))
        }
        Err(error) => {
            DoctorCheck::unavailable("NUMA", format!("the kernel does not tell the nodes: {error}"))
        }
    }
}

fn direct_io(dir: &Path) -> DoctorCheck {
    let name = format!("O_DIRECT in {}", dir.display());
    let file = match tempfile::Builder::new().prefix("kvbm-doctor-").tempfile_in(dir) {
        Ok(file) => file,
        Err(error) => {
            return DoctorCheck::unavailable(name, format!("{error}; choose another disk.dirs"));
        }
    };
    let direct = OFlags::DIRECT.bits().cast_signed();
    // Only opening tells: file systems without it refuse the flag there, and not before.
    match fs::OpenOptions::new().read(true).custom_flags(direct).open(file.path()) {
        Ok(_) => DoctorCheck::ready(name, "the file system bypasses the page cache"),
        Err(error) => {
            let remedy = "I/O will be buffered; use ext4 or XFS on a local drive";
            DoctorCheck::unavailable(name, format!("{error}; {remedy}"))
        }
    }
}

fn persistent_memory(settings: &Settings) -> DoctorCheck {
    let name = "persistent DRAM";
    let Some(dir) = &settings.host.persist else {
        return match Mount::of(Path::new(USUAL)) {
            Ok(mount) => {
                let there = describe(&mount);
                DoctorCheck::disabled(
                    name,
                    format!("unless DYN_KVBM_CPU_CACHE_PERSIST={USUAL}/kvbm: {there}"),
                )
            }
            Err(_) => DoctorCheck::disabled(
                name,
                "unless DYN_KVBM_CPU_CACHE_PERSIST names a directory on tmpfs",
            ),
        };
    };
    match Mount::of(dir) {
        Ok(mount) => {
            let found = format!("{}: {}", dir.display(), describe(&mount));
            DoctorCheck::of(name, lacks(settings, dir, &mount).map_or(Ok(found), Err))
        }
        Err(error) => DoctorCheck::unavailable(name, with_causes(&error)),
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
