"""Python files of versions of vLLM that no package for CPUs has: classes that need no kernel can be imported from them."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PLACE = Path(os.environ.get("KVBM_VLLM_SOURCES", Path(__file__).parents[2] / "target" / "vllm-sources"))


def sources_of(version: str) -> Path | None:
    """A directory with the package `vllm` of this version. The first call fetches a wheel of some 350 MB; `None`: it cannot
    be had."""
    place = PLACE / version
    if not place.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, f"vllm=={version}"]
            if subprocess.run(fetch, check=False).returncode:
                return None
            (wheel,) = Path(scratch).glob("*.whl")
            unpacked = Path(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as files:
                files.extractall(unpacked, [name for name in files.namelist() if name.endswith(".py")])
            unpacked.rename(place)
    return place


def passes_with(version: str, file: str, those: str = "") -> None:
    """Runs the tests of `file` in a process that imports this version of vLLM, but for those that do so themselves."""
    sources = sources_of(version)
    if sources is None:
        print(f"SKIPPED: the wheel of vLLM {version} cannot be had")
        pytest.skip(f"no vLLM {version}")
    paths = ":".join([str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}

    def said(*arguments: str) -> str:
        run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
        return run.stdout.strip()

    assert said("-c", "import vllm; print(vllm.__version__)") == version
    wanted = " and ".join(filter(None, [those, "not 0_33"]))
    said("-m", "pytest", file, "-k", wanted, "-p", "no:cacheprovider", "-q")
