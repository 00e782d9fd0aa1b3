//! The `kvbm` binary as a user meets it: what it prints, how it ends, what it leaves behind.

mod bad_input;
mod chaos;
mod commands;
mod docs;
mod forget;
mod fsck;
mod fsck_bucket;
mod interrupt;
#[cfg(feature = "nvtx")]
mod nvtx;
mod plan;
mod replay;
mod serve;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// A place of its own for one test: the working directory and the directory for temporary files.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = tempfile::tempdir().expect("a directory for the test");
        fs::create_dir(place.path().join("tmp")).expect("a directory for temporary files");
        Self(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn url(&self, name: &str) -> String {
        format!("file://{}", self.path(name).display())
    }

    /// `kvbm` with these arguments.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_kvbm"));
        command.args(args);
        command
    }

    /// A program with none of the settings that this process was started with.
    fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DYN_KVBM_") {
                command.env_remove(name);
            }
        }
        command.env("TMPDIR", self.path("tmp")).env_remove("RUST_LOG").current_dir(self.0.path());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the binary starts")
    }

    /// Writes a trace of `requests` turns of `sessions` chats. Turn t of a session has 8 + 4 t
    /// blocks.
    fn trace(&self, name: &str, requests: u64, sessions: u64) -> PathBuf {
        let mut text = String::new();
        for request in 0..requests {
            let (session, turn) = (request % sessions, request / sessions);
            let ids: Vec<_> =
                (0..8 + 4 * turn).map(|block| (session << 32 | block).to_string()).collect();
            let _ = writeln!(
                text,
                r#"{{"timestamp":{},"input_length":{},"output_length":9,"hash_ids":[{}]}}"#,
                request * 100,
                ids.len() * 512,
                ids.join(",")
            );
        }
        let path = self.path(name);
        fs::write(&path, text).expect("the trace is written");
        path
    }

    /// That nothing of ours is left but `kept`.
    #[track_caller]
    fn assert_clean(&self, kept: &[&str]) {
        assert_eq!(names(&self.path("tmp")), [""; 0], "temporary files");
        let left: Vec<_> = names(self.0.path()).into_iter().filter(|name| name != "tmp").collect();
        assert_eq!(left, kept, "the working directory");
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("the directory is there");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The one JSON object that a command printed.
#[track_caller]
fn json(output: &Output) -> Value {
    let stdout = text(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", text(&output.stderr));
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    serde_json::from_str(&stdout).expect("standard output is JSON")
}

/// That a command ended with `code`, printed no result, and said all of `parts` in one paragraph.
#[track_caller]
fn assert_fails(output: &Output, code: i32, parts: &[&str]) {
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stdout, "");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(stderr.lines().filter(|line| line.starts_with("kvbm: ")).count(), 1, "{stderr}");
    parts.iter().for_each(|part| assert!(stderr.contains(part), "`{part}` is not in: {stderr}"));
}
