"""What `KvbmConnector` does in a step of vLLM's scheduler, without a model: what is filled is kept, and the rest is left alone."""

import sys

import pytest
from connectors import connector
from engine import prompt
from modelless import BLOCK, BLOCK_BYTES, Modelless

from kvbm_rs import Chain

KVBM, WITH_PEERS = (
    connector({"host.capacity": 4096 * BLOCK_BYTES, **peers}, weights="made up")["kv_transfer_config"]
    for peers in ({}, {"peers.enabled": True, "peers.port": 0})
)


def calls(engine: Modelless, steps: int) -> int:
    """Calls of functions, Python's or native, that the connector makes in `steps` steps."""
    connector, counted = engine.scheduler.connector, []

    def watched(method):
        def called(*arguments):
            sys.setprofile(lambda frame, event, argument: counted.append(event) if "call" in event else None)
            try:
                return method(*arguments)
            finally:
                sys.setprofile(None)

        return called

    for name in ("build_connector_meta", "update_connector_output", "has_pending_push_work"):
        setattr(connector, name, watched(getattr(connector, name)))
    for _ in range(steps):
        engine.step()
    return len(counted)


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_fill_no_block_are_left_alone(is_async):
    counted = []
    for running in (2, 50):
        engine = Modelless(KVBM, blocks=1024, requests=running, is_async=is_async)
        for number in range(running):
            engine.add(str(number), prompt(number, 2 * BLOCK + 1))
        for _ in range(4):
            engine.step()
        for saving in engine.scheduler.connector._scheduler._saving:
            saving.save.wait(10.0)
        # Now it hears of the end of saves.
        engine.step()
        counted.append(calls(engine, steps=8))
        engine.close()
    assert counted[0] == counted[1] > 0


# Blocks of the engine's: enough, and too few for all. Prompts that other engines read meanwhile are saved layer by layer, but for steps
# that overlap.
@pytest.mark.parametrize("blocks", [512, 100])
@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_all_that_requests_fill_is_kept(blocks, is_followed, is_async):
    transfer = WITH_PEERS if is_followed else KVBM
    engine, asked = Modelless(transfer, blocks, requests=24, is_async=is_async, max_num_batched_tokens=5 * BLOCK), []
    params = {"remote_decoder": {}} if is_followed else None
    for number in range(24):
        tokens = BLOCK // 2 * (number % 7) + number % 5 + 1
        asked.append(engine.add(str(number), prompt(number, tokens), tokens=3 * BLOCK + number * 3, params=params))
    preempted = 0
    while engine.scheduler.has_requests():
        preempted += len(engine.step().preempted_req_ids or ())
    assert bool(preempted) == (blocks == 100)
    manager = engine.scheduler.connector._scheduler.manager
    (layered,) = [values for name, *_, values in manager.samples() if name == "kvbm_layered_blocks_total"]
    assert bool(layered[0][1]) == (is_followed and not is_async)
    for request in asked:
        # The last token has no keys and values. Of the one before it, when steps overlap, that is not known.
        full = (request.num_tokens - 1 - is_async) // BLOCK
        chain = Chain(request.block_hashes[:full])
        assert manager.matches(chain).get("host", 0) == full, request.request_id
    engine.close()
