"""Every method of vLLM's that we override or call is what we take it for, in every version that is supported."""

import inspect
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from interface import OURS, Sources, differences
from sources import passes_with, sources_of

from kvbm_rs.vllm import versions

INSTALLED = Path(vllm.__file__).parents[1]


def of_version(version: str) -> Path:
    if version == vllm.__version__.partition("+")[0]:
        return INSTALLED
    sources = sources_of(version)
    if sources is None:
        print(f"SKIPPED: the wheel of vLLM {version} cannot be had")
        pytest.skip(f"no vLLM {version}")
    return sources


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_it_is_what_we_take_it_for(version: str) -> None:
    assert list(differences(Sources(of_version(version)))) == []


def test_what_differs_is_found(tmp_path: Path) -> None:
    ours = tmp_path / "vllm"
    shutil.copytree(OURS, ours)

    def change(file: str, before: str, after: str) -> None:
        text = (ours / file).read_text()
        assert before in text
        (ours / file).write_text(text.replace(before, after, 1))

    change("connector/__init__.py", "def on_new_request(self, request: Any)", "def on_new_request(self)")
    change("connector/__init__.py", "def wait_for_layer_load(self, layer_name", "def wait_for_layer_load(self, name")
    change("connector/__init__.py", "(self, forward_context: Any, **kwargs: Any)", "(self, forward_context)")
    change("tier.py", "def submit_store(", "def submit_stores(")
    change("tier.py", "transfer_time=seconds", "took=seconds")
    change("connector/scheduler.py", "self._kv.get_blocks(known.request.request_id)", "self._kv.get_blocks()")
    change("connector/scheduler.py", "self._pool.free_blocks(", "self._pool.release_blocks(")
    change("policy.py", "import CachePolicy, ChunkStatus", "import CachePolicies, ChunkStatus")
    assert sorted(differences(Sources(INSTALLED), ours)) == [
        "connector/__init__.py: KvbmConnector.on_new_request does not take request",
        "connector/__init__.py: KvbmConnector.start_load_kv does not take what else vLLM names",
        "connector/__init__.py: KvbmConnector.wait_for_layer_load takes name where vLLM gives layer_name",
        "connector/scheduler.py: BlockPool has no release_blocks",
        "connector/scheduler.py: KVCacheManager.get_blocks wants request_id",
        "policy.py: vllm.v1.kv_offload.cpu.policies.base has no CachePolicies",
        "tier.py: JobResult does not take took",
        "tier.py: KvbmTier lacks submit_store, which SecondaryTierManager leaves open",
    ]


class _Theirs:
    def told(self, key: int, request: str = "", more: int = 0, *, urgent: bool = False) -> Any:
        raise NotImplementedError

    def same(self, key: int) -> Any:
        raise NotImplementedError


def test_arguments_that_are_new_are_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def same(self: Any, key: int) -> int:
        return key

    class Ours(_Theirs):
        def told(self, key: int, request: str = "") -> tuple[int, str]:
            return key, request

    Ours.same = same  # type: ignore[method-assign]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    versions.logger.addHandler(handler)
    try:
        ours = versions.takes_what_is_new(Ours)()
        assert ours.told(1, "a", 7) == ours.told(1, "a", more=7, urgent=True) == ours.told(key=1, request="a") == (1, "a")
    finally:
        versions.logger.removeHandler(handler)
    assert Ours.same is same, "what takes all of it costs nothing"
    assert records == ["Ours.told: this version of vLLM also gives more, urgent, which is left out"]
    with pytest.raises(TypeError):
        ours.told(1, nonsense=2)


def test_ours_take_all_that_this_version_gives() -> None:
    from kvbm_rs.vllm.connector import KvbmConnector
    from kvbm_rs.vllm.policy import HazardPolicy
    from kvbm_rs.vllm.tier import KvbmTier

    for ours in (KvbmConnector, KvbmTier, HazardPolicy):
        methods = [method for method in vars(ours).values() if inspect.isfunction(method)]
        assert not any(hasattr(method, "__wrapped__") for method in methods)


def test_the_factories_find_ours() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    from kvbm_rs.vllm.connector import KvbmConnector

    transfer = SimpleNamespace(kv_connector="KvbmConnector", kv_connector_module_path="kvbm_rs.vllm.connector")
    assert KVConnectorFactory.get_connector_class(transfer) is KvbmConnector
    assert supports_hma(KvbmConnector) and not KvbmConnector.__abstractmethods__


@pytest.mark.slow
def test_the_same_with_vllm_0_33() -> None:
    passes_with("0.33.0", __file__, "factories or all_that_this")
