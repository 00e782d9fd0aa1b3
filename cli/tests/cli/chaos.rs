//! Replays while media misbehave.

use serde_json::Value;

use crate::{Place, json};

const SMALL: [&str; 10] = [
    "--json",
    "--device-blocks",
    "60",
    "--host-blocks",
    "120",
    "--disk-blocks",
    "300",
    "--block-bytes",
    "16KiB",
    "--fault",
];

/// A replay with these faults, the first of them without its `--fault`.
fn replay(place: &Place, more: &[&str]) -> Value {
    replay_within(400, place, more)
}

/// The same with another time-out, in milliseconds.
fn replay_within(timeout_ms: u64, place: &Place, more: &[&str]) -> Value {
    let trace = place.trace("trace.jsonl", 120, 12);
    let args = [&["replay", trace.to_str().expect("UTF-8")], SMALL.as_slice(), more].concat();
    let mut command = place.command(&args);
    command.env("RUST_LOG", "off").env("DYN_KVBM_TRANSFER_TIMEOUT_MS", timeout_ms.to_string());
    json(&command.output().expect("the binary starts"))
}

/// What is broken comes back whole: nothing wrong was served, nothing is missing, every tier works.
#[track_caller]
fn assert_healed(report: &Value, overdue: u64) {
    for key in ["mismatches", "served_wrong", "hangs", "panics", "missing_slots"] {
        assert_eq!(report[key], 0, "{key} in {report}");
    }
    assert_eq!(report["overdue"], overdue, "{report}");
    assert!(report["recovered_s"].as_f64() < Some(60.0), "{report}");
    assert_eq!(
        (&report["drained"], report["drift"].as_array().map(Vec::len)),
        (&Value::Bool(true), Some(0))
    );
}

#[test]
fn a_disk_that_fails_and_lies_costs_only_hits() {
    // One at a time: the first ones have the disk left alone for longer than such a replay takes.
    for kind in ["eio", "emfile", "short", "torn", "corrupt"] {
        let place = Place::new();
        let report = replay(&place, &[&format!("disk:{kind}@0s+1h x5"), "--object", "memory:///"]);
        assert_healed(&report, 0);
        assert!(report["injected"][kind].as_u64() > Some(0), "{kind} in {report}");
        assert!(report["token_hit_rate"].as_f64() > Some(0.0), "{report}");
        place.assert_clean(&["trace.jsonl"]);
    }
}

#[test]
fn a_full_disk_is_used_when_there_is_room_again() {
    let place = Place::new();
    let report = replay(&place, &["disk.write:enospc@0s+1h"]);
    assert_healed(&report, 0);
    assert!(report["injected"]["enospc"].as_u64() > Some(0), "{report}");
}

#[test]
fn a_store_that_failed_or_truncated_answers_is_used_again() {
    for kind in ["500", "503", "403", "short", "corrupt", "delay"] {
        let place = Place::new();
        let objects = place.url("objects");
        let report = replay(&place, &[&format!("object:{kind}@0s+1h x3"), "--object", &objects]);
        assert_healed(&report, 0);
        assert!(report["injected"][kind].as_u64() > Some(0), "{kind} in {report}");
    }
}

#[test]
fn a_disk_that_hangs_below_the_time_out_costs_nothing() {
    let place = Place::new();
    let more = ["disk:hang@0s+1s", "--speed", "20", "--concurrency", "4"];
    // On a busy machine 400 ms may pass without a hang.
    let report = replay_within(60_000, &place, &more);
    assert_healed(&report, 0);
    assert!(report["injected"]["hang"].as_u64() > Some(0), "{report}");
    assert_eq!((&report["failed_loads"], &report["failed_saves"]), (&0.into(), &0.into()));
}

#[test]
fn only_a_copy_that_never_completes_is_finally_overdue() {
    let place = Place::new();
    let report = replay(&place, &["disk.write:never@0s+1h x2"]);
    assert_healed(&report, 2);
    assert_eq!(report["injected"]["never"], 2);
}

#[test]
fn a_clock_that_jumps_either_way_disturbs_nobody() {
    let place = Place::new();
    let report =
        replay(&place, &["clock:jump@10ms+5h", "--fault", "clock:back@50ms+3h", "--speed", "60"]);
    assert_healed(&report, 0);
    assert_eq!((&report["injected"]["jump"], &report["injected"]["back"]), (&1.into(), &1.into()));
}

#[test]
fn a_seed_lets_many_things_go_wrong_at_once() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 120, 12);
    let mut command =
        place.command(&["replay", trace.to_str().expect("UTF-8"), "--chaos", "5", "--speed", "8"]);
    command.args(&SMALL[..9]).args(["--object", "memory:///"]).env("RUST_LOG", "off");
    let report = json(&command.output().expect("the binary starts"));
    assert_eq!(report["seed"], 5);
    assert!(report["injected"].as_object().map(serde_json::Map::len) > Some(2), "{report}");
    assert_healed(&report, report["injected"]["never"].as_u64().unwrap_or_default());
}

#[test]
fn requests_begin_when_their_timestamps_say() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 10, 2);
    let args = ["replay", trace.to_str().expect("UTF-8"), "--json", "--speed", "9"];
    let report = json(&place.run(&args));
    // The last of ten comes 900 ms after the first.
    assert!(report["seconds"].as_f64() >= Some(0.1), "{report}");
    assert!(report.get("injected").is_none(), "nothing was to go wrong: {report}");
}

#[test]
fn unknown_faults_are_refused_with_what_is_valid() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 10, 2);
    for (option, value, remedy) in [
        ("--fault", "floppy:hang@1s+1s", "memory, disk, disk0, disk1, disk2, object, clock"),
        ("--fault", "disk:hang", "disk:hang@100s+20s"),
        ("--speed", "0", "10 ten times as fast"),
    ] {
        let output = place.run(&["replay", trace.to_str().expect("UTF-8"), option, value]);
        assert_eq!(output.status.code(), Some(2));
        let stderr = crate::text(&output.stderr);
        assert!(stderr.contains(remedy), "{stderr}");
    }
}
