"""Files of vLLM that no package for CPUs has: classes of other versions that need no kernel can be imported from them, and programs
of its repository run.

    python tests/vllm/sources.py VERSION                # says where this version's proxy is
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PLACE = Path(os.environ.get("KVBM_VLLM_SOURCES", Path(__file__).parents[2] / "target" / "vllm-sources"))
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"


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


def proxy_of(version: str) -> Path | None:
    """The proxy of vLLM's own tests, which sends a prompt to one engine and then to another. The first call fetches the sources of
    this version, some 45 MB; `None`: they cannot be had."""
    place = PLACE / f"{version}-repository" / PROXY
    if not place.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
            # pip asks sources for their name and version, which these tell without a GPU's tools if they are told them.
            environment = os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
            if subprocess.run([*fetch, "--dest", scratch, f"vllm=={version}"], env=environment, check=False).returncode:
                return None
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                program = files.extractfile(f"vllm-{version}/{PROXY}").read()
            place.parent.mkdir(parents=True, exist_ok=True)
            unpacked = Path(scratch, "unpacked")
            unpacked.write_bytes(program)
            unpacked.rename(place)
    return place


def passes_with(version: str, file: str, those: str = "") -> None:
    """Runs the tests of `file` in a process that imports this version of vLLM, but for those that do so themselves."""
    # As a program this file needs no tests.
    import pytest

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


if __name__ == "__main__":
    found = proxy_of(sys.argv[1])
    if found is None:
        sys.exit("vLLM's sources cannot be fetched")
    print(found)
