//! What can be wrong with the settings, and where a value came from.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

use crate::value::InvalidValue;

/// Why the settings could not be had. Every message names the key, where it came from and what is
/// valid; none ever holds a secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A value that its setting does not take, alone or together with other settings: change the
    /// value.
    #[error("{key} = \"{value}\" ({origin}): {problem}")]
    Invalid {
        /// The setting, by its TOML path or, where it has none, its variable.
        key: String,
        /// The value as it was given; `(set)` for a secret.
        value: String,
        /// Where it came from.
        origin: Origin,
        /// What is wrong, and what is valid.
        #[source]
        problem: InvalidValue,
    },
    /// A key or variable that does not exist: a slip of the pen, most often.
    #[error("unknown setting {name} ({origin}); the nearest valid one is {nearest}, and beside it {}", valid.join(", "))]
    Unknown {
        /// The name as it was given.
        name: String,
        /// Where it came from.
        origin: Origin,
        /// The most similar name of the same sort.
        nearest: &'static str,
        /// The other names of its section.
        valid: Vec<&'static str>,
    },
    /// A key that articles name, and that no version of the programs has that they write of.
    #[error("{name} ({origin}): NIXL and Dynamo never had it; use {instead}")]
    NeverWas {
        /// The name as it was given.
        name: String,
        /// Where it came from.
        origin: Origin,
        /// What does what is meant.
        instead: &'static str,
    },
    /// A variable whose name or value is not UTF-8.
    #[error("{name}: the variable is not valid UTF-8")]
    NotUnicode {
        /// The variable, as far as it can be read.
        name: String,
    },
    /// The settings file cannot be read.
    #[error("cannot read the settings file {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The settings file, or text, is not TOML.
    #[error("{}:{line}: not valid TOML: {message}", path.display())]
    Syntax {
        /// The file, or the name of the text.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The parser's description; it quotes nothing of the file.
        message: String,
    },
}

/// Where a value came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The default.
    #[default]
    Default,
    /// The program's own choice, see [`Loader::defaults`](crate::Loader::defaults).
    Program,
    /// A line of the settings file, or of a text in its place.
    File {
        /// The file, or the name of the text.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// The command line.
    CommandLine,
    /// An argument of the program that embeds us, see
    /// [`Loader::argument`](crate::Loader::argument).
    Argument,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Program => f.write_str("program"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::CommandLine => f.write_str("command line"),
            Self::Argument => f.write_str("argument"),
        }
    }
}

impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
