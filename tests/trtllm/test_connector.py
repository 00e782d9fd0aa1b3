"""The scheduler's and the worker's class under TensorRT-LLM's order of calls: a contract test, since the real one needs a GPU."""

import ast
import inspect
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine import BLOCK, Executor, Request
from kvbm_rs.errors import InvalidError, KvbmError
from kvbm_rs.trtllm import engine as engine_module
from kvbm_rs.trtllm.connector import KvbmScheduler, KvbmWorker
from kvbm_rs.trtllm.engine import LoadError

PROMPT = list(range(100, 150))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(autouse=True)
def tiers(monkeypatch, tmp_path):
    for name, value in {
        "CPU_CACHE_OVERRIDE_NUM_BLOCKS": "256",
        "HOST_CACHE_HUGE_PAGES": "false",
        "HOST_CACHE_STAGING_BLOCKS": "16",
        "DISK_CACHE_OVERRIDE_NUM_BLOCKS": "1024",
        "DISK_CACHE_DIR": str(tmp_path),
        "DISK_KEEP": "true",
    }.items():
        monkeypatch.setenv(f"DYN_KVBM_{name}", value)


@pytest.fixture
def make(model):
    made = []

    def make(**others) -> Executor:
        for executor in made:
            close(executor)
        made.append(Executor(KvbmScheduler, KvbmWorker, model, **others))
        return made[-1]

    yield make
    for executor in made:
        close(executor)


def close(executor: Executor) -> None:
    engine_module.engine_of(executor.llm_args).close()


def test_a_prompt_is_computed_once(make):
    executor = make()
    said = executor.generate(Request(PROMPT), 6)
    assert executor.loaded_tokens == 0
    assert executor.generate(Request(PROMPT), 6) == said
    assert executor.loaded_tokens == 48, "all full blocks but what the last token is in"
    # A prompt that begins alike, one that is full of blocks, and one that goes on with what was said.
    executor.generate(Request(PROMPT[:18] + [7] * 9), 2)
    assert executor.loaded_tokens == 48 + 16
    executor.generate(Request(PROMPT[:48]), 2)
    assert executor.loaded_tokens == 48 + 16 + 44
    executor.generate(Request(PROMPT + said + [5]), 2)
    assert executor.loaded_tokens == 48 + 16 + 44 + 52


def test_nothing_is_left_of_requests(make):
    executor = make()
    for number in range(30):
        executor.generate(Request([number % 10] * 30), 3)
    engine = engine_module.engine_of(executor.llm_args)
    assert len(executor.free) == 64
    assert (executor.scheduler._requests, engine.loads, engine._saves, engine._computing) == ({}, {}, [], [])
    assert (executor.worker._saving, executor.worker._loading) == ([], [])


def test_the_next_process_finds_it_on_disk(make):
    executor = make()
    executor.generate(Request(PROMPT), 6)
    again = make()
    assert engine_module.engine_of(again.llm_args).manager.recovered() == {"disk": 13}
    again.generate(Request(PROMPT), 6)
    assert again.loaded_tokens == 48


def test_a_request_that_begins_in_the_engines_own_cache(make):
    executor = make()
    executor.generate(Request(PROMPT), 2)
    request = Request(PROMPT)
    matched, is_async = executor.scheduler.get_num_new_matched_tokens(request, 5 * BLOCK)
    assert (matched, is_async) == (48 - 5 * BLOCK, True)
    # Of a block in the middle there is nothing to go on from.
    assert executor.scheduler.get_num_new_matched_tokens(request, 5 * BLOCK + 1) == (0, False)
    assert executor.scheduler.get_num_new_matched_tokens(request, 48) == (0, False)


def test_what_tokens_do_not_say(make):
    executor = make()
    executor.generate(Request(PROMPT, lora_task_id=1), 2)
    executor.generate(Request(PROMPT, cache_salt="mine"), 2)
    executor.generate(Request(PROMPT), 2)
    assert executor.loaded_tokens == 0
    executor.generate(Request(PROMPT, lora_task_id=1), 2)
    assert executor.loaded_tokens == 48
    executor.generate(Request(PROMPT, multimodal_hashes=[[1]]), 2)
    assert executor.loaded_tokens == 48


def test_blocks_of_an_adapter_are_found_by_their_engine_alone(make):
    executor = make()
    for adapter in (None, 1):
        executor.generate(Request(PROMPT, lora_task_id=adapter), 2)
    # In which the number may be that of other weights.
    again = make()
    again.generate(Request(PROMPT, lora_task_id=1), 2)
    assert again.loaded_tokens == 0
    again.generate(Request(PROMPT), 2)
    assert again.loaded_tokens == 48


def test_an_abort_while_it_loads(make):
    executor = make()
    executor.generate(Request(PROMPT), 2)
    for _ in range(10):
        request = Request(PROMPT)
        executor.start(request)
        assert request.request_id in executor.starting
        # The engine keeps its blocks until the worker says that nothing writes them any more.
        while request.request_id in executor.starting or request.request_id in executor.loading:
            executor.step()
        executor.end(request)
        executor.settle()
    assert len(executor.free) == 64
    executor.generate(Request(PROMPT), 2)


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_in_the_middle_of_a_prompt(make, steps):
    """What was not computed is not kept, whatever the request's blocks hold."""
    executor = make(chunk=10)
    request = Request(PROMPT)
    executor.start(request)
    for _ in range(steps):
        executor.step()
    executor.end(request)
    executor.settle()
    assert len(executor.free) == 64
    executor.generate(Request(PROMPT), 2)
    assert executor.loaded_tokens == 10 * steps // BLOCK * BLOCK


def test_several_at_once(make):
    executor = make(blocks=200)
    for _ in range(3):
        requests = [Request([number] * (20 + number)) for number in range(8)]
        for request in requests:
            executor.start(request)
        while any(len(request.tokens) < request.prompt + 5 for request in requests):
            executor.step()
        for request in requests:
            executor.check(request)
            executor.end(request)
        executor.settle()
    assert executor.loaded_tokens == 2 * sum((19 + number) // BLOCK * BLOCK for number in range(8))


def test_a_load_that_fails_stops_the_engine(make):
    """There is no way to tell it, and wrong bytes are worse."""
    executor = make()
    executor.generate(Request(PROMPT), 2)
    executor.start(Request(PROMPT))
    engine = engine_module.engine_of(executor.llm_args)
    (number, (load, blocks)), = engine.loads.items()
    engine.loads[number] = (load, blocks + 1)
    with pytest.raises(LoadError, match="cannot be copied"):
        executor.settle()


def test_corrupt_blocks_on_disk_are_computed_again(make, tmp_path):
    executor = make()
    said = executor.generate(Request(PROMPT), 6)
    close(executor)
    for path in tmp_path.glob("*.blocks"):
        whole = bytearray(path.read_bytes())
        for at in range(100, len(whole), 1024):
            whole[at] ^= 0x10
        path.write_bytes(whole)
    again = make()
    assert again.generate(Request(PROMPT), 6) == said
    assert again.loaded_tokens == 0
    assert again.generate(Request(PROMPT), 6) == said
    assert again.loaded_tokens == 48, "it heals"


def test_a_look_up_waits_for_disk_a_little_only(make, monkeypatch):
    executor = make()
    executor.generate(Request(PROMPT), 2)
    again = make()
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    # A disk that never answers.
    slow = SimpleNamespace(manager=SimpleNamespace(matches=lambda _: {}))
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "time", clock)
        engine_module.Engine._wait(slow, None, 1)
    assert sum(slept) == pytest.approx(engine_module.MAX_WAIT, abs=0.01)
    monkeypatch.setattr(engine_module, "MAX_WAIT", 0.0)
    matched, _ = again.scheduler.get_num_new_matched_tokens(Request(PROMPT), 0)
    assert matched in range(49)
    # It comes up meanwhile.
    deadline = time.monotonic() + 10
    while again.scheduler.get_num_new_matched_tokens(Request(PROMPT), 0) != (48, True):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_settings_are_checked_at_start(make, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_DISK_CAPCITY", "1GB")
    with pytest.raises(KvbmError, match="DYN_KVBM_DISK_CAPCITY"):
        make()
    monkeypatch.delenv("DYN_KVBM_DISK_CAPCITY")
    monkeypatch.delenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS")
    with pytest.raises(InvalidError, match=r"host\.capacity"):
        make()


def test_one_rank_only(model):
    args = SimpleNamespace(
        model=str(model), kv_cache_config=SimpleNamespace(tokens_per_block=BLOCK), tensor_parallel_size=2
    )
    with pytest.raises(InvalidError, match="tensor_parallel_size"):
        KvbmScheduler(args)


def test_the_classes_have_the_interface():
    for ours in (KvbmScheduler, KvbmWorker):
        (theirs,) = ours.__bases__
        for name in theirs.__abstractmethods__:
            parameters = list(inspect.signature(getattr(ours, name)).parameters)
            assert parameters == list(inspect.signature(getattr(theirs, name)).parameters), name


@pytest.mark.skipif("KVBM_TENSORRT_LLM" not in os.environ, reason="KVBM_TENSORRT_LLM names no checkout of TensorRT-LLM")
def test_the_stand_in_has_the_real_interface():
    """Against TensorRT-LLM's source, which need not be importable."""
    place = Path(os.environ["KVBM_TENSORRT_LLM"], "tensorrt_llm/_torch/pyexecutor")
    files = [place / "connectors/kv_cache_connector.py", place / "kv_cache_connector.py"]
    tree = ast.parse(next(file for file in files if file.exists()).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for stand_in in (KvbmScheduler.__bases__[0], KvbmWorker.__bases__[0]):
        methods = {node.name: node for node in classes[stand_in.__name__].body if isinstance(node, ast.FunctionDef)}
        abstract = {
            name: [argument.arg for argument in node.args.args]
            for name, node in methods.items()
            if any(getattr(mark, "id", "") == "abstractmethod" for mark in node.decorator_list)
        }
        ours = {name: list(inspect.signature(getattr(stand_in, name)).parameters) for name in stand_in.__abstractmethods__}
        assert ours == abstract
