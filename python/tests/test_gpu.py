"""The manager beside an engine whose KV cache is on a GPU: skipped where there is none, or no PyTorch that reaches it."""

import random
from collections.abc import Iterator

import pytest

from kvbm_rs import Chain, EngineMemory, Manager, Settings
from kvbm_rs.errors import InvalidError

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch reaches", allow_module_level=True)

LAYERS, SLOTS, TOKENS, HEADS, WIDTH = 8, 64, 16, 8, 128
PIECE = TOKENS * HEADS * WIDTH * 2
# Cycles of the GPU: longer than a copy that does not wait would take to start.
LONG = 200_000_000


class Engine:
    """Keys and values of each layer in a tensor of their own, `[slots, tokens, heads, width]`."""

    def __init__(self) -> None:
        shape = (SLOTS, TOKENS, HEADS, WIDTH)
        self.tensors = [torch.empty(shape, dtype=torch.int16, device="cuda") for _ in range(2 * LAYERS)]
        parts = [(tensor.data_ptr(), PIECE, PIECE) for tensor in self.tensors]
        memory = EngineMemory(SLOTS, LAYERS, parts, owner=self.tensors, device=self.tensors[0].device.index)
        block_bytes = 2 * LAYERS * PIECE
        settings = Settings({"block_bytes": block_bytes, "host.capacity": 2 * SLOTS * block_bytes})
        self.manager = Manager(settings, memory, block_tokens=TOKENS)

    def fill(self) -> None:
        for tensor in self.tensors:
            tensor.random_(-32768, 32767)

    def blocks(self, slots: list[int]) -> list["torch.Tensor"]:
        return [tensor[slots].cpu() for tensor in self.tensors]


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine()
    yield opened
    assert opened.manager.close(10.0)


def chain(name: int, blocks: int) -> Chain:
    return Chain(bytes([name, at]) * 16 for at in range(blocks))


def some(count: int) -> list[int]:
    return random.sample(range(SLOTS), count)


def are_equal(left: list["torch.Tensor"], right: list["torch.Tensor"]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_is_saved_comes_back_into_other_slots(engine: Engine) -> None:
    for name in range(8):
        engine.fill()
        torch.cuda.synchronize()
        slots, others = some(16), some(16)
        wanted = engine.blocks(slots)
        assert engine.manager.save_from(chain(name, 16), [(0, 0, slots)]).wait(10.0).blocks == 16
        engine.fill()
        torch.cuda.synchronize()
        loaded = engine.manager.load_into(engine.manager.lease(chain(name, 16)), [(0, 0, others)]).wait(10.0)
        assert (loaded.arrived, loaded.failed) == (16, 0)
        assert are_equal(engine.blocks(others), wanted)


def recorded() -> "torch.cuda.Event":
    event = torch.cuda.Event()
    event.record()
    return event


def test_a_save_waits_for_what_fills_its_slots(engine: Engine) -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    engine.fill()
    saved = engine.manager.save_from(chain(1, 16), [(0, 0, range(16))], ready=recorded())
    assert saved.poll() is None, "the GPU still sleeps"
    assert saved.wait(10.0).blocks == 16
    wanted = engine.blocks(list(range(16)))
    others = list(range(32, 48))
    engine.manager.load_into(engine.manager.lease(chain(1, 16)), [(0, 0, others)]).wait(10.0)
    assert are_equal(engine.blocks(others), wanted)


def test_a_load_waits_for_what_still_uses_its_slots(engine: Engine) -> None:
    engine.fill()
    torch.cuda.synchronize()
    wanted = engine.blocks(list(range(16)))
    engine.manager.save_from(chain(1, 16), [(0, 0, range(16))]).wait(10.0)
    others = list(range(32, 48))
    torch.cuda._sleep(LONG)
    # A step that is queued writes there before the load may.
    for tensor in engine.tensors:
        tensor[32:48] = 0
    load = engine.manager.load_into(engine.manager.lease(chain(1, 16)), [(0, 0, others)], after=recorded())
    assert load.poll() is None, "the GPU still sleeps"
    assert load.wait(10.0).arrived == 16
    assert are_equal(engine.blocks(others), wanted)


def test_a_capture_goes_on_beside_saves(engine: Engine) -> None:
    engine.fill()
    torch.cuda.synchronize()
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    saves = []
    with torch.cuda.graph(graph):
        for name in range(4):
            total += 1
            saves.append(engine.manager.save_from(chain(name, 16), [(0, 0, range(16))]))
    assert all(save.wait(10.0).failed == 0 for save in saves)
    graph.replay()
    torch.cuda.synchronize()
    assert total.item() == 4


def test_what_is_no_fence_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidError, match="recorded"):
        engine.manager.save_from(chain(1, 1), [(0, 0, [0])], ready=torch.cuda.Event())
    with pytest.raises(InvalidError, match="torch.cuda.Event"):
        engine.manager.save_from(chain(1, 1), [(0, 0, [0])], ready="now")
