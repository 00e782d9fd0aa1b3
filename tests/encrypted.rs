//! What lies below memory can be read with its key and not without: through a manager, on real
//! files.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvbm::{ErrorKind, Manager, Tier};
use kvbm_settings::{DiskBackend, Settings};
use kvbm_tests::engine::{self, Served, drain, open, push_down, serve, settings, stop};
use kvbm_tests::rig::{chain, files, number_of};
use kvbm_tiers::sealed::{
    Cipher, KeyFiles, KeyRing, SEAL_BYTES, Scratch, ScratchOptions, TenantKeys,
};
use kvbm_tiers::testing::{
    disk, fill_pattern, frames, has_pattern, host, main_key, order, run, take_all,
};
use kvbm_tiers::{
    CopyError, CopyErrorKind, DiskRegion, DramRegion, Frame, FramePool, Sealed, ThreadsBackend,
};
use prometheus::Registry;

const BLOCK: usize = 8192;
const BLOCKS: u32 = 12;

fn first_key() -> String {
    main_key(7, "0123456789abcdef")
}

fn second_key() -> String {
    main_key(8, "fedcba9876543210")
}

/// Small upper tiers over a disk, and objects if there is to be nothing on disk.
fn lower_tiers(dir: &Path, has_disk: bool) -> Settings {
    let mut settings = settings(BLOCK as u64, 16, 16);
    if has_disk {
        engine::keep_on_disk(&mut settings, 256, dir.join("disk"));
    } else {
        engine::keep_in_bucket(&mut settings, 8 * BLOCK as u64, &dir.join("objects"));
    }
    settings
}

fn manager(settings: Settings) -> Manager {
    open(settings, &Registry::new()).unwrap()
}

/// Computed, flushed, gone from the upper tiers, and then asked for again.
fn down_and_up(manager: &Manager) -> Served {
    serve(manager, &chain(0, BLOCKS));
    drain(manager);
    push_down(manager, &chain(0, BLOCKS));
    serve(manager, &chain(0, BLOCKS))
}

/// How often a word of one of the chain's blocks stands in a file, wherever it begins.
fn words_found(dir: &Path) -> usize {
    let mut words = HashSet::new();
    for hash in chain(0, BLOCKS) {
        let mut block = vec![0; BLOCK];
        fill_pattern(number_of(hash), &mut block);
        words.extend(block.as_chunks::<8>().0.iter().filter(|word| **word != [0; 8]).copied());
    }
    let found = |file: PathBuf| {
        let bytes = fs::read(file).unwrap();
        bytes.windows(8).filter(|window| words.contains(*window)).count()
    };
    files(dir).into_iter().map(found).sum()
}

#[test]
fn blocks_come_back_and_files_show_nothing_of_them() {
    for (has_disk, backend) in
        [(true, DiskBackend::Auto), (true, DiskBackend::Threads), (false, DiskBackend::Auto)]
    {
        for is_encrypted in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let mut settings = lower_tiers(dir.path(), has_disk);
            settings.disk.backend = backend;
            settings.encryption.key = is_encrypted.then(first_key);
            let manager = manager(settings);
            let served = down_and_up(&manager);
            assert_eq!((served.hit, served.wrong), (BLOCKS as usize, 0), "{backend:?}: {served:?}");
            assert_eq!(manager.admin().failures(), 0);
            let below =
                |route: &&kvbm::RouteReport| route.to >= Tier::Disk && route.from == Tier::Host;
            let route = manager.admin().routes().iter().find(below).unwrap();
            assert_eq!(
                route.backend.ends_with(", encrypted with key 7"),
                is_encrypted,
                "{route:?}"
            );
            drop(manager);
            // Without encryption they are found, so we look in the right place.
            assert_eq!(words_found(dir.path()) == 0, is_encrypted, "{backend:?}, disk: {has_disk}");
        }
    }
}

#[test]
fn a_flipped_bit_is_a_miss_and_then_it_heals() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = lower_tiers(dir.path(), true);
    settings.encryption.key = Some(first_key());
    let manager = manager(settings);
    serve(&manager, &chain(0, BLOCKS));
    drain(&manager);
    push_down(&manager, &chain(0, BLOCKS));
    assert_eq!(manager.matches(&chain(0, BLOCKS)).blocks(Tier::Disk), BLOCKS as usize);
    for path in files(&dir.path().join("disk")) {
        flip_a_bit_of_each_block(&path);
    }
    let served = serve(&manager, &chain(0, BLOCKS));
    // A load ends with its first bad block, and others may still be on their way to their slots:
    // what is missing then is computed next time.
    assert_eq!((served.hit, served.wrong), (0, 0), "{served:?}");
    drain(&manager);
    let served = serve(&manager, &chain(0, BLOCKS));
    assert_eq!(served.wrong, 0, "{served:?}");
    drain(&manager);
    push_down(&manager, &chain(0, BLOCKS));
    let served = serve(&manager, &chain(0, BLOCKS));
    assert_eq!((served.hit, served.wrong), (BLOCKS as usize, 0), "{served:?}");
    assert!(manager.admin().audit().is_empty());
}

/// Past the page cache, as blocks are written.
fn flip_a_bit_of_each_block(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let stride = (BLOCK + SEAL_BYTES).next_multiple_of(4096) as u64;
    for slot in 0..file.metadata().unwrap().len() / stride {
        let (mut byte, at) = ([0], slot * stride + 4567);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn keys_that_are_none_are_refused_without_being_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    let refused = |change: &dyn Fn(&mut Settings), reason: &str| {
        let mut settings = lower_tiers(dir.path(), true);
        change(&mut settings);
        let error = open(settings, &Registry::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(!format!("{error} {error:?}").contains("0123456789abcdef"), "{error:?}");
    };
    let from_file = |settings: &mut Settings| {
        settings.encryption.key_file = Some(path.display().to_string());
    };
    refused(&from_file, "DYN_KVBM_ENCRYPTION_KEY_FILE");
    OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path).unwrap();
    refused(&from_file, "chmod 0600");
    refused(
        &|settings| settings.encryption.key = Some("0123456789abcdef".into()),
        "DYN_KVBM_ENCRYPTION_KEY",
    );
    let gds = |settings: &mut Settings| {
        settings.encryption.key = Some(first_key());
        settings.disk.backend = DiskBackend::Gds;
    };
    refused(&gds, "disk.backend");
    fs::remove_file(&path).unwrap();
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    file.write_all_at(first_key().as_bytes(), 0).unwrap();
    let mut settings = lower_tiers(dir.path(), true);
    from_file(&mut settings);
    assert_eq!(down_and_up(&manager(settings)).hit, BLOCKS as usize);
}

/// What is on disk outlives the process that wrote it, and may be met with other keys.
struct Drive {
    dir: PathBuf,
    memory: Arc<DramRegion>,
    disk: Arc<DiskRegion>,
    here: Vec<Frame>,
    there: Vec<Frame>,
}

impl Drive {
    fn new(dir: &Path) -> Self {
        let memory = Arc::new(host(3, BLOCK));
        let disk = disk(&[dir], 3, BLOCK + SEAL_BYTES);
        let (here, there) = (frames(&memory), take_all(FramePool::new(Tier::Disk, 3)));
        Self { dir: dir.to_owned(), memory, disk, here, there }
    }

    fn with_keys(&self, keys: &str) -> Sealed<ThreadsBackend> {
        let options = ScratchOptions { block_bytes: BLOCK, blocks: 2, huge_pages: false };
        let scratch = Scratch::open(options).unwrap();
        let threads = ThreadsBackend::new(scratch.memory(), Arc::clone(&self.disk), 1).unwrap();
        let files =
            KeyFiles::open(std::slice::from_ref(&self.dir), "model", Duration::from_secs(10))
                .unwrap();
        let ring = Arc::new(KeyRing::parse(keys).unwrap());
        let keys = Arc::new(TenantKeys::new(ring, "model", Box::new(files)));
        let cipher = Cipher::new(keys, Tier::Disk, "model", BLOCK);
        Sealed::new(threads, Arc::clone(&self.memory) as _, scratch, cipher, 1).unwrap()
    }

    fn store(&mut self, keys: &str, block: usize) {
        fill_pattern(block, self.memory.write(&mut self.here[0]).unwrap());
        let op = order(block, self.here[0].slot_ref(), self.there[block].slot_ref());
        run(&self.with_keys(keys), vec![op]).remove(0).unwrap();
    }

    fn load(&mut self, keys: &str, block: usize) -> Result<(), CopyError> {
        self.memory.write(&mut self.here[1]).unwrap().fill(0);
        let op = order(block, self.there[block].slot_ref(), self.here[1].slot_ref());
        run(&self.with_keys(keys), vec![op]).remove(0)?;
        assert!(has_pattern(block, self.memory.read(&self.here[1]).unwrap()));
        Ok(())
    }
}

#[test]
fn keys_are_rotated_and_blocks_without_their_key_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let mut drive = Drive::new(dir.path());
    let both = format!("{},{}", second_key(), first_key());
    drive.store(&first_key(), 0);
    drive.store(&both, 1);
    for block in [0, 1] {
        drive.load(&both, block).unwrap();
    }
    // What was written since is under the new key alone, and the old one opens what it once sealed.
    drive.load(&second_key(), 1).unwrap();
    drive.load(&first_key(), 0).unwrap();
    let impostor = main_key(7, "0123456789abcdee");
    for (keys, block) in [(&first_key(), 1), (&second_key(), 0), (&impostor, 0)] {
        assert_eq!(drive.load(keys, block).unwrap_err().kind(), CopyErrorKind::Corrupt, "{keys}");
    }
    // And then it works again.
    drive.store(&impostor, 0);
    drive.load(&impostor, 0).unwrap();
    // A slot that nothing was written to.
    assert_eq!(drive.load(&both, 2).unwrap_err().kind(), CopyErrorKind::Corrupt);
}

fn restarted(dir: &Path, keys: &str) -> Manager {
    try_restart(dir, keys).unwrap()
}

fn try_restart(dir: &Path, keys: &str) -> kvbm::Result<Manager> {
    let mut settings = lower_tiers(dir, true);
    settings.encryption.key = Some(keys.to_owned());
    engine::open_with(settings, engine::model(engine::fingerprint("one")))
}

#[test]
fn a_restart_finds_encrypted_blocks_only_with_their_key() {
    let dir = tempfile::tempdir().unwrap();
    let blocks = BLOCKS as usize;
    let first = restarted(dir.path(), &first_key());
    serve(&first, &chain(0, BLOCKS));
    stop(first);
    for keys in [first_key(), format!("{},{}", second_key(), first_key())] {
        let again = restarted(dir.path(), &keys);
        let served = serve(&again, &chain(0, BLOCKS));
        assert_eq!((served.hit, served.wrong), (blocks, 0), "{served:?}");
        stop(again);
    }
    // The index is authenticated, and a start without its key leaves it alone.
    for keys in [main_key(9, "fedcba9876543210"), main_key(8, "0123456789abcdef")] {
        let error = try_restart(dir.path(), &keys).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("emove"), "{error}");
    }
    // The last start wrote it under its first key, and so the older one need not be given to read
    // it.
    let later = restarted(dir.path(), &second_key());
    assert_eq!(
        later.matches(&chain(0, BLOCKS)).blocks(Tier::Disk),
        0,
        "the blocks cannot be read, and are not found"
    );
    let served = down_and_up(&later);
    assert_eq!((served.hit, served.wrong), (blocks, 0), "{served:?}");
    stop(later);
    assert_eq!(words_found(dir.path()), 0);
}
