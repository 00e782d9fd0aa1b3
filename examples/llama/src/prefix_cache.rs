//! All that knows kvbm: KV tensors to blocks, and back.
//!
//! A block is [`BLOCK_TOKENS`] tokens of all layers: of each layer K, then V, each `(tokens, heads,
//! head size)` of `f32`, as `llama2_c` has them at batch size 1.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Storage, Tensor};
use candle_transformers::models::llama2_c::Config;
use kvbm::blocking::Blocks;
use kvbm::{BlockHash, ChainHasher, Options, RequestInfo};
use kvbm_settings::Settings;

use crate::engine::CHUNK_TOKENS;

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 16;

/// K and V of each layer, as candle's cache has them.
pub type Kvs = [Option<(Tensor, Tensor)>];

/// Keeps the KV cache of prompts' beginnings.
#[derive(Debug)]
pub struct PrefixCache {
    blocks: Blocks,
    hasher: ChainHasher,
    layers: usize,
    heads: usize,
    head_size: usize,
}

impl PrefixCache {
    /// Bytes of a model's block.
    pub const fn block_bytes(model: &Config) -> usize {
        2 * model.n_layers
            * BLOCK_TOKENS
            * model.n_kv_heads
            * (model.dim / model.n_heads)
            * size_of::<f32>()
    }

    /// Opens kvbm for the blocks of `model`. Whatever makes KV differ must be in `salt`: weights,
    /// type, layout, chunks.
    pub fn open(model: &Config, salt: &str, settings: Settings) -> Result<Self> {
        let settings = Settings { block_bytes: Some(Self::block_bytes(model) as u64), ..settings };
        let options = Options { block_tokens: BLOCK_TOKENS as u64, ..Options::default() };
        Ok(Self {
            blocks: Blocks::open(settings, options)?,
            hasher: ChainHasher::new(BLOCK_TOKENS, salt.as_bytes())?,
            layers: model.n_layers,
            heads: model.n_kv_heads,
            head_size: model.dim / model.n_heads,
        })
    }

    /// kvbm, for its counts and its shutdown.
    pub const fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The names of a prompt's full blocks.
    pub fn chain(&self, prompt: &[u32]) -> Vec<BlockHash> {
        self.hasher.chain(prompt)
    }

    /// Loads the beginning of a prompt of `tokens` tokens into an empty cache. Returns how many
    /// tokens that is: whole chunks, so that what comes behind them is computed in the chunks in
    /// which it would have been without kvbm; and never all of the prompt, since a model that is
    /// run on no tokens has nothing to say.
    pub fn load(
        &self,
        request: RequestInfo,
        chain: &[BlockHash],
        tokens: usize,
        kvs: &mut Kvs,
    ) -> Result<usize> {
        ensure!(kvs.len() == self.layers, "a cache of {} layers, not {}", kvs.len(), self.layers);
        let wanted = whole_chunks(tokens.saturating_sub(1)).min(chain.len() * BLOCK_TOKENS);
        let room = || Vec::with_capacity(wanted * self.token_floats());
        let mut parts: Vec<Vec<f32>> = std::iter::repeat_with(room).take(2 * self.layers).collect();
        let found = self.blocks.get_for(request, &chain[..wanted / BLOCK_TOKENS], |_, block| {
            for (part, piece) in parts.iter_mut().zip(block.chunks_exact(self.piece_bytes())) {
                part.extend_from_slice(bytemuck::cast_slice(piece));
            }
            anyhow::Ok(())
        })?;
        let loaded = whole_chunks(found * BLOCK_TOKENS);
        let mut tensors = parts.into_iter().map(|mut part| {
            part.truncate(loaded * self.token_floats());
            Tensor::from_vec(part, (1, loaded, self.heads, self.head_size), &Device::Cpu)
        });
        for kv in kvs.iter_mut().filter(|_| loaded > 0) {
            *kv = tensors
                .next()
                .zip(tensors.next())
                .map(|(k, v)| anyhow::Ok((k?, v?)))
                .transpose()?;
        }
        Ok(loaded)
    }

    /// Saves what kvbm lacks of a prompt's whole chunks. Returns how many leading tokens it has
    /// now.
    pub fn save(
        &self,
        request: RequestInfo,
        chain: &[BlockHash],
        tokens: usize,
        kvs: &Kvs,
    ) -> Result<usize> {
        let tensors = kvs.iter().flatten().flat_map(|(k, v)| [k, v]);
        ensure!(tensors.clone().count() == 2 * self.layers, "a layer has no K and V yet");
        let wanted = (whole_chunks(tokens) / BLOCK_TOKENS).min(chain.len());
        let kept = self.blocks.put_for(request, &chain[..wanted], |position, block| {
            let tensors = tensors.clone();
            for (tensor, piece) in tensors.zip(block.chunks_exact_mut(self.piece_bytes())) {
                Self::copy(tensor, position, piece)?;
            }
            anyhow::Ok(())
        })?;
        Ok(kept * BLOCK_TOKENS)
    }

    /// Copies a block's tokens out of K or V of a layer, straight from its storage.
    fn copy(tensor: &Tensor, position: usize, piece: &mut [u8]) -> Result<()> {
        let tokens = tensor.narrow(1, position * BLOCK_TOKENS, BLOCK_TOKENS)?;
        let (storage, layout) = tokens.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("K and V are not on the CPU") };
        let (start, end) =
            layout.contiguous_offsets().context("a block of K or V lies in pieces")?;
        piece.copy_from_slice(bytemuck::cast_slice(&storage.as_slice::<f32>()?[start..end]));
        Ok(())
    }

    /// Numbers of a token in K or V of a layer.
    const fn token_floats(&self) -> usize {
        self.heads * self.head_size
    }

    /// Bytes of a block in K or V of a layer.
    const fn piece_bytes(&self) -> usize {
        BLOCK_TOKENS * self.token_floats() * size_of::<f32>()
    }
}

const fn whole_chunks(tokens: usize) -> usize {
    tokens / CHUNK_TOKENS * CHUNK_TOKENS
}
