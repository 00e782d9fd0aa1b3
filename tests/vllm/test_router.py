"""`examples/router` before two servers: a prompt that would hold up who decodes is computed by the one that prefills."""

import json
import os
from pathlib import Path

import pytest
from connectors import LENGTH
from engine import BLOCK, prompt
from servers import Process, asked
from test_disagg import pair, tokens, until_computed

ROUTER = Path(os.environ.get("KVBM_ROUTER", Path(__file__).parents[2] / "target" / "checked" / "kvbm-router"))


class Router(Process):
    def __init__(self, prefill: int, decode: int) -> None:
        urls = [f"--{kind}=http://127.0.0.1:{port}" for kind, port in (("prefill", prefill), ("decode", decode))]
        start = 'import os, sys; os.execv(sys.argv[1], [*sys.argv[1:-2], f"--listen=127.0.0.1:{sys.argv[-1]}"])'
        super().__init__(["-c", start, str(ROUTER), *urls], "/health")


def test_a_prompt_that_would_hold_up_who_decodes_goes_to_the_other_engine(model, said):
    if not ROUTER.exists():
        pytest.skip(f"no {ROUTER}: cargo build --profile checked -p kvbm-router")
    with pair(model) as (prefills, decodes), Router(prefills.port, decodes.port) as router:
        # No one is held up yet: it is computed where it is said.
        alone = router.post(asked(model, prompt(0, LENGTH)))
        assert tokens(json.load(alone)) == said[0]
        assert alone.headers["x-kvbm-route"].startswith("computed here: ")
        long = router.stream(asked(model, prompt(1, LENGTH), 3000))
        # An engine that is behind says several tokens at once, on a busy machine more than are known.
        first = tokens(next(long))
        assert first and first[: len(said[1])] == said[1][: len(first)]
        until_computed(decodes, 2 * LENGTH)
        sent = router.post(asked(model, prompt(2, LENGTH)))
        assert tokens(json.load(sent)) == said[2]
        assert sent.headers["x-kvbm-route"].startswith("offloaded: ")
        until_computed(decodes, 2 * LENGTH + LENGTH % BLOCK)
        long.close()
        # Without the one that prefills the other one does all.
        prefills.kill()
        assert tokens(router.ask(asked(model, prompt(3, LENGTH)))) == said[3]
