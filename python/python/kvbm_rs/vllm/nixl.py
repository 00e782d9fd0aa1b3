"""`KvbmConnector` under the name of vLLM's `NixlConnector`, for what goes by that name, as Dynamo does.

What is set for vLLM's means the same: `VLLM_NIXL_SIDE_CHANNEL_HOST` and `…_PORT` are where peers reach this engine, unless
`peers.host` and `peers.port` are set, and `backends` names the plugins that NIXL must have. docs/disaggregated.md shows how to use it.
"""

import socket
from typing import TYPE_CHECKING, Any

from vllm import envs

from kvbm_rs import Settings
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector import KvbmConnector
from kvbm_rs.vllm.connector.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import KVTransferConfig

__all__ = ["NixlConnector"]


class NixlConfig(Config):
    @staticmethod
    def _extra(transfer: "KVTransferConfig") -> dict[str, Any]:
        extra = dict(transfer.kv_connector_extra_config)
        settings = _plugins(extra.pop("backends", None)) | extra.get("settings", {})
        # Of a block's size they do not depend.
        given = Settings.from_environment({**settings, "block_bytes": 1})
        is_free = lambda path: given.origin(path) == "default"
        settings |= {path: value() for path, value in _SIDE_CHANNEL.items() if is_free(path)}
        return extra | {"settings": settings}


class NixlConnector(KvbmConnector):
    config = NixlConfig


def _address() -> str:
    host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidError(f"VLLM_NIXL_SIDE_CHANNEL_HOST: {host!r} is no address of this machine: {error}") from error
    # `localhost` has two.
    return min(found, key=lambda one: one[0] != socket.AF_INET)[4][0]


# Ranks of data parallelism add their numbers to the port, there as here. All of a tier may be leased: who decodes waits for it.
_SIDE_CHANNEL: dict[str, "Callable[[], Any]"] = {
    "peers.enabled": lambda: True,
    "peers.host": _address,
    "peers.port": lambda: envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
    "peers.lease_share": lambda: 1.0,
}


def _plugins(names: list[str] | None) -> dict[str, Any]:
    if names is None:
        return {}
    if names != ["UCX"]:
        raise InvalidError(
            f"kv_connector_extra_config: backends is {names!r}, and peers are read by NIXL's plugin UCX alone: name UCX, or "
            "leave backends out"
        )
    return {"nixl.backends.UCX": True}
