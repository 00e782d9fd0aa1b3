//! Replays that succeed.

use serde_json::Value;

use crate::{Place, json, names};

const SMALL: [&str; 8] = [
    "--device-blocks",
    "60",
    "--host-blocks",
    "120",
    "--disk-blocks",
    "300",
    "--block-bytes",
    "16KiB",
];

fn replay(place: &Place, more: &[&str]) -> Value {
    let trace = place.trace("trace.jsonl", 120, 12);
    let args =
        [&["replay", trace.to_str().expect("UTF-8"), "--json"], SMALL.as_slice(), more].concat();
    json(&place.run(&args))
}

/// Nothing wrong, nothing lost, and every hit checked.
#[track_caller]
fn assert_sound(report: &Value) {
    for key in ["mismatches", "failed_loads", "failed_saves", "unsaved_blocks"] {
        assert_eq!(report[key], 0, "{key} in {report}");
    }
    assert_eq!(report["drained"], true);
    assert_eq!(report["drift"].as_array().map(Vec::len), Some(0), "{report}");
    for (tier, slots) in report["slots"].as_object().expect("slots by tier") {
        assert_eq!(
            (&slots["lost"], &slots["filling"]),
            (&0.into(), &0.into()),
            "{tier} in {report}"
        );
    }
    let hits: u64 =
        report["hit_tokens"].as_object().expect("by tier").values().filter_map(Value::as_u64).sum();
    assert_eq!(report["blocks_verified"].as_u64(), Some(hits / 512));
    let rate = hits as f64 / report["prompt_tokens"].as_f64().expect("a number");
    assert!((report["token_hit_rate"].as_f64().expect("a number") - rate).abs() < 1e-4);
}

#[test]
fn all_four_tiers_give_back_what_they_were_given() {
    let place = Place::new();
    let report = replay(&place, &["--object", &place.url("objects")]);
    assert_sound(&report);
    assert_eq!(report["requests"], 120);
    assert!(
        report["token_hit_rate"].as_f64() > Some(0.8),
        "the last tier has room for all: {report}"
    );
    for tier in ["disk", "object"] {
        assert!(report["hit_tokens"][tier].as_u64() > Some(0), "{tier} in {report}");
    }
    for route in ["device_host", "host_device", "host_disk"] {
        assert!(report["bytes"][route].as_u64() > Some(0), "{route} in {report}");
    }
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn several_requests_at_a_time() {
    let place = Place::new();
    let report = replay(&place, &["--concurrency", "8", "--object", "memory:///"]);
    assert_sound(&report);
    assert_eq!(report["requests"], 120);
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn a_tier_without_a_size_is_absent() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 40, 12);
    let report =
        json(&place.run(&["replay", trace.to_str().expect("UTF-8"), "--json", "--requests", "20"]));
    assert_sound(&report);
    assert_eq!(report["requests"], 20);
    assert_eq!(
        report["slots"].as_object().expect("by tier").keys().collect::<Vec<_>>(),
        ["device"]
    );
    assert_eq!(report["slots"]["device"]["total"], 1_000);
}

#[test]
fn settings_and_options_combine() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 20, 4);
    let mut command =
        place.command(&["replay", trace.to_str().expect("UTF-8"), "--json", "--host-blocks", "70"]);
    command
        .env("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "50")
        .env("DYN_KVBM_BLOCK_BYTES", "12345");
    let report = json(&command.output().expect("the binary starts"));
    assert_sound(&report);
    assert_eq!(report["slots"]["host"]["total"], 70, "the option wins over the variable");
    let bytes = report["bytes"]["device_host"].as_u64().expect("saves");
    assert!(bytes > 0 && bytes.is_multiple_of(12_345), "{bytes}");
}

#[test]
fn kept_places_stay_and_are_used_again() {
    let place = Place::new();
    let (disk, objects) = (place.path("disk"), place.url("objects"));
    let keep = ["--keep", "--disk-dir", disk.to_str().expect("UTF-8"), "--object", &objects];
    for run in 0..2 {
        let report = replay(&place, &keep);
        assert_sound(&report);
        let found = report["recovered"][0]["blocks"].as_u64();
        assert_eq!(found > Some(0), run > 0, "the second run is warm: {report}");
        assert_eq!(names(&disk).len(), 2, "one slot file and its index");
        assert!(!names(&place.path("objects")).is_empty());
    }
    place.assert_clean(&["disk", "objects", "trace.jsonl"]);
}

#[test]
fn people_get_tables() {
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 10, 2);
    let mut command =
        place.command(&["replay", trace.to_str().expect("UTF-8"), "--host-blocks", "100"]);
    // Whatever this machine has of GPUs and NIXL, and without a word about what it lacks.
    command.env("DYN_KVBM_DEVICE_BACKEND", "emulated").env("DYN_KVBM_NIXL_BACKEND_UCX", "false");
    let output = command.output().expect("the binary starts");
    let stdout = crate::text(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", crate::text(&output.stderr));
    for part in ["device (emulated)", "host", "device → host", "0 mismatches"] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
}

#[test]
fn a_missing_gpu_is_an_error_with_a_remedy() {
    if kvbm::probe_gpu().cuda.is_ok() {
        return eprintln!("SKIPPED: there is a GPU here");
    }
    let place = Place::new();
    let trace = place.trace("trace.jsonl", 10, 2);
    for (variable, value, remedy) in [
        ("DYN_KVBM_DEVICE_BACKEND", "cuda", "install NVIDIA's driver"),
        ("DYN_KVBM_DISK_BACKEND", "gds", "disk.backend to auto"),
    ] {
        let arguments = ["replay", trace.to_str().expect("UTF-8"), "--disk-blocks", "100"];
        let output =
            place.command(&arguments).env(variable, value).output().expect("the binary starts");
        crate::assert_fails(&output, 2, &[remedy]);
    }
}
