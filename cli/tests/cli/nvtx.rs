//! Ranges for a profiler, taken by a library that stands in for NVIDIA's.

use std::fs;
use std::process::Command;

use crate::{Place, text};

/// Writes down what it is told, as `start NUMBER NAME` and `end NUMBER`.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <stdatomic.h>
static atomic_ulong next = 1;
static void note(const char *what, unsigned long id, const char *name) {
    FILE *log = fopen(getenv("NVTX_LOG"), "a");
    fprintf(log, "%s %lu %s\n", what, id, name);
    fclose(log);
}
unsigned long nvtxRangeStartA(const char *name) {
    unsigned long id = next++;
    note("start", id, name);
    return id;
}
void nvtxRangeEnd(unsigned long id) { note("end", id, ""); }
"#;

#[test]
fn each_transfer_is_a_range_that_ends() {
    let place = Place::new();
    fs::write(place.path("nvtx.c"), LIBRARY).expect("room");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o", "libnvtx3interop.so.1", "nvtx.c"])
        .current_dir(place.path(""))
        .status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: no C compiler");
        return;
    }
    place.trace("trace.jsonl", 20, 5);
    let mut command =
        place.command(&["replay", "trace.jsonl", "--host-blocks", "100", "--device-blocks", "40"]);
    command.env("DYN_KVBM_TRACES_NVTX", "true").env("LD_LIBRARY_PATH", place.path(""));
    let output = command.env("NVTX_LOG", place.path("log")).output().expect("the binary starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let log = fs::read_to_string(place.path("log")).expect("it was told");
    let ids = |what: &str| -> Vec<u64> {
        let lines = log.lines().filter_map(|line| line.strip_prefix(what));
        let mut ids: Vec<u64> = lines
            .map(|line| {
                line.trim().split(' ').next().and_then(|id| id.parse().ok()).expect("a number")
            })
            .collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids("start "), ids("end "), "each range ends once");
    for expected in [
        "kvbm load request=",
        "kvbm save request=",
        "kvbm copy class=save from=device to=host backend=memcpy blocks=",
    ] {
        assert!(
            log.contains(expected),
            "{expected}: {}",
            log.lines().take(20).collect::<Vec<_>>().join("\n")
        );
    }
}

#[test]
fn a_missing_library_is_named_with_how_to_get_it() {
    let place = Place::new();
    let output = place
        .command(&["config"])
        .env("DYN_KVBM_TRACES_NVTX", "true")
        .output()
        .expect("the binary starts");
    // Where NVTX is on the loader's path there is nothing to complain of.
    if !output.status.success() {
        let told = text(&output.stderr);
        assert!(told.contains("nvidia-nvtx") && told.contains("DYN_KVBM_TRACES_NVTX"), "{told}");
        assert_eq!(output.status.code(), Some(2));
    }
}
