"""The quick start of docs/vllm.md does what it says, in the environment that is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from engine import ENVIRONMENT, HERE

ROOT = HERE.parent.parent


def test_the_quick_start_serves_the_second_process(model, tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/vllm.md").read_text(), re.DOTALL).group(1)
    place = tmp_path / "target/quick-start"
    (place / "blocks").mkdir(parents=True)
    shutil.copytree(model, place / "model")
    (place / "story.py").write_text(program)

    def run() -> tuple[int, str]:
        path = ":".join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "target/quick-start/story.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | ENVIRONMENT | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
        )
        line = re.search(r"served: (\d+) tokens; said: (.*)", done.stdout)
        assert line, done.stdout + done.stderr[-4000:]
        return int(line[1]), line[2]

    (cold, said), (warm, again) = run(), run()
    assert (cold, warm) == (0, 1056)
    assert again == said
