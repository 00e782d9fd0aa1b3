"""`NixlConnector` of ours: what is set for vLLM's means the same. And vLLM's beside ours, which keeps what it brings."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from connectors import LENGTH, SERVED, connector, host, probe
from engine import HERE, Engine, prompt
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector import KvbmConnector
from kvbm_rs.vllm.nixl import NixlConfig, NixlConnector
from servers import free_port
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
    always = {"peers.enabled": True, "peers.lease_share": 1.0}
    assert settings() == always | {"peers.host": "127.0.0.1", "peers.port": 5600}
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.1.2.3")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
    assert settings() == always | {"peers.host": "10.1.2.3", "peers.port": 5700}
    # What is set for ours comes first.
    own = {"peers": {"host": "10.1.2.4"}}
    monkeypatch.setenv("DYN_KVBM_PEERS_PORT", "7000")
    assert settings(settings=own) == always | own
    # Nor is the address looked at that is not used.
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "no such host")
    assert settings(settings=own) == always | own
    with pytest.raises(InvalidError, match="VLLM_NIXL_SIDE_CHANNEL_HOST: 'no such host' is no address"):
        settings()


def test_backends_name_plugins_of_nixl():
    assert settings(backends=["UCX"])["nixl.backends.UCX"] is True
    for others in (["LIBFABRIC"], ["UCX", "GDS"], []):
        with pytest.raises(InvalidError, match="name UCX, or leave backends out"):
            settings(backends=others)


# tests/vllm.sh installs NIXL there, beside the environment, and not in it: the other tests are meant without.
NIXL = Path(sys.prefix, "kvcr")


def beside_vllms(model: Path, role: str) -> Engine:
    """An engine with vLLM's `NixlConnector`, and our tiers."""
    ours = connector(host(64), role=role)["kv_transfer_config"]
    theirs = {"kv_connector": "NixlConnector", "kv_role": role}
    del ours["kv_load_failure_policy"]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [theirs, ours]},
    }
    paths = ":".join(filter(None, [str(HERE), str(NIXL), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": paths, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,shm,self"}
    return Engine(model, environment=environment, **connector({}) | {"kv_transfer_config": multi})


@pytest.mark.slow
@pytest.mark.skipif(not (NIXL / "nixl").is_dir(), reason="NIXL is not beside the environment")
def test_ours_keeps_what_vllms_brings(model, said):
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    asked |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    with beside_vllms(model, "kv_producer") as first, beside_vllms(model, "kv_consumer") as second:
        told = probe(first, "ask", prompt=prompt(0, LENGTH), params=asked, tokens=1)["params"]
        # It is vLLM's: it says where the blocks are.
        assert told["do_remote_prefill"] and told["remote_block_ids"][0] and "kvbm_peer" not in told
        went_on = probe(second, "ask", prompt=prompt(0, LENGTH), params=told)
        assert went_on["said"] == said[0]
        assert went_on["scheduled"] < LENGTH, "vLLM's brought it"
        # Both keep it below, without the other.
        first.settle()
        for engine in (first, second):
            assert engine.reset()
            warm = engine.generate(prompt(0, LENGTH))
            assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
