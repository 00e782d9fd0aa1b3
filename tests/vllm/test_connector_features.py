"""`KvbmConnector` beside what else an engine does: sleep, other weights, speculative decoding, other connectors."""

from collections import deque

import pytest
from connectors import LENGTH, SERVED, connector, host, is_at_rest, peerless, probe
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, EngineError, offloading, prompt


@pytest.mark.slow
def test_an_engine_sleeps_and_wakes(model, said):
    with Engine(model, **connector(host(64))) as engine:
        engine.generate(prompt(0, LENGTH))
        # At once, while blocks are saved; and again with requests that it takes back.
        probe(engine, "sleep")
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7), "the weights may be others"
        asked = [prompt(number, LENGTH) for number in range(1, 4)]
        for steps in range(1, 5):
            assert probe(engine, "sleep", prompts=asked, steps=steps) == []
            assert is_at_rest(engine)
            assert probe(engine, "sleep", prompts=asked, steps=steps, mode="keep") == said[1:4]
            assert is_at_rest(engine)
        for number in range(4):
            assert engine.generate(prompt(number, LENGTH)).said == [said[number]]
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)


@pytest.mark.slow
def test_what_is_kept_outlives_sleep_where_weights_never_change(model, said):
    with Engine(model, **connector(host(64), weights_never_change=True)) as engine:
        engine.generate(prompt(0, LENGTH))
        probe(engine, "sleep")
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


@pytest.mark.slow
def test_nothing_of_other_weights_is_served(model, said):
    with Engine(model, **connector(host(64))) as engine:
        assert engine.generate(prompt(0, LENGTH)).said == [said[0]]
        # While a request is under way: what it computed with the old weights must not be kept either.
        probe(engine, "exchange_weights", prompt=prompt(1, LENGTH))
        other = engine.generate(prompt(0, LENGTH))
        assert other.said != [said[0]] and other.scheduled == LENGTH + 7
        underway = engine.generate(prompt(1, LENGTH))
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH), prompt(1, LENGTH))
        assert warm.said == other.said + underway.said and underway.said != [said[1]]

        # The first ones again: also they are new.
        probe(engine, "exchange_weights", prompt=prompt(1, LENGTH))
        again = engine.generate(prompt(0, LENGTH))
        assert (again.said, again.scheduled) == ([said[0]], LENGTH + 7)
        assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH), prompt(1, LENGTH))
        assert warm.said == said[:2]
        assert is_at_rest(engine)


@pytest.mark.slow
def test_tokens_that_were_guessed_are_kept_once_they_are_right(model):
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    # Prompts that repeat themselves, whose answers the proposer has something to guess from.
    asked = [prompt(number, 40) * 5 for number in range(3)]
    with Engine(model, dtype="float32") as engine:
        said = engine.generate(*asked, tokens=3 * BLOCK).said
    with Engine(model, **connector(host(256)), speculative_config=ngram) as engine:
        assert engine.generate(*asked, tokens=3 * BLOCK).said == said
        assert probe(engine, "metrics")["vllm:spec_decode_num_draft_tokens"][0][1] > 0
        # The next turn goes on behind the answers: every block of them was kept, and is right.
        turns = [begun + answer + prompt(9, 5) for begun, answer in zip(asked, said)]
        assert engine.reset()
        warm = engine.generate(*turns, tokens=BLOCK)
        assert is_at_rest(engine)
    with Engine(model, dtype="float32") as engine:
        assert engine.generate(*turns, tokens=BLOCK).said == warm.said
    kept = sum((len(begun) + len(answer) - 1) // BLOCK * BLOCK for begun, answer in zip(asked, said))
    assert sum(warm.cached) == kept


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False])
def test_it_serves_beside_another_connector(model, said, ours_first):
    ours = connector(host(64))["kv_transfer_config"]
    theirs = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": offloading(64 * TINY_BLOCK_BYTES),
    }
    both = [ours, theirs] if ours_first else [theirs, ours]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both},
    }
    arguments = connector({}) | {"kv_transfer_config": multi}
    with Engine(model, **arguments) as engine:
        for _ in range(2):
            for number in range(3):
                assert engine.generate(prompt(number, LENGTH)).said == [said[number]]
            assert engine.reset()
        warm = engine.generate(prompt(0, LENGTH))
        assert (warm.said, warm.scheduled) == ([said[0]], SERVED)
        assert is_at_rest(engine)
        # All that was computed is in ours, whichever connector loads.
        counted = probe(engine, "metrics")
        saved = [value for labels, value in counted["vllm:kvbm_transfer_blocks"] if labels["from"] == "device"]
        assert saved == [3 * (LENGTH // BLOCK)]
        # And is given where the other one has nothing.
        assert engine.reset(connector=True)
        cold = engine.generate(prompt(0, LENGTH))
        assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)


def test_a_session_keeps_nothing_under_names_it_took_back(model):
    """Of each chunk of a session but the last the token that was said is taken back: blocks are full of other tokens then."""
    chunks = [prompt(0, 4 * BLOCK - 1), prompt(1, 4 * BLOCK), prompt(2, 2 * BLOCK + 3)]
    whole = [token for chunk in chunks for token in chunk]
    with Engine(model, dtype="float32") as engine:
        taken_back = engine.generate(chunks[0], tokens=1).said[0]
        assert taken_back != chunks[1][:1], "else the test tells nothing"
        astray = chunks[0] + taken_back + prompt(3, 9)
        said = [engine.generate(asked).said[0] for asked in (whole, astray)]
    with Engine(model, **connector(host(64))) as engine:
        assert probe(engine, "converse", chunks=chunks)[0] == taken_back[0]
        assert engine.reset()
        answers = [engine.generate(asked) for asked in (whole, astray)]
        assert [answer.said[0] for answer in answers] == said
        # All of the first is served, and of the second what it shares with it.
        assert [answer.scheduled for answer in answers] == [len(whole) % BLOCK + 7, len(astray) - 3 * BLOCK + 7]
        assert is_at_rest(engine)


@pytest.mark.slow
def test_a_request_that_waits_for_room_is_counted_once(model, said):
    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 6, "max_model_len": 16 * BLOCK}
    with Engine(model, **connector(host(256)), **few) as engine:
        answer = engine.generate(*(prompt(number, LENGTH) for number in range(10)))
        assert answer.said == said
        assert probe(engine, "requested_tokens") == 10 * (LENGTH // BLOCK * BLOCK)


@pytest.mark.slow
def test_salted_prompts_have_blocks_of_their_own(model, said):
    with Engine(model, **connector(host(64))) as engine:
        for salt in (None, "one", "other"):
            cold = engine.generate(prompt(0, LENGTH), salt=salt)
            assert (cold.said, cold.scheduled) == ([said[0]], LENGTH + 7)
        assert engine.reset()
        for salt in (None, "one", "other"):
            warm = engine.generate(prompt(0, LENGTH), salt=salt)
            assert (warm.said, warm.scheduled) == ([said[0]], SERVED)


@pytest.mark.slow
def test_layer_by_layer_is_refused_where_failures_come_too_late(model):
    guessing = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(EngineError, match="layerwise is not for speculative decoding"):
        Engine(model, **connector(host(64), layerwise=True), speculative_config=guessing)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_producer_loads_where_no_step_under_way_writes(role):
    """Under asynchronous scheduling, which CPUs have not. For the other roles vLLM keeps such blocks back."""
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.scheduler import Scheduler
    from kvbm_rs.vllm.connector.worker import Stepped

    begun = []
    load = SimpleNamespace(wait=lambda seconds: SimpleNamespace(is_whole=True))
    lease = SimpleNamespace(blocks=2, by_tier={"host": 2}, wanted=lambda number: (0, 2))
    request = SimpleNamespace(request_id="one", num_computed_tokens=0)
    known = SimpleNamespace(lease=lease, owed=0, prefilled=None, steps=[], request=request)
    scheduler = object.__new__(Scheduler)
    scheduler.manager = SimpleNamespace(load_into=lambda lease, slots: begun.append(slots) or load)
    scheduler._config = SimpleNamespace(
        is_producer=role == "kv_producer",
        block_tokens=32,
        groups=[SimpleNamespace(index=0)],
        layerwise=False,
        saves_layers=False,
        is_windowed=False,
        is_shared=False,
    )
    scheduler._pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
    scheduler._adapters = SimpleNamespace(look_again=lambda: None)
    scheduler._requests, scheduler._loading, scheduler._layered = {"one": known}, {}, []
    scheduler._saving, scheduler._ending, scheduler._pinning = [], [], []
    scheduler._step, scheduler._ended, scheduler._computing = 7, 6, 7
    scheduler._due, scheduler._filling = {}, deque()
    nothing = SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=()),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )

    # Step 7 is under way.
    scheduler.load(request, ([4, 5],), 64)
    assert len(begun) == (role != "kv_producer")
    if role == "kv_producer":
        assert not scheduler.step(nothing).loaded and not begun
        scheduler.stepped(Stepped(7))
    assert scheduler.step(nothing).loaded == {"one"}
    assert begun == [[(0, 0, [4, 5])]]


@pytest.mark.slow
def test_a_wrapping_connector_of_another_role_does_not_start(model):
    arguments = connector(host(64))
    ours = arguments["kv_transfer_config"]
    arguments["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    with pytest.raises(EngineError, match="Set kv_producer for KvbmConnector too"):
        Engine(model, **arguments)


def test_context_parallelism_is_refused():
    from kvbm_rs.errors import InvalidError
    from kvbm_rs.vllm.connector.config import _check_parallel
    from vllm.config import ParallelConfig

    _check_parallel(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        parallel = ParallelConfig(tensor_parallel_size=2)
        setattr(parallel, name, 2)
        with pytest.raises(InvalidError, match=name):
            _check_parallel(parallel)


def test_what_steps_compute_of_withdrawn_tokens_is_not_kept():
    """Under asynchronous scheduling, which CPUs have not, a step is under way with the token that a session takes back."""
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.scheduler import Scheduler, _Request

    def output(computed: int, scheduled: int) -> SimpleNamespace:
        cached = SimpleNamespace(req_ids=["session"], num_computed_tokens=[computed], resumed_req_ids={"session"})
        return SimpleNamespace(
            preempted_req_ids=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"session": scheduled},
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=scheduled,
        )

    scheduler = Scheduler.__new__(Scheduler)
    scheduler._step, scheduler._ended, scheduler._layered, scheduler._loading = 0, 0, [], {}
    scheduler._due, scheduler._filling = {}, deque()
    scheduler._config = SimpleNamespace(block_tokens=BLOCK, step_tokens=1, saves_layers=False)
    scheduler._adapters = Adapters(None)
    request = SimpleNamespace(num_tokens=4 * BLOCK, num_computed_tokens=4 * BLOCK)
    known = _Request(1, request, None, None, b"")
    scheduler._requests = {"session": known}
    # The prompt but for a block's last token; that token, which was said; and what comes in its place.
    for computed, scheduled in ((0, 2 * BLOCK - 1), (2 * BLOCK - 1, 1), (2 * BLOCK - 1, BLOCK)):
        scheduler.step(output(computed, scheduled))
    filled = []
    for step in (1, 2, 3):
        assert scheduler._advance(known, step)
        filled.append(known.computed // BLOCK)
    assert filled == [1, 1, 2]


@pytest.mark.parametrize("status", ["RUNNING", "WAITING"])
def test_a_session_from_before_a_reset_is_not_kept(status):
    """Its blocks, and what is computed behind them, are of the old weights."""
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.scheduler import _ALL, Scheduler, _Request
    from vllm.v1.request import RequestStatus

    hashes = [bytes([at]) * 32 for at in range(4)]
    request = SimpleNamespace(
        block_hashes=hashes,
        num_tokens=4 * BLOCK,
        num_computed_tokens=4 * BLOCK,
        status=RequestStatus[status],
        mm_features=[],
        lora_request=None,
    )
    known = _Request(1, request, None, None, b"", saved=4, computed=4 * BLOCK)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._config = SimpleNamespace(weights_never_change=False, block_tokens=BLOCK, names_media=True)
    scheduler._adapters, scheduler._weights, scheduler._hashes_per_block = Adapters(None), b"", 1
    scheduler._publisher, scheduler._requests, scheduler._ending = None, {"session": known}, []
    scheduler._loading = {}
    scheduler._pinning, scheduler._pinned = [], []
    scheduler.manager = SimpleNamespace(reset=lambda: None)
    scheduler._chain(known)
    assert scheduler.reset()
    # The last token of its last block is another one now.
    request.block_hashes = [*hashes[:3], bytes(32)]
    assert len(scheduler._chain(known)) == 4
    assert known.saved == _ALL


def test_a_partly_noted_reset_keeps_nothing_of_before():
    """A disk that cannot be written keeps no engine from going on, nor has it serve what it must not."""
    from types import SimpleNamespace

    from kvbm_rs.errors import UnavailableError
    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.scheduler import _ALL, Scheduler, _Request
    from vllm.v1.request import RequestStatus

    def reset():
        raise UnavailableError("the disk cannot be written")

    running, waiting = (
        SimpleNamespace(block_hashes=[bytes(32)], num_computed_tokens=computed, status=status, mm_features=[], lora_request=None)
        for computed, status in ((BLOCK, RequestStatus.RUNNING), (0, RequestStatus.WAITING))
    )
    requests = {name: _Request(1, request, None, None, b"", saved=1) for name, request in (("a", running), ("b", waiting))}
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._config = SimpleNamespace(weights_never_change=False, names_media=True)
    scheduler._adapters, scheduler._weights = Adapters(None), b""
    scheduler._requests, scheduler._ending, scheduler._pinning, scheduler._pinned = requests, [], [], []
    scheduler._loading = {}
    scheduler.manager = SimpleNamespace(reset=reset)
    assert scheduler.reset()
    assert [known.saved for known in requests.values()] == [_ALL, 0]
    assert all(known.salt == scheduler._weights != b"" for known in requests.values())


@pytest.mark.parametrize("status", ["WAITING", "PREEMPTED"])
def test_what_was_computed_before_a_reset_is_not_taken_for_what_comes(status):
    """While its blocks are loaded anew nothing of them is there, whatever was computed of it before."""
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.scheduler import Scheduler, _Request
    from vllm.v1.request import RequestStatus

    request = SimpleNamespace(
        block_hashes=[bytes(32)], num_computed_tokens=0, status=RequestStatus[status], mm_features=[], lora_request=None
    )
    known = _Request(1, request, None, None, b"", saved=4, computed=4 * BLOCK)
    known.steps.append((7, 5 * BLOCK))
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._config = SimpleNamespace(weights_never_change=False, names_media=True)
    scheduler._adapters, scheduler._weights = Adapters(None), b""
    scheduler._requests, scheduler._ending, scheduler._pinning, scheduler._pinned = {"one": known}, [], [], []
    scheduler._loading = {}
    scheduler.manager = SimpleNamespace(reset=lambda: None)
    assert scheduler.reset()
    # It is loaded, an earlier step ends, and it is taken back.
    request.num_computed_tokens = 4 * BLOCK
    assert not scheduler._advance(known, 7)
    assert (known.computed, known.saved) == (0, 0)


def test_a_preempted_request_has_computed_nothing():
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.scheduler import Scheduler, _Request

    known = _Request(1, SimpleNamespace(num_computed_tokens=0), None, None, b"", saved=4, computed=4 * BLOCK)
    known.steps.append((1, 5 * BLOCK))
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._step, scheduler._requests, scheduler._loading, scheduler._layered = 1, {"one": known}, {}, []
    scheduler._ended, scheduler._computing, scheduler._due, scheduler._filling = 1, 1, {}, deque()
    scheduler._adapters = SimpleNamespace(look_again=lambda: None)
    scheduler._config = SimpleNamespace(saves_layers=False)
    nothing = SimpleNamespace(
        preempted_req_ids={"one"},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=()),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )
    scheduler.step(nothing)
    assert (known.computed, len(known.steps)) == (0, 0)


def test_a_reset_that_fails_is_told_and_keeps_nothing_of_before():
    from types import SimpleNamespace

    from kvbm_rs.errors import ClosedError
    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.scheduler import _ALL, Scheduler, _Ending, _Request
    from vllm.v1.request import RequestStatus

    def reset():
        raise ClosedError("it is closed")

    def running():
        request = SimpleNamespace(num_computed_tokens=BLOCK, status=RequestStatus.RUNNING, mm_features=[], lora_request=None)
        return _Request(1, request, None, None, b"", saved=1)

    freed, known = [], running()
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._config = SimpleNamespace(weights_never_change=False, names_media=True)
    scheduler._adapters, scheduler._weights = Adapters(None), b""
    scheduler._requests, scheduler._ending = {"one": known}, [_Ending(running(), [(0, ["block"])])]
    scheduler._loading = {}
    scheduler._pinning, scheduler._pinned = [], []
    scheduler._pool = SimpleNamespace(free_blocks=lambda blocks: freed.extend(blocks))
    scheduler.manager = SimpleNamespace(reset=reset)
    assert not scheduler.reset()
    assert not scheduler.reset()
    assert known.saved == _ALL and known.salt == scheduler._weights != b""
    assert freed == ["block"], "once"


def test_who_needs_room_waits_for_saves_and_not_for_a_slow_medium():
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.scheduler import Scheduler, _Saving

    ours, shared = SimpleNamespace(ref_cnt=1), SimpleNamespace(ref_cnt=2)
    scheduler = Scheduler.__new__(Scheduler)
    for saves, waits in (
        ([], False),
        ([_Saving(1, None, [shared])], False),
        ([_Saving(1, None, [shared, ours])], True),
        ([_Saving(1, None, [ours], since=0.0)], False),
    ):
        scheduler._saving = saves
        assert scheduler.frees_blocks_soon() == waits


def test_a_request_with_hashes_of_another_granularity_is_not_kept():
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.hints import Limits
    from kvbm_rs.vllm.connector.peers import Prefills
    from kvbm_rs.vllm.connector.scheduler import Scheduler

    scheduler = Scheduler.__new__(Scheduler)
    scheduler._config = SimpleNamespace(names_media=True, hash_tokens=BLOCK // 2)
    scheduler._adapters, scheduler._weights, scheduler._requests = Adapters(None), b"", {}
    scheduler._numbers = set()
    scheduler._limits, scheduler._prefills = Limits(4096, "", True), Prefills(None, peerless())
    kept = []
    for hashes in (7, 8, 3, 0):
        request = SimpleNamespace(
            request_id=f"request-{hashes}",
            block_hashes=[bytes(32)] * hashes,
            num_tokens=7 * BLOCK // 2 + 3,
            mm_features=[],
            lora_request=None,
            kv_transfer_params=None,
            kv_hints=None,
        )
        kept.append(scheduler._known(request).salt is not None)
    assert kept == [True, False, False, False]


def test_images_that_vllm_only_numbers_are_not_kept():
    """Without caches of its own vLLM names them by the order in which they came: another process's first one is another image."""
    from types import SimpleNamespace

    from kvbm_rs.vllm.connector.adapters import Adapters
    from kvbm_rs.vllm.connector.config import _names_media
    from kvbm_rs.vllm.connector.scheduler import Scheduler

    def config(gigabytes: float, prefix_caching: bool) -> SimpleNamespace:
        model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=gigabytes))
        return SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))

    assert [_names_media(config(*asked)) for asked in ((4, True), (4, False), (0, True), (0, False))] == [True] * 3 + [False]
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._adapters, scheduler._weights = Adapters(None), b""
    for names_media, media, salt in ((True, ["image"], b""), (False, ["image"], None), (False, [], b"")):
        scheduler._config = SimpleNamespace(names_media=names_media)
        assert scheduler._salt(SimpleNamespace(mm_features=media, lora_request=None)) == salt


def test_a_request_comes_and_goes_without_a_look_at_those_that_live():
    """One number stands for what the client called it; two that live at a time have two."""
    from kvbm_rs._native import vllm_request_numbers
    from kvbm_rs.vllm.connector.scheduler import Scheduler

    class Living(dict):
        def values(self):
            raise AssertionError("all are looked at")

        items = __iter__ = values

    scheduler = Scheduler.__new__(Scheduler)
    scheduler._requests, scheduler._numbers = Living(), set()
    names = [f"cmpl-a-{number:08x}" for number in range(2)]
    first = scheduler._number(names[0])
    assert first == vllm_request_numbers(names[0])[0] == vllm_request_numbers(names[1])[0]
    scheduler._numbers.add(first)
    assert scheduler._number(names[1]) == vllm_request_numbers(names[1])[1] != first
    scheduler._numbers.discard(first)
    assert scheduler._number(names[1]) == first
