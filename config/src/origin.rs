//! Where a value came from.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

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
