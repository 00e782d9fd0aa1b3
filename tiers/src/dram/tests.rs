use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use tempfile::TempDir;

use super::pages::kilobytes;
use super::*;
use crate::clock;
use crate::geometry::ALIGNMENT;
use crate::testing::{Child, fill_pattern, frames, has_pattern, holds_in_a_child, skip};

fn options(slots: u32, block_bytes: usize) -> DramOptions {
    let geometry = Geometry::new(slots, block_bytes).unwrap();
    DramOptions { geometry, huge_pages: true, fault_threads: 2 }
}

#[test]
fn blocks_are_kept_apart_and_aligned() {
    let region = DramRegion::host(options(600, 5000)).unwrap();
    let mut all = frames(&region);
    assert_eq!(all.len(), 600);
    for frame in &mut all {
        let mark = frame.slot().0 as u8;
        region.write(frame).unwrap().fill(mark);
    }
    for frame in &all {
        let block = region.read(frame).unwrap();
        assert_eq!(block.len(), 5000);
        assert!(block.as_ptr().addr().is_multiple_of(ALIGNMENT));
        assert!(block.iter().all(|&byte| byte == frame.slot().0 as u8));
    }
    assert!(region.base().addr().get().is_multiple_of(HUGE_PAGE));
}

#[test]
fn a_frame_opens_its_own_region_only() {
    let ours = DramRegion::host(options(1, 4096)).unwrap();
    let theirs = DramRegion::emulated_device(options(1, 4096)).unwrap();
    let mut frame = theirs.frames().unwrap().take().unwrap();
    assert!(theirs.frames().is_none());
    assert!(ours.read(&frame).is_none() && ours.write(&mut frame).is_none());
    assert_eq!(theirs.label(), "emulated device");
}

/// Where `smaps` counts huge pages: of private memory, of tmpfs, of hugetlbfs.
const HUGE: [&str; 4] = ["AnonHugePages", "ShmemPmdMapped", "Shared_Hugetlb", "Private_Hugetlb"];

/// What the kernel says of the mapping that the slots begin in: bytes that are mapped, bytes in
/// huge pages.
fn pages(region: &DramRegion) -> [u64; 2] {
    let start = region.base().addr().get();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let fields = smaps
        .lines()
        .skip_while(|line| {
            !address_range(line).is_some_and(|(from, to)| from <= start && start < to)
        })
        .skip(1)
        .take_while(|line| address_range(line).is_none())
        .filter_map(|line| line.split_once(':'));
    let fields: Vec<_> = fields.collect();
    assert!(!fields.is_empty(), "no such mapping");
    let of = |names: &[&str]| -> u64 {
        let found = fields.iter().filter(|(name, _)| names.contains(name));
        found.map(|(_, value)| kilobytes(value).unwrap()).sum()
    };
    [of(&["Rss"]), of(&HUGE)]
}

/// `7f00-7f10 rw-p …`: the first line of a mapping in `smaps`.
fn address_range(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split_once(' ')?.0.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

fn is_not_mapped(page: NonNull<u8>) -> bool {
    // SAFETY: the kernel is asked what lies at an address and writes the answer for one page.
    let found = unsafe { libc::mincore(page.as_ptr().cast(), ALIGNMENT, [0].as_mut_ptr()) };
    found == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// With a ring, whose registered memory the kernel would copy at the fork.
#[test]
fn a_fork_copies_nothing_of_the_pool() {
    for open in [DramRegion::host, DramRegion::emulated_device, DramRegion::shareable_host] {
        let region = open(options(64, 1 << 20)).unwrap();
        let ring = crate::disk::ring::build(1).inspect_err(|error| skip("uring", error)).ok();
        let _parts =
            ring.as_ref().and_then(|ring| crate::disk::ring::register_memory(ring, &region));
        let before = pages(&region);
        assert!(holds_in_a_child(|| is_not_mapped(region.base())), "the child has the pool");
        assert_eq!(pages(&region), before);
    }
}

#[test]
fn a_child_that_drops_the_pool_unmaps_nothing() {
    let mut region = Some(DramRegion::host(options(4, 4096)).unwrap());
    let start = region.as_ref().unwrap().base();
    assert!(holds_in_a_child(|| {
        // Something else of the child's lies where the pool was.
        // SAFETY: nothing lies there in the child, else this fails.
        let place = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(
                start.as_ptr().cast(),
                ALIGNMENT,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        drop(region.take());
        // SAFETY: mapped above, unless the drop has unmapped it, which ends the child and fails the
        // test.
        place == start.as_ptr().cast() && unsafe { start.read_volatile() } == 0
    }));
    let mut frame = region.as_ref().unwrap().frames().unwrap().take().unwrap();
    region.as_ref().unwrap().write(&mut frame).unwrap().fill(1);
}

#[test]
fn more_memory_than_there_is_names_the_setting() {
    for open in [DramRegion::host, DramRegion::shareable_host] {
        let error = open(options(1 << 20, 1 << 30)).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NoSpace);
        assert!(error.to_string().contains("DYN_KVBM_CPU_CACHE_GB"), "{error}");
    }
}

#[test]
fn memory_that_others_may_read_has_huge_pages_if_asked() {
    let geometry = Geometry::new(17, 1 << 20).unwrap();
    let options = DramOptions { geometry, huge_pages: true, fault_threads: 2 };
    let [mapped, huge] = pages(&DramRegion::shareable_host(options).unwrap());
    assert_eq!(mapped, 17 << 20, "all of it is there");
    if huge < 16 << 20 {
        skip("shmem huge pages", &"before Linux 6.1, or memory lies in pieces");
    }
}

/// A directory in memory.
fn shm() -> Option<TempDir> {
    let made = Mount::of(Path::new("/dev/shm")).map_err(|error| error.to_string()).and_then(|_| {
        let made = tempfile::Builder::new().prefix("kvbm-test-").tempdir_in("/dev/shm");
        made.map_err(|error| error.to_string())
    });
    made.inspect_err(|error| skip("tmpfs", error)).ok()
}

const BLOCK: usize = 5000;

fn place(dir: &Path, slots: u32) -> PersistOptions {
    PersistOptions { dir: dir.to_owned(), namespace: "test".to_owned(), slots }
}

/// A region of which all slots but two persist.
fn attach(dir: &Path, slots: u32) -> Result<DramRegion, SetupError> {
    attach_within(dir, slots, Duration::ZERO)
}

fn attach_within(dir: &Path, slots: u32, patience: Duration) -> Result<DramRegion, SetupError> {
    DramRegion::persistent_within(options(slots, BLOCK), &place(dir, slots - 2), patience)
}

fn write_all(region: &DramRegion, seed: usize) -> Vec<Frame> {
    let mut all = frames(region);
    for (frame, number) in all.iter_mut().zip(seed..) {
        fill_pattern(number, region.write(frame).unwrap());
    }
    all
}

/// Which slots are as [`write_all`] left them.
fn written(region: &DramRegion, seed: usize) -> Vec<u32> {
    let all = frames(region);
    let is_written =
        |frame: &&Frame| has_pattern(seed + frame.slot().0 as usize, region.read(frame).unwrap());
    all.iter().filter(is_written).map(|frame| frame.slot().0).collect()
}

#[test]
fn the_next_process_finds_only_slots_that_persist() {
    let Some(home) = shm() else { return };
    let dir = home.path().join("made");
    for seed in [100, 200] {
        let region = attach(&dir, 10).unwrap();
        let (path, was_there) = region.persists().unwrap();
        assert_eq!((path, was_there), (dir.join("kvbm-test.memory").as_path(), seed == 200));
        let found = fs::metadata(path).unwrap();
        assert_eq!((found.len(), found.permissions().mode() & 0o777), (8 * 8192, 0o600));
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        write_all(&region, seed);
        drop(region);
        assert_eq!(written(&attach(&dir, 10).unwrap(), seed), (0..8).collect::<Vec<_>>());
    }
    // More staging slots do not change the file.
    let more =
        DramRegion::persistent_within(options(30, BLOCK), &place(&dir, 8), Duration::ZERO).unwrap();
    assert_eq!(written(&more, 200), (0..8).collect::<Vec<_>>());
}

/// Of 256 MiB, all of which persist, in blocks of 1 MiB.
fn attach_large(dir: &Path) -> DramRegion {
    DramRegion::persistent(options(LARGE, 1 << 20), &place(dir, LARGE)).unwrap()
}

const LARGE: u32 = 256;

#[test]
fn nobody_awaits_mapping_of_small_pages_and_blocks_are_right() {
    let Some(home) = shm() else { return };
    write_all(&attach_large(home.path()), 1);
    let is_early = |region: &DramRegion| pages(region)[0] < u64::from(LARGE) << 20;
    let region = attach_large(home.path());
    let DramRegion { _mapper: mapper, .. } = &region;
    assert!(mapper.is_some(), "somebody waited for it");
    assert_eq!(written(&region, 1), (0..LARGE).collect::<Vec<_>>());
    drop(region);
    // And then all of it is mapped, without being touched.
    let region = attach_large(home.path());
    let started = clock::now();
    while is_early(&region) {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "{:?} bytes are mapped",
            pages(&region)
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let _frames = write_all(&region, 9);
    drop(region);
    assert_eq!(written(&attach_large(home.path()), 9), (0..LARGE).collect::<Vec<_>>());
}

#[test]
fn a_region_that_goes_while_it_is_mapped_leaves_nothing() {
    let Some(home) = shm() else { return };
    for _ in 0..20 {
        // The file is unlocked too: attaching again finds it free.
        let region = attach_large(home.path());
        let map = Arc::downgrade(&region.map);
        drop(region);
        assert!(map.upgrade().is_none(), "the thread still has it");
    }
}

#[test]
fn a_child_that_drops_a_region_amid_mapping_never_waits() {
    let Some(home) = shm() else { return };
    write_all(&attach_large(home.path()), 1);
    let mut region = Some(attach_large(home.path()));
    assert!(holds_in_a_child(|| {
        drop(region.take());
        true
    }));
    assert_eq!(written(region.as_ref().unwrap(), 1), (0..LARGE).collect::<Vec<_>>());
}

/// With a ring, which lets go of memory only some time after its process.
#[test]
fn a_process_that_was_killed_leaves_its_blocks() {
    let Some(home) = shm() else { return };
    for seed in [1, 50] {
        let child = Child::fork(|| {
            let region = attach_within(home.path(), 10, Duration::from_mins(1)).unwrap();
            let ring = crate::disk::ring::build(1).ok();
            if let Some(ring) = &ring {
                crate::disk::ring::register_memory(ring, &region);
                ring.submitter().register_files(&[region.lock().unwrap().as_raw_fd()]).unwrap();
            }
            write_all(&region, seed);
            // SAFETY: ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            false
        });
        assert!(!child.held(), "it was killed");
        let region = attach_within(home.path(), 10, Duration::from_mins(1)).unwrap();
        assert_eq!(written(&region, seed), (0..8).collect::<Vec<_>>());
    }
}

#[test]
fn one_region_has_it_at_a_time() {
    let Some(home) = shm() else { return };
    let region = attach(home.path(), 4).unwrap();
    let error = attach(home.path(), 4).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::InUse, "{error}");
    assert!(error.to_string().contains("DYN_KVBM_CPU_CACHE_PERSIST"), "{error}");
    drop(region);
    attach(home.path(), 4).unwrap();
}

#[test]
fn a_file_of_another_size_is_refused_and_left_alone() {
    let Some(home) = shm() else { return };
    let region = attach(home.path(), 4).unwrap();
    write_all(&region, 7);
    drop(region);
    for slots in [3, 5] {
        let error = attach(home.path(), slots).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
        for part in ["host.capacity", "remove the file", "kvbm-test.memory"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
    }
    assert_eq!(written(&attach(home.path(), 4).unwrap(), 7), [0, 1]);
}

#[test]
fn what_a_stranger_put_there_is_not_attached_to() {
    let Some(home) = shm() else { return };
    let path = home.path().join("kvbm-test.memory");
    let other = home.path().join("other");
    fs::write(&other, vec![0; 2 * 8192]).unwrap();
    let open_to_all = || fs::copy(&other, &path).map(drop);
    let link = || std::os::unix::fs::symlink(&other, &path);
    let second_name = || {
        fs::set_permissions(&other, PermissionsExt::from_mode(0o600))?;
        fs::hard_link(&other, &path)
    };
    let cases: [(&dyn Fn() -> io::Result<()>, _); 3] =
        [(&open_to_all, "has mode"), (&link, "is a symbolic link"), (&second_name, "has 2 names")];
    for (put, wrong) in cases {
        put().unwrap();
        let error = attach(home.path(), 4).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
        assert!(
            error.to_string().contains(wrong) && error.to_string().contains("host.persist"),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
    }
    attach(home.path(), 4).unwrap();
}

#[test]
fn a_file_with_holes_is_refused() {
    let Some(home) = shm() else { return };
    drop(attach(home.path(), 4).unwrap());
    let path = home.path().join("kvbm-test.memory");
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(0).unwrap();
    file.set_len(2 * 8192).unwrap();
    let error = attach(home.path(), 4).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
}

#[test]
fn a_fork_does_not_get_a_file_either() {
    let Some(home) = shm() else { return };
    let region = attach(home.path(), 4).unwrap();
    assert!(holds_in_a_child(|| is_not_mapped(region.base())));
}

/// On a thread that has a view of its own of what is mounted where. `None`: this process may not
/// mount.
fn with_mount<T: Send>(
    kind: &std::ffi::CStr,
    options: &std::ffi::CStr,
    work: impl FnOnce(&Path) -> T + Send,
) -> Option<T> {
    let home = tempfile::tempdir().unwrap();
    let at = std::ffi::CString::new(home.path().to_str().unwrap()).unwrap();
    std::thread::scope(|scope| {
        let mounted = scope.spawn(|| {
            let none = std::ptr::null();
            // SAFETY: strings that end, and a namespace that is this thread's alone.
            let failed = unsafe {
                libc::unshare(libc::CLONE_NEWNS) != 0
                    || libc::mount(
                        none,
                        c"/".as_ptr(),
                        none,
                        libc::MS_REC | libc::MS_PRIVATE,
                        none.cast(),
                    ) != 0
                    || libc::mount(
                        kind.as_ptr(),
                        at.as_ptr(),
                        kind.as_ptr(),
                        0,
                        options.as_ptr().cast(),
                    ) != 0
            };
            let error = io::Error::last_os_error();
            if failed {
                skip("mounts", &error);
            }
            (!failed).then(|| work(home.path()))
        });
        mounted.join().unwrap()
    })
}

#[test]
fn a_mount_too_small_is_an_error_at_the_start() {
    with_mount(c"tmpfs", c"size=1m", |dir| {
        let error = attach(dir, 500).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
        for part in ["3 MiB wanted", "of 1 MiB available", "--shm-size", "DYN_KVBM_CPU_CACHE_GB"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
        attach(dir, 50).unwrap();
    });
}

#[test]
fn a_mount_with_huge_pages_gives_them() {
    with_mount(c"tmpfs", c"huge=advise,size=64m", |dir| {
        let mount = Mount::of(dir).unwrap();
        assert_eq!(
            (mount.kind, mount.limit),
            (MountKind::Tmpfs { huge_pages: true }, Some(64 << 20))
        );
        for was_there in [false, true] {
            let (options, place) = (options(1024, 8192), place(dir, 1024));
            let region = DramRegion::persistent(options, &place).unwrap();
            assert_eq!(region.persists().unwrap().1, was_there);
            assert_eq!(pages(&region)[1], 8 << 20);
        }
    });
}

#[test]
fn hugetlbfs_gives_whole_huge_pages() {
    with_mount(c"hugetlbfs", c"pagesize=2m", |dir| {
        let mount = Mount::of(dir).unwrap();
        assert_eq!((mount.kind, mount.page_bytes), (MountKind::Hugetlbfs, 2 << 20));
        match attach(dir, 300) {
            Ok(region) => {
                write_all(&region, 9);
                drop(region);
                let region = attach(dir, 300).unwrap();
                assert_eq!(pages(&region)[1], 4 << 20);
                assert_eq!(fs::metadata(region.persists().unwrap().0).unwrap().len(), 4 << 20);
                assert_eq!(written(&region, 9)[..298], (0..298).collect::<Vec<_>>());
            }
            Err(error) => {
                assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
                assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
                assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
                skip("hugetlb pages", &error);
            }
        }
    });
}
