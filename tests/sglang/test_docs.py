"""What docs/sglang.md shows does what it says."""

import json
import re
from pathlib import Path

from hicache import HiCache, tokens

PAGE_OF_DOCS = Path(__file__).parents[2] / "docs/sglang.md"


def test_the_configuration_of_the_page_serves(tmp_path):
    (shown,) = re.findall(r"```json by tests/sglang/test_docs.py\n(.*?)```", PAGE_OF_DOCS.read_text(), re.DOTALL)
    config = json.loads(shown)
    # Smaller, elsewhere, and with a model that is none.
    config["settings"]["disk"] |= {"capacity": "16MiB", "dirs": str(tmp_path)}
    config["weights"] = "made up"
    prompt = tokens(1, 20)
    for stored in (0, 20):
        with HiCache(config) as cache:
            assert cache.serves(prompt) == stored
            assert cache.backup(prompt) == 20
