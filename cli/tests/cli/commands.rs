//! The other commands, and the help.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::{Place, assert_fails, json, text};

#[test]
fn every_command_helps() {
    let place = Place::new();
    for command in ["demo", "replay", "plan", "config", "doctor", "bench"] {
        let help = place.run(&[command, "--help"]);
        assert!(help.status.success() && text(&help.stdout).contains("Usage: kvbm"), "{command}");
    }
    let overview = text(&place.run(&["--help"]).stdout);
    assert!(
        ["demo", "replay", "doctor", "DYN_KVBM_"].iter().all(|part| overview.contains(part)),
        "{overview}"
    );
    assert_eq!(place.run(&["--nonsense"]).status.code(), Some(2));
}

#[test]
fn plans_as_table_and_as_json() {
    let place = Place::new();
    place.trace("trace.jsonl", 40, 4);
    let args = ["plan", "trace.jsonl", "--capacity", "10,1000", "--eviction", "lru,belady"];
    let plan = json(&place.run(&[&args, ["--json"].as_slice()].concat()));
    let rows = plan["rows"].as_array().expect("rows");
    let names: Vec<_> =
        rows.iter().map(|row| (row["eviction"].as_str(), row["capacity"].as_u64())).collect();
    let expected = [("lru", 10), ("lru", 1000), ("belady", 10), ("belady", 1000)];
    assert_eq!(names, expected.map(|(name, capacity)| (Some(name), Some(capacity))));
    let table = text(&place.run(&args).stdout);
    let rate = rows[3]["token_hit_rate"].as_f64().expect("a number") * 100.0;
    assert!(table.contains("belady") && table.contains(&format!("{rate:.2} %")), "{table}");
}

#[test]
fn settings_are_shown_with_their_origin_and_without_secrets() {
    let place = Place::new();
    std::fs::write(place.path("kvbm.toml"), "block_bytes = \"1MiB\"\n")
        .expect("the file is written");
    let run = |args: &[&str]| {
        let mut command = place.command(&[&["config", "--config", "kvbm.toml"], args].concat());
        command
            .env("DYN_KVBM_OBJECT_ACCESS_KEY", "abc")
            .env("DYN_KVBM_OBJECT_SECRET_KEY", "hunter2");
        command.env("DYN_KVBM_ENABLE_RECORD", "on").output().expect("the binary starts")
    };
    let shown = json(&run(&["--json"]));
    let row = |key: &str| {
        let rows = shown["settings"].as_array().expect("rows").iter();
        rows.into_iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("{key} in {shown}"))
    };
    assert_eq!(
        (&row("block_bytes")["value"], &row("block_bytes")["origin"]),
        (&"1MiB".into(), &"kvbm.toml:1".into())
    );
    assert_eq!(row("object.secret_key")["value"], "(set)");
    assert_eq!(row("eviction")["origin"], "default");
    assert_eq!(shown["accepted"].as_array().map(Vec::len), Some(1), "{shown}");
    let table = text(&run(&[]).stdout);
    assert!(table.contains("kvbm.toml:1") && table.contains("accepted, no effect yet"), "{table}");
    assert!(!table.contains("hunter2") && !shown.to_string().contains("hunter2"));
}

#[test]
fn the_doctor_tries_each_tier_and_leaves_nothing() {
    let place = Place::new();
    let examine = |more: &[&str]| {
        let mut command = place.command(&[&["doctor"], more].concat());
        command.env("DYN_KVBM_BLOCK_BYTES", "64KiB").env("DYN_KVBM_CPU_CACHE_GB", "0.1");
        command.env("DYN_KVBM_PEERS", "true").env("DYN_KVBM_PEERS_PORT", "0");
        command
            .env("DYN_KVBM_DISK_CACHE_GB", "0.1")
            .env("DYN_KVBM_DISK_CACHE_DIR", place.path("tmp"));
        command
            .env("DYN_KVBM_OBJECT_URL", "file:///proc/nowhere")
            .output()
            .expect("the binary starts")
    };
    let found = json(&examine(&["--json"]));
    let state = |section: &str, name: &str| {
        let checks = found[section].as_array().expect("checks").iter();
        checks.into_iter().find(|check| check["name"] == name).map(|check| check["state"].clone())
    };
    assert_eq!(state("tiers", "host"), Some("ready".into()));
    assert_eq!(state("tiers", "disk"), Some("ready".into()));
    assert_eq!(state("tiers", "object"), Some("unavailable".into()));
    assert_eq!(
        state("routes", "host → disk"),
        Some("ready".into()),
        "what works is routed: {found}"
    );
    assert_eq!(state("machine", "kernel"), Some("ready".into()));
    assert_eq!(state("peers", "address 127.0.0.1:0"), Some("ready".into()));
    let page = text(&examine(&[]).stdout);
    assert!(page.contains("io_uring") && page.contains("unavailable: "), "{page}");
    place.assert_clean(&[]);
}

#[test]
fn a_tier_of_nothing_is_none_and_says_so() {
    let place = Place::new();
    let mut command = place.command(&["doctor", "--json"]);
    command.env("DYN_KVBM_OBJECT_URL", place.url("objects")).env("DYN_KVBM_OBJECT_CACHE_GB", "0");
    let output = command.output().expect("the binary starts");
    assert_eq!(json(&output)["tiers"].as_array().map(Vec::len), Some(0));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("no object tier, since object.capacity is 0 (DYN_KVBM_OBJECT_CACHE_GB)"),
        "{stderr}"
    );
    place.assert_clean(&[]);
}

/// What chooses among the blocks of the host tier does not make a disk tier fail that is tried
/// without one.
#[test]
fn the_doctor_tries_a_disk_with_a_rule() {
    let place = Place::new();
    let mut command = place.command(&["doctor", "--json"]);
    command.env("DYN_KVBM_BLOCK_BYTES", "64KiB").env("DYN_KVBM_CPU_CACHE_GB", "0.1");
    command.env("DYN_KVBM_DISK_CACHE_GB", "0.1").env("DYN_KVBM_DISK_CACHE_DIR", place.path("tmp"));
    command.env("DYN_KVBM_DISK_ADMISSION", "selective").env("DYN_KVBM_DISK_WRITE_BUDGET", "1dwpd");
    let found = json(&command.output().expect("the binary starts"));
    let disk = found["tiers"].as_array().expect("tiers").iter().find(|tier| tier["name"] == "disk");
    assert_eq!(disk.map(|tier| &tier["state"]), Some(&"ready".into()), "{found}");
    place.assert_clean(&[]);
}

#[test]
fn the_demo_tells_its_story() {
    let place = Place::new();
    let output = place.run(&["demo"]);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(!stderr.contains("NIXL"), "who sees it first knows nothing of that: {stderr}");
    for part in [
        "device",
        "host",
        "disk",
        "object",
        "8,000 prompt tokens/s",
        "0 mismatches",
        "kvbm-demo.html",
    ] {
        assert!(stdout.contains(part), "{part} in {stdout}");
    }
    let page = std::fs::read_to_string(place.path("kvbm-demo.html")).expect("the report is there");
    assert!(page.contains("</html>") && page.contains("<svg"));
    place.assert_clean(&["kvbm-demo.html"]);
}

#[test]
fn the_table_is_timed() {
    let place = Place::new();
    let report =
        json(&place.run(&["bench", "table", "--blocks", "20000", "--samples", "3", "--json"]));
    for key in ["match_8192_us", "match_288_us", "cycle_ns_per_block", "bytes_per_block"] {
        assert!(report[key].as_f64() > Some(0.0), "{key} in {report}");
    }
}

#[test]
fn transfers_are_timed_from_another_process_and_another_machine() {
    let place = Place::new();
    let bench = ["bench", "transfer", "--working-set", "1MiB", "--rounds", "1", "--json"];
    let with_secret = |more: &[&str]| {
        let mut command = place.command(&[&bench[..], more].concat());
        command
            .env("DYN_KVBM_PEERS_SECRET", "the-secret-of-this-test")
            .env("DYN_KVBM_PEERS_PORT", "0");
        command
    };
    let mut holder = with_secret(&["--size", "16KiB", "--hold"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let said = BufReader::new(holder.stdout.take().expect("it was asked for"));
    // UCX may log before.
    let mut lines = said.lines().map_while(Result::ok);
    let address = lines
        .find_map(|line| Some(line.split_once("blocks are held at ")?.1.to_owned()))
        .expect("it says where it is");
    let connect = ["--connect", &address, "--size", "16KiB"];
    let report = json(&with_secret(&connect).output().expect("the binary starts"));
    let row = &report["rows"][0];
    // By NIXL where it is installed.
    assert!(["tcp", "nixl"].contains(&row["way"].as_str().unwrap_or_default()), "{row}");
    assert_eq!(row["size"], 16_384);
    assert!(row["prompts"][1]["us"]["p99"].as_f64() > row["prompts"][0]["us"]["p50"].as_f64());
    // Without the secret, or with blocks of another size, nothing comes.
    assert_fails(&place.run(&[&bench[..], &connect].concat()), 2, &["secret"]);
    let other = with_secret(&["--connect", &address]).output().expect("the binary starts");
    assert_fails(&other, 2, &["1048576", "16384"]);
    drop(holder.stdin.take());
    assert!(holder.wait().expect("it ends").success());

    let local = place.run(&[&bench[..], &["--size", "16KiB"]].concat());
    let rows = json(&local)["rows"].as_array().cloned().unwrap_or_default();
    let ways: Vec<_> = rows.iter().map(|row| row["way"].as_str()).collect();
    // NIXL is between them, where it is installed.
    assert_eq!((ways.first(), ways.last()), (Some(&Some("shared_memory")), Some(&Some("tcp"))));
    place.assert_clean(&[]);
}
