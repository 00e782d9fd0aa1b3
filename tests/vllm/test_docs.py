"""The quick starts of docs/vllm.md do what they say, in the environment that is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine import ENVIRONMENT, HERE

ROOT = HERE.parent.parent


def follow(name: str, directory: Path, memory: Path | None = None) -> list[str]:
    """Saves the program of the page that it names so, takes the steps behind it, and returns what these print.

    `memory` stands for the page's directory of shared memory, which may be somebody's: the only difference to the page.
    """
    page = (ROOT / "docs/vllm.md").read_text()
    if memory:
        page = page.replace("/dev/shm/kvbm-quick-start", str(memory))
    said = re.search(
        rf"Save this\s+as `target/quick-start/{name}`:\n```python[^\n]*\n(.*?)```.*?```sh[^\n]*\n(.*?)```", page, re.DOTALL
    )
    (directory / "target/quick-start" / name).write_text(said.group(1))
    path = ":".join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path, "PATH": commands}
    # What goes wrong is told here.
    steps = said.group(2).replace("2>target/quick-start/log", "")
    done = subprocess.run(["bash", "-e", "-c", steps], cwd=directory, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture
def place(model, tmp_path) -> Path:
    (tmp_path / "target/quick-start").mkdir(parents=True)
    shutil.copytree(model, tmp_path / "target/quick-start/model")
    return tmp_path


def test_the_quick_start_serves_the_second_process(place):
    lines = [re.fullmatch(r"served: (\d+) tokens; said: (\[.*\])", line) for line in follow("story.py", place)]
    (cold, said), (warm, again) = (line.groups() for line in lines)
    assert (int(cold), int(warm)) == (0, 1056)
    assert again == said


@pytest.mark.slow
def test_the_connectors_quick_start_is_served_from_both_tiers(place, shared_memory):
    lines = [
        re.fullmatch(r"served: ({.*?}) said: (\[.*\])", line) for line in follow("connector.py", place, shared_memory)
    ]
    served, said = zip(*(line.groups() for line in lines))
    host, disk = "{'host': 1056}", "{'disk': 1056}"
    # Each process asks twice: cold; after kill -9; and without the memory.
    assert served == ("{}", host, host, host, disk, host)
    assert len(set(said)) == 1
