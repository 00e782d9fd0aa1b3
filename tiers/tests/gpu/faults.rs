//! Faults that only a simulated driver can have: each test does nothing but in the child of its
//! own.

use kvbm_tiers::{EngineCopies, Fence, StraightBlock};

use super::*;

#[test]
fn of_drivers_are_told_with_a_remedy() {
    for (fault, flags, why) in [
        ("no-device", "", "CUDA_VISIBLE_DEVICES"),
        ("old-driver", "", "CUDA 11.4"),
        ("no-symbol", "-DWITHOUT_LOCK", "cuMemHostRegister_v2"),
    ] {
        if simulation::is(fault) {
            let error = Gpu::open(0).unwrap_err();
            assert_eq!(error.kind(), SetupErrorKind::Unavailable);
            assert!(error.to_string().contains(why), "{error}");
            assert!(cuda::probe().driver.is_err());
        }
        simulation::run_one_test(fault, flags, "faults::of_drivers_are_told_with_a_remedy");
    }
}

#[test]
fn of_memory_are_told_with_the_setting() {
    if simulation::is("out-of-memory") {
        let gpu = Gpu::open(0).unwrap();
        let error = gpu.allocate(Geometry::new(4, 4096).unwrap()).unwrap_err();
        assert_eq!(error.kind(), SetupErrorKind::NoSpace);
        assert!(error.to_string().contains("DYN_KVBM_DEVICE_CACHE_GB"), "{error}");
    }
    if simulation::is("no-lock") {
        let gpu = Gpu::open(0).unwrap();
        let device = Arc::new(gpu.allocate(Geometry::new(4, 4096).unwrap()).unwrap());
        let error = CudaBackend::new(&gpu, Arc::new(host(4, 4096)), &device).unwrap_err();
        assert!(error.to_string().contains("ulimit"), "{error}");
    }
    for fault in ["out-of-memory", "no-lock"] {
        simulation::run_one_test(fault, "", "faults::of_memory_are_told_with_the_setting");
    }
}

#[test]
fn of_copies_end_every_operation_in_an_error() {
    if simulation::is("copies-fail") {
        let gpu = Gpu::open(0).unwrap();
        let bench = Bench::new(&gpu, tensors(&gpu, 9, 64 << 10, 64));
        let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
        let neighbour = neighbours::holder(64 << 10).memory;
        let from_neighbour = neighbours::copies(&neighbour, &bench.device);
        let block = [StraightBlock { from: SlotId(0), to: SlotId(1) }];
        assert_eq!(from_neighbour.copy(&block).unwrap_err().kind(), CopyErrorKind::Io);
        assert!(EngineCopies::between(&neighbour, &bench.device, &Fence::Done).is_none());
        // After the first batch the context is gone: what comes later fails too.
        for _ in 0..2 {
            for result in run(&bench.backend, (0..9).map(up).collect()) {
                assert_eq!(result.unwrap_err().kind(), CopyErrorKind::Io);
            }
        }
    }
    simulation::run_one_test(
        "copies-fail",
        "",
        "faults::of_copies_end_every_operation_in_an_error",
    );
}

/// The driver does not say whether copies have ended: they may still run.
#[test]
fn of_questions_keep_the_slots_until_there_is_an_answer() {
    let name = "faults::of_questions_keep_the_slots_until_there_is_an_answer";
    if simulation::is("queries-fail") {
        let gpu = Gpu::open(0).unwrap();
        let mut bench = Bench::new(&gpu, tensors(&gpu, 9, 64 << 10, 64));
        for slot in 0..9 {
            let block = vec![slot as u8; 64 << 10];
            bench.upload(slot, &block);
            assert_eq!(bench.download(slot), block);
        }
    }
    simulation::run_one_test("queries-fail", "", name);
}

#[test]
fn of_none_nothing_is_allocated_while_copies_run() {
    let name = "faults::of_none_nothing_is_allocated_while_copies_run";
    if simulation::is("no-fault") {
        let gpu = Gpu::open(0).unwrap();
        // The kernel, one call for all, and copies one by one.
        for pieces in [64, 4, 1] {
            let bench = Bench::new(&gpu, tensors(&gpu, 100, 1 << 20, pieces));
            let neighbour = neighbours::holder(1 << 20).memory;
            let from_neighbour = neighbours::copies(&neighbour, &bench.device);
            let before = simulation::allocations();
            for _ in 0..3 {
                let block = [StraightBlock { from: SlotId(0), to: SlotId(1) }];
                from_neighbour.copy(&block).unwrap();
                let up = |i: usize| order(i, bench.here[i].slot_ref(), bench.there[i].slot_ref());
                let back = |i: usize| order(i, bench.there[i].slot_ref(), bench.here[i].slot_ref());
                run(&bench.backend, (0..100).map(up).collect())
                    .into_iter()
                    .for_each(Result::unwrap);
                run(&bench.backend, (0..100).map(back).collect())
                    .into_iter()
                    .for_each(Result::unwrap);
            }
            assert_eq!(simulation::allocations(), before);
        }
    }
    simulation::run_one_test("no-fault", "", name);
}

#[test]
fn that_hang_the_gpu_hang_nobody_who_drops_the_backend() {
    if simulation::is("streams-hang") {
        let gpu = Gpu::open(0).unwrap();
        let bench = Bench::new(&gpu, gpu.allocate(Geometry::new(1, 4096).unwrap()).unwrap());
        let order = order(0, bench.here[0].slot_ref(), bench.there[0].slot_ref());
        let reports = start(&bench.backend, vec![order]);
        let started = Instant::now();
        while simulation::streams_hanging() == 0 {
            assert!(started.elapsed() < Duration::from_mins(1), "no copy begins");
            std::thread::yield_now();
        }
        let started = Instant::now();
        drop(bench);
        assert!(started.elapsed() < Duration::from_secs(1));
        assert!(reports.recv_timeout(Duration::from_millis(50)).is_err());
        // And then it heals: the copy ends all the same.
        simulation::set(c"no-fault");
        let (_, copied) = reports.recv_timeout(Duration::from_mins(1)).unwrap();
        copied.unwrap();
    }
    simulation::run_one_test(
        "streams-hang",
        "",
        "faults::that_hang_the_gpu_hang_nobody_who_drops_the_backend",
    );
}
