//! A Llama with random weights: what it says means nothing, and it computes like any other.

use std::collections::HashMap;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama2_c::{Cache, Config, Llama};

/// A model's shape and weights.
pub struct Model {
    config: Config,
    weights: HashMap<String, Tensor>,
}

/// A model of 5 million weights, which computes a prompt of 1,024 tokens in a second.
pub const fn small() -> Config {
    Config {
        dim: 256,
        hidden_dim: 768,
        n_layers: 4,
        n_heads: 8,
        n_kv_heads: 4,
        vocab_size: 4096,
        seq_len: 1280,
        norm_eps: 1e-5,
    }
}

impl Model {
    /// The same weights for the same `seed`.
    pub fn random(config: Config, seed: u64) -> Result<Self> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut weights = HashMap::new();
        for (name, shape) in shapes(&config) {
            weights.insert(format!("{name}.weight"), tensor(&shape, &mut random)?);
        }
        Ok(Self { config, weights })
    }

    /// Its shape.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The model, ready to run.
    pub fn llama(&self) -> Result<Llama> {
        Ok(Llama::load(self.variables(), self.config.clone())?)
    }

    /// A cache with nothing in it.
    pub fn empty_cache(&self) -> Result<Cache> {
        Ok(Cache::new(true, &self.config, self.variables())?)
    }

    /// Not from a `VarMap`: that makes up what it lacks, so the cache's table of rotations would be
    /// zeroes, and all K.
    fn variables(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.weights.clone(), DType::F32, &Device::Cpu)
    }
}

/// Names and shapes, as `llama2_c` asks for them.
fn shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let Config { dim, hidden_dim, vocab_size, n_layers, .. } = *config;
    let kv = dim / config.n_heads * config.n_kv_heads;
    let of_layer = [
        ("self_attn.q_proj", vec![dim, dim]),
        ("self_attn.k_proj", vec![kv, dim]),
        ("self_attn.v_proj", vec![kv, dim]),
        ("self_attn.o_proj", vec![dim, dim]),
        ("mlp.gate_proj", vec![hidden_dim, dim]),
        ("mlp.up_proj", vec![hidden_dim, dim]),
        ("mlp.down_proj", vec![dim, hidden_dim]),
        ("input_layernorm", vec![dim]),
        ("post_attention_layernorm", vec![dim]),
    ];
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocab_size, dim]),
        ("lm_head".to_owned(), vec![vocab_size, dim]),
        ("model.norm".to_owned(), vec![dim]),
    ];
    for layer in 0..n_layers {
        let named = |(name, shape): &(&str, Vec<usize>)| {
            (format!("model.layers.{layer}.{name}"), shape.clone())
        };
        shapes.extend(of_layer.iter().map(named));
    }
    shapes
}

/// Norms are ones; matrices are such that what passes them keeps its size.
fn tensor(shape: &[usize], random: &mut fastrand::Rng) -> Result<Tensor> {
    let &[rows, columns] = shape else { return Ok(Tensor::ones(shape, DType::F32, &Device::Cpu)?) };
    let scale = (3.0 / columns as f32).sqrt();
    let values: Vec<f32> =
        (0..rows * columns).map(|_| scale * (2.0 * random.f32() - 1.0)).collect();
    Ok(Tensor::from_vec(values, (rows, columns), &Device::Cpu)?)
}
