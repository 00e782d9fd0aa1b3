"""What scheduler and worker share: the manager, and copies under way."""

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorrt_llm
import torch

from kvbm_rs import Chain, EngineMemory, Manager, Settings
from kvbm_rs.errors import InvalidError, KvbmError
from kvbm_rs.weights import weights_of

if TYPE_CHECKING:
    from kvbm_rs import Hints, Lease, Load, Save

logger = logging.getLogger(__name__)

# Seconds for which a look-up waits for what lies below the host tier. All requests wait meanwhile.
MAX_WAIT = 0.25
_LOOK = 0.001
# Seconds to bring what is only in memory to its medium when the KV cache goes.
_CLOSE_WAIT = 10.0


class LoadError(KvbmError):
    """Blocks that a request was promised did not come, and TensorRT-LLM cannot be told: it must not go on."""


@dataclass
class PlannedSave:
    """Blocks of a request that a step computes: they are copied when it has ended."""

    request: int
    chain: Chain
    first: int
    slots: list[int]


@dataclass
class _Computing:
    """A step of which not all is computed yet."""

    done: Any
    saves: list[PlannedSave]


@dataclass
class Engine:
    """One for each engine in this process, which has one worker."""

    llm_args: Any
    manager: Manager | None = None
    loads: "dict[int, tuple[Load, int]]" = field(default_factory=dict)
    _saves: "list[tuple[int, Save]]" = field(default_factory=list)
    _computing: list[_Computing] = field(default_factory=list)
    _on_gpu: bool = False

    def __post_init__(self) -> None:
        args = self.llm_args
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            if (getattr(args, name, 1) or 1) > 1:
                raise InvalidError(f"{name}: KvbmScheduler and KvbmWorker serve engines of one rank, for now")
        self.block_tokens: int = args.kv_cache_config.tokens_per_block
        # A typo is an error before the model is loaded; how large a block is TensorRT-LLM says later.
        if Settings.from_environment({"block_bytes": 1})["host.capacity"] == "none":
            raise InvalidError(
                "host.capacity (DYN_KVBM_CPU_CACHE_GB): set it. What a request is promised must be in memory, since "
                "TensorRT-LLM cannot be told that a load failed"
            )

    def adopt(self, tensor: torch.Tensor) -> None:
        """The KV cache: a block in each row."""
        if not tensor.is_contiguous():
            raise InvalidError(f"a KV cache of shape {tuple(tensor.shape)} and strides {tensor.stride()} has no rows")
        self.close()
        slots, block_bytes = tensor.shape[0], tensor[0].numel() * tensor.element_size()
        self._on_gpu = tensor.device.type == "cuda"
        device = tensor.device.index if self._on_gpu else None
        memory = EngineMemory(slots, 1, [(tensor.data_ptr(), block_bytes, block_bytes)], owner=tensor, device=device)
        self.manager = Manager(
            Settings.from_environment({"block_bytes": block_bytes}),
            memory,
            block_tokens=self.block_tokens,
            fingerprint=self._fingerprint(tensor),
        )

    def _fingerprint(self, tensor: torch.Tensor) -> dict[str, Any]:
        model = str(self.llm_args.model)
        shape = list(tensor.shape[1:])
        return {
            "model": model,
            "weights": weights_of(model),
            "dtype": str(tensor.dtype),
            "layouts": [(1, "tensorrt-llm", shape, list(tensor.stride()[1:]))],
            "block_tokens": self.block_tokens,
            "engine": "tensorrt-llm",
            "engine_version": tensorrt_llm.__version__,
            "hash_algorithm": "kvbm_rs.trtllm sha256",
        }

    def find(self, chain: Chain, request: int) -> "tuple[Lease, int] | None":
        """Leading blocks of `chain` that are in memory, and pinned there. What lies below is waited for, a little."""
        if self.manager is None or not len(chain):
            return None
        lease = self.manager.lease(chain, request=request)
        wanted = lease.blocks
        if lease.by_tier.get("host", 0) < wanted:
            self.manager.prefetch(lease)
            self._wait(chain, wanted)
            lease = self.manager.lease(chain, request=request)
        here = min(lease.by_tier.get("host", 0), wanted)
        return (lease, here) if here else None

    def _wait(self, chain: Chain, wanted: int) -> None:
        deadline = time.monotonic() + MAX_WAIT
        while self.manager.matches(chain).get("host", 0) < wanted and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def load(self, request: int, lease: "Lease", first: int, slots: list[int]) -> None:
        if self._on_gpu:
            # Steps that are queued may still read what the slots had before.
            torch.cuda.synchronize()
        self.loads[request] = (self.manager.load_into(lease, [(0, first, slots)]), len(slots))

    def compute(self, saves: list[PlannedSave], stream: Any = None) -> None:
        """A step is queued on `stream`: when it has ended, `saves` begin."""
        if saves:
            self._computing.append(_Computing(self._mark(stream), saves))

    def _mark(self, stream: Any) -> Any:
        if not self._on_gpu:
            return None
        done = torch.cuda.Event()
        done.record(stream or torch.cuda.current_stream())
        return done

    def poll(self) -> None:
        """Begins saves whose step has ended, and forgets those that have ended themselves."""
        while self._computing and (self._computing[0].done is None or self._computing[0].done.query()):
            for save in self._computing.pop(0).saves:
                begun = self.manager.save_from(save.chain, [(0, save.first, save.slots)], request=save.request)
                self._saves.append((save.request, begun))
        self._saves = [(request, save) for request, save in self._saves if not _has_ended(save)]

    def is_saving(self, request: int) -> bool:
        planned = (save.request for step in self._computing for save in step.saves)
        return request in planned or any(request == saving for saving, _ in self._saves)

    def has_loaded(self, request: int) -> bool:
        """Whether the blocks of a request are in their slots.

        Raises:
            LoadError: they are not, and will not be.
        """
        if request not in self.loads:
            raise LoadError(f"request {request}: TensorRT-LLM did not say where its blocks are to go")
        load, wanted = self.loads[request]
        end = load.poll()
        if end is None:
            return False
        del self.loads[request]
        if end.arrived < wanted:
            raise LoadError(f"request {request}: {end.failed} of {wanted} blocks cannot be copied from memory")
        return True

    def close(self) -> None:
        if self.manager is None:
            return
        if not self.manager.drain(_CLOSE_WAIT):
            logger.warning("not all blocks got to their medium in %.0f s", _CLOSE_WAIT)
        if not self.manager.close(_CLOSE_WAIT):
            logger.error("copies are still under way that no medium ends")
        self.manager = None


_engines: dict[int, Engine] = {}


def engine_of(llm_args: Any) -> Engine:
    """That of scheduler and worker, which TensorRT-LLM makes at the same time, of the same arguments."""
    found = _engines.get(id(llm_args))
    return found or _engines.setdefault(id(llm_args), Engine(llm_args))


def _has_ended(save: "Save") -> bool:
    try:
        return save.poll() is not None
    except KvbmError as error:
        logger.warning("blocks cannot be saved: %s", error)
        return True
