//! Capacities, as blocks or as bytes.

use std::fmt;

use kvbm_settings::parse_size;

use super::model::KvModel;
use crate::failure::CommandFailure;

/// A capacity as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CostAmount {
    /// A number of blocks.
    Blocks(u32),
    /// What fits into a number of bytes.
    Bytes { bytes: u64, text: String },
}

impl CostAmount {
    /// `5000` is blocks; `64GB`, `1.5TB` and `64GiB` are bytes.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            let blocks = text.parse().map_err(|_| format!("more than {} blocks", u32::MAX))?;
            return Ok(Self::Blocks(blocks));
        }
        let bytes = parse_size(text).map_err(|error| {
            format!("{error}; a capacity is blocks, such as 5000, or a size, such as 64GB")
        })?;
        Ok(Self::Bytes { bytes, text: text.to_owned() })
    }

    /// In whole blocks.
    ///
    /// # Errors
    /// A size, where it is not known what a block takes.
    pub(super) fn blocks(&self, model: Option<&KvModel>) -> Result<u32, CommandFailure> {
        match (self, model) {
            (Self::Blocks(blocks), _) => Ok(*blocks),
            (Self::Bytes { bytes, .. }, Some(model)) => {
                Ok(u32::try_from(bytes / model.bytes_per_block.max(1)).unwrap_or(u32::MAX))
            }
            (Self::Bytes { text, .. }, None) => Err(CommandFailure::unusable(format!(
                "{text} is a size, and what a block takes depends on the model: name it with --model (or --layers, \
                 --kv-heads and --head-dim), or give blocks"
            ))),
        }
    }
}

impl fmt::Display for CostAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(blocks) => write!(f, "{blocks}"),
            Self::Bytes { text, .. } => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_blocks_and_units_are_bytes() {
        assert_eq!(CostAmount::parse("5000"), Ok(CostAmount::Blocks(5_000)));
        let bytes = |text| match CostAmount::parse(text) {
            Ok(CostAmount::Bytes { bytes, .. }) => bytes,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(
            ["64GB", "1.5TB", "1GiB"].map(bytes),
            [64_000_000_000, 1_500_000_000_000, 1 << 30]
        );
        for text in ["", "lots", "-5", "5000000000", "1.5"] {
            assert!(CostAmount::parse(text).is_err(), "{text}");
        }
    }
}
