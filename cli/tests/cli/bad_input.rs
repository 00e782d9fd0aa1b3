//! Input, settings and systems that are not as they should be: exit 2, and what to change.

use std::fs;
use std::net::TcpListener;

use crate::{Place, assert_fails, text};

const LINE: &str = r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[7]}"#;

#[test]
fn a_malformed_line_is_named() {
    let place = Place::new();
    let trace = place.path("bad.jsonl");
    fs::write(&trace, format!("{LINE}\n\n{{\"timestamp\":0}}\n")).expect("the trace is written");
    let trace = trace.to_str().expect("UTF-8");
    let object = place.url("objects");
    for command in
        [vec!["plan", trace], vec!["replay", trace, "--disk-blocks", "5", "--object", &object]]
    {
        assert_fails(&place.run(&command), 2, &["bad.jsonl:3: "]);
    }
    place.assert_clean(&["bad.jsonl"]);
}

#[test]
fn a_trace_that_is_missing_or_empty() {
    let place = Place::new();
    fs::write(place.path("empty"), "").expect("the trace is written");
    for command in ["plan", "replay"] {
        assert_fails(&place.run(&[command, "nowhere.jsonl"]), 2, &["nowhere.jsonl"]);
        assert_fails(&place.run(&[command, "empty"]), 2, &["empty: it holds no request"]);
    }
}

#[test]
fn an_unknown_policy_lists_the_valid_ones() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    for (command, names) in [("replay", "mru"), ("replay", "belady"), ("plan", "lru,mru")] {
        let output = place.run(&[command, "trace.jsonl", "--eviction", names]);
        let stderr = crate::text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("[possible values: hazard, lru, fifo"), "{stderr}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_names_the_setting() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let disk = ["--disk-blocks", "9", "--disk-dir", "trace.jsonl/below"];
    let output = place.run(&[&["replay", "trace.jsonl"], disk.as_slice()].concat());
    assert_fails(&output, 2, &["trace.jsonl/below", "--disk-dir", "DYN_KVBM_DISK_CACHE_DIR"]);
    let kept = place.run(&[&["replay", "trace.jsonl", "--keep"], disk.as_slice()].concat());
    assert_fails(&kept, 2, &["DYN_KVBM_DISK_CACHE_DIR"]);
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn a_store_that_is_not_there_names_the_setting() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let mut command = place.command(&["replay", "trace.jsonl", "--object", "s3://bucket/prefix"]);
    command.env("DYN_KVBM_OBJECT_ENDPOINT", "http://127.0.0.1:9");
    command
        .env("DYN_KVBM_OBJECT_ACCESS_KEY", "an-access-key")
        .env("DYN_KVBM_OBJECT_SECRET_KEY", "hunter2");
    let output = command.output().expect("the binary starts");
    assert_fails(
        &output,
        2,
        &["s3://bucket/prefix", "DYN_KVBM_OBJECT_URL", "DYN_KVBM_OBJECT_ENDPOINT"],
    );
    let stderr = crate::text(&output.stderr);
    assert!(!stderr.contains("hunter2") && !stderr.contains("an-access-key"), "{stderr}");
    for url in ["nonsense", "ftp://host/x", "file://relative/x"] {
        assert_fails(&place.run(&["replay", "trace.jsonl", "--object", url]), 2, &["object.url"]);
    }
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn credentials_in_a_url_are_printed_by_no_command() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let commands: [&[&str]; 5] = [
        &["config"],
        &["config", "--json"],
        &["doctor", "--json"],
        &["replay", "trace.jsonl", "-vv"],
        &["demo", "-vv"],
    ];
    for url in ["s3://id:hunter2@bucket", "s3://id:hunter2", "s3://bucket/id:hunter2", "id:hunter2"]
    {
        for args in commands {
            for variable in ["DYN_KVBM_OBJECT_URL", "DYN_KVBM_OBJECT_ENDPOINT"] {
                let mut command = place.command(args);
                let output = command
                    .env(variable, url)
                    .env("RUST_LOG", "trace")
                    .output()
                    .expect("it starts");
                let shown = [text(&output.stdout), text(&output.stderr)].concat();
                assert!(!shown.contains("hunter2"), "{args:?} with {variable}={url}: {shown}");
                assert_eq!(
                    output.status.code(),
                    Some(2),
                    "{args:?} with {variable}={url}: {shown}"
                );
            }
        }
        let output = place.run(&["replay", "trace.jsonl", "-vv", "--object", url]);
        assert_fails(&output, 2, &["object.url"]);
        assert!(!text(&output.stderr).contains("hunter2"), "{}", text(&output.stderr));
    }
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn sizes_that_do_not_fit() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let sizes = [("--host-blocks", "host.capacity"), ("--disk-blocks", "disk.")];
    for (option, setting) in sizes {
        assert_fails(&place.run(&["replay", "trace.jsonl", option, "1000000000"]), 2, &[setting]);
    }
    place.assert_clean(&["trace.jsonl"]);
}

#[test]
fn every_command_refuses_settings_that_are_wrong() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    fs::write(place.path("bad.toml"), "[host]\ncapacity = \"lots\"\n")
        .expect("the file is written");
    let commands: [&[&str]; 6] = [
        &["demo"],
        &["replay", "trace.jsonl"],
        &["plan", "trace.jsonl"],
        &["config"],
        &["doctor"],
        &["bench", "table", "--blocks", "1024"],
    ];
    for command in commands {
        let output = place
            .command(command)
            .env("DYN_KVBM_CPU_CACHE", "1")
            .output()
            .expect("the binary starts");
        assert_fails(&output, 2, &["DYN_KVBM_CPU_CACHE ", "DYN_KVBM_CPU_CACHE_GB"]);
        let output = place.run(&[command, &["--config", "bad.toml"]].concat());
        assert_fails(&output, 2, &["bad.toml:2", "host.capacity"]);
    }
    place.assert_clean(&["bad.toml", "trace.jsonl"]);
}

#[test]
fn an_address_in_use() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    assert_fails(
        &place.run(&["replay", "trace.jsonl", &format!("--serve={address}")]),
        2,
        &[&address, "DYN_KVBM_METRICS_PORT"],
    );
}

const NIXL: &str = "DYN_KVBM_NIXL_BACKEND_";

#[test]
fn nixl_toggles_are_checked_by_every_command() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let bad = [
        ("POSIX", "maybe", "true, 1, on, yes, false, 0, off, no"),
        ("POSIX", "", "true, 1, on, yes, false, 0, off, no"),
        ("NOSUCH", "1", "UCX, "),
        ("NO_SUCH", "false", "GDS_MT, "),
    ];
    for (name, value, listed) in bad {
        let variable = format!("{NIXL}{name}");
        for command in
            [&["doctor"][..], &["config"], &["plan", "trace.jsonl"], &["replay", "trace.jsonl"]]
        {
            let output =
                place.command(command).env(&variable, value).output().expect("the binary starts");
            assert_fails(&output, 2, &[&variable, listed]);
        }
    }
}

/// A command whose NIXL is at a place where nothing is.
fn without_nixl(place: &Place, args: &[&str]) -> std::process::Command {
    let mut command = place.command(args);
    command.env("DYN_KVBM_NIXL_LIBRARY", "/nowhere/libnixl_capi.so");
    command
}

#[test]
fn a_missing_plugin_that_was_requested_stops_all_but_doctor() {
    let place = Place::new();
    place.trace("trace.jsonl", 1, 1);
    let run = |args: &[&str]| {
        let mut command = without_nixl(&place, args);
        command.env(format!("{NIXL}POSIX"), "on").env(format!("{NIXL}UCX"), "no");
        command.output().expect("the binary starts")
    };
    let replayed = run(&["replay", "trace.jsonl", "--host-blocks", "4"]);
    assert_fails(&replayed, 2, &["POSIX", "/nowhere", "pip install nixl-cu12"]);
    let examined = crate::json(&run(&["doctor", "--json"]));
    let state = |name: &str| {
        let checks = examined["nixl"].as_array().expect("checks").iter();
        let check = checks.into_iter().find(|check| check["name"] == name);
        check.unwrap_or_else(|| panic!("{name} in {examined}"))
    };
    assert_eq!(state("POSIX")["state"], "unavailable");
    assert!(state("POSIX")["detail"].as_str().expect("text").contains("pip install"));
    assert_eq!(
        (&state("UCX")["state"], &state("UCX")["detail"]),
        (&"disabled".into(), &format!("by {NIXL}UCX").into())
    );
}

#[test]
fn choosing_nixl_needs_its_plugin() {
    let place = Place::new();
    for (variable, plugin) in
        [("DYN_KVBM_DISK_BACKEND", "POSIX"), ("DYN_KVBM_OBJECT_BACKEND", "OBJ")]
    {
        let output =
            place.command(&["config"]).env(variable, "nixl").output().expect("the binary starts");
        assert_fails(&output, 2, &[variable, &format!("{NIXL}{plugin}=true")]);
    }
}
