//! Ctrl-C.

use std::fs;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Place, assert_fails, names};

/// Starts a command, interrupts it once it has made something below `tmp`, and checks how it ends.
fn interrupt(place: &Place, args: &[&str]) {
    let mut command = place.command(args);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    wait_until(&mut child, || !names(&place.path("tmp")).is_empty());
    sleep(Duration::from_millis(150));
    send(&child, Signal::INT);
    assert_fails(&child.wait_with_output().expect("it ends"), 130, &["interrupted"]);
}

pub(crate) fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the process is there");
}

pub(crate) fn wait_until(child: &mut Child, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < deadline, "it never came to that");
        assert!(child.try_wait().expect("it can be asked").is_none(), "it ended too early");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_replay_removes_what_it_made() {
    let place = Place::new();
    place.trace("trace.jsonl", 100_000, 50_000);
    fs::create_dir(place.path("objects")).expect("a directory");
    let tiers = ["--device-blocks", "100", "--host-blocks", "200", "--disk-blocks", "400"];
    let object = ["--object", &place.url("objects")];
    interrupt(&place, &[&["replay", "trace.jsonl", "--json"], tiers.as_slice(), &object].concat());
    assert!(names(&place.path("objects")).is_empty());
    place.assert_clean(&["objects", "trace.jsonl"]);
}

#[test]
fn a_demo_removes_what_it_made() {
    let place = Place::new();
    interrupt(&place, &["demo"]);
    place.assert_clean(&[]);
}
