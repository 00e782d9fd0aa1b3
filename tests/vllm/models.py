"""Models with random weights, small enough for an engine on a CPU, and a tokenizer of bytes.

    python tests/vllm/models.py DIRECTORY [--shape tiny|hybrid|windowed|states|latent|bench|large]
"""

import argparse
import json
from pathlib import Path

# What a shape changes in the configuration of a Llama, or of the model that it is `like`. All but the last two have weights of
# numbers wide apart, in float32: a wrong byte of KV changes their tokens, and the size of chunks does not. Four layers of `hybrid`
# look back over 128 tokens only: vLLM keeps them as two cache groups beside that of the others; all layers of `windowed` do. Half of
# the layers of `states` keep a state, of a short convolution. `latent` has multi-head latent attention. `bench` is large enough for
# times to mean something on a CPU, and `large`, of Llama 3 8B's shape, on a GPU; an engine fills in their weights
# (`load_format="dummy"`).
SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "torch_dtype": "float32",
    },
    "hybrid": {
        "like": "Gemma3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "torch_dtype": "float32",
    },
    "windowed": {
        "like": "Gemma3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 4,
        "torch_dtype": "float32",
    },
    "states": {
        "like": "Lfm2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        # By the names that vLLM reads, too.
        "conv_dim": 256,
        "block_dim": 256,
        "block_auto_adjust_ff_dim": False,
        # With weights wider apart what attention adds is lost beside what convolutions do.
        "initializer_range": 0.1,
        "torch_dtype": "float32",
    },
    "latent": {
        "like": "DeepseekV2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        # No experts.
        "first_k_dense_replace": 2,
        "torch_dtype": "float32",
    },
    "bench": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "torch_dtype": "bfloat16",
    },
    "large": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
}
SPECIAL = ["<s>", "</s>", "<pad>"]
VOCABULARY = 512


def make(directory: Path, shape: str = "tiny") -> Path:
    """Writes a model of `shape` to `directory`, unless it is there. Returns the directory."""
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(directory)
        write_model(directory, shape)
    return directory


def write_model(directory: Path, shape: str) -> None:
    import torch
    import transformers

    said = dict(SHAPES[shape])
    like = said.pop("like", "Llama")
    kind = getattr(transformers, f"{like}TextConfig" if like == "Gemma3" else f"{like}Config")
    model = getattr(transformers, f"{like}ForCausalLM")
    config = kind(
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        architectures=[model.__name__],
        **{"initializer_range": 0.4, **said},
    )
    if shape in ("bench", "large"):
        config.save_pretrained(directory)
        return
    torch.manual_seed(20)
    model(config).to(torch.float32).save_pretrained(directory)


def write_adapter(directory: Path, seed: int, shape: str = "tiny") -> Path:
    """Writes a LoRA adapter of made-up weights, over one that may be there. Returns the directory."""
    import torch
    from safetensors.torch import save_file

    rank, of = 8, SHAPES[shape]
    width, heads = of["hidden_size"], of["num_attention_heads"]
    keys = width // heads * of["num_key_value_heads"]
    outputs = {"q_proj": width, "k_proj": keys, "v_proj": keys, "o_proj": width}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(of["num_hidden_layers"]):
        for module, rows in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=random)
            weights[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=random) * 0.2
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": list(outputs)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def write_tokenizer(directory: Path) -> None:
    """One token for each byte, so that any text is a prompt, and as many without a meaning as the model can say."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<{i}>" for i in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    arguments = parser.parse_args()
    print(json.dumps({"model": str(make(arguments.directory, arguments.shape))}))
