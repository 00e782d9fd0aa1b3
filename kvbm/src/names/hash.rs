//! Names of blocks: chained 128-bit hashes.
//!
//! A block's hash commits to every token before its end, so equal hashes mean equal KV bytes, for
//! one model in one layout. A manager cannot tell models apart: give it only the blocks of one
//! model (weights, type, layout, ranks), or put the difference into the hashes, as the salt of a
//! [`ChainHasher`] does.
//!
//! Engines bring their own hashes ([`BlockHash::from_engine`]); [`ChainHasher`] computes them from
//! tokens. It uses BLAKE3, because tenants share a cache: with a hash that can be collided an
//! attacker would get another tenant's KV.

use std::fmt;

use kvbm_tiers::BlockKey;
use xxhash_rust::xxh3::xxh3_128;

use crate::error::Error;

/// Chained hash of one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockHash(u128);

impl BlockHash {
    /// Shortest hash that is taken from an engine, in bytes.
    pub const MIN_ENGINE_BYTES: usize = 16;

    /// A hash computed elsewhere, already 128 bits wide.
    pub const fn from_u128(hash: u128) -> Self {
        Self(hash)
    }

    /// An engine's own chained hash (vLLM: 32 bytes of SHA-256). Sixteen bytes are taken as they
    /// are; longer ones are condensed.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) below [`Self::MIN_ENGINE_BYTES`].
    pub fn from_engine(bytes: &[u8]) -> Result<Self, Error> {
        if let Ok(exact) = <[u8; 16]>::try_from(bytes) {
            return Ok(Self(u128::from_le_bytes(exact)));
        }
        if bytes.len() < Self::MIN_ENGINE_BYTES {
            let message =
                format!("a block hash of {} bytes is too short: give at least 16", bytes.len());
            return Err(Error::invalid(message));
        }
        // Fast, not cryptographic: a collision needs chosen inputs, and an engine's digests cannot
        // be chosen.
        Ok(Self(xxh3_128(bytes)))
    }

    /// The 128 bits.
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The leading blocks of a prompt in one cache group, root first.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Cache group: layers that share one geometry. 0 is full attention.
    pub group: u8,
    /// Hashes of its full blocks.
    pub hashes: &'a [BlockHash],
    /// Makes the names of blocks differ between namespaces. A table sets it where a chain enters.
    salt: u128,
}

impl<'a> Chain<'a> {
    /// A chain in a cache group.
    pub const fn of_group(group: u8, hashes: &'a [BlockHash]) -> Self {
        Self { group, hashes, salt: 0 }
    }

    /// The same blocks, with their names in the namespace of `salt`.
    pub(crate) const fn salted(self, salt: u128) -> Self {
        Self { salt, ..self }
    }

    /// Number of blocks.
    pub const fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether the prompt has no full block.
    pub const fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Its first `blocks` blocks, or all of them if it has fewer.
    #[must_use]
    pub fn prefix(self, blocks: usize) -> Self {
        Self { hashes: &self.hashes[..blocks.min(self.hashes.len())], ..self }
    }

    /// The name of block `i`, in the namespace that the chain
    /// [entered](crate::table::Table::enter). If it entered none, in that of a manager without
    /// fingerprint before its first reset.
    pub fn key(&self, i: usize) -> BlockKey {
        BlockKey { hash: self.hashes[i].0 ^ self.salt, group: self.group }
    }

    /// What an engine calls a block of the namespace that the chain entered.
    pub(crate) const fn hash_of(&self, key: BlockKey) -> BlockHash {
        BlockHash(key.hash ^ self.salt)
    }
}

impl<'a> From<&'a [BlockHash]> for Chain<'a> {
    fn from(hashes: &'a [BlockHash]) -> Self {
        Self::of_group(0, hashes)
    }
}

impl<'a> From<&'a Vec<BlockHash>> for Chain<'a> {
    fn from(hashes: &'a Vec<BlockHash>) -> Self {
        Self::of_group(0, hashes)
    }
}

/// Computes a prompt's chain from its tokens.
#[derive(Clone, Debug)]
pub struct ChainHasher {
    block_tokens: usize,
    root: BlockHash,
}

impl ChainHasher {
    /// Blocks of `block_tokens` tokens (any number from 1). Chains of different salts never share a
    /// block.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) for blocks of no tokens.
    pub fn new(block_tokens: usize, salt: &[u8]) -> Result<Self, Error> {
        if block_tokens == 0 {
            return Err(Error::invalid("a block must hold at least one token"));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"kvbm chain 1").update(&(block_tokens as u64).to_le_bytes()).update(salt);
        Ok(Self { block_tokens, root: finish(&hasher) })
    }

    /// For the prompts of one tenant, which share no block with another's: no one can learn what
    /// others have sent from the time that a guess takes, nor name their blocks. `secret` is 32
    /// random bytes, the same in all processes that share; a holder of it can compute all tenants'
    /// names.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_tenant(block_tokens: usize, secret: &[u8; 32], tenant: u32) -> Result<Self, Error> {
        let mut salt = blake3::Hasher::new_keyed(secret);
        salt.update(b"kvbm tenant 1").update(&tenant.to_le_bytes());
        Self::new(block_tokens, salt.finalize().as_bytes())
    }

    /// The chain of all full blocks of `tokens`; a partial last block has no hash.
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockHash> {
        self.chain_with(tokens, |_| &[])
    }

    /// [`chain`](Self::chain), with extra keys for block `i` (`LoRA` name, image ids) from
    /// `extra(i)`.
    pub fn chain_with<'a>(
        &self,
        tokens: &[u32],
        extra: impl Fn(usize) -> &'a [u8],
    ) -> Vec<BlockHash> {
        let mut parent = self.root;
        let blocks = tokens.chunks_exact(self.block_tokens).enumerate();
        blocks
            .map(|(i, block)| {
                parent = next(parent, block, extra(i));
                parent
            })
            .collect()
    }
}

fn next(parent: BlockHash, tokens: &[u32], extra: &[u8]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.0.to_le_bytes());
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    finish(hasher.update(extra))
}

fn finish(hasher: &blake3::Hasher) -> BlockHash {
    let mut half = [0; 16];
    half.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    BlockHash(u128::from_le_bytes(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_commits_to_everything_before_it() {
        let hasher = ChainHasher::new(4, b"").unwrap();
        let a = hasher.chain(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let b = hasher.chain(&[1, 2, 3, 0, 5, 6, 7, 8]);
        assert_eq!((a.len(), b.len()), (2, 2));
        assert!(a[0] != b[0] && a[1] != b[1]);
        assert_eq!(a, hasher.chain(&[1, 2, 3, 4, 5, 6, 7, 8]));
    }

    #[test]
    fn salt_block_size_and_extra_keys_separate_chains() {
        let tokens = [7; 8];
        let plain = ChainHasher::new(4, b"").unwrap().chain(&tokens);
        assert_ne!(plain, ChainHasher::new(4, b"tenant").unwrap().chain(&tokens));
        assert_ne!(plain[0], ChainHasher::new(8, b"").unwrap().chain(&tokens)[0]);
        let adapted = ChainHasher::new(4, b"")
            .unwrap()
            .chain_with(&tokens, |i| if i == 1 { b"x" } else { b"" });
        assert_eq!(plain[0], adapted[0]);
        assert_ne!(plain[1], adapted[1]);
    }

    #[test]
    fn tenants_share_no_block_and_names_take_the_secret() {
        let chain = |secret: u8, tenant| {
            ChainHasher::for_tenant(4, &[secret; 32], tenant).unwrap().chain(&[7; 16])
        };
        let ours = chain(1, 7);
        assert_eq!(ours, chain(1, 7), "the same in every process");
        let shared = ChainHasher::new(4, b"").unwrap().chain(&[7; 16]);
        for others in [chain(1, 8), chain(2, 7), shared] {
            assert!(others.iter().all(|block| !ours.contains(block)), "{others:?}");
        }
    }

    #[test]
    fn engine_hashes_of_any_length_from_sixteen_bytes() {
        assert!(BlockHash::from_engine(&[1; 15]).is_err());
        assert_eq!(BlockHash::from_engine(&[1; 16]).unwrap().get(), u128::from_le_bytes([1; 16]));
        assert_ne!(
            BlockHash::from_engine(&[1; 32]).unwrap(),
            BlockHash::from_engine(&[1; 33]).unwrap()
        );
        assert!(ChainHasher::new(0, b"").is_err());
    }
}
