#![expect(unsafe_code, reason = "calls of the C library")]

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::{DiskOptions, DiskRegion, ThreadsBackend, UringBackend};
use crate::backend::Backend;
use crate::copy::{CopyErrorKind, SlotId, Tier};
use crate::dram::{DramOptions, DramRegion};
use crate::error::{SetupError, SetupErrorKind};
use crate::frame::Frame;
use crate::geometry::Geometry;
use crate::memory::Memory;
use crate::testing::conformance::{self, Pair};
use crate::testing::{Child, each, holds_in_a_child};
use crate::testing::{
    disk_options, fill_pattern, frames, has_pattern, host, order, run, skip, start,
};
use crate::verify::Verified;

/// How a test's backend is made.
type Make = fn(Arc<dyn Memory>, Arc<DiskRegion>, u32) -> Result<Arc<dyn Backend>, SetupError>;

fn threads(
    memory: Arc<dyn Memory>,
    disk: Arc<DiskRegion>,
    depth: u32,
) -> Result<Arc<dyn Backend>, SetupError> {
    Ok(Arc::new(ThreadsBackend::new(memory, disk, depth)?))
}

fn uring(
    memory: Arc<dyn Memory>,
    disk: Arc<DiskRegion>,
    depth: u32,
) -> Result<Arc<dyn Backend>, SetupError> {
    Ok(Arc::new(UringBackend::new(memory, disk, depth)?))
}

/// The backends that this system allows.
fn backends() -> Vec<Make> {
    match UringBackend::probe() {
        Ok(()) => vec![threads, uring],
        Err(error) => {
            skip("uring", &error);
            vec![threads]
        }
    }
}

fn kept(dir: &Path, slots: u32, block_bytes: usize) -> DiskOptions {
    DiskOptions { keep: Some("test".into()), ..disk_options(&[dir], slots, block_bytes) }
}

fn kept_file(dir: &Path) -> PathBuf {
    dir.join("kvbm-test.blocks")
}

fn conforms(o_direct: bool, dirs: usize, depth: u32) {
    for make in backends() {
        conformance::check(|slots, block_bytes| {
            let homes: Vec<_> = (0..dirs).map(|_| tempfile::tempdir().unwrap()).collect();
            let homes: Vec<_> = homes.iter().map(tempfile::TempDir::path).collect();
            let options = DiskOptions { o_direct, ..disk_options(&homes, slots, block_bytes) };
            let disk = Arc::new(DiskRegion::open(&options).unwrap());
            let memory = Arc::new(host(slots, block_bytes));
            let backend = make(Arc::clone(&memory) as _, disk, depth).unwrap();
            let backend = Verified::new(backend, Arc::clone(&memory) as _, Arc::default()).unwrap();
            Pair { memory, other: Tier::Disk, backend: Arc::new(backend) }
        });
    }
}

#[test]
fn conforms_with_direct_io() {
    conforms(true, 1, 16);
}

#[test]
fn conforms_with_buffered_io_on_stripes() {
    conforms(false, 3, 4);
}

/// Two titled host slots, the first with the pattern 1, and a disk of eight slots.
struct Fixture {
    memory: Arc<DramRegion>,
    disk: Arc<DiskRegion>,
    here: Vec<Frame>,
}

impl Fixture {
    fn new(options: &DiskOptions) -> Self {
        let memory = Arc::new(host(2, options.geometry.block_bytes()));
        let mut here = frames(&memory);
        fill_pattern(1, memory.write(&mut here[0]).unwrap());
        Self { memory, disk: Arc::new(DiskRegion::open(options).unwrap()), here }
    }

    fn backend(&self, make: Make) -> Arc<dyn Backend> {
        make(Arc::clone(&self.memory) as _, Arc::clone(&self.disk), 4).unwrap()
    }

    fn stored(slot: u32) -> crate::SlotRef {
        crate::SlotRef { tier: Tier::Disk, slot: SlotId(slot), generation: 1 }
    }

    fn write(&self, backend: &dyn Backend, slot: u32) -> Result<(), crate::CopyError> {
        run(backend, vec![order(1, self.here[0].slot_ref(), Self::stored(slot))]).remove(0)
    }

    fn read(&self, backend: &dyn Backend, slot: u32) -> Result<(), crate::CopyError> {
        run(backend, vec![order(1, Self::stored(slot), self.here[1].slot_ref())]).remove(0)
    }
}

#[test]
fn a_truncated_file_is_a_short_read() {
    for make in backends() {
        let home = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(&kept(home.path(), 8, 64 << 10));
        let backend = fixture.backend(make);
        fixture.write(&*backend, 7).unwrap();
        let file = OpenOptions::new().write(true).open(kept_file(home.path())).unwrap();
        file.set_len(8 * 65536 - 4096).unwrap();
        let error = fixture.read(&*backend, 7).unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Io);
        assert!(error.to_string().contains("61440 of 65536"), "{error}");
    }
}

#[test]
fn slots_lie_where_the_format_says() {
    for make in backends() {
        let home = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(&kept(home.path(), 8, 5000));
        fixture.write(&*fixture.backend(make), 3).unwrap();
        let mut block = vec![0; 5000];
        File::open(kept_file(home.path())).unwrap().read_exact_at(&mut block, 3 * 8192).unwrap();
        assert!(has_pattern(1, &block));
    }
}

#[test]
fn kept_blocks_are_there_after_reopening() {
    let home = tempfile::tempdir().unwrap();
    let first = Fixture::new(&kept(home.path(), 8, 4096));
    first.write(&*first.backend(threads), 5).unwrap();
    drop(first);
    let second = Fixture::new(&kept(home.path(), 8, 4096));
    second.read(&*second.backend(threads), 5).unwrap();
    assert!(has_pattern(1, second.memory.read(&second.here[1]).unwrap()));
}

#[test]
fn a_kept_file_is_resized_and_keeps_its_blocks() {
    let home = tempfile::tempdir().unwrap();
    let first = Fixture::new(&kept(home.path(), 8, 4096));
    first.write(&*first.backend(threads), 5).unwrap();
    drop(first);
    for slots in [9, 6] {
        let again = Fixture::new(&kept(home.path(), slots, 4096));
        again.read(&*again.backend(threads), 5).unwrap();
        assert!(has_pattern(1, again.memory.read(&again.here[1]).unwrap()));
        assert_eq!(fs::metadata(kept_file(home.path())).unwrap().len(), u64::from(slots) * 4096);
    }
}

#[test]
fn an_unusable_directory_is_left_out_and_the_others_serve() {
    let home = tempfile::tempdir().unwrap();
    let (here, file) = (home.path().join("here"), home.path().join("file"));
    File::create(&file).unwrap();
    let fixture = Fixture::new(&disk_options(&[&file, &here], 8, 4096));
    assert_eq!(fixture.disk.absent().collect::<Vec<_>>(), [0]);
    for make in backends() {
        let backend = fixture.backend(make);
        fixture.write(&*backend, 3).unwrap();
        fixture.read(&*backend, 3).unwrap();
        assert_eq!(fixture.write(&*backend, 2).unwrap_err().kind(), CopyErrorKind::Refused);
    }
}

#[test]
fn a_kept_file_has_one_user_and_one_owner() {
    let home = tempfile::tempdir().unwrap();
    let open = DiskRegion::open(&kept(home.path(), 8, 4096)).unwrap();
    assert_eq!(fs::metadata(kept_file(home.path())).unwrap().mode() & 0o777, 0o600);
    assert!(is_in_use(home.path()));
    drop(open);
    DiskRegion::open(&kept(home.path(), 8, 4096)).unwrap();
}

fn is_in_use(home: &Path) -> bool {
    let opened = DiskRegion::open_within(&kept(home, 8, 4096), Duration::ZERO);
    opened.is_err_and(|error| error.kind() == SetupErrorKind::InUse)
}

/// As after kill -9, when the kernel has not yet let go of the files of the ring.
#[test]
fn a_start_waits_for_a_lock_that_soon_ends() {
    let home = tempfile::tempdir().unwrap();
    let dying = DiskRegion::open(&kept(home.path(), 8, 4096)).unwrap();
    let dies = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(dying);
    });
    DiskRegion::open(&kept(home.path(), 8, 4096)).unwrap();
    dies.join().unwrap();
}

/// A process that is killed in the middle of its writes, whose ring the kernel ends some time
/// later.
#[test]
fn a_start_follows_a_process_that_was_killed() {
    let home = tempfile::tempdir().unwrap();
    for make in backends() {
        let killed = holds_in_a_child(|| {
            let fixture = Fixture::new(&kept(home.path(), 8, 4096));
            let backend = fixture.backend(make);
            let write = order(1, fixture.here[0].slot_ref(), Fixture::stored(0));
            let _reports = start(&*backend, vec![write; 8]);
            // SAFETY: ends the child, as a test of that wants.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            false
        });
        assert!(!killed);
        let fixture = Fixture::new(&kept(home.path(), 8, 4096));
        let backend = fixture.backend(make);
        fixture.write(&*backend, 7).unwrap();
        fixture.read(&*backend, 7).unwrap();
    }
}

#[test]
fn a_child_that_drops_all_leaves_the_parents_files_alone() {
    for make in backends() {
        let home = tempfile::tempdir().unwrap();
        let made = home.path().join("made");
        let fixture = Fixture::new(&kept(home.path(), 8, 4096));
        let mut all = Some((
            fixture.backend(make),
            DiskRegion::open(&disk_options(&[&made], 8, 4096)).unwrap(),
            Arc::clone(&fixture.disk),
        ));
        let Fixture { memory, disk, here } = fixture;
        drop(disk);
        let mut parents = Some(memory);
        assert!(holds_in_a_child(|| {
            drop((all.take(), parents.take()));
            true
        }));
        assert!(is_in_use(home.path()), "the child unlocked the parent's file");
        assert!(made.is_dir(), "the child removed the parent's directory");
        let (backend, _, disk) = all.take().unwrap();
        let fixture = Fixture { memory: parents.take().unwrap(), disk, here };
        fixture.write(&*backend, 7).unwrap();
        fixture.read(&*backend, 7).unwrap();
        drop((backend, fixture));
        assert!(!is_in_use(home.path()));
    }
}

/// Another child may live on: it has a copy of the file, and with it of the lock.
#[test]
fn a_child_that_lives_on_locks_no_files() {
    let home = tempfile::tempdir().unwrap();
    let disk = DiskRegion::open(&kept(home.path(), 8, 4096)).unwrap();
    let (mut ended, end) = std::io::pipe().unwrap();
    let mut end = Some(end);
    let child = Child::fork(|| {
        drop(end.take());
        matches!(ended.read(&mut [0]), Ok(0))
    });
    drop(disk);
    assert!(!is_in_use(home.path()));
    drop(end.take());
    assert!(child.held());
}

/// A ring of two at a time, and many writes before the read.
#[test]
fn a_read_does_not_wait_for_the_writes_before_it() {
    const WRITES: usize = 256;
    if let Err(error) = UringBackend::probe() {
        return skip("uring", &error);
    }
    let home = tempfile::tempdir().unwrap();
    let fixture = Fixture::new(&disk_options(&[home.path()], 8, 256 << 10));
    let backend =
        UringBackend::new(Arc::clone(&fixture.memory) as _, Arc::clone(&fixture.disk), 2).unwrap();
    fixture.write(&backend, 0).unwrap();
    let (report, reports) = mpsc::channel();
    let submit = |ops: Vec<crate::CopyOp>, what, report: mpsc::Sender<_>| {
        backend.submit(
            ops,
            each(move |_, result| {
                result.unwrap();
                report.send(what).unwrap();
            }),
        );
    };
    let write = |n| order(1, fixture.here[0].slot_ref(), Fixture::stored(1 + n as u32 % 7));
    submit((0..WRITES).map(write).collect(), Tier::Disk, report.clone());
    submit(vec![order(1, Fixture::stored(0), fixture.here[1].slot_ref())], Tier::Host, report);
    let order: Vec<_> = reports.into_iter().collect();
    assert_eq!(order.len(), WRITES + 1);
    let before = order.iter().position(|&to| to == Tier::Host).unwrap();
    assert!(before < WRITES / 2, "the read waited for {before} writes");
}

/// What the kernel says when there really is no space, a bad medium, or nothing to do now.
#[test]
fn errors_of_the_kernel_say_what_a_caller_can_do() {
    for make in backends() {
        let on = |path| {
            let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
            fixture_on(file)
        };
        let full = on("/dev/full");
        let error = full.write(&*full.backend(make), 0).unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::NoSpace, "{error}");
        full.read(&*full.backend(make), 0).unwrap();
        // Nothing is mapped at address 0.
        let broken = on("/proc/self/mem");
        let error = broken.read(&*broken.backend(make), 0).unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Io, "{error}");
        let short = on("/dev/null");
        let error = short.read(&*short.backend(make), 0).unwrap_err();
        assert_eq!(error.kind(), CopyErrorKind::Io, "{error}");
        assert!(error.to_string().contains("0 of 4096"), "{error}");
    }
}

/// Slots of 4 KiB in a file that is no slot file.
fn fixture_on(file: File) -> Fixture {
    let home = tempfile::tempdir().unwrap();
    let mut fixture = Fixture::new(&disk_options(&[home.path()], 2, 4096));
    fixture.disk = Arc::new(DiskRegion::of_files(fixture.disk.geometry(), vec![file]));
    fixture
}

#[test]
fn nothing_is_left_behind_of_what_is_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let made = home.path().join("made");
    let disk = DiskRegion::open(&disk_options(&[made.as_path(), home.path()], 8, 4096)).unwrap();
    assert_eq!(fs::read_dir(&made).unwrap().count(), 0, "a killed process would leave a file");
    assert_eq!(
        disk.files().map(|file| file.metadata().unwrap().len()).collect::<Vec<_>>(),
        [4 * 4096; 2]
    );
    drop(disk);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_opened_names_the_setting() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    File::create(&file).unwrap();
    for dir in [file.as_path(), &file.join("below"), &home.path().join("no/such")] {
        let error = DiskRegion::open(&disk_options(&[dir], 8, 4096)).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NotWritable, "{error}");
        assert!(error.to_string().contains("DYN_KVBM_DISK_CACHE_DIR"), "{error}");
    }
    let error = DiskRegion::open(&disk_options(&[home.path()], 1 << 20, 1 << 30)).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
    let error = DiskRegion::open(&kept(home.path(), 1 << 20, 1 << 30)).unwrap_err();
    assert_eq!(error.kind(), SetupErrorKind::NoSpace, "{error}");
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "failed attempts left files");
    for wrong in [
        disk_options::<&Path>(&[], 8, 4096),
        DiskOptions { keep: Some("../x".into()), ..disk_options(&[home.path()], 8, 4096) },
    ] {
        assert_eq!(DiskRegion::open(&wrong).unwrap_err().kind(), SetupErrorKind::Invalid);
    }
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let disk = Arc::new(DiskRegion::open(&disk_options(&[home.path()], 2, 8192)).unwrap());
    for make in backends() {
        let error = make(Arc::new(host(2, 4096)), Arc::clone(&disk), 4).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid);
    }
}

/// What is moved is a whole stride: of a longer one the end would lie in the next slot.
#[test]
fn slots_that_lie_further_apart_in_memory_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let disk = Arc::new(DiskRegion::open(&disk_options(&[home.path()], 2, 8192)).unwrap());
    let geometry = Geometry::new(2, 8192).unwrap().with_room(1).unwrap();
    for make in backends() {
        let memory = DramOptions { geometry, huge_pages: false, fault_threads: 1 };
        let memory = Arc::new(DramRegion::host(memory).unwrap());
        let error = make(memory, Arc::clone(&disk), 4).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("12288 apart"), "{error}");
    }
}
