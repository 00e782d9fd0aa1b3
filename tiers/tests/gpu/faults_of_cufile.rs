//! Faults that only a simulated cuFile can have: each test does nothing but in the child of its
//! own.

use std::os::unix::fs::MetadataExt;

use super::*;

/// A device region of two slots, and what opening GDS for it comes to.
fn opened(gpu: &Gpu) -> (Arc<DeviceRegion>, Result<GdsBackend, SetupError>) {
    let device = Arc::new(gpu.allocate(Geometry::new(2, 4096).unwrap()).unwrap());
    let home = tempfile::tempdir().unwrap();
    let gds = gds(gpu, &device, home.path(), Arc::default());
    (device, gds)
}

#[test]
fn are_told_in_time_with_a_remedy() {
    for (fault, why) in [
        ("cufile-hangs", "did not end in 1s"),
        ("cufile-fails", "cuFile error 5010"),
        ("cufile-no-files", "put disk.dirs on ext4 or XFS"),
    ] {
        if simulation::is(fault) {
            let gpu = Gpu::open(0).unwrap();
            for _ in 0..2 {
                let started = Instant::now();
                let error = opened(&gpu).1.unwrap_err();
                assert_eq!(error.kind(), SetupErrorKind::Unavailable);
                assert!(error.to_string().contains(why), "{error}");
                assert!(started.elapsed() < Duration::from_secs(3));
            }
        }
        simulation::run_one_test(fault, "", "faults_of_cufile::are_told_in_time_with_a_remedy");
    }
}

#[test]
fn modules_that_cannot_be_read_keep_cufile_from_starting() {
    if simulation::is("cufile-hangs") {
        let options = CuFileOptions { modules: "/no/such/list".into(), ..CuFileOptions::default() };
        let why = probe_cufile(&options).unwrap_err();
        assert!(why.contains("/no/such/list") && why.contains("mount /proc"), "{why}");
    }
    let name = "faults_of_cufile::modules_that_cannot_be_read_keep_cufile_from_starting";
    simulation::run_one_test("cufile-hangs", "", name);
}

#[test]
fn compatibility_mode_is_told() {
    if simulation::is("cufile-compatible") {
        let gpu = Gpu::open(0).unwrap();
        let gds = opened(&gpu).1.unwrap();
        assert_eq!(gds.name(), "gds (compatibility mode)");
    }
    simulation::run_one_test(
        "cufile-compatible",
        "",
        "faults_of_cufile::compatibility_mode_is_told",
    );
}

/// The driver reaches NVMe, and the slot files may lie elsewhere.
#[test]
fn only_files_that_the_driver_reaches_are_direct() {
    let name = "faults_of_cufile::only_files_that_the_driver_reaches_are_direct";
    if simulation::is("no-fault") {
        let gpu = Gpu::open(0).unwrap();
        let (device, gds) = opened(&gpu);
        let gds = gds.unwrap();
        let why = gds.indirect().unwrap();
        assert!(why.contains("no direct path") || why.contains("does not describe"), "{why}");
        // A kernel that knows the drive as NVMe.
        let (home, sysfs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let on = std::fs::metadata(home.path()).unwrap().dev();
        let block = sysfs.path().join("dev/block");
        let (drive, link) =
            (block.join("nvme0n1"), block.join(format!("{}:{}", libc::major(on), libc::minor(on))));
        std::fs::create_dir_all(&drive).unwrap();
        std::os::unix::fs::symlink(drive, link).unwrap();
        let options = CuFileOptions { sysfs: sysfs.path().to_owned(), ..cufile_options() };
        let gds = gds_with(&gpu, &device, home.path(), Arc::default(), &options).unwrap();
        match gds.indirect() {
            None => assert_eq!(gds.name(), "gds"),
            Some(why) => skip("direct", &why),
        }
    }
    simulation::run_one_test("no-fault", "", name);
}

#[test]
fn a_block_of_many_pieces_is_shared_by_all_threads() {
    let name = "faults_of_cufile::a_block_of_many_pieces_is_shared_by_all_threads";
    if simulation::is("no-fault") {
        let gpu = Gpu::open(0).unwrap();
        let home = tempfile::tempdir().unwrap();
        let mut bench = Bench::new(&gpu, tensors(&gpu, 2, 64 << 10, 16));
        let gds = gds(&gpu, &bench.device, home.path(), Arc::default()).unwrap();
        let mut block = vec![0; 64 << 10];
        fill_pattern(5, &mut block);
        bench.upload(0, &block);
        let disk = SlotRef { tier: Tier::Disk, ..bench.here[0].slot_ref() };
        for op in
            [order(0, bench.there[0].slot_ref(), disk), order(0, disk, bench.there[1].slot_ref())]
        {
            run(&gds, vec![op]).remove(0).unwrap();
            // How many of the four load_remote_metadata depends on the scheduler of a busy machine.
            let at_once = simulation::transfers_at_once();
            assert!((2..=4).contains(&at_once), "{at_once} transfers at once");
        }
        assert_eq!(bench.download(1), block);
    }
    simulation::run_one_test("no-fault", "", name);
}

#[test]
fn of_pinning_name_limits_and_blocks_move_all_the_same() {
    let name = "faults_of_cufile::of_pinning_name_limits_and_blocks_move_all_the_same";
    if simulation::is("cufile-pins-little") {
        let gpu = Gpu::open(0).unwrap();
        let (device, gds) = opened(&gpu);
        let gds = gds.unwrap();
        let why = gds.unregistered().unwrap();
        assert!(why.contains("max_device_pinned_mem_size_kb") && why.contains("BAR1"), "{why}");
        let report = probe_cufile(&cufile_options()).unwrap();
        assert_eq!((report.max_pinned, &*report.reached), (4096, &["NVMe"][..]));
        let from = device.frames().unwrap().take().unwrap();
        let disk = SlotRef { tier: Tier::Disk, ..from.slot_ref() };
        run(&gds, vec![order(0, from.slot_ref(), disk)]).remove(0).unwrap();
    }
    simulation::run_one_test("cufile-pins-little", "", name);
}

#[test]
fn short_transfers_are_errors() {
    if simulation::is("cufile-short") {
        let gpu = Gpu::open(0).unwrap();
        let (device, gds) = opened(&gpu);
        let from = device.frames().unwrap().take().unwrap();
        let disk = SlotRef { tier: Tier::Disk, ..from.slot_ref() };
        let error =
            run(&gds.unwrap(), vec![order(0, from.slot_ref(), disk)]).remove(0).unwrap_err();
        assert!(error.to_string().contains("4095 of 4096"), "{error}");
    }
    simulation::run_one_test("cufile-short", "", "faults_of_cufile::short_transfers_are_errors");
}
