//! `kvbm fsck` on a bucket that a replay filled.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{Place, assert_fails, json, text};

fn filled() -> (Place, String) {
    let place = Place::new();
    place.trace("trace.jsonl", 60, 12);
    let url = place.url("bucket");
    let tiers = [
        "--json",
        "--keep",
        "--device-blocks",
        "60",
        "--host-blocks",
        "300",
        "--block-bytes",
        "16KiB",
    ];
    json(&place.run(&[["replay", "trace.jsonl", "--object", &url].as_slice(), &tiers].concat()));
    (place, url)
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(segments(&path));
        } else if path.extension().is_some_and(|kind| kind == "kvseg") {
            found.push(path);
        }
    }
    found
}

fn fsck(place: &Place, url: &str, more: &[&str]) -> (Option<i32>, Value) {
    let output = place.run(&[&["fsck", url, "--json"], more].concat());
    let report: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON");
    (output.status.code(), report["buckets"][0].clone())
}

#[test]
fn a_bucket_that_a_replay_filled_is_sound() {
    let (place, url) = filled();
    let (code, found) = fsck(&place, &url, &[]);
    assert_eq!((code, &found["is_sound"]), (Some(0), &true.into()), "{found}");
    assert!(found["namespaces"][0]["blocks"].as_u64() > Some(100), "{found}");
    let shown = place.run(&["fsck", &url]);
    assert!(text(&shown.stdout).contains("v1-block16384"), "{shown:?}");
}

#[test]
fn a_changed_block_is_told_and_kept_while_relied_on() {
    let (place, url) = filled();
    let segment = segments(&place.path("bucket")).pop().expect("a segment");
    let mut bytes = fs::read(&segment).expect("a segment");
    bytes[100] ^= 1;
    fs::write(&segment, bytes).expect("a segment");
    let (code, found) = fsck(&place, &url, &[]);
    assert_eq!((code, &found["namespaces"][0]["wrong_blocks"]), (Some(1), &1.into()), "{found}");
    assert_eq!(
        (&found["findings"][0]["problem"], &found["findings"][0]["in_use"]),
        (&"damaged".into(), &true.into())
    );
}

#[test]
fn what_is_no_bucket_is_refused() {
    let place = Place::new();
    let nowhere = place.url("nowhere");
    assert_fails(&place.run(&["fsck", &nowhere]), 2, &["cannot open the directory"]);
    assert!(!place.path("nowhere").exists(), "looking makes nothing");
    assert_fails(&place.run(&["fsck", "memory:///"]), 2, &["ends with the process"]);
    assert_fails(&place.run(&["fsck", "ftp://host/x"]), 2, &["names no object store"]);
    let output = place.run(&["fsck", "s3://AKIAEXAMPLE:s3cr3t@bucket"]);
    assert_fails(&output, 2, &["contains credentials"]);
    assert!(!text(&output.stderr).contains("s3cr3t"), "{output:?}");
}
