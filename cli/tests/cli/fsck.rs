//! `kvbm fsck` on what a replay left.

use std::fs;

use serde_json::Value;

use crate::{Place, assert_fails, json, text};

const TIERS: [&str; 9] = [
    "--json",
    "--keep",
    "--device-blocks",
    "60",
    "--disk-blocks",
    "300",
    "--block-bytes",
    "16KiB",
    "--disk-dir",
];

struct Kept {
    place: Place,
    dir: String,
}

impl Kept {
    fn new() -> Self {
        let place = Place::new();
        place.trace("trace.jsonl", 60, 12);
        let dir = place.path("disk").to_str().expect("UTF-8").to_owned();
        let kept = Self { place, dir };
        kept.replay();
        kept
    }

    fn replay(&self) -> Value {
        let args = [["replay", "trace.jsonl"].as_slice(), &TIERS, &[&self.dir]].concat();
        json(&self.place.run(&args))
    }

    fn file(&self, extension: &str) -> std::path::PathBuf {
        let mut files = fs::read_dir(&self.dir)
            .expect("the directory")
            .map(|entry| entry.expect("an entry").path());
        files
            .find(|path| path.extension().is_some_and(|found| found == extension))
            .expect("a kept file")
    }

    fn flip(&self, extension: &str, at: usize) {
        let path = self.file(extension);
        let mut bytes = fs::read(&path).expect("a kept file");
        bytes[at] ^= 4;
        fs::write(path, bytes).expect("a kept file");
    }

    /// The exit code and what was found of the one index.
    fn fsck(&self, more: &[&str]) -> (Option<i32>, Value) {
        let output = self.place.run(&[&["fsck", &self.dir, "--json"], more].concat());
        let report: Value =
            serde_json::from_slice(&output.stdout).expect("standard output is JSON");
        (output.status.code(), report["files"][0].clone())
    }
}

#[test]
fn what_a_replay_left_is_sound() {
    let kept = Kept::new();
    let (code, found) = kept.fsck(&[]);
    assert_eq!(
        (code, &found["wrong"], &found["orphans"], &found["damaged"]),
        (Some(0), &0.into(), &0.into(), &0.into())
    );
    assert!(found["blocks"].as_u64() > Some(100), "{found}");
    let table = kept.place.run(&["fsck", &kept.dir]);
    assert_eq!(table.status.code(), Some(0));
    assert!(text(&table.stdout).contains("disk"), "{table:?}");
}

#[test]
fn damage_is_told_and_dropped_and_then_all_works_again() {
    let kept = Kept::new();
    let before = fs::read(kept.file("index")).expect("the index");
    kept.flip("blocks", 5 * (16 << 10) + 77);
    kept.flip("index", 4_096 + 20);
    kept.flip("index", 8_192 + 64 * 3 + 9);
    let (code, found) = kept.fsck(&[]);
    assert_eq!(
        (code, &found["wrong"], &found["damaged"]),
        (Some(1), &1.into(), &1.into()),
        "{found}"
    );
    assert_eq!(found["header_is_whole"], false);
    assert_ne!(fs::read(kept.file("index")).expect("the index"), before, "the flips");
    let (code, told) = kept.fsck(&["--repair"]);
    assert_eq!((code, &told["wrong"]), (Some(1), &1.into()));
    let (code, after) = kept.fsck(&[]);
    assert_eq!(
        (code, &after["wrong"], &after["orphans"]),
        (Some(0), &0.into(), &0.into()),
        "{after}"
    );
    let left = found["blocks"]
        .as_u64()
        .map(|blocks| blocks - 1 - found["orphans"].as_u64().unwrap_or_default());
    assert_eq!(after["blocks"].as_u64(), left, "nothing that was sound is gone: {found}");
    let report = kept.replay();
    assert_eq!(
        (&report["mismatches"], &report["recovered"][0]["dropped"]),
        (&0.into(), &0.into()),
        "{report}"
    );
    assert_eq!(report["recovered"][0]["blocks"].as_u64(), left);
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let kept = Kept::new();
    assert_fails(&kept.place.run(&["fsck", "nowhere"]), 2, &["cannot read the directory nowhere"]);
    let index = kept.file("index");
    let held = fs::OpenOptions::new().read(true).write(true).open(&index).expect("the index");
    held.lock().expect("a lock");
    assert_fails(&kept.place.run(&["fsck", &kept.dir]), 2, &["still in use"]);
    drop(held);
    fs::write(&index, "something else").expect("the index");
    assert_fails(
        &kept.place.run(&["fsck", &kept.dir, "--repair"]),
        2,
        &["is not an index of blocks"],
    );
    fs::remove_file(index).expect("the index");
    let output = kept.place.run(&["fsck", &kept.dir]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("no index tells of"), "{output:?}");
}
