"""How `KvbmConnector` finds a block in KV tensors, in each of vLLM's layouts: a GPU's default is not that of a CPU."""

from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector import config
from kvbm_rs.vllm.connector.config import _COLUMNS, _UNKNOWN, Group, _check_states, _groups, _keeps_all, _layout, _order
from kvbm_rs.vllm.connector.tensors import adopt, block_dimension, by_blocks, parts_of

LAYERS, BLOCKS, HEADS, TOKENS, NUMBERS = 3, 7, 4, 16, 64
# Bytes of a layer's block.
PIECE = HEADS * TOKENS * NUMBERS * 2


def layers(order: str) -> list[torch.Tensor]:
    """vLLM's view of each layer, `[B, H, N, C]`, in one storage whose axes are in this order."""
    extents = dict(L=LAYERS, B=BLOCKS, H=HEADS, N=TOKENS, C=NUMBERS)
    whole = torch.zeros([extents[axis] for axis in order], dtype=torch.bfloat16)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_block_has_pieces_of_layers_in_any_order(order):
    tensors = layers(order)
    adopt(tensors, BLOCKS, (PIECE,) * LAYERS, LAYERS)
    for tensor in tensors:
        assert block_dimension(tensor, BLOCKS) == 0
        ((base, stride, piece),) = parts_of(tensor, BLOCKS)
        assert (base, stride, piece) == (tensor.data_ptr(), tensor.stride(0) * 2, PIECE)
    # Where blocks come first, all of a block lies together.
    assert (stride == LAYERS * PIECE) == order.startswith("B")


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_block_in_kernel_parts_is_one_in_any_order(layout):
    """As vLLM shows it to a backend that has no kernel for blocks of that size, such as FlashInfer's for more than 64."""
    from vllm.config import VllmConfig
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=NUMBERS, dtype=torch.bfloat16)
    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout
    groups = kv_cache_utils.get_kv_cache_groups(config, {"a": spec, "b": spec})
    cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 22)
    (group,) = _groups(cache)
    tensors = {}
    for tensor in cache.kv_cache_tensors:
        raw = torch.arange(tensor.size, dtype=torch.int64).to(torch.int8)
        views = create_kv_cache_views(
            raw, spec, cache.num_blocks, KVCacheLayout[layout], tensor, kernel_block_size=TOKENS // 2
        )
        tensors.update(zip(tensor.layers, views))
    shown = [tensors[name] for name in group.layers]
    assert all(tensor.shape[0] == 2 * cache.num_blocks for tensor in shown)
    if layout == "LBHNC":
        with pytest.raises(InvalidError, match="set VLLM_KV_CACHE_LAYOUT to LBNHC, or --block-size to 8"):
            by_blocks(shown[0], cache.num_blocks)
        return
    blocks = [by_blocks(tensor, cache.num_blocks) for tensor in shown]
    adopt(blocks, cache.num_blocks, group.layer_bytes, group.shares)
    for whole, parts in zip(blocks, shown):
        # All of a block, and nothing of another one.
        whole.select(block_dimension(whole, cache.num_blocks), 3).zero_()
        assert (parts[6:8] == 0).all() and (parts[5] != 0).any() and (parts[8] != 0).any()


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_a_block_whose_bytes_do_not_lie_together_is_refused(order):
    with pytest.raises(InvalidError, match="lie together"):
        parts_of(layers(order)[0], BLOCKS)


def test_blocks_of_another_layout_have_another_name(monkeypatch):
    def named(layout: str, backend: str | None) -> str:
        cache, attention = SimpleNamespace(kv_cache_layout=layout), SimpleNamespace(backend=backend)
        return _order(SimpleNamespace(cache_config=cache, attention_config=attention))

    # Where it is left to vLLM, what that chooses among counts.
    installed = {}
    monkeypatch.setattr(config.metadata, "version", lambda name: installed.get(name) or version(name))
    names = [named("LBHNC", None), named("LBNHC", None), named("LBHNC", "TRITON_ATTN")]
    installed["flashinfer-python"] = "0.6.1"
    names += [named("LBHNC", None)]
    assert len(set(names)) == 4
    assert named("LBHNC", "TRITON_ATTN") == names[2]


def test_a_layout_says_where_heads_lie():
    group = Group(0, ("a", "b"), (240, 240), 0, heads=3, tokens=4)
    assert _layout(group, "LBNHC") == (2, "layer,token,head,byte", [2, 4, 3, 20], [240, 60, 20, 1])
    for layout in ("LBHNC", "BLHNC", "LHBNC"):
        assert _layout(group, layout) == (2, "layer,head,token,byte", [2, 3, 4, 20], [240, 80, 20, 1])
    # On CPUs all keys of a head come before its values, as columns.
    group = replace(group, head_size=5)
    columns = "layer,head,kv(channel,token|token,channel),byte"
    assert _layout(group, "LBHNC", _COLUMNS) == (2, columns, [2, 3, 2, 5, 4, 2], [240, 80, 40, 8, 2, 1])
    assert _layout(group, "LBHNC", _UNKNOWN) == (2, "layer,head,byte", [2, 3, 80], [240, 80, 1])
    assert _layout(replace(group, head_size=7), "LBHNC", _COLUMNS)[1] == "layer,head,byte"
    # Of others no part is given.
    opaque = (2, "layer,byte of NHD", [2, 240], [240, 1])
    assert _layout(group, "NHD") == opaque
    assert _layout(Group(0, ("a", "b"), (240, 240), 0), "LBNHC")[1] == "layer,byte of LBNHC"
    assert _layout(Group(0, ("a", "b"), (250, 250), 0, heads=3, tokens=4), "LBNHC")[1] == "layer,byte of LBNHC"


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_layers_that_differ_have_blocks_of_their_own_sizes(layout):
    """vLLM tells the worker of all layers at once, and the scheduler of one of them: both find the same sizes."""
    from vllm.config import VllmConfig
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def spec(heads: int) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=NUMBERS, dtype=torch.bfloat16)

    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout
    groups = kv_cache_utils.get_kv_cache_groups(config, {"a": spec(4), "b": spec(2), "c": spec(4)})
    of_worker = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 24)
    of_scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([of_worker])
    ((found,), (again,)) = _groups(of_worker), _groups(of_scheduler)
    assert found == again
    assert (found.layer_bytes, found.shares) == ((2 * PIECE, PIECE, 2 * PIECE), 1)
    assert all(_keeps_all(groups.kv_cache_groups[0]) for groups in (of_worker, of_scheduler))
    # They are adopted as they are, and no other blocks are taken for theirs.
    tensors = [torch.zeros(BLOCKS, size, dtype=torch.uint8) for size in found.layer_bytes]
    adopt(tensors, BLOCKS, found.layer_bytes, found.shares)
    assert _layout(found, "order") != _layout(Group(0, found.layers, (PIECE, 2 * PIECE, 2 * PIECE), 0), "order")


def state_groups(mode: str, *others):
    """A cache with two layers of states, in pages of attention's size, and `others`."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

    state = MambaSpec(
        block_size=TOKENS if mode == "align" else 4096,
        shapes=((3, 8), (2, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PIECE,
        mamba_cache_mode=mode,
    )
    groups = [KVCacheGroupSpec(["a", "b"], state)] + [KVCacheGroupSpec(["c", "d"], other) for other in others]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[])


def full_attention():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=NUMBERS, dtype=torch.bfloat16)


def test_a_state_is_of_one_block_and_as_large_as_it_is():
    full, state = _groups(state_groups("align", full_attention()))
    assert (full.index, full.window, full.is_state) == (1, 0, False)
    assert (state.index, state.window, state.is_state) == (0, 1, True)
    assert (state.layer_bytes, state.shares) == ((3 * 8 * 2 + 2 * 4 * 4,) * 2, 2)
    # As vLLM shows it: bytes at the beginning of a page.
    shown = [torch.zeros(BLOCKS, PIECE, dtype=torch.int8).as_strided((BLOCKS, 1, 1, 80), (PIECE, 80, 80, 1)) for _ in "ab"]
    adopt(shown, BLOCKS, state.layer_bytes, state.shares)


def test_states_alone_and_states_of_no_block_are_refused():
    with pytest.raises(InvalidError, match="this model keeps states alone"):
        _groups(state_groups("align"))
    with pytest.raises(InvalidError, match="set --enable-prefix-caching"):
        _groups(state_groups("none", full_attention()))


def test_states_of_a_model_that_decodes_speculatively_are_refused():
    _check_states(SimpleNamespace(speculative_config=None))
    with pytest.raises(InvalidError, match="decodes speculatively"):
        _check_states(SimpleNamespace(speculative_config=object()))
