"""What tests of `KvbmConnector` share: how an engine is given one, and what is looked at in its process."""

from pathlib import Path
from types import SimpleNamespace

import connector_probe
from engine import BLOCK, TINY_BLOCK_BYTES, Engine, prompt

LENGTH = 10 * BLOCK + 5
# What a prompt costs that is served as far as it can be: the tokens behind its last full block, and those generated.
SERVED = 5 + 7
# A prompt that is all full blocks, and what it costs.
WHOLE = prompt(30, 10 * BLOCK)
ONE_LEFT = 1 + 7


def connector(settings: dict, failure_policy: str = "recompute", role: str = "kv_both", **extra) -> dict:
    """Arguments of an engine with tiers of these settings."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KvbmConnector",
            "kv_connector_module_path": "kvbm_rs.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": failure_policy,
            "kv_connector_extra_config": {"settings": settings, **extra},
        },
        # As it was made: `auto` halves it.
        "dtype": "float32",
        # Without statistics vLLM does not ask where hits come from.
        "disable_log_stats": False,
    }


def host(blocks: int, **more) -> dict:
    return {"host.capacity": blocks * TINY_BLOCK_BYTES, **more}


def disk(directory, **more) -> dict:
    """A disk tier that the next process finds, and that all goes to at once."""
    tier = {"disk.capacity": 256 * TINY_BLOCK_BYTES, "disk.dirs": str(directory), "disk.keep": True}
    return tier | {"flush.interval_ms": 10, **more}


def probe(engine: Engine, function: str, **arguments):
    """Calls a function of `connector_probe` in the engine's process."""
    assert hasattr(connector_probe, function)
    return engine.call(f"connector_probe:{function}", **arguments)


def is_at_rest(engine: Engine) -> bool:
    """Whether nothing of a finished request is left: no state, no block of the engine's held, no slot lost."""
    engine.settle()
    return probe(engine, "left") == {"requests": 0, "loading": 0, "saving": 0, "ending": 0, "pinning": 0, "used_blocks": 1}


def spoil(place: Path, every: int = 1, block_bytes: int = TINY_BLOCK_BYTES) -> None:
    """Changes a byte in the middle of each `every`-th block of a slot file, or of those below a directory."""
    below = [file for file in place.rglob("*") if file.is_file() and file.stat().st_size >= 64 * block_bytes]
    files = [place] if place.is_file() else below
    assert files
    for file in files:
        with file.open("r+b") as slots:
            for slot in range(every // 2, file.stat().st_size // block_bytes, every):
                at = slot * block_bytes + block_bytes // 2
                slots.seek(at)
                byte = slots.read(1)
                slots.seek(at)
                slots.write(bytes([byte[0] ^ 0x40]))


def spoiled_disk(model: Path, directory: Path) -> dict:
    """A disk tier that an engine left the first prompt in, with a byte of each block changed. Only a request for it finds that."""
    tiers = disk(directory, **{"transfer.scrub_mib_per_second": 0})
    with Engine(model, **connector(tiers)) as engine:
        engine.generate(prompt(0, LENGTH))
        assert probe(engine, "drain")
    spoil(directory)
    return tiers


def peerless() -> SimpleNamespace:
    """As much of a configuration as requests take that come from no peer."""
    none = {"names_of": None, "knows_rows": False, "groups": [None]}
    return SimpleNamespace(
        block_tokens=BLOCK, hash_tokens=BLOCK, peer_seconds=1.0, fails=False, is_windowed=False, engine="", workers=1, stages=1, **none
    )
