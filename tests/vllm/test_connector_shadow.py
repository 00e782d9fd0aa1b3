"""Shadow verification: hits that an idle engine computes again, and compares with what the tiers have of them."""

from types import SimpleNamespace

import pytest
import torch
from connectors import LENGTH, SERVED, connector, host, is_at_rest, probe
from engine import BLOCK, Engine, prompt

BLOCKS = LENGTH // BLOCK
ALL = host(64, **{"transfer.shadow_share": 1.0})


def test_a_hit_is_computed_again_and_what_is_wrong_leaves(model, said):
    with Engine(model, **connector(ALL)) as engine:
        engine.generate(prompt(0, LENGTH))
        assert engine.reset()
        again = engine.generate(prompt(0, LENGTH))
        assert (again.said, again.scheduled) == ([said[0]], LENGTH + 7)
        assert is_at_rest(engine)
        assert probe(engine, "shadowed") == {"same": BLOCKS}
        # What the engine has itself is no hit.
        assert engine.generate(prompt(0, LENGTH)).scheduled == SERVED
        # One that ends with the step that computes it; one that is longer than what is compared of it; one behind what the engine
        # has.
        assert engine.reset()
        engine.generate(prompt(0, LENGTH), tokens=1)
        assert is_at_rest(engine)
        long = prompt(20, 20 * BLOCK + 5)
        engine.generate(long)
        assert engine.reset()
        engine.generate(long[: 8 * BLOCK + 1])
        assert engine.generate(long).scheduled == 12 * BLOCK + 5 + 7
        assert is_at_rest(engine)
        compared = {"same": 2 * BLOCKS + 8 + 12}
        assert probe(engine, "shadowed") == compared
        # No request waits for it: of two that come together both are served.
        engine.generate(prompt(1, LENGTH))
        assert engine.reset()
        both = engine.generate(prompt(0, LENGTH), prompt(1, LENGTH))
        assert (both.said, both.scheduled) == (said[:2], 2 * SERVED)
        # Taken back while it is computed.
        for steps in range(3):
            assert engine.reset()
            probe(engine, "abort_after", prompt=prompt(0, LENGTH), steps=steps)
            assert is_at_rest(engine)

        # Other bytes than the name says, with a checksum that is right.
        probe(engine, "spoil_next_save")
        engine.generate(prompt(2, LENGTH))
        assert engine.reset()
        before = probe(engine, "shadowed")
        again = engine.generate(prompt(2, LENGTH))
        assert (again.said, again.scheduled) == ([said[2]], LENGTH + 7)
        assert is_at_rest(engine)
        assert probe(engine, "shadowed") == {**before, "wrong": 1}
        assert probe(engine, "matches", prompt=prompt(2, LENGTH)) == {}
        # And then it heals.
        for _ in range(2):
            assert engine.reset()
            assert engine.generate(prompt(2, LENGTH)).said == [said[2]]
        assert is_at_rest(engine)
        assert probe(engine, "shadowed") == {"same": before["same"] + BLOCKS, "wrong": 1}


def test_where_hits_cannot_be_compared_it_is_said_at_the_start():
    from kvbm_rs.errors import InvalidError
    from kvbm_rs.vllm.connector.config import _shadow_elements
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def elements(dtype=torch.bfloat16, speculative=None, **config) -> str:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=dtype)
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        own = SimpleNamespace(**{"is_windowed": False, "is_alone": True, **config})
        return _shadow_elements(own, SimpleNamespace(speculative_config=speculative), cache)

    assert [elements(), elements(torch.float16), elements(torch.float32)] == ["bf16", "f16", "f32"]
    refused = [
        ({"is_windowed": True}, "full attention"),
        ({"is_alone": False}, "one worker"),
        ({"speculative": object()}, "no speculative decoding"),
        ({"dtype": torch.uint8}, "float16 or bfloat16"),
    ]
    for changed, why in refused:
        with pytest.raises(InvalidError, match=f"transfer.shadow_share: .*{why}.*: set it to 0"):
            elements(**changed)
