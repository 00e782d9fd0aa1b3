"""What `KvbmConnector` tells blocks apart by: kept bytes of other weights are never found."""

from types import SimpleNamespace

import pytest
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector.config import (
    _check_parallel,
    _dtype,
    _fp8,
    _groups,
    _order,
    _positions,
    _scales,
    _settings,
    _weights,
)
from kvbm_rs.weights import model_name, weights_at, weights_of


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub with two commits of a model, of which one is the branch `main`."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--owner--name"
    for commit in ("abc", "def"):
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    return model


def test_a_branch_that_moves_is_other_weights(hub):
    before = weights_at("owner/name", None)
    assert before == weights_at("owner/name", "main") == weights_at("owner/name", "abc")
    (hub / "refs" / "main").write_text("def")
    assert weights_at("owner/name", None) != before
    # A cache of its own (`--download-dir`).
    with pytest.raises(InvalidError, match="nothing of it"):
        weights_at("owner/name", None, cache=str(hub))
    assert weights_at("owner/name", None, cache=str(hub.parent)) == "commit def"
    # Who does not say which one is served cannot tell.
    with pytest.raises(InvalidError, match="2 commits of it"):
        weights_of("owner/name")
    with pytest.raises(InvalidError, match="nothing of it.*Name them"):
        weights_at("owner/other", None)


def test_files_that_change_are_other_weights(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = weights_of(str(file)), weights_of(str(tmp_path))
    file.write_bytes(b"other")
    assert weights_of(str(file)) != before[0] and weights_of(str(tmp_path)) != before[1]


def test_what_is_made_of_weights_counts_too(tmp_path):
    def named(named: str | None = None, **changed) -> str:
        draft = changed.pop("draft", None)
        speculative = draft and SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft), revision=None))
        model = {"model": str(tmp_path), "revision": None, "quantization": None, "hf_overrides": {}, "seed": 0}
        model["multimodal_config"] = SimpleNamespace(mm_processor_kwargs=changed.pop("media", None))
        load = SimpleNamespace(load_format=changed.pop("load_format", "auto"), download_dir=None)
        config = SimpleNamespace(
            model_config=SimpleNamespace(**model | changed), load_config=load, speculative_config=speculative
        )
        return _weights(config, named)

    (tmp_path / "draft").mkdir()
    (tmp_path / "config").mkdir()
    changes = [
        {"quantization": "fp8"},
        {"quantization_config": {"ignored_layers": ["a"]}},
        {"hf_overrides": {"a": 1}},
        {"hf_config_path": str(tmp_path / "config")},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"draft": tmp_path / "draft"},
        {"media": {"max_pixels": 100}},
    ]
    names = [named(), *(named(**change) for change in changes)]
    # Also where the weights are named.
    names += [named("mine"), *(named("mine", **change) for change in changes)]
    assert len(set(names)) == len(names)
    assert named("mine", model="owner/name") == named("mine")
    # Weights that are read are the same whatever is drawn.
    assert named(seed=1) == named() and named("mine", seed=1) == named("mine")


def test_machines_that_name_their_weights_may_have_the_model_where_they_like(tmp_path):
    one, other = tmp_path / "one" / "model", tmp_path / "other" / "model"
    one.mkdir(parents=True)
    other.mkdir(parents=True)
    assert model_name(str(one), "mine") == model_name(f"{other}/", "mine") == "model"
    assert model_name(str(one), None) != model_name(str(other), None)
    assert model_name("owner/name", "mine") == model_name("owner/name", None) == "owner/name"


def test_what_the_connector_cannot_serve_is_said_at_the_start():
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    with pytest.raises(InvalidError, match="block_bytes: leave it out"):
        _settings({"host.capacity": "1GB", "block_bytes": 4096}, 8192)
    one = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    _check_parallel(SimpleNamespace(**one, distributed_executor_backend="mp"))
    with pytest.raises(InvalidError, match="external_launcher gives each rank a scheduler"):
        _check_parallel(SimpleNamespace(**one, distributed_executor_backend="external_launcher"))
    states = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    group = SimpleNamespace(kv_cache_spec=states, layer_names=["layer"], is_eagle_group=False)
    with pytest.raises(InvalidError, match="this model keeps states alone"):
        _groups(SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=[]))


def test_the_longest_prompt_counts_where_positions_use_it():
    def said(architecture: str, rope: str, longest: int, fitted: int | None = None) -> str:
        text = SimpleNamespace(rope_parameters={"rope_type": rope})
        generates = {"generation_config": "auto", "override_generation_config": {}, "original_max_model_len": fitted}
        return _positions(
            SimpleNamespace(hf_text_config=text, architectures=[architecture], max_model_len=longest, **generates)
        )

    # What is left to vLLM follows from how much memory is free: of other models it must not count.
    assert said("LlamaForCausalLM", "llama3", 4096) == said("LlamaForCausalLM", "llama3", 8192)
    for asked in (("Phi3ForCausalLM", "longrope"), ("Llama4ForCausalLM", "llama3")):
        assert said(*asked, 4096) != said(*asked, 8192)
        assert said(*asked, 4096, -1) == said(*asked, 8192, -1) != said(*asked, 8192)


def test_what_workers_make_of_the_configuration_is_not_counted():
    """They come to it when they make the model. The scheduler, which does not, would take them for others."""

    def of_rope(**rope) -> str:
        return _positions(SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=rope), architectures=None))

    assert of_rope(rope_type="yarn", factor=40) == of_rope(rope_type="deepseek_yarn", factor=40) != of_rope(factor=20)

    def of_cache(asked: str, spec: str) -> str:
        model, cache = SimpleNamespace(dtype="bfloat16"), SimpleNamespace(cache_dtype=asked)
        specs = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(dtype=spec))])
        return _dtype(SimpleNamespace(model_config=model, cache_config=cache), specs)

    assert of_cache("auto", "uint8") == of_cache("fp8", "uint8") != of_cache("fp8_e5m2", "uint8")
    assert of_cache("auto", "bfloat16") != of_cache("auto", "uint8")


def test_an_fp8_cache_differs_from_one_of_16_bits_in_its_type_alone():
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    def of(number: torch.dtype, mode: KVQuantMode, asked: str, groups: int = 1):
        cache = SimpleNamespace(cache_dtype=asked, kv_cache_layout="LBNHC")
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            cache_config=cache,
            attention_config=SimpleNamespace(backend="TRITON_ATTN"),
        )
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=number, kv_quant_mode=mode)
        return vllm_config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups)

    fp8 = (torch.uint8, KVQuantMode.FP8_PER_TENSOR)
    half = of(torch.bfloat16, KVQuantMode.NONE, "auto")
    said = _fp8(*of(*fp8, "fp8"))
    assert said.replace("torch.float8_e4m3fn", "torch.bfloat16") == f"{_dtype(*half)}, as {_order(half[0])}"
    assert [_fp8(*half), _fp8(*of(*fp8, "fp8_e5m2")), _fp8(*of(*fp8, "fp8", groups=2))] == [None] * 3
    assert _fp8(*of(torch.uint8, KVQuantMode.FP8_PER_TOKEN_HEAD, "fp8_per_token_head")) is None


def test_scales_are_those_of_whole_layers():
    import torch

    def layer(keys, values):
        return SimpleNamespace(_k_scale=torch.tensor(keys), _v_scale=torch.tensor(values))

    columns, rows = "layer,head,kv(channel,token|token,channel),byte", "layer,token,head,byte"
    assert _scales([layer(0.5, 0.25), layer(1.0, 2.0)], columns) == [0.5, 0.25, 1.0, 2.0]
    # Where keys and values are one axis, they have one scale or none.
    assert _scales([layer(0.5, 0.5), layer(1.0, 1.0)], rows) == [0.5, 1.0]
    for layers in ([layer(0.5, 0.25)], [layer([0.5, 1.0], [0.5, 1.0])], [None], [SimpleNamespace()]):
        assert _scales(layers, rows) is None
