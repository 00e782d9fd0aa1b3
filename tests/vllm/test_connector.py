"""`KvbmConnector` in real engines: what they say with it is what they say without it, and less is computed."""

import pytest

from connectors import LENGTH, ONE_LEFT, SERVED, WHOLE, connector, disk, host, is_at_rest, probe, spoil, spoiled_disk
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, EngineError, prompt


def test_what_the_engine_forgot_comes_from_below(model, said):
    with Engine(model, **connector(host(64))) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        hit = engine.generate(prompt(0, LENGTH))
        assert (hit.said, hit.scheduled) == ([said[0]], SERVED), "from the engine's own cache"

        assert engine.reset()
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED), "from the host tier"
        assert probe(engine, "watched")["sources"] == {"host": 10 * BLOCK}

        assert is_at_rest(engine)

        # Of a prompt that is all full blocks the last token is computed all the same, and no other: twice, since the block that it
        # is in is saved no second time.
        whole = engine.generate(WHOLE)
        assert whole.scheduled == len(WHOLE) + 7
        for _ in range(2):
            assert engine.reset()
            warm = engine.generate(WHOLE)
            assert (warm.said, warm.scheduled) == (whole.said, ONE_LEFT)
            assert probe(engine, "matches", prompt=WHOLE) == {"host": 10}
        # From its own cache the engine leaves a block; so it does where that is all that it lacks.
        assert engine.generate(WHOLE).scheduled == BLOCK + 7
        assert engine.reset()
        assert engine.generate(WHOLE[: 9 * BLOCK + 1]).said
        assert engine.generate(WHOLE).scheduled == BLOCK + 7
        assert is_at_rest(engine)

        # New weights: what was kept is not served any more, and what comes then is.
        assert engine.reset(connector=True)
        assert engine.generate(prompt(0, LENGTH)).scheduled == LENGTH + 7
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)

        # What the figures ask of a load can be asked, and nothing is wrong after it.
        assert engine.reset()
        assert len(probe(engine, "load_times", prompt=prompt(0, LENGTH), rounds=2)["ratios"]) == 2
        assert engine.generate(prompt(0, LENGTH)).said == [said[0]]
        assert engine.stop(whole=True) == 0


@pytest.mark.slow
def test_generated_tokens_are_kept_unless_told_not_to(model):
    for keeps, served in ((True, 3 * BLOCK), (False, BLOCK)):
        with Engine(model, **connector(host(64), save_generated=keeps)) as engine:
            first = prompt(1, BLOCK + 4)
            answer = engine.generate(first, tokens=2 * BLOCK)
            assert engine.reset()
            turn = first + answer.said[0] + prompt(2, 9)
            assert engine.generate(turn).scheduled == len(turn) - served + 7


def test_a_killed_process_leaves_its_blocks_to_the_next(model, said, tmp_path):
    memory = tmp_path / "memory"
    tiers = host(64, **{"host.persist": str(memory), "host.persist_index": str(memory)})
    disk = {"disk.capacity": 256 * TINY_BLOCK_BYTES, "disk.dirs": str(tmp_path), "disk.keep": True}
    with Engine(model, **connector(disk | {"flush.interval_ms": 10})) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **connector(disk)) as engine:
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert probe(engine, "watched")["sources"] == {"disk": 10 * BLOCK}
        # vLLM's log says what there is, and what was there.
        logged = engine.logged()
        assert "KvbmConnector of kvbm_rs" in logged and "routes: " in logged
        assert f"disk: 256 blocks, 32MiB in {tmp_path}, 10 blocks of an earlier process" in logged
    # /dev/shm is where memory survives a process; another file system is refused, and says so.
    with pytest.raises(EngineError, match="tmpfs|hugetlbfs"):
        Engine(model, **connector(tiers))


def test_persistent_memory_serves_the_next_process(model, said, shared_memory):
    tiers = host(64, **{"host.persist": str(shared_memory)})
    with Engine(model, **connector(tiers)) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **connector(tiers)) as engine:
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert probe(engine, "watched")["sources"] == {"host": 10 * BLOCK}
    # Other weights find nothing, and do not disturb what is there.
    with Engine(model, **connector(tiers, weights="others")) as engine:
        assert engine.generate(prompt(0, LENGTH)).scheduled == LENGTH + 7


def test_bytes_that_changed_are_computed_again(model, said, tmp_path):
    tiers = spoiled_disk(model, tmp_path)
    with Engine(model, **connector(tiers)) as engine:
        answer = engine.generate(prompt(0, LENGTH))
        assert answer.said == [said[0]]
        assert answer.scheduled >= LENGTH + 7, "computed again, after a load that failed"
        engine.call("connector_probe:flush_log")
        assert "a block and its descendants are dropped" in engine.logged(), "whose cause is heard of"
        # And then it heals.
        assert probe(engine, "drain")
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_failed_load_is_an_error_of_one_request(model, said, tmp_path):
    tiers = spoiled_disk(model, tmp_path)
    with Engine(model, **connector(tiers, failure_policy="fail")) as engine:
        answer = engine.generate(*(prompt(number, LENGTH) for number in range(4)))
        assert answer.ended == ["error", *["length"] * 3]
        assert answer.said[1:] == said[1:4]
        # And then it heals: the next one computes it, and it is kept.
        assert is_at_rest(engine)
        for _ in range(2):
            assert engine.generate(prompt(0, LENGTH)).said == [said[0]]
            assert probe(engine, "drain") and engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_objects_serve_the_next_process(model, said, tmp_path):
    objects = {"object.url": f"file://{tmp_path}/objects", "object.keep": True, "flush.interval_ms": 10}
    with Engine(model, **connector(objects)) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **connector(objects)) as engine:
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_wrong_byte_would_show(model, said):
    """The control of all others: with bytes that changed in the host tier behind everybody's back, tokens differ."""
    with Engine(model, **connector(host(64))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        probe(engine, "spoil_next_load")
        spoiled = engine.generate(prompt(0, LENGTH))
        assert spoiled.scheduled == SERVED
        assert spoiled.said != [said[0]]


@pytest.mark.slow
def test_preempted_requests_say_the_same(model, said):
    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 6, "max_model_len": 16 * BLOCK}
    with Engine(model, **connector(host(256)), **few) as engine:
        probe(engine, "watch")
        for _ in range(2):
            answer = engine.generate(*(prompt(number, LENGTH) for number in range(10)), tokens=8)
            assert answer.said == said
        long = engine.generate(*(prompt(number, 4 * BLOCK) for number in range(6)), tokens=3 * BLOCK)
        assert probe(engine, "watched")["preempted"] > 0
        again = engine.generate(*(prompt(number, 4 * BLOCK) for number in range(6)), tokens=3 * BLOCK)
        assert again.said == long.said
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_hot_prefix_that_never_leaves_the_engine_stays_below(model):
    hot = prompt(0, 4 * BLOCK)
    # Room below for the hot prefix and a few strangers only.
    with Engine(model, **connector(host(16))) as engine:
        # As many as it takes the default policy to learn what returns, where prompts come within milliseconds.
        for number in range(1, 40):
            engine.generate(hot + prompt(number, 5), tokens=1)
            engine.generate(prompt(100 + number, 5 * BLOCK), tokens=1)
        assert engine.reset()
        again = engine.generate(hot + prompt(50, 5), tokens=1)
        assert again.scheduled == 5


@pytest.mark.slow
def test_requests_that_are_aborted_leave_nothing(model, said):
    with Engine(model, **connector(host(64))) as engine:
        engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        # While it waits, while it loads, while it computes, while it generates.
        for steps in range(6):
            probe(engine, "abort_after", prompt=prompt(0, LENGTH), steps=steps)
            assert is_at_rest(engine)
            assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


@pytest.mark.slow
def test_what_is_wrong_with_the_configuration_is_said(model):
    with pytest.raises(EngineError, match=r"no 'setings'; valid: settings, weights, weights_never_change, save_generated"):
        Engine(model, **connector(host(64), setings={}))
    with pytest.raises(EngineError, match="host.capacity"):
        Engine(model, **connector({"host.capasity": "1GiB"}))


@pytest.mark.slow
def test_two_ranks_serve_together_and_so_do_the_next_two(model, said, tmp_path):
    tiers = {"host.capacity": "16MiB", **disk(tmp_path)}
    two = {"tensor_parallel_size": 2, "environment": {"OMP_NUM_THREADS": "1"}}
    with Engine(model, **connector(tiers), **two) as engine:
        cold = engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (cold.said, SERVED)
        assert is_at_rest(engine)
        assert probe(engine, "drain")
        engine.kill()
    with Engine(model, **connector(tiers), **two) as engine:
        probe(engine, "watch")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (cold.said, SERVED)
        assert probe(engine, "watched")["sources"] == {"disk": LENGTH // BLOCK * BLOCK}
        # Requests that are taken back while both ranks load.
        for steps in range(4):
            assert engine.reset()
            probe(engine, "abort_after", prompt=prompt(0, LENGTH), steps=steps)
            assert is_at_rest(engine)
        engine.kill()
    # What one rank cannot give back is lacking in both, and is computed again.
    (slots,) = tmp_path.glob("*rank1of2.blocks")
    spoil(slots, block_bytes=TINY_BLOCK_BYTES // 2)
    with Engine(model, **connector(tiers), **two) as engine:
        again = engine.generate(prompt(0, LENGTH))
        assert again.said == cold.said
        assert again.scheduled >= LENGTH + 7
        assert probe(engine, "drain") and engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == (cold.said, SERVED)
        assert is_at_rest(engine)
