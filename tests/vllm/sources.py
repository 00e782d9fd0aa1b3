"""Python files of versions of vLLM that no package for CPUs has: classes that need no kernel can be imported from them."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

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
