//! How many bytes a block takes: the shape of a model's KV cache. Capacities, as blocks or as
//! bytes.

use std::fmt;

use clap::Args;
use clap::builder::PossibleValuesParser;
use kvbm_policies::{BLOCK_TOKENS, checkpoints};
use kvbm_settings::parse_size;
use serde::Serialize;

use crate::by_name;
use crate::output::{self, CommandFailure};

/// What a model's attention keeps of a token, as published.
///
/// From the `config.json` of each model on huggingface.co: `num_hidden_layers`,
/// `num_key_value_heads`, `head_dim` (or `hidden_size ÷ num_attention_heads`), `sliding_window` and
/// `layer_types`; for multi-head latent attention `kv_lora_rank + qk_rope_head_dim` in place of
/// heads. Collected in `litgpt/config.py` of Lightning-AI/litgpt; gpt-oss:
/// <https://docs.nvidia.com/nemo/megatron-bridge/nightly/models/llm/gpt-oss.html>; `DeepSeek`:
/// <https://deepwiki.com/deepseek-ai/DeepSeek-V3/6.1-configuration-options>; Qwen3 235B: the
/// configuration of AI-Hypercomputer/maxtext.
#[rustfmt::skip]
const PRESETS: [(&str, ModelShape); 24] = [
    ("deepseek-v2", latent(60, 512 + 64)),
    ("deepseek-v3", latent(61, 512 + 64)),
    ("gemma-3-4b", ModelShape { window_layers: 29, window: 1024, ..heads(34, 4, 256) }),
    ("gemma-3-12b", ModelShape { window_layers: 40, window: 1024, ..heads(48, 8, 256) }),
    ("gemma-3-27b", ModelShape { window_layers: 52, window: 1024, ..heads(62, 16, 128) }),
    ("gpt-oss-20b", ModelShape { window_layers: 12, window: 128, ..heads(24, 8, 64) }),
    ("gpt-oss-120b", ModelShape { window_layers: 18, window: 128, ..heads(36, 8, 64) }),
    ("llama-3-8b", heads(32, 8, 128)),
    ("llama-3-70b", heads(80, 8, 128)),
    ("llama-3-405b", heads(126, 8, 128)),
    ("mistral-7b", heads(32, 8, 128)),
    ("mistral-small-24b", heads(40, 8, 128)),
    ("mistral-large-123b", heads(88, 8, 128)),
    ("mixtral-8x7b", heads(32, 8, 128)),
    ("mixtral-8x22b", heads(56, 8, 128)),
    ("qwen-2.5-7b", heads(28, 4, 128)),
    ("qwen-2.5-14b", heads(48, 8, 128)),
    ("qwen-2.5-32b", heads(64, 8, 128)),
    ("qwen-2.5-72b", heads(80, 8, 128)),
    ("qwen-3-8b", heads(36, 8, 128)),
    ("qwen-3-14b", heads(40, 8, 128)),
    ("qwen-3-30b-a3b", heads(48, 4, 128)),
    ("qwen-3-32b", heads(64, 8, 128)),
    ("qwen-3-235b-a22b", heads(94, 4, 128)),
];

const DTYPES: [(&str, u64); 5] = [("bf16", 2), ("fp16", 2), ("fp32", 4), ("fp8", 1), ("int8", 1)];

/// Numbers that a model is built with. 0 where it has none of the kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ModelShape {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Numbers that latent attention keeps of a token in a layer.
    latent_dim: u32,
    /// How many of the layers look back over a window only.
    window_layers: u32,
    /// Tokens of the window.
    window: u32,
}

const fn heads(layers: u32, kv_heads: u32, head_dim: u32) -> ModelShape {
    ModelShape { layers, kv_heads, head_dim, latent_dim: 0, window_layers: 0, window: 0 }
}

const fn latent(layers: u32, latent_dim: u32) -> ModelShape {
    ModelShape { layers, kv_heads: 0, head_dim: 0, latent_dim, window_layers: 0, window: 0 }
}

/// The options that say how large a block is.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Sizes: what a block of 512 tokens takes on one rank")]
pub(super) struct ModelArgs {
    /// Model to take the shape of the KV cache from; the options below override it
    #[arg(long, value_name = "PRESET", value_parser = PossibleValuesParser::new(PRESETS.map(|(name, _)| name)))]
    model: Option<String>,
    /// Layers with attention
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    layers: Option<u32>,
    /// Key-value heads of a layer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    kv_heads: Option<u32>,
    /// Numbers in a head
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    head_dim: Option<u32>,
    /// Latent attention (MLA): numbers kept of a token in a layer, in place of heads; every rank
    /// has them all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    mla_latent_dim: Option<u32>,
    /// Layers, of all, that look back over a window
    #[arg(long, value_name = "N", requires = "window")]
    window_layers: Option<u32>,
    /// Tokens of that window
    #[arg(long, value_name = "TOKENS", requires = "window_layers")]
    window: Option<u32>,
    /// State that a hybrid model keeps of a sequence on a rank, whatever its length, such as 20MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    state_bytes: Option<u64>,
    /// Blocks from one checkpoint of windows and state to the next
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    checkpoint_blocks: u32,
    /// Type of the cache's numbers [default: bf16]
    #[arg(long, value_name = "TYPE", value_parser = by_name(DTYPES.map(|(name, _)| (name, name))))]
    dtype: Option<&'static str>,
    /// Ranks that share the heads of a layer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    tensor_parallel: u32,
}

impl ModelArgs {
    /// The model, where any was described.
    ///
    /// # Errors
    /// A description that is not whole, or contradicts itself.
    pub(super) fn model(&self) -> Result<Option<KvModel>, CommandFailure> {
        let preset = PRESETS.into_iter().find(|(name, _)| Some(*name) == self.model.as_deref());
        let shape = self.shape(preset.map(|(_, shape)| shape).unwrap_or_default());
        if shape == ModelShape::default() {
            return self.is_alone().map(|()| None);
        }
        if shape.layers == 0
            || (shape.latent_dim == 0 && (shape.kv_heads == 0 || shape.head_dim == 0))
        {
            return Err(CommandFailure::unusable(
                "a model needs --layers, and --kv-heads with --head-dim or --mla-latent-dim; or name one: --model",
            ));
        }
        if shape.window_layers > shape.layers {
            return Err(CommandFailure::unusable(format!(
                "--window-layers {} is more than all {} layers",
                shape.window_layers, shape.layers
            )));
        }
        let name = preset.map_or("custom", |(name, _)| name);
        Ok(Some(KvModel::new(name, shape, self)))
    }

    fn shape(&self, preset: ModelShape) -> ModelShape {
        let by_latent = self.mla_latent_dim.is_some();
        ModelShape {
            layers: self.layers.unwrap_or(preset.layers),
            kv_heads: self.kv_heads.unwrap_or(preset.kv_heads),
            head_dim: self.head_dim.unwrap_or(preset.head_dim),
            latent_dim: match self.mla_latent_dim {
                Some(latent_dim) => latent_dim,
                None if self.kv_heads.or(self.head_dim).is_some() && !by_latent => 0,
                None => preset.latent_dim,
            },
            window_layers: self.window_layers.unwrap_or(preset.window_layers),
            window: self.window.unwrap_or(preset.window),
        }
    }

    /// That nothing was said which only a model gives a meaning.
    fn is_alone(&self) -> Result<(), CommandFailure> {
        if self.dtype.is_some() || self.state_bytes.is_some() || self.tensor_parallel > 1 {
            return Err(CommandFailure::unusable(
                "--dtype, --state-bytes and --tensor-parallel describe a model: say which, with --model or --layers",
            ));
        }
        Ok(())
    }
}

/// What a block takes on one rank. Serialises to a part of the command's JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct KvModel {
    /// The preset, or `custom`.
    pub(super) name: &'static str,
    pub(super) dtype: &'static str,
    /// Bytes of the layers that keep every token, for one token.
    bytes_per_token: u64,
    /// Bytes of windows and state, for one checkpoint.
    bytes_per_checkpoint: u64,
    /// Bytes of a block of 512 tokens, with its share of a checkpoint.
    pub(super) bytes_per_block: u64,
}

impl KvModel {
    fn new(name: &'static str, shape: ModelShape, args: &ModelArgs) -> Self {
        let dtype = args.dtype.unwrap_or("bf16");
        let number_bytes =
            DTYPES.iter().find(|(name, _)| *name == dtype).map_or(2, |&(_, bytes)| bytes);
        let layer_bytes = number_bytes * numbers_per_layer(shape, args.tensor_parallel);
        let bytes_per_token = layer_bytes * u64::from(shape.layers - shape.window_layers);
        let way = u64::from(args.checkpoint_blocks) * u64::from(BLOCK_TOKENS);
        let window = checkpoints::kept(u64::from(shape.window), way);
        let bytes_per_checkpoint =
            layer_bytes * u64::from(shape.window_layers) * window + args.state_bytes.unwrap_or(0);
        Self {
            name,
            dtype,
            bytes_per_token,
            bytes_per_checkpoint,
            bytes_per_block: bytes_per_token * u64::from(BLOCK_TOKENS)
                + bytes_per_checkpoint / u64::from(args.checkpoint_blocks),
        }
    }

    /// The model in a few words.
    pub(super) fn describe(&self) -> String {
        let checkpoint = match self.bytes_per_checkpoint {
            0 => String::new(),
            bytes => format!(", {} a checkpoint", output::decimal_bytes(bytes as f64)),
        };
        format!(
            "{} in {}: {} a token{checkpoint}, {} a block of {BLOCK_TOKENS} tokens on one rank",
            self.name,
            self.dtype,
            output::decimal_bytes(self.bytes_per_token as f64),
            output::decimal_bytes(self.bytes_per_block as f64),
        )
    }
}

/// What one rank keeps of a token in a layer. Heads are shared out, and repeated where ranks
/// outnumber them; a latent serves all heads, so each rank has it whole.
fn numbers_per_layer(shape: ModelShape, ranks: u32) -> u64 {
    match shape.latent_dim {
        0 => 2 * u64::from(shape.kv_heads.div_ceil(ranks)) * u64::from(shape.head_dim),
        latent_dim => u64::from(latent_dim),
    }
}

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
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct ModelCommand {
        #[command(flatten)]
        args: ModelArgs,
    }

    fn model(line: &str) -> Result<Option<KvModel>, String> {
        let line =
            ModelCommand::try_parse_from(["test"].into_iter().chain(line.split_whitespace()));
        line.map_err(|error| error.to_string())?.args.model().map_err(|failure| failure.to_string())
    }

    #[track_caller]
    fn token_and_block(line: &str) -> (u64, u64) {
        let model = model(line).unwrap().unwrap();
        (model.bytes_per_token, model.bytes_per_block)
    }

    #[test]
    fn bytes_of_well_known_models() {
        // 2 × 80 layers × 8 heads × 128 numbers × 2 bytes.
        assert_eq!(token_and_block("--model llama-3-70b"), (327_680, 167_772_160));
        assert_eq!(token_and_block("--model llama-3-8b").0, 131_072);
        // 61 layers × 576 numbers × 2 bytes.
        assert_eq!(token_and_block("--model deepseek-v3").0, 70_272);
        assert_eq!(token_and_block("--model llama-3-70b --dtype fp8").0, 163_840);
    }

    #[test]
    fn every_preset_is_whole() {
        for (name, shape) in PRESETS {
            assert!(token_and_block(&format!("--model {name}")).0 > 0, "{name}");
            assert_eq!(shape.window == 0, shape.window_layers == 0, "{name}");
        }
        assert!(
            PRESETS.iter().map(|(name, _)| name).is_sorted_by_key(|name| name.split('-').next())
        );
    }

    #[test]
    fn ranks_share_heads_and_repeat_latents() {
        assert_eq!(token_and_block("--model llama-3-70b --tensor-parallel 4").0, 81_920);
        assert_eq!(token_and_block("--model llama-3-70b --tensor-parallel 16").0, 40_960);
        assert_eq!(token_and_block("--model deepseek-v3 --tensor-parallel 8").0, 70_272);
    }

    #[test]
    fn a_shape_may_be_given_or_overridden() {
        let custom = "--layers 80 --kv-heads 8 --head-dim 128";
        assert_eq!(token_and_block(custom), token_and_block("--model llama-3-70b"));
        assert_eq!(token_and_block("--model llama-3-70b --layers 40").0, 163_840);
        assert_eq!(
            token_and_block("--layers 61 --mla-latent-dim 576"),
            token_and_block("--model deepseek-v3")
        );
    }

    #[test]
    fn windows_and_states_cost_by_the_checkpoint() {
        // 18 of 36 layers keep every token: 18 × 2 × 8 × 64 × 2 bytes; the others 128 tokens every
        // 16 blocks.
        let (token, block) = token_and_block("--model gpt-oss-120b");
        assert_eq!((token, block), (36_864, 512 * 36_864 + 128 * 36_864 / 16));
        let dense = token_and_block("--layers 36 --kv-heads 8 --head-dim 64");
        let all_of_it = token_and_block("--model gpt-oss-120b --window 1000000 --window-layers 18");
        assert_eq!(
            all_of_it.1, dense.1,
            "a window as long as the way between checkpoints keeps every token"
        );
        let state = token_and_block("--layers 1 --kv-heads 1 --head-dim 1 --state-bytes 16MB");
        assert_eq!(state.1, 2_048 + 1_000_000);
    }

    #[test]
    fn what_is_not_a_model_says_what_is_missing() {
        assert_eq!(model("").unwrap(), None);
        for (line, part) in [
            ("--layers 3", "--kv-heads"),
            ("--kv-heads 3 --head-dim 3", "--layers"),
            ("--dtype fp8", "--model"),
            ("--tensor-parallel 2", "--model"),
            ("--model llama-3-70b --window-layers 81 --window 5", "all 80 layers"),
            ("--model llama-4", "possible values: deepseek-v2"),
            ("--layers 0", "0 is not in 1"),
        ] {
            let error = model(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

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
