"""The versions of vLLM that the package has run with, and what the connector does without in the oldest of them."""

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

# All tests run with it.
TESTED = "0.32.0"
# Whose classes are driven with ours, and whose methods are compared with those that ours override and call. No package for CPUs
# has the second: its engine has not run with them.
SUPPORTED = (TESTED, "0.33.0")
# The connector has run with them by hand: docs/vllm.md says what of it.
TRIED = ("0.29.0",)

__all__ = [
    "SUPPORTED",
    "TESTED",
    "TRIED",
    "CacheHitSource",
    "KVConnectorTransferResults",
    "block_hashes",
    "check_shows_tables",
    "cpu_kernel",
    "kv_cache_layout",
    "loads_amid",
    "takes_what_is_new",
    "warn",
]

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:

    class CacheHitSource(enum.Enum):  # type: ignore[no-redef]
        """Of vLLM 0.32; 0.29 does not ask where a hit came from."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:

    @dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        """Of vLLM 0.32; 0.29 asks for the first two alone (`get_finished`)."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)


def kv_cache_layout(vllm_config: "VllmConfig") -> str:
    """How vLLM lays its KV cache out: by vLLM 0.32 that is settled before connectors are made. 0.29 has two layouts, and a
    function that tells which."""
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if layout is not None:
        return str(layout)
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return str(get_kv_cache_layout())


def cpu_kernel(vllm_config: "VllmConfig", block_tokens: int, head_size: int) -> str | None:
    """By which instructions a CPU computes attention, which says how it has keys and values in blocks. `None`: this version of
    vLLM does not say it so."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kv_dtype = vllm_config.cache_config.cache_dtype
        return _get_attn_isa(vllm_config.model_config.dtype, block_tokens, head_size, kv_dtype)
    except (ImportError, TypeError):
        return None


class _Unnamed:
    """A request none of whose blocks has a name yet."""

    def __init__(self, request: "Request") -> None:
        self._request, self.block_hashes = request, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def block_hashes(request: "Request", tokens: int, algorithm: str) -> list[bytes]:
    """vLLM's names of what a request has, at each multiple of `tokens`."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(tokens, get_hash_fn_by_name(algorithm))(_Unnamed(request))


def check_shows_tables(what: str, version: str = vllm.__version__) -> None:
    """Refuses `what`, which takes the tables of requests that run, where vLLM shows a connector its pool of blocks alone.

    Such versions also take back a load by its blocks alone, which of several cache groups stops them.
    """
    if not hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager"):
        raise InvalidError(f"with KvbmConnector {what} takes vLLM {TESTED}, and this is {version}")


def loads_amid(output: Any) -> bool:
    """Whether a step loads while it computes, for any connector. vLLM 0.29 does not say it."""
    return getattr(output, "has_sync_kv_loads", True)


def warn(what: str, version: str = vllm.__version__) -> None:
    """Says at the start, by its name, that this version of vLLM has not been tested with `what`."""
    # A build's own name follows a plus.
    release = version.partition("+")[0]
    if release in TRIED:
        logger.warning(
            "%s is tested with vLLM %s; with %s hits and restarts were tried by hand: docs/vllm.md says what differs",
            what,
            TESTED,
            version,
        )
    elif release in SUPPORTED and release != TESTED:
        logger.info("%s is tested with vLLM %s; of %s the interface is, and no engine", what, TESTED, version)
    elif release != TESTED:
        logger.warning("%s is tested with vLLM %s, and has never run with %s, which this is", what, TESTED, version)


def takes_what_is_new(ours: type) -> type:
    """Has the methods of `ours` take what a later vLLM gives them in addition, by what the classes that they come from say. It is
    left out and said once: an error would end the engine. Methods that take all of it stay as they are."""
    for name, method in list(vars(ours).items()):
        theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
        if name == "__init__" or not inspect.isfunction(method) or not inspect.isfunction(theirs):
            continue
        new = _new_arguments(method, theirs)
        if new:
            setattr(ours, name, _without(method, theirs, new))
    return ours


def _new_arguments(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    mine = inspect.signature(ours).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in mine):
        return []
    names = {parameter.name for parameter in mine}
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        parameter.name
        for parameter in inspect.signature(theirs).parameters.values()
        if parameter.kind not in open_ended and parameter.name not in names
    ]


def _without(ours: Callable[..., Any], theirs: Callable[..., Any], new: list[str]) -> Callable[..., Any]:
    what = ours.__qualname__.rpartition("<locals>.")[2]
    logger.warning("%s: this version of vLLM also gives %s, which is left out", what, ", ".join(new))
    signature = inspect.signature(theirs)

    mine = inspect.signature(ours).parameters

    @functools.wraps(ours)
    def taken(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        return ours(**{name: value for name, value in given.items() if name in mine})

    return taken
