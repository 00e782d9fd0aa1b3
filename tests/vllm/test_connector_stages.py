"""`KvbmConnector` with pipeline parallelism: each worker has the layers of its stage, and later stages are steps behind the first."""

import os
import random
import signal
from types import SimpleNamespace
from unittest.mock import patch

import engine as real
import pytest
from connectors import LENGTH, SERVED, connector, disk, is_at_rest, probe, spoil
from engine import TINY_BLOCK_BYTES, Engine, EngineError, prompt
from modelless import BLOCK, BLOCK_BYTES
from staged import Staged, Worker

from kvbm_rs import Chain
from kvbm_rs.errors import InvalidError
from kvbm_rs.vllm.connector.config import Group, _check_stages
from kvbm_rs.vllm.connector.worker import SlicedLoad


def staged(
    stages: int = 2, workers: int = 1, blocks: int = 512, role: str = "kv_both", layerwise: bool = False, **arguments
) -> Staged:
    tiers = {"host.capacity": 4096 * BLOCK_BYTES}
    transfer = connector(tiers, role=role, weights="made up", layerwise=layerwise)["kv_transfer_config"]
    return Staged(transfer, blocks, 16, stages, workers, **arguments)


def run(engine: Staged) -> int:
    """Until all requests have ended. Returns how many were preempted."""
    preempted = 0
    while engine.scheduler.has_requests():
        preempted += len(engine.step().preempted_req_ids or ())
    return preempted


def kept(engine: Staged, request) -> int:
    """Leading blocks of a request that the tiers have."""
    manager = engine.scheduler.connector._scheduler.manager
    return manager.matches(Chain(request.block_hashes)).get("host", 0)


def loaded(engine: Staged) -> int:
    """Blocks that came from below."""
    samples = {name: values for name, _, _, values in engine.scheduler.connector._scheduler.manager.samples()}
    return sum(int(value) for labels, value in samples["kvbm_transfer_blocks_total"] if labels["to"] == "device")


@pytest.mark.parametrize("workers", [1, 2])
def test_each_stage_gets_back_what_it_computed(workers):
    engine = staged(workers=workers)
    first = engine.add("first", prompt(0, 10 * BLOCK + 5), tokens=3)
    run(engine)
    engine.scheduler.connector._scheduler._wait(10.0)
    assert kept(engine, first) == 10
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", prompt(0, 10 * BLOCK + 5), tokens=3)
    run(engine)
    assert loaded(engine) == 10
    engine.close()


def test_nothing_is_kept_before_the_last_stage_has_computed_it():
    engine = staged()
    request = engine.add("one", prompt(0, 4 * BLOCK), tokens=2)
    # The first stage has computed the prompt, the second one has not.
    engine.step()
    assert not engine.scheduler.connector._scheduler._saving and not kept(engine, request)
    run(engine)
    engine.scheduler.connector._scheduler._wait(10.0)
    assert kept(engine, request) == 4
    engine.close()


# Chunks of a prompt are in several steps under way, and there are too few blocks for all requests.
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize(("stages", "workers"), [(2, 1), (4, 1), (2, 2)])
def test_blocks_that_others_had_are_never_saved_or_loaded_wrong(stages, workers, role, is_async):
    """What a request lets go while later stages compute it becomes another one's: they would write over what that loads."""
    soak(staged(stages, workers, blocks=60, role=role, is_async=is_async, max_num_batched_tokens=6 * BLOCK))


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_layers_that_workers_wait_for_are_never_wrong(role):
    soak(staged(1, 2, blocks=60, role=role, layerwise=True, max_num_batched_tokens=6 * BLOCK))


def soak(engine: Staged) -> None:
    dice, preempted, asked = random.Random(20), 0, []
    for number in range(200):
        # Few prompts with beginnings in common: most come again.
        which, blocks = dice.randrange(6), dice.randint(1, 14)
        asked.append(f"request-{number}")
        engine.add(asked[-1], prompt(which, blocks * BLOCK + dice.randrange(BLOCK)), tokens=dice.randint(1, 2 * BLOCK))
        for _ in range(dice.randrange(4)):
            preempted += len(engine.step().preempted_req_ids or ())
        if dice.random() < 0.3:
            engine.finish(dice.choice(asked))
        if dice.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
    preempted += run(engine)
    assert preempted and loaded(engine)
    engine.close()


def test_each_worker_waits_for_layers_of_its_own_slice():
    engine = staged(1, 2, layerwise=True)
    asked = prompt(0, 10 * BLOCK + 5)
    for name, scheduled in (("first", 10 * BLOCK + 5), ("again", 5)):
        engine.add(name, asked, tokens=3)
        # At once: nothing is loaded in steps before, or computed again.
        assert engine.step().num_scheduled_tokens == {name: scheduled}
        assert engine.step().num_scheduled_tokens == {name: 1}
        run(engine)
        engine.scheduler.connector._scheduler._wait(10.0)
        assert engine.scheduler.reset_prefix_cache()
    assert loaded(engine) == 10
    engine.close()


def test_a_worker_lost_amid_a_layered_load_costs_that_and_heals():
    engine = staged(1, 2, layerwise=True)
    asked = prompt(0, 10 * BLOCK + 5)
    engine.add("first", asked, tokens=3)
    run(engine)
    engine.scheduler.connector._scheduler._wait(10.0)
    assert engine.scheduler.reset_prefix_cache()

    def lost(*load) -> SlicedLoad:
        engine.workers[1].connector._worker._rank = None
        return SlicedLoad(*load)

    engine.add("without", asked, tokens=3)
    with patch("kvbm_rs.vllm.connector.scheduler.SlicedLoad", lost):
        # What was computed from it is dropped, and computed again.
        assert engine.step().num_scheduled_tokens == {"without": 5}
    assert engine.step().num_scheduled_tokens == {"without": 10 * BLOCK + 5}
    run(engine)
    assert not loaded(engine)
    heal(engine, engine.workers[1], asked)
    engine.close()


def test_a_stage_that_is_lost_costs_misses_and_then_heals():
    engine = staged()
    asked = prompt(0, 10 * BLOCK + 5)
    engine.add("first", asked, tokens=3)
    run(engine)
    engine.scheduler.connector._scheduler._wait(10.0)
    engine.workers[1].connector.shutdown()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("without", asked, tokens=3)
    run(engine)
    assert not loaded(engine)
    heal(engine, engine.workers[1], asked)
    engine.close()


def heal(engine: Staged, worker: Worker, asked: list[int]) -> None:
    """The worker comes again with nothing in its tiers, and is tried with one block first."""
    worker.join()
    served = 0
    while served < 10:
        before = loaded(engine)
        engine.scheduler.reset_prefix_cache()
        engine.add("again", asked, tokens=3)
        run(engine)
        served = loaded(engine) - before


def test_stages_of_unlike_layers_are_refused():
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 12)

    def check(stages: int, layers: int, sizes: tuple[int, ...] = (64,), is_hybrid: bool = False) -> None:
        group = Group(0, ("layer",) * layers, (sizes * layers)[:layers], 0)
        _check_stages(SimpleNamespace(stages=stages, groups=[group], is_hybrid=is_hybrid), model)

    for stages in (1, 2, 3, 4, 6, 12):
        check(stages, 12 // stages)
    with pytest.raises(InvalidError, match=r"vLLM makes stages of \[2, 2, 3, 3, 2\]: set it to a divisor of the model's 12 layers"):
        check(5, 2)
    # A draft model's layer in the last stage; layers that keep nothing; layers of two sizes; several cache groups.
    for unlike in ((3, 5), (3, 3), (3, 4, (64, 32)), (3, 4, (64,), True)):
        with pytest.raises(InvalidError, match="a model all of whose layers keep keys and values of one size, and no draft model"):
            check(*unlike)


def open_engine(model, tiers: dict, **arguments) -> Engine:
    two = {"pipeline_parallel_size": 2, "environment": {"OMP_NUM_THREADS": "1"}}
    engine = Engine(model, **connector(tiers), **two, **arguments)
    probe(engine, "run_stages_once")
    return engine


@pytest.mark.slow
def test_two_stages_serve_together_and_so_do_the_next_two(model, said, tmp_path):
    tiers = {"host.capacity": "16MiB", **disk(tmp_path)}
    served = {"disk": LENGTH // real.BLOCK * real.BLOCK}
    with open_engine(model, tiers) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        # Requests that are taken back while both stages load.
        for steps in range(4):
            assert engine.reset()
            probe(engine, "abort_after", prompt=prompt(0, LENGTH), steps=steps)
            assert is_at_rest(engine)
        assert probe(engine, "drain")
        # A worker is killed, and vLLM ends the engine.
        os.kill(probe(engine, "worker_processes")[1], signal.SIGKILL)
        with pytest.raises(EngineError):
            engine.generate(prompt(1, LENGTH))
    with open_engine(model, tiers) as engine:
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert probe(engine, "watched")["sources"] == served
        assert engine.generate(prompt(1, LENGTH)).said == [said[1]]
        assert is_at_rest(engine)
        engine.kill()
    # What one stage cannot give back is lacking in both, and is computed again.
    (slots,) = tmp_path.glob("*rank1of2.blocks")
    spoil(slots, block_bytes=TINY_BLOCK_BYTES // 2)
    with open_engine(model, tiers) as engine:
        again = engine.generate(prompt(0, LENGTH))
        assert again.said == [said[0]] and again.scheduled >= LENGTH + 7
        assert probe(engine, "drain") and engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)
    # One worker has all layers of a block: what stages kept is not its.
    with Engine(model, **connector(tiers)) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)


@pytest.mark.slow
def test_stages_answer_right_with_too_few_blocks(model, said, tmp_path):
    few = {"num_gpu_blocks_override": 30, "max_num_seqs": 6, "max_model_len": 16 * real.BLOCK}
    with open_engine(model, {"host.capacity": "64MiB"}, **few) as engine:
        probe(engine, "watch")
        for _ in range(3):
            assert engine.generate(*(prompt(number, LENGTH) for number in range(10)), tokens=8).said == said
            assert engine.reset()
        assert probe(engine, "watched")["sources"]["host"] > 0
        assert is_at_rest(engine)
