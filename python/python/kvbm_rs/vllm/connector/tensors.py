"""Where the pieces of a block lie in an engine's KV tensors."""

import itertools
from typing import TYPE_CHECKING

from kvbm_rs import EngineMemory
from kvbm_rs.errors import InvalidError

if TYPE_CHECKING:
    import torch

Part = tuple[int, int, int]


def adopt(tensors: list["torch.Tensor"], slots: int, layer_bytes: tuple[int, ...], shares: int) -> EngineMemory:
    """The memory of `tensors`, one for each layer, with one piece or several of each of `slots` blocks: `layer_bytes` of a block
    in each of them, together as `shares` equal parts.

    The bytes are opaque: whatever a backend of vLLM keeps in them comes back as it was.
    """
    by_layer = [parts_of(tensor, slots) for tensor in tensors]
    found = tuple(sum(part[2] for part in parts) for parts in by_layer)
    if found != layer_bytes:
        raise InvalidError(
            f"a block has {found} bytes in the KV tensors of the layers, and {layer_bytes} by vLLM's page sizes: "
            "this layout is not known"
        )
    device = tensors[0].device
    ordinal = device.index if device.type == "cuda" else None
    return EngineMemory(slots, shares, list(itertools.chain(*by_layer)), owner=tensors, device=ordinal)


def by_blocks(tensor: "torch.Tensor", slots: int) -> "torch.Tensor":
    """The same memory, counted in blocks. For kernels that take fewer tokens at a time vLLM counts in parts of blocks, as many of
    each.

    Not where heads come before tokens: how many tokens a kernel takes is nowhere told, and bytes lie by it.
    """
    parts, rest = divmod(tensor.shape[0], slots)
    if rest or parts < 2 or tensor.dim() != 4:
        return tensor
    _, heads, tokens, _ = tensor.shape
    _, of_head, of_token, _ = tensor.stride()
    if heads > 1 and of_head > of_token:
        raise InvalidError(
            f"vLLM's attention takes a block in {parts} parts, with heads before tokens: set VLLM_KV_CACHE_LAYOUT to LBNHC, or "
            f"--block-size to {tokens}"
        )
    return tensor.unflatten(0, (slots, parts))


def parts_of(tensor: "torch.Tensor", slots: int) -> list[Part]:
    """The pieces of a layer's block: address, bytes from slot to slot, and bytes of a piece.

    Dimensions before the one that counts blocks (keys and values apart) make pieces; those after it lie together.
    """
    dimension = block_dimension(tensor, slots)
    size = tensor.element_size()
    stride = tensor.stride(dimension) * size
    piece = tensor[(0,) * (dimension + 1)].numel() * size
    outer = itertools.product(*(range(extent) for extent in tensor.shape[:dimension]))
    offsets = (sum(i * step for i, step in zip(at, tensor.stride())) * size for at in outer)
    return [(tensor.data_ptr() + offset, stride, piece) for offset in offsets]


def block_dimension(tensor: "torch.Tensor", slots: int) -> int:
    """Which dimension of a layer's KV tensor counts blocks."""
    for dimension, extent in enumerate(tensor.shape):
        if extent == slots and _is_dense(tensor[(0,) * (dimension + 1)]):
            return dimension
    raise InvalidError(
        f"a KV tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has no {slots} blocks whose bytes "
        "lie together"
    )


def _is_dense(block: "torch.Tensor") -> bool:
    """Whether its numbers lie together, in whatever order of its dimensions: tokens or heads first."""
    numbers = 1
    for stride, extent in sorted(zip(block.stride(), block.shape)):
        if extent > 1 and stride != numbers:
            return False
        numbers *= extent
    return True
