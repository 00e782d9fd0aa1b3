//! What a process finds that is started after another one: all that it has is found again, and nothing wrong.

use std::path::Path;
use std::time::Duration;

use kvbm::{BlockHash, Fingerprint, Manager, Options, RecoveryReport, Tier};
use kvbm_settings::{Capacity, Settings};
use kvbm_tests::engine;
use kvbm_tests::rig::hash;

const BLOCK: u64 = 4096;
const LIMIT: Duration = Duration::from_secs(30);

fn settings(dir: &Path, host: u64, disk: u64) -> Settings {
    let mut settings = engine::settings(BLOCK, 16, host);
    settings.disk.capacity = Some(Capacity::Blocks(disk));
    settings.disk.dirs = vec![dir.to_owned()];
    settings.disk.keep = true;
    settings.flush.interval_ms = 1;
    settings
}

fn fingerprint(weights: &str, epoch: u64) -> Fingerprint {
    let fingerprint = Fingerprint {
        model: "m".into(),
        weights: weights.into(),
        block_tokens: 16,
        ..Fingerprint::default()
    };
    Fingerprint { epoch, ..fingerprint }
}

fn chain(n: u32, blocks: u32) -> Vec<BlockHash> {
    (0..blocks).map(|block| hash(1_000 * n + block + 1)).collect()
}

fn open_with(settings: Settings, options: Options) -> kvbm::Result<Manager> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(Manager::open(settings, options))
}

fn open(settings: Settings, fingerprint: Fingerprint) -> kvbm::Result<Manager> {
    open_with(settings, Options { fingerprint: Some(fingerprint), ..Options::default() })
}

fn report(manager: &Manager) -> RecoveryReport {
    let [report] = manager.recovered() else { panic!("one tier is kept: {:?}", manager.recovered()) };
    *report
}

fn drained(manager: &Manager) {
    assert!(manager.drain(LIMIT).is_complete());
}

fn closed(manager: &Manager) {
    assert!(manager.close(LIMIT).is_complete());
}

#[test]
fn what_was_flushed_is_served_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let settings = settings(home.path(), 64, 256);
    let first = open(settings.clone(), fingerprint("one", 0)).unwrap();
    assert_eq!(report(&first).blocks, 0);
    for n in 0..8 {
        engine::serve(&first, &chain(n, 8));
    }
    drained(&first);
    closed(&first);
    drop(first);
    let second = open(settings.clone(), fingerprint("one", 0)).unwrap();
    let RecoveryReport { tier, blocks, dropped, past, damaged, torn_bytes, .. } = report(&second);
    assert_eq!((tier, blocks, dropped, past, damaged, torn_bytes), (Tier::Disk, 64, 0, 0, 0, 0));
    assert_eq!(second.audit(), []);
    for n in 0..8 {
        assert_eq!(second.matches(&chain(n, 8)).blocks(Tier::Disk), 8);
        let served = engine::serve(&second, &chain(n, 8));
        assert_eq!((served.hit, served.wrong), (8, 0));
    }
    // And then it goes on: other blocks take the place of these.
    for n in 100..200 {
        engine::serve(&second, &chain(n, 8));
    }
    drained(&second);
    assert_eq!(second.audit(), []);
    let resident = second.counts(Tier::Disk).resident as usize;
    drop(second);
    let third = open(settings, fingerprint("one", 0)).unwrap();
    assert_eq!(report(&third).blocks, resident);
    let served: Vec<_> = (0..200).map(|n| engine::serve(&third, &chain(n, 8))).collect();
    assert_eq!(served.iter().map(|served| served.wrong).sum::<usize>(), 0);
    assert_eq!(third.audit(), []);
}
