//! Names of blocks: chained hashes, and what their bytes depend on besides tokens.

pub(crate) mod epoch;
pub(crate) mod fingerprint;
pub(crate) mod hash;
