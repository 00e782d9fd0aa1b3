"""What tells the weights of a model from others under the same name."""

import hashlib
from pathlib import Path

from kvbm_rs.errors import InvalidError


def weights_of(model: str) -> str:
    """What tells the weights of `model` from others: of a directory the names, sizes and times of its files, of a model of the
    hub its commit. Engines do not say which commit they serve, so only one may be in the cache.
    """
    if Path(model).is_dir():
        return f"files {digest_of_files(Path(model))}"
    commits = commits_of(model)
    if len(commits) == 1:
        return f"commit {commits[0]}"
    found = f"{len(commits)} commits of it" if commits else "nothing of it"
    message = f"cannot tell which weights {model} has: {found} in the cache of the hub. Name them (`weights`), or serve a directory"
    raise InvalidError(message)


def digest_of_files(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(directory)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def commits_of(model: str) -> list[str]:
    """The commits of a model of the hub that are in its cache: `models--OWNER--NAME/snapshots/COMMIT`."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []
    snapshots = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots")
    return [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
