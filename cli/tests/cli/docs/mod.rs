//! The pages of `docs/` and the READMEs do what they say: commands run, settings are taken, links
//! lead somewhere.
//!
//! The first line of each fenced block says, behind its language, what is done with it:
//!
//! | info string | the block |
//! |---|---|
//! | `sh run` | is executed, in a directory with traces and without the settings of this process |
//! | `sh check: WHY` | is not executed, and why not; each `kvbm …` in it has to be a command line that `kvbm` takes |
//! | `sh skip: WHY` | is not executed, and why not |
//! | `toml run`, `json run` | is taken as a settings file, or read |
//! | `rust,ignore from FILE` | stands in FILE, which is compiled, but for comments and what only the file needs |
//! | any language, `by FILE` | is executed by the test or script FILE, which names the page |
//! | `text` | is a picture or an output |

mod blocks;
mod links;
mod markdown;
mod settings;
