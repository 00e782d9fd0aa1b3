//! Processes of a test's own executable: a rank, or an engine's worker, that a test tells what to
//! do line by line.

use std::env;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvbm_tiers::testing::freeze;

/// How an executable is told what it is to be, and where.
const ROLE: &str = "KVBM_TEST_ROLE";
const PLACE: &str = "KVBM_TEST_PLACE";

/// A process of this executable, which ends with this handle.
#[derive(Debug)]
pub struct Process {
    child: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

/// What this process is to be, and where, if a test started it. A module that starts processes has
/// a test called `process`, which asks for this first thing.
pub fn role() -> Option<(String, PathBuf)> {
    Some((env::var(ROLE).ok()?, PathBuf::from(env::var(PLACE).ok()?)))
}

/// Answers the test that started this process.
pub fn say(answer: &str) {
    println!("@ {answer}");
}

impl Process {
    /// Starts the test `process` of a module of this executable (`module_path!()`).
    ///
    /// # Panics
    /// If the system starts no processes.
    pub fn start(module: &str, role: &str, place: &Path) -> Self {
        let this = env::current_exe().expect("this executable");
        Self::start_by(Command::new(this), module, role, place)
    }

    /// The same, in a network namespace of its own.
    ///
    /// # Panics
    /// If the system starts no processes.
    pub fn start_alone(module: &str, role: &str, place: &Path) -> Self {
        let mut command = Command::new("unshare");
        command.arg("--net").arg(env::current_exe().expect("this executable"));
        Self::start_by(command, module, role, place)
    }

    fn start_by(mut command: Command, module: &str, role: &str, place: &Path) -> Self {
        // The name of a test leaves out that of the executable.
        let (_, module) = module.split_once("::").expect("a module of the executable");
        command.args(["--exact", &format!("{module}::process"), "--nocapture"]);
        command.env(ROLE, role).env(PLACE, place);
        Self::spawn(command)
    }

    /// Starts any other command that takes lines and [says](say) others.
    ///
    /// # Panics
    /// If the system starts no processes.
    pub fn spawn(mut command: Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let commands = child.stdin.take().expect("it was asked for");
        let answers = BufReader::new(child.stdout.take().expect("it was asked for")).lines();
        Self { child, commands, answers }
    }

    /// What it says next; the test harness around it speaks too.
    ///
    /// # Panics
    /// If it ends without a word.
    pub fn hear(&mut self) -> String {
        let mut said = self.answers.by_ref().map(|line| line.expect("a line"));
        said.find_map(|line| Some(line.split_once("@ ")?.1.to_owned())).expect("it says something")
    }

    /// What it says to a command.
    ///
    /// # Panics
    /// If it is gone.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.hear()
    }

    /// Gives it a command, and does not wait.
    ///
    /// # Panics
    /// If it is gone.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("it listens");
    }

    /// Its number in the system.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal of this name, such as `CONT`.
    ///
    /// # Panics
    /// If it is gone.
    pub fn signal(&self, signal: &str) {
        let status =
            Command::new("kill").args([format!("-{signal}"), self.id().to_string()]).status();
        assert!(status.expect("there is kill").success(), "it is gone");
    }

    /// Stops every thread of it.
    ///
    /// # Panics
    /// If it is gone.
    pub fn stop(&self) {
        freeze(self.id());
    }

    /// Waits for its end, and tells whether it ended well.
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn ends_well(mut self) -> bool {
        self.child.wait().expect("it is ours").success()
    }

    /// Ends it where it is.
    ///
    /// # Panics
    /// If it ended before.
    pub fn kill(mut self) {
        self.child.kill().expect("it is there");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
