"""What one engine has computed comes straight into another one's blocks: two engines without a model, and what their tiers hold."""

import torch
from engine import prompt
from modelless import BLOCK
from pairs import BLOCKS, LENGTH, Worker, pair
from vllm.v1.request import RequestStatus


def comes(here: Worker, number: int, there: Worker, blocks: int = BLOCKS) -> None:
    """The leading blocks of a prompt come as they are at the peer, and nothing but the others is computed."""
    computed = there.compute(number, blocks)
    request = here.ask(number, there)
    here.engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS, "it waits for a look-up"
    assert here.step_until(request.is_finished)["asked"] == LENGTH - blocks * BLOCK
    here.step_until(lambda: not here.scheduler.is_saving())
    assert here.held(request)["host"] == BLOCKS, "it is saved from the engine's blocks"


def test_a_prompt_that_was_computed_comes_without_a_look_up():
    with pair() as (there, here):
        comes(here, 1, there)
        samples = {name: values for name, _, _, values in here.manager.samples()}
        counted = [sum(value for _, value in samples[f"kvbm_{name}_tokens_total"]) for name in ("requested", "hit")]
        assert counted == [BLOCKS * BLOCK] * 2, "it is one request, and a hit"


def test_its_bytes_are_those_that_were_computed():
    with pair() as (there, here):
        computed = there.compute(1, BLOCKS)
        request = here.ask(1, there)
        here.engine.step()
        (table,) = here.engine.scheduler.kv_cache_manager.get_block_ids("asked")
        here.step_until(request.is_finished)
        came = torch.stack([tensor[table[:BLOCKS]] for tensor in here.tensors])
        assert torch.equal(came, computed)


def test_what_the_peer_lacks_is_computed():
    with pair() as (there, here):
        comes(here, 1, there, blocks=5)
        # It goes on where that was kept.
        comes(here, 2, there)


def test_what_is_here_needs_no_peer():
    with pair() as (there, here):
        there.compute(1, BLOCKS)
        here.compute(1, BLOCKS)
        here.engine.scheduler.kv_cache_manager.reset_prefix_cache()
        request = here.ask(1, there)
        here.step_until(request.is_finished)
        leases = {name: values for name, _, _, values in here.manager.samples()}["kvbm_peer_leases_total"]
        assert not sum(value for labels, value in leases if labels["direction"] == "in")


def test_a_request_that_is_taken_back_amid_it_leaves_nothing():
    with pair(policy="fail") as (there, here):
        # It has half of the prompt, and the rest is waited for.
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.count("kvbm_peer_blocks_total", direction="received") == BLOCKS // 2)
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        here.engine.finish("asked")
        assert here.is_at_rest()
        comes(here, 2, there)


def test_what_does_not_come_in_time_is_an_error():
    with pair(policy="fail", timeout_ms=100) as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_ERROR
    with pair(policy="fail") as (there, here):
        comes(here, 1, there)


def test_the_time_for_room_in_the_engine_does_not_count():
    with pair(policy="fail", timeout_ms=30_000) as (there, here):
        there.compute(1, BLOCKS // 2)
        here.engine.add("other", prompt(3, 56 * BLOCK))
        here.engine.step()
        request = here.ask(1, there)
        here.engine.step()
        assert request.status == RequestStatus.WAITING, "there is room"
        here.scheduler._requests["asked"].prefilled.started -= 60
        here.engine.finish("other")
        # The rest is waited for.
        here.step_until(lambda: here.count("kvbm_peer_blocks_total", direction="received") == BLOCKS // 2)
        there.compute(1, BLOCKS)
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_what_came_before_a_reset_is_computed_again():
    with pair() as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.count("kvbm_peer_blocks_total", direction="received") == BLOCKS // 2)
        assert here.scheduler.reset()
        assert here.step_until(request.is_finished)["asked"] == LENGTH


def test_a_reset_amid_it_leaves_nothing():
    with pair(policy="fail") as (there, here):
        there.compute(1, BLOCKS // 2)
        request = here.ask(1, there)
        here.step_until(lambda: here.count("kvbm_peer_blocks_total", direction="received") == BLOCKS // 2)
        assert here.scheduler.reset()
        here.step_until(request.is_finished)
        assert request.status == RequestStatus.FINISHED_ERROR


def test_what_is_not_computed_yet_holds_no_blocks():
    with pair() as (there, here):
        there.compute(1, BLOCKS // 2)
        params = {"remote_prefiller": {"kvbm_peer": there.manager.peer()[0]}}
        request = here.engine.add("asked", prompt(1, LENGTH), tokens=1, params=params)
        here.engine.step()
        assert request.status == RequestStatus.WAITING
        there.compute(1, BLOCKS)
        assert here.step_until(request.is_finished)["asked"] == LENGTH - BLOCKS * BLOCK
