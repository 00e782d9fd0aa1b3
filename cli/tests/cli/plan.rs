//! `kvbm plan`: sizes, tiers, what-if, the report, and what it refuses.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::{Place, assert_fails, json, text};

/// 25 turns of 8 chats: turn t has 8 + 4 t blocks, 448 distinct ones a chat.
fn place() -> Place {
    let place = Place::new();
    place.trace("trace.jsonl", 200, 8);
    place
}

fn plan(options: &str) -> Value {
    let options: Vec<_> = options.split_whitespace().collect();
    json(&place().run(&[&["plan", "trace.jsonl", "--json"], options.as_slice()].concat()))
}

fn notes(plan: &Value) -> String {
    plan["notes"].to_string()
}

#[test]
fn sizes_are_blocks_once_the_model_is_known() {
    let by_size = plan("--capacity 8GB,500 --model llama-3-8b --eviction lru");
    // 2 × 32 layers × 8 heads × 128 numbers × 2 bytes × 512 tokens = 67,108,864 bytes.
    assert_eq!(by_size["model"]["bytes_per_block"], 67_108_864);
    let capacities = by_size["rows"].as_array().expect("rows").iter().map(|row| &row["capacity"]);
    assert_eq!(capacities.collect::<Vec<_>>(), [&Value::from(119), &Value::from(500)]);
    assert_eq!(by_size["rows"][1]["bytes"], 33_554_432_000_u64);
    let by_shape = plan("--capacity 8GB --layers 32 --kv-heads 8 --head-dim 128 --eviction lru");
    assert_eq!(by_shape["rows"][0]["token_hit_rate"], by_size["rows"][0]["token_hit_rate"]);
}

#[test]
fn tiers_tell_where_hits_come_from_and_what_is_written() {
    let plan = plan(
        "--tiers disk=4000,device=50,host=300 --admission write_through --eviction belady,lru",
    );
    let tiers = &plan["tiers"][0];
    assert_eq!(
        (tiers["admission"].as_str(), tiers["eviction"].as_str()),
        (Some("write_through"), Some("lru"))
    );
    let steps = tiers["tiers"].as_array().expect("tiers");
    let names: Vec<_> = steps.iter().map(|step| step["tier"].as_str().expect("a name")).collect();
    assert_eq!(names, ["device", "host", "disk"]);
    let sum: f64 = steps.iter().map(|step| step["token_hit_rate"].as_f64().expect("a rate")).sum();
    assert!((sum - tiers["token_hit_rate"].as_f64().expect("a rate")).abs() < 1e-3, "{tiers}");
    // All that is new is written once: the disk holds everything.
    assert_eq!(
        steps[2]["blocks_written_per_request"],
        plan["blocks"].as_f64().expect("a number") / 200.0
    );
    assert!(tiers["disk"]["drive_writes_per_day"].as_f64() > Some(0.0));
    assert!(notes(&plan).contains("disk tier holds all"), "{plan}");
}

#[test]
fn what_if_says_what_more_would_bring() {
    let options = "--what-if --tiers device=50,host=300 --model llama-3-70b --capacity 100";
    let plan = plan(options);
    let what_if = &plan["what_if"];
    assert_eq!(what_if["costs"]["prefill_tokens_per_second"], 8000.0);
    let host = &what_if["tiers"][1];
    assert_eq!(host["tier"], "host");
    let points = host["points"].as_array().expect("points");
    let most = points.last().expect("a point");
    assert_eq!((&most["capacity"], &most["more_blocks"]), (&1200.into(), &900.into()));
    assert!(most["token_hit_rate"].as_f64() > what_if["token_hit_rate"].as_f64(), "{what_if}");
    assert!(
        most["mean_ttft_seconds"].as_f64() < what_if["mean_ttft_seconds"].as_f64(),
        "{what_if}"
    );
    assert!(what_if["microseconds_per_request"].as_f64() > Some(0.0));
    let place = place();
    let page = text(
        &place
            .run(&[&["plan", "trace.jsonl"], &options.split(' ').collect::<Vec<_>>()[..]].concat())
            .stdout,
    );
    for part in ["What if the host tier", "+151 GB", "µs a request", "mean TTFT"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= 110), "{page}");
}

#[test]
fn a_sample_is_said_and_close() {
    let (all, some) = (
        plan("--capacity 1000 --eviction lru"),
        plan("--capacity 1000 --eviction lru --sample 0.25"),
    );
    assert_eq!((&all["sample_stride"], &some["sample_stride"]), (&1.into(), &4.into()));
    let rate = |plan: &Value| plan["rows"][0]["token_hit_rate"].as_f64().expect("a rate");
    assert!((rate(&all) - rate(&some)).abs() < 0.05, "{} {}", rate(&all), rate(&some));
    assert!(notes(&some).contains("one block in 4"), "{some}");
}

#[test]
fn the_report_is_one_file() {
    let place = place();
    let output = place.run(&[
        "plan",
        "trace.jsonl",
        "--capacity",
        "50,500",
        "--what-if",
        "--html",
        "report.html",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = fs::read_to_string(place.path("report.html")).expect("the report is there");
    assert!(page.contains("</html>") && page.matches("<svg").count() >= 5, "{page}");
    let mode = fs::metadata(place.path("report.html")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    place.assert_clean(&["report.html", "trace.jsonl"]);
}

#[test]
fn odd_input_is_noted() {
    let ample = plan("--capacity 1000000,0 --eviction lru");
    assert!(
        notes(&ample).contains("hold everything") && notes(&ample).contains("0 blocks"),
        "{ample}"
    );
    let place = Place::new();
    let line = |time: u32| {
        format!(r#"{{"timestamp":{time},"input_length":512,"output_length":1,"hash_ids":[7]}}"#)
    };
    fs::write(place.path("late.jsonl"), format!("{}\n{}\n", line(9), line(3)))
        .expect("the trace is written");
    let late = json(&place.run(&[
        "plan",
        "late.jsonl",
        "--json",
        "--tiers",
        "device=0,host=1",
        "--what-if",
    ]));
    assert!(notes(&late).contains("1 requests carry a timestamp"), "{late}");
    assert!(
        notes(&late).contains("device tier has 0 blocks") && notes(&late).contains("--model"),
        "{late}"
    );
}

#[test]
fn what_cannot_be_is_refused() {
    let place = place();
    for (options, parts) in [
        ("--capacity 64GB", ["64GB", "--model"]),
        ("--tiers host=64GB", ["64GB", "--model"]),
        ("--tiers host=5,host=6", ["host", "twice"]),
        ("--dtype fp8", ["--dtype", "--model"]),
        ("--layers 5", ["--kv-heads", "--mla-latent-dim"]),
        ("--model llama-3-8b --window-layers 33 --window 128", ["33", "32 layers"]),
        ("--html nowhere/report.html", ["nowhere/report.html", "--html"]),
    ] {
        let options: Vec<_> = options.split(' ').collect();
        assert_fails(
            &place.run(&[&["plan", "trace.jsonl"], options.as_slice()].concat()),
            2,
            &parts,
        );
    }
    // These are found by the parser of the command line, which has its own way to say so.
    for (options, part) in [
        ("--model llama-9", "possible values: deepseek-v2, deepseek-v3"),
        ("--eviction mru", "possible values: hazard, lru"),
        ("--admission never", "possible values: write_through"),
        ("--tiers ssd=5", "valid: device, host, disk, object"),
        ("--tiers host", "host=5000"),
        ("--capacity many", "64GB"),
        ("--capacity 5000000000", "more than"),
        ("--sample 0", "above 0"),
        ("--sample 1.5", "at most 1"),
        ("--prefill-rate 0", "above 0"),
        ("--disk-bandwidth 0GB", "above 0"),
        ("--window 128", "--window-layers"),
        ("--tensor-parallel 0", "0 is not in"),
    ] {
        let options: Vec<_> = options.split(' ').collect();
        let output = place.run(&[&["plan", "trace.jsonl"], options.as_slice()].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {stderr}");
        assert!(stderr.contains(part), "{options:?}: {stderr}");
    }
    place.assert_clean(&["trace.jsonl"]);
}
