"""What docs/trtllm.md shows, as far as that can be seen without TensorRT-LLM: its classes are there, and its names are right."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector

PAGE = Path(__file__).parents[2] / "docs/trtllm.md"


def test_the_program_of_the_page_names_our_classes(monkeypatch):
    (shown,) = re.findall(r"```python by tests/trtllm/test_docs.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    arguments = lambda **given: SimpleNamespace(**given)
    # Of what it imports only the arguments matter here.
    for name, classes in {
        "tensorrt_llm": ("LLM",),
        "tensorrt_llm.llmapi": ("KvCacheConfig",),
        "tensorrt_llm.llmapi.llm_args": ("KvCacheConnectorConfig",),
    }.items():
        module = sys.modules.get(name) or ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        for made in classes:
            monkeypatch.setattr(module, made, arguments, raising=False)
    told: dict = {}
    exec(shown, told)  # noqa: S102
    config = told["llm"].kv_connector_config
    module = importlib.import_module(config.connector_module)
    scheduler, worker = (getattr(module, name) for name in (config.connector_scheduler_class, config.connector_worker_class))
    assert issubclass(scheduler, kv_cache_connector.KvCacheConnectorScheduler)
    assert issubclass(worker, kv_cache_connector.KvCacheConnectorWorker)
    for name in (scheduler.__name__, worker.__name__, config.connector_module):
        assert PAGE.read_text().count(name) > 2, "the other ways to say it have the same names"
