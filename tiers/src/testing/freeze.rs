//! Processes that hang: they are there, and do nothing.

use std::fs;
use std::process::Command;
use std::time::Duration;

/// Stops a process, and waits until every thread of it has stopped: on a busy machine some go on
/// for a while.
///
/// # Panics
/// If it is gone.
pub fn freeze(process: u32) {
    let status = Command::new("kill").args(["-STOP", &process.to_string()]).status();
    assert!(status.expect("there is kill").success(), "it is gone");
    while !has_stopped(process) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn has_stopped(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("it is there");
    threads.map(|thread| thread.expect("a thread").path().join("stat")).all(|path| {
        let stat = fs::read_to_string(path).unwrap_or_default();
        // Behind the name, which may hold anything.
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    })
}
