"""What an engine saves layer by layer while another one reads it: two engines without a model, and two real ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from connectors import LENGTH as TOKENS
from connectors import SERVED, is_at_rest, probe
from engine import BLOCK as ENGINE_BLOCK
from engine import Engine, EngineError, prompt
from modelless import BLOCK, LAYERS
from pairs import BLOCKS, LENGTH, Worker, pair, wait_until
from test_connector_peers import decode, worker
from vllm.v1.request import Request

# As vLLM's `p2p` tier is told, and what the request says here to be the same prompt's.
FOLLOWED = {"remote_decoder": {"kv_request_id": "some"}}


def follow(here: Worker, number: int, there: Worker) -> Request:
    """Asks for a prompt that the other engine is about to compute, which is followed from here on."""
    params = {"remote_prefiller": {"kvbm_peer": there.manager.peer()[0]}}
    request = here.engine.add(f"asked {number}", prompt(number, LENGTH), tokens=1, params=params)
    here.engine.step()
    return request


def compute(there: Worker, number: int, params: dict | None = FOLLOWED) -> Request:
    """Has a prompt computed, to its end."""
    request = there.engine.add(f"computed {number}", prompt(number, LENGTH), tokens=2, params=params)
    there.step_until(request.is_finished)
    there.step_until(lambda: not there.scheduler.is_saving())
    return request


def comes(here: Worker, number: int, there: Worker) -> None:
    """A prompt comes while it is computed, however it is saved."""
    asked = follow(here, number, there)
    compute(there, number)
    assert here.step_until(asked.is_finished)[asked.request_id] == LENGTH - BLOCKS * BLOCK


def saved(there: Worker) -> tuple[int, int, int]:
    """Blocks that were saved layer by layer, when a step had ended, and twice."""
    of_steps = {"from": "device", "to": "host"}
    return (
        there.count("kvbm_layered_blocks_total"),
        there.count("kvbm_transfer_blocks_total", **of_steps),
        there.count("kvbm_duplicate_blocks_total"),
    )


def test_layers_travel_before_the_step_has_ended():
    with pair({"peers.shared_memory": False}) as (there, here):
        computed, came = [], []
        # What is copied too early is something else.
        there.engine.compute = lambda layer: there.tensors[layer].random_(1, 100)

        def end_step():
            wait_until(lambda: there.count("kvbm_peer_blocks_total", direction="sent") == BLOCKS)
            (running,) = there.engine.scheduler.running
            assert there.held(running).get("host", 0) == 0
            computed.append(there.blocks_of(running, BLOCKS))
            there.engine.compute, there.engine.end_layers = lambda layer: None, lambda: None

        there.engine.end_layers = end_step
        asked = follow(here, 1, there)
        compute(there, 1)
        here.engine.end_layers = lambda: came.append(here.blocks_of(asked, BLOCKS))
        assert here.step_until(asked.is_finished)["asked 1"] == LENGTH - BLOCKS * BLOCK
        assert torch.equal(computed[0], came[0])
        assert saved(there) == (BLOCKS, 0, 0)


def test_each_chunk_of_a_prompt_travels_in_its_step():
    with pair({"peers.shared_memory": False, "step_tokens": 5 * BLOCK + 3}) as (there, here):
        due = [5, 10, BLOCKS]

        def end_step():
            if due:
                wait_until(lambda: there.count("kvbm_peer_blocks_total", direction="sent") == due[0])
                del due[0]

        there.engine.end_layers = end_step
        comes(here, 1, there)
        assert (due, saved(there)) == ([], (BLOCKS, 0, 0))


def test_what_nobody_reads_meanwhile_is_saved_when_its_step_has_ended():
    with pair() as (there, _):
        for number, params in enumerate((None, {"do_remote_decode": True}, {"remote_decoder": True})):
            assert there.held(compute(there, number, params)) == {"host": BLOCKS}
        assert saved(there) == (0, 3 * BLOCKS, 0)


def test_layers_that_come_in_another_order_are_saved_as_blocks():
    with pair() as (there, here):

        def compute_last_first(layer: int) -> None:
            wait_until(lambda: there.count("kvbm_peer_open_leases", direction="sent"))
            there.engine._worker.save_kv_layer(f"model.layers.{LAYERS - 1}.attn", None, None)
            there.engine.compute = lambda layer: None

        there.engine.compute = compute_last_first
        asked = follow(here, 1, there)
        assert there.held(compute(there, 1)) == {"host": BLOCKS}
        # What was begun and given up is not waited for.
        assert here.step_until(asked.is_finished)["asked 1"] == LENGTH
        # Nor is it begun again.
        comes(here, 2, there)
        assert saved(there) == (0, 2 * BLOCKS, 0)


def test_a_step_that_also_loads_saves_when_it_has_ended():
    with pair({"layerwise": True}) as (there, _):
        compute(there, 1)
        there.engine.scheduler.kv_cache_manager.reset_prefix_cache()
        longer = there.engine.add("longer", prompt(1, LENGTH + 3 * BLOCK), tokens=2, params=FOLLOWED)
        assert there.step_until(longer.is_finished)["longer"] == 3 * BLOCK + LENGTH % BLOCK + 1
        there.step_until(lambda: not there.scheduler.is_saving())
        # What did not come is told at its end. What came is there.
        assert saved(there) == (BLOCKS, 3, BLOCKS)


def test_what_finds_no_room_is_not_kept():
    with pair({"host_blocks": 8}, timeout_ms=100) as (there, here):
        assert there.held(compute(there, 1)) == {"host": 8}
        asked = follow(here, 1, there)
        assert here.step_until(asked.is_finished)["asked 1"] == LENGTH - 8 * BLOCK
        assert saved(there) == (8, 0, 0)


def test_a_reset_between_two_layers_keeps_nothing_of_before():
    with pair() as (there, here):
        there.engine.compute = lambda layer: layer == 1 and there.scheduler.reset()
        asked = follow(here, 1, there)
        compute(there, 1)
        there.engine.compute = lambda layer: None
        assert there.manager.occupancy()["host"][1] == 0
        assert here.step_until(asked.is_finished)["asked 1"] == LENGTH
        compute(there, 2)
        assert saved(there) == (BLOCKS, 0, 0)


def test_a_prompt_that_is_taken_back_amid_it_goes_on_where_it_was():
    with pair({"step_tokens": 5 * BLOCK}) as (there, here):
        there.engine.add("aborted", prompt(1, LENGTH), params=FOLLOWED)
        there.engine.step()
        there.engine.finish("aborted")
        assert there.is_at_rest()
        there.engine.scheduler.kv_cache_manager.reset_prefix_cache()
        assert saved(there) == (5, 0, 0)
        comes(here, 1, there)
        assert saved(there) == (BLOCKS, 0, 0)


@pytest.mark.slow
def test_real_engines_hand_over_layer_by_layer(model, said, tmp_path):
    by_tcp = {"peers.shared_memory": False}
    with ThreadPoolExecutor(2) as clients:

        def ask_both(first: Engine, second: Engine, number: int):
            name, _ = probe(first, "peer")
            answer = clients.submit(decode, second, number, {"remote_prefiller": {"kvbm_peer": name}})
            return answer, clients.submit(probe, first, "ask", prompt=prompt(number, TOKENS), params=FOLLOWED, tokens=1)

        def travel(first: Engine, second: Engine, number: int) -> None:
            """All layers have come before the step ends that computes them."""
            before = probe(first, "saved_in_layers")
            probe(first, "hold_layers", blocks=TOKENS // ENGINE_BLOCK)
            answer, computed = ask_both(first, second, number)
            assert computed.result()["said"] == said[number][:1]
            assert (answer.result()["said"], answer.result()["scheduled"]) == (said[number], SERVED)
            assert probe(first, "saved_in_layers") == before + TOKENS // ENGINE_BLOCK
            assert is_at_rest(first) and is_at_rest(second)

        with worker(model, role="kv_producer", **by_tcp) as first:
            with worker(model, probe(first, "peer")[1], role="kv_consumer") as second:
                for number in range(2):
                    travel(first, second, number)
                # It dies between two layers.
                flag = tmp_path / "between"
                probe(first, "hang_between_layers", flag=str(flag))
                answer, computed = ask_both(first, second, 2)
                wait_until(flag.exists)
                first.kill()
                with pytest.raises(EngineError):
                    computed.result()
                assert (answer.result()["said"], answer.result()["scheduled"]) == (said[2], TOKENS + 7)
                assert is_at_rest(second)
        # Others come in their place, and all works again.
        with worker(model, role="kv_producer", **by_tcp) as first:
            with worker(model, probe(first, "peer")[1], role="kv_consumer") as second:
                travel(first, second, 2)
