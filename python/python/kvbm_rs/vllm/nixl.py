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
    from vllm.config import KVTransferConfig

__all__ = ["NixlConnector"]


class NixlConfig(Config):
    @staticmethod
    def _extra(transfer: "KVTransferConfig") -> dict[str, Any]:
        extra = dict(transfer.kv_connector_extra_config)
        settings = _plugins(extra.pop("backends", None)) | extra.get("settings", {})
        # Of a block's size they do not depend.
        given = Settings.from_environment({**settings, "block_bytes": 1})
        side_channel = _side_channel().items()
        settings |= {path: value for path, value in side_channel if given.origin(path) == "default"}
        return extra | {"settings": settings}


class NixlConnector(KvbmConnector):
    config = NixlConfig


def _side_channel() -> dict[str, Any]:
    """Ranks of data parallelism add their numbers to the port, there as here."""
    host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise InvalidError(f"VLLM_NIXL_SIDE_CHANNEL_HOST: {host!r} is no address of this machine: {error}") from error
    return {"peers.enabled": True, "peers.host": address, "peers.port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT}


def _plugins(names: list[str] | None) -> dict[str, Any]:
    if names is None:
        return {}
    if names != ["UCX"]:
        raise InvalidError(
            f"kv_connector_extra_config: backends is {names!r}, and peers are read by NIXL's plugin UCX alone: name UCX, or "
            "leave backends out"
        )
    return {"nixl.backends.UCX": True}
