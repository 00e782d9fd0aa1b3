//! What a slot file lies on, and whether cuFile has a direct path to it. The driver's own status
//! does not tell: it names the media that it could reach, and takes files on any other in
//! compatibility mode, without a word.

use std::ffi::c_uint;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{fstat, fstatfs, major, minor};

/// Storage, as cuFile tells it apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StorageMedium {
    /// A file system on NVMe drives, or on RAID of such.
    Nvme,
    /// The same, behind a network.
    NvmeOverFabrics,
    /// A file system that brings its own path.
    Distributed(&'static str, c_uint),
    /// None that cuFile knows.
    Other(String),
}

/// Status bits for drives: with the kernel module `nvidia-fs`, and without it.
const NVME: c_uint = 1 << 4;
const NVME_OVER_FABRICS: c_uint = 1 << 5;
const NVME_PEER_TO_PEER: c_uint = 1 << 11;

/// File systems on drives from which cuFile reads directly, by the magic number in `statfs`.
const LOCAL: [(u64, &str); 2] = [(0xef53, "ext4"), (0x5846_5342, "XFS")];
/// File systems with a path of their own, with its status bit.
const DISTRIBUTED: [(u64, &str, c_uint); 5] = [
    (0x0bd0_0bd0, "Lustre", 1),
    (0x1803_1977, "WekaFS", 1 << 1),
    (0x6969, "NFS", 1 << 2),
    (0x4750_4653, "GPFS", 1 << 3),
    (0x1983_0326, "BeeGFS", 1 << 9),
];

impl StorageMedium {
    /// Of a file. `sysfs`: where the kernel describes its devices, `/sys`.
    pub(super) fn of(file: &File, sysfs: &Path) -> Self {
        let (Ok(system), Ok(stat)) = (fstatfs(file), fstat(file)) else {
            return Self::Other("a file system that cannot be asked".into());
        };
        let device = sysfs.join(format!("dev/block/{}:{}", major(stat.st_dev), minor(stat.st_dev)));
        Self::on(system.f_type as u64, &device)
    }

    fn on(magic: u64, device: &Path) -> Self {
        if let Some(&(_, name, bit)) = DISTRIBUTED.iter().find(|system| system.0 == magic) {
            return Self::Distributed(name, bit);
        }
        match LOCAL.iter().find(|system| system.0 == magic) {
            None => {
                Self::Other(format!("a file system (type {magic:#x}) that is neither ext4 nor XFS"))
            }
            Some((_, system)) => match fs::canonicalize(device) {
                Ok(device) => drive(&device, system),
                Err(_) => {
                    Self::Other(format!("{system} on a device that the kernel does not describe"))
                }
            },
        }
    }

    /// Whether a driver of this status reaches it directly; else why not.
    pub(super) fn is_direct(&self, status: c_uint) -> Result<(), String> {
        let bits = match self {
            Self::Nvme => NVME | NVME_PEER_TO_PEER,
            Self::NvmeOverFabrics => NVME_OVER_FABRICS,
            Self::Distributed(_, bit) => *bit,
            Self::Other(_) => return Err(format!("{self}, to which cuFile has no direct path")),
        };
        let reaches = status & bits != 0;
        reaches
            .then_some(())
            .ok_or_else(|| format!("{self}, to which this driver has no direct path"))
    }
}

impl fmt::Display for StorageMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvme => "NVMe",
            Self::NvmeOverFabrics => "NVMe over a network",
            Self::Distributed(name, _) => name,
            Self::Other(what) => what,
        })
    }
}

/// What cuFile reaches directly, in the words of people.
pub(super) fn reached(status: c_uint) -> Vec<&'static str> {
    let drives =
        [("NVMe", NVME), ("NVMe peer to peer", NVME_PEER_TO_PEER), ("NVMe-oF", NVME_OVER_FABRICS)];
    let all = drives.into_iter().chain(DISTRIBUTED.map(|(_, name, bit)| (name, bit)));
    all.filter(|(_, bit)| status & bit != 0).map(|(name, _)| name).collect()
}

/// A block device, or a partition of it: `/sys/devices/…/nvme0n1/nvme0n1p1`.
fn drive(device: &Path, system: &str) -> StorageMedium {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with("md") {
        return raid(device, system);
    }
    if !name.starts_with("nvme") {
        return StorageMedium::Other(format!("{system} on {name}"));
    }
    let partition = device.join("partition").exists();
    let whole = if partition { device.parent().unwrap_or(device) } else { device };
    match fs::read_to_string(whole.join("device/transport")) {
        Ok(transport) if transport.trim() != "pcie" => StorageMedium::NvmeOverFabrics,
        // Drives with several paths do not say.
        _ => StorageMedium::Nvme,
    }
}

/// As direct as the least of its drives.
fn raid(device: &Path, system: &str) -> StorageMedium {
    let drives = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    let paths = drives.filter_map(|entry| fs::canonicalize(entry.path()).ok());
    let media: Vec<StorageMedium> = paths.map(|path: PathBuf| drive(&path, system)).collect();
    let slowest =
        media.iter().find(|medium| **medium != StorageMedium::Nvme).or_else(|| media.first());
    slowest
        .cloned()
        .unwrap_or_else(|| StorageMedium::Other(format!("{system} on RAID of no drives")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const EXT4: u64 = 0xef53;

    /// Devices as the kernel describes them.
    fn sysfs(devices: &[&str]) -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        for device in devices {
            fs::create_dir_all(home.path().join(device)).unwrap();
        }
        home
    }

    #[test]
    fn a_drive_is_what_the_kernel_says() {
        let home = sysfs(&["nvme0/nvme0n1/nvme0n1p1", "nvme1/nvme1n1/device", "vda"]);
        fs::write(home.path().join("nvme0/nvme0n1/nvme0n1p1/partition"), "1").unwrap();
        fs::write(home.path().join("nvme1/nvme1n1/device/transport"), "tcp\n").unwrap();
        let on = |device: &str| StorageMedium::on(EXT4, &home.path().join(device));
        assert_eq!(on("nvme0/nvme0n1"), StorageMedium::Nvme);
        assert_eq!(on("nvme0/nvme0n1/nvme0n1p1"), StorageMedium::Nvme);
        assert_eq!(on("nvme1/nvme1n1"), StorageMedium::NvmeOverFabrics);
        assert_eq!(on("vda"), StorageMedium::Other("ext4 on vda".into()));
        assert!(matches!(on("gone"), StorageMedium::Other(_)));
    }

    #[test]
    fn raid_is_what_its_drives_are() {
        let home = sysfs(&["md0/slaves", "md1/slaves", "md2/slaves", "nvme0n1", "nvme1n1", "sda"]);
        let link = |raid: &str, drive: &str| {
            symlink(home.path().join(drive), home.path().join(raid).join("slaves").join(drive))
                .unwrap();
        };
        link("md0", "nvme0n1");
        link("md0", "nvme1n1");
        link("md1", "nvme0n1");
        link("md1", "sda");
        let on = |device: &str| StorageMedium::on(EXT4, &home.path().join(device));
        assert_eq!(on("md0"), StorageMedium::Nvme);
        assert_eq!(on("md1"), StorageMedium::Other("ext4 on sda".into()));
        assert!(matches!(on("md2"), StorageMedium::Other(_)));
    }

    #[test]
    fn files_where_the_driver_reaches_are_direct() {
        assert_eq!(StorageMedium::Nvme.is_direct(1 << 4), Ok(()));
        assert_eq!(StorageMedium::Nvme.is_direct(1 << 11), Ok(()));
        assert!(StorageMedium::Nvme.is_direct(1 << 5).is_err());
        let other = StorageMedium::on(0x0102_1994, Path::new("/"));
        let why = other.is_direct(c_uint::MAX).unwrap_err();
        assert!(why.contains("0x1021994") && why.contains("ext4"), "{why}");
        let lustre = StorageMedium::on(0x0bd0_0bd0, Path::new("/"));
        assert_eq!((lustre.is_direct(1), lustre.to_string()), (Ok(()), "Lustre".into()));
        assert_eq!(reached(1 << 4 | 1), ["NVMe", "Lustre"]);
    }
}
