//! What the blocks of a prompt are called: here, and at peers whose blocks have other names.

use crate::names::hash::{BlockHash, Chain};

/// The names of a prompt's full blocks, root first.
///
/// Those of a chain are enough for peers whose blocks have the same names. Others' blocks have
/// another number of tokens, most often, of which one must divide the other: say with
/// [`in_blocks_of`](Self::in_blocks_of) what they are called there.
#[derive(Clone, Debug)]
pub struct ChainNames {
    pub(super) here: Vec<BlockHash>,
    pub(super) there: Option<PeerChain>,
}

/// The names that a prompt's blocks have where each has this number of tokens.
#[derive(Clone, Debug)]
pub(super) struct PeerChain {
    pub(super) block_tokens: u64,
    pub(super) hashes: Vec<BlockHash>,
}

impl ChainNames {
    /// At peers whose blocks have `block_tokens` tokens, the same prompt's are called so.
    #[must_use]
    pub fn in_blocks_of(self, block_tokens: u64, hashes: Vec<BlockHash>) -> Self {
        Self { there: Some(PeerChain { block_tokens, hashes }), ..self }
    }
}

impl From<Vec<BlockHash>> for ChainNames {
    fn from(here: Vec<BlockHash>) -> Self {
        Self { here, there: None }
    }
}

impl From<&[BlockHash]> for ChainNames {
    fn from(here: &[BlockHash]) -> Self {
        here.to_vec().into()
    }
}

impl From<&Vec<BlockHash>> for ChainNames {
    fn from(here: &Vec<BlockHash>) -> Self {
        here.clone().into()
    }
}

impl From<Chain<'_>> for ChainNames {
    fn from(chain: Chain<'_>) -> Self {
        chain.hashes.into()
    }
}
