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


def program(name: str, directory: Path) -> None:
    """Saves the program of the page that it names so."""
    page = (ROOT / "docs/vllm.md").read_text()
    said = re.search(rf"Save this\s+as `target/quick-start/{name}`:\n```python[^\n]*\n(.*?)```", page, re.DOTALL)
    (directory / "target/quick-start" / name).write_text(said.group(1))


def run(name: str, directory: Path) -> str:
    """What it prints. One that kills itself is no failure."""
    path = ":".join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, f"target/quick-start/{name}"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert "served: " in done.stdout, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def place(model, tmp_path) -> Path:
    (tmp_path / "target/quick-start/blocks").mkdir(parents=True)
    shutil.copytree(model, tmp_path / "target/quick-start/model")
    return tmp_path


def test_the_quick_start_serves_the_second_process(place):
    program("story.py", place)
    lines = [re.search(r"served: (\d+) tokens; said: (.*)", run("story.py", place)) for _ in range(2)]
    (cold, said), (warm, again) = (line.groups() for line in lines)
    assert (int(cold), int(warm)) == (0, 1056)
    assert again == said


@pytest.mark.slow
def test_the_connectors_quick_start_is_served_from_memory_and_from_disk(place, shared_memory):
    program("connector.py", place)
    # Its directory may be somebody's: another name is the only difference to the page.
    saved = place / "target/quick-start/connector.py"
    saved.write_text(saved.read_text().replace("/dev/shm/kvbm-quick-start", str(shared_memory)))

    def served() -> list[tuple[str, str]]:
        return re.findall(r"served: ({.*?}) said: (.*)", run("connector.py", place))

    (nothing, said), (host, warm) = served()
    assert (nothing, host, warm) == ("{}", "{'host': 1056}", said)
    assert served() == [("{'host': 1056}", said)] * 2, "after kill -9"
    for file in shared_memory.iterdir():
        file.unlink()
    assert served()[0] == ("{'disk': 1056}", said), "and without the memory"
