"""How `KvbmConnector` finds a block in KV tensors, in each of vLLM's layouts: a GPU's default is not that of a CPU."""

from types import SimpleNamespace

import pytest
import torch
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector.config import Group, _layout, _order
from kvbm_rs.vllm.connector.tensors import adopt, block_dimension, parts_of

LAYERS, BLOCKS, HEADS, TOKENS, NUMBERS = 3, 7, 4, 16, 64
# Bytes of a layer's block.
PIECE = HEADS * TOKENS * NUMBERS * 2


def layers(order: str) -> list[torch.Tensor]:
    """vLLM's view of each layer, `[B, H, N, C]`, in one storage whose axes are in this order."""
    extents = dict(L=LAYERS, B=BLOCKS, H=HEADS, N=TOKENS, C=NUMBERS)
    whole = torch.zeros([extents[axis] for axis in order], dtype=torch.bfloat16)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_a_block_is_a_piece_of_each_layer_in_any_order_of_its_numbers(order):
    tensors = layers(order)
    adopt(tensors, BLOCKS, LAYERS * PIECE)
    for tensor in tensors:
        assert block_dimension(tensor, BLOCKS) == 0
        ((base, stride, piece),) = parts_of(tensor, BLOCKS)
        assert (base, stride, piece) == (tensor.data_ptr(), tensor.stride(0) * 2, PIECE)
    # Where blocks come first, all of a block lies together.
    assert (stride == LAYERS * PIECE) == order.startswith("B")


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_a_block_whose_bytes_do_not_lie_together_is_refused(order):
    with pytest.raises(InvalidError, match="lie together"):
        parts_of(layers(order)[0], BLOCKS)


def test_blocks_of_another_layout_have_another_name():
    group = Group(0, ("a", "b"), 2 * PIECE, 0)

    def named(layout: str, backend: str | None) -> tuple:
        cache, attention = SimpleNamespace(kv_cache_layout=layout), SimpleNamespace(backend=backend)
        return _layout(group, _order(SimpleNamespace(cache_config=cache, attention_config=attention)))[1]

    names = [named("LBHNC", None), named("LBNHC", None), named("LBHNC", "TRITON_ATTN")]
    assert len(set(names)) == 3
