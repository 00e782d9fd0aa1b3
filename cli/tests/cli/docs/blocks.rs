//! What pages show is executed, taken or compiled, or says why not.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Command, Output};

use super::markdown::{Block, pages, root};
use crate::{Place, text};

/// What is to be done with a block.
#[derive(Debug, PartialEq, Eq)]
enum Rule<'a> {
    Run,
    Check,
    By(&'a str),
    From(&'a str),
    Nothing,
}

/// Why a block's first line is none, if it is not.
fn rule(block: &Block) -> Result<Rule<'_>, String> {
    let (word, rest) = block.rule.split_once(' ').unwrap_or((&block.rule, ""));
    let reason = |rule| if rest.len() < 8 { Err("say why not".to_owned()) } else { Ok(rule) };
    match (block.language.as_str(), word) {
        ("text", "") => Ok(Rule::Nothing),
        ("sh" | "toml" | "json", "run") if rest.is_empty() => Ok(Rule::Run),
        ("sh", "check:") => reason(Rule::Check),
        ("sh" | "json" | "python" | "promql", "by") if !rest.is_empty() => Ok(Rule::By(rest)),
        ("rust,ignore", "from") if !rest.is_empty() => Ok(Rule::From(rest)),
        ("sh" | "toml", "skip:") => reason(Rule::Nothing),
        (language, rule) => {
            Err(format!("`{language} {rule}` says not what is done with the block"))
        }
    }
}

/// Blocks of a language that `keep` keeps by their rule.
fn blocks(language: &str, keep: impl Fn(&Rule<'_>) -> bool) -> Vec<(Block, Place)> {
    let all = pages().into_iter().flat_map(|page| page.blocks());
    let kept =
        all.filter(|block| block.language == language && rule(block).is_ok_and(|rule| keep(&rule)));
    kept.map(|block| (block, Place::new())).collect()
}

#[track_caller]
fn assert_ok(block: &Block, output: &Output) {
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {}\n{stdout}{stderr}", block.at, output.status);
}

#[test]
fn every_block_says_what_is_done_with_it() {
    let all: Vec<Block> = pages().into_iter().flat_map(|page| page.blocks()).collect();
    let wrong =
        all.iter().filter_map(|block| Some(format!("{}: {}", block.at, rule(block).err()?)));
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(all.len() > 50, "the pages are not where they were");
}

#[test]
fn a_block_that_says_nothing_is_seen() {
    let block = |language: &str, rule: &str| Block {
        at: String::new(),
        language: language.into(),
        rule: rule.into(),
        text: String::new(),
    };
    for (language, rule_) in
        [("", ""), ("sh", ""), ("sh", "skip:"), ("python", "run"), ("rust", "")]
    {
        assert!(rule(&block(language, rule_)).is_err(), "{language} {rule_}");
    }
    assert_eq!(rule(&block("sh", "run")), Ok(Rule::Run));
    assert_eq!(rule(&block("sh", "check: it takes an hour")), Ok(Rule::Check));
}

const KVBM: &str = env!("CARGO_BIN_EXE_kvbm");

/// Commands find `kvbm`, some traces and some directories, and `cargo run --release --` is the
/// binary that is tested.
fn shell(place: &Place) -> Command {
    let shell = shell_with_cargo(
        place,
        "[ \"$1 $2 $3\" = 'run --release --' ] || exit 2\nshift 3\nexec kvbm \"$@\"\n",
    );
    symlink(KVBM, place.path("bin/kvbm")).expect("a link");
    // Compressed or not, traces are known by their first bytes.
    for name in
        ["TRACE", "trace.jsonl", "trace.jsonl.gz", "conversation.jsonl.gz", "agentic.jsonl.gz"]
    {
        place.trace(name, 60, 6);
    }
    shell
}

/// A shell to which `cargo` is what `cargo` says.
fn shell_with_cargo(place: &Place, cargo: &str) -> Command {
    let bin = place.path("bin");
    fs::create_dir(&bin).expect("a directory for programs");
    fs::write(bin.join("cargo"), format!("#!/bin/sh\n{cargo}")).expect("a program");
    fs::set_permissions(bin.join("cargo"), fs::Permissions::from_mode(0o755)).expect("its mode");
    let path = std::env::var("PATH").expect("a path");
    let mut shell = place.program("bash");
    shell.args(["-euo", "pipefail"]).env("PATH", format!("{}:{path}", bin.display()));
    shell
}

#[test]
fn commands_run() {
    let mut ran = 0;
    let is_alone = |(block, _): &(Block, Place)| !block.at.starts_with(QUICK_START);
    for (block, place) in blocks("sh", |rule| *rule == Rule::Run).into_iter().filter(is_alone) {
        let output = shell(&place).args(["-c", &block.text]).output().expect("bash starts");
        assert_ok(&block, &output);
        ran += 1;
    }
    assert!(ran > 0, "no page has a command to run");
}

/// Its commands are run one after the other.
const QUICK_START: &str = "docs/quick-start.md:";

/// What a newcomer is told to do works from the first command to the last, with nothing there but
/// what they made.
#[test]
fn the_quick_start_takes_nothing_for_granted() {
    let all = blocks("sh", |rule| *rule == Rule::Run);
    let steps: Vec<_> = all
        .iter()
        .map(|(block, _)| block)
        .filter(|block| block.at.starts_with(QUICK_START))
        .collect();
    let script: Vec<_> = steps.iter().map(|block| block.text.as_str()).collect();
    let place = Place::new();
    let cargo = format!(
        "[ \"$*\" = 'build --release' ] || exit 2\nmkdir -p target/release\nln -s {KVBM} target/release/kvbm\n"
    );
    let output = shell_with_cargo(&place, &cargo)
        .args(["-c", &script.join("\n")])
        .output()
        .expect("bash starts");
    assert_ok(steps[0], &output);
}

/// The `kvbm` command lines of a block: their arguments, whatever else stands there.
fn kvbm_lines(text: &str) -> Vec<Vec<String>> {
    let lines = text.replace("\\\n", " ");
    let words = lines
        .lines()
        .map(|line| shlex::split(line).unwrap_or_else(|| panic!("no shell reads: {line}")));
    words.filter_map(kvbm_arguments).collect()
}

fn kvbm_arguments(words: Vec<String>) -> Option<Vec<String>> {
    let is_assignment =
        |word: &String| word.split('=').next().is_some_and(is_variable) && word.contains('=');
    let words: Vec<String> = words.into_iter().skip_while(is_assignment).collect();
    let rest = if words.first()? == "kvbm" {
        &words[1..]
    } else if words.starts_with(&["cargo", "run", "--release", "--"].map(str::to_owned)) {
        &words[4..]
    } else {
        return None;
    };
    Some(
        rest.iter()
            .take_while(|word| !["|", "&", ";", "&&", ">"].contains(&word.as_str()))
            .cloned()
            .collect(),
    )
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|letter| letter == '_' || letter.is_ascii_uppercase())
}

/// With `--help` at its end a command line is read, and nothing is done.
#[test]
fn commands_that_are_not_run_are_taken() {
    let place = Place::new();
    let mut taken = 0;
    for (block, _) in blocks("sh", |rule| matches!(rule, Rule::Check | Rule::By(_))) {
        for mut line in kvbm_lines(&block.text) {
            line.push("--help".to_owned());
            let words: Vec<&str> = line.iter().map(String::as_str).collect();
            assert_ok(&block, &place.run(&words));
            taken += 1;
        }
    }
    assert!(taken > 0, "no page has a command to check");
}

#[test]
fn a_command_that_kvbm_does_not_take_is_seen() {
    let place = Place::new();
    for wrong in ["replay TRACE --nonsense 3", "bench nothing", "plan TRACE --capacity abc"] {
        let lines = kvbm_lines(&format!("A=1 kvbm {wrong}  # why\nls"));
        assert_eq!(lines.len(), 1, "{wrong}");
        let words: Vec<&str> = lines[0].iter().map(String::as_str).chain(["--help"]).collect();
        assert!(!place.run(&words).status.success(), "{wrong}");
    }
}

#[test]
fn settings_are_taken() {
    for (block, place) in blocks("toml", |rule| *rule == Rule::Run) {
        fs::write(place.path("kvbm.toml"), &block.text).expect("the settings are written");
        // An engine says how large its blocks are.
        let mut command = place.command(&["--config", "kvbm.toml", "config"]);
        assert_ok(
            &block,
            &command.env("DYN_KVBM_BLOCK_BYTES", "1MiB").output().expect("the binary starts"),
        );
    }
}

#[test]
fn json_is_json() {
    for (block, _) in blocks("json", |rule| *rule == Rule::Run) {
        let read = serde_json::from_str::<serde_json::Value>(&block.text);
        assert!(read.is_ok(), "{}: {read:?}", block.at);
    }
}

#[test]
fn whoever_executes_a_block_names_its_page() {
    for page in pages() {
        for block in page.blocks() {
            let Ok(Rule::By(file)) = rule(&block) else { continue };
            let source = fs::read_to_string(root().join(file));
            let source = source.unwrap_or_else(|error| panic!("{}: {file}: {error}", block.at));
            let name = page.path.display().to_string();
            assert!(source.contains(&name), "{}: {file} does not name {name}", block.at);
        }
    }
}

/// Code without white space, comments, and commas that depend on where lines end.
fn squeeze(code: &str) -> String {
    let mut squeezed = String::new();
    for line in code.lines() {
        let line =
            line.trim_start().trim_start_matches("///").trim_start_matches("//!").trim_start();
        let line = line.split_once("// ").map_or(line, |(code, _)| code);
        squeezed.extend(line.chars().filter(|letter| !letter.is_whitespace()));
    }
    [",)", ",}", ",]"].iter().fold(squeezed, |code, comma| code.replace(comma, &comma[1..]))
}

/// The first line of `code` that does not follow in `source` what stands before it.
fn first_missing<'a>(code: &'a str, source: &str) -> Option<&'a str> {
    let source = squeeze(source);
    let mut rest = source.as_str();
    code.lines().find(|line| {
        let line = squeeze(line);
        match rest.find(line.trim_end_matches(',')) {
            Some(at) => {
                rest = &rest[at + line.trim_end_matches(',').len()..];
                false
            }
            None => true,
        }
    })
}

#[test]
fn code_is_that_of_a_file_that_is_compiled() {
    let mut wrong = Vec::new();
    for (block, _) in blocks("rust,ignore", |_| true) {
        let Ok(Rule::From(file)) = rule(&block) else { continue };
        let source = fs::read_to_string(root().join(file));
        let source = source.unwrap_or_else(|error| panic!("{}: {file}: {error}", block.at));
        if let Some(line) = first_missing(&block.text, &source) {
            wrong.push(format!("{}: {file} lacks: {line}", block.at));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn code_that_is_in_no_file_is_seen() {
    let source = "    let a = f(\n        1, // one\n        2,\n    )?;\n    b(a);\n";
    assert_eq!(first_missing("let a = f(1, 2)?;   // why\nb(a);", source), None);
    assert_eq!(first_missing("b(a);\nlet a = f(1, 2)?;", source), Some("let a = f(1, 2)?;"));
    assert_eq!(first_missing("let a = f(1, 3)?;", source), Some("let a = f(1, 3)?;"));
}

#[test]
fn scripts_that_pages_name_are_there() {
    for page in pages() {
        for block in page.blocks().iter().filter(|block| block.language == "sh") {
            for word in block.text.split_whitespace().filter(|word| word.starts_with("tests/")) {
                assert!(root().join(word).exists(), "{}: {word} is not there", block.at);
            }
        }
    }
}
