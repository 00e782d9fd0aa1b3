"""`NixlConnector` of ours: what is set for vLLM's means the same."""

from types import SimpleNamespace

import pytest
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector import KvbmConnector
from kvbm_rs.vllm.nixl import NixlConfig, NixlConnector
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "DYN_KVBM_PEERS_PORT"):
        monkeypatch.delenv(name, raising=False)


def settings(**extra) -> dict:
    return NixlConfig._extra(SimpleNamespace(kv_connector_extra_config=extra))["settings"]


def test_vllm_takes_ours_by_its_name():
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_connector_module_path="kvbm_rs.vllm.nixl", kv_role="kv_producer"
    )
    found = KVConnectorFactory.get_connector_class(transfer)
    assert found is NixlConnector and found.__name__ == "NixlConnector" and issubclass(found, KvbmConnector)
    assert KVConnectorFactory.supports_hma_config(transfer)


def test_the_side_channel_is_where_peers_reach_it(monkeypatch):
    assert settings() == {"peers.enabled": True, "peers.host": "127.0.0.1", "peers.port": 5600}
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.1.2.3")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
    assert settings() == {"peers.enabled": True, "peers.host": "10.1.2.3", "peers.port": 5700}
    # What is set for ours comes first.
    own = {"peers": {"host": "10.1.2.4"}}
    monkeypatch.setenv("DYN_KVBM_PEERS_PORT", "7000")
    assert settings(settings=own) == {"peers.enabled": True, **own}
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "no such host")
    with pytest.raises(InvalidError, match="VLLM_NIXL_SIDE_CHANNEL_HOST: 'no such host' is no address"):
        settings()


def test_backends_name_plugins_of_nixl():
    assert settings(backends=["UCX"])["nixl.backends.UCX"] is True
    for others in (["LIBFABRIC"], ["UCX", "GDS"], []):
        with pytest.raises(InvalidError, match="name UCX, or leave backends out"):
            settings(backends=others)
