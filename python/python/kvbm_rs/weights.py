"""What tells the weights of a model from others under the same name."""

import hashlib
from pathlib import Path

from kvbm_rs.errors import InvalidError


def weights_of(model: str, cache: str | None = None) -> str:
    """What tells the weights of `model` from others: of a file or a directory names, sizes and times, of a model of the hub its
    commit. It is for engines that do not say which commit they serve, so only one may be in the cache: `cache`, or where
    the hub's lies.
    """
    place = Path(model)
    if place.exists():
        return f"files {digest_of_files(place)}"
    commits = commits_of(model, cache)
    if len(commits) == 1:
        return f"commit {commits[0]}"
    found = f"{len(commits)} commits of it" if commits else "nothing of it"
    message = f"cannot tell which weights {model} has: {found} in the cache of the hub. Name them (`weights`), or serve a directory"
    raise InvalidError(message)


def weights_at(model: str, revision: str | None, cache: str | None = None) -> str:
    """`weights_of`, where the engine says which revision of the hub it serves; `None` is the branch `main`."""
    commit = None if Path(model).exists() else commit_at(model, revision or "main", cache)
    return f"commit {commit}" if commit else weights_of(model, cache)


def digest_of_files(place: Path, pattern: str = "**/*") -> str:
    """Of names, sizes and times: of a file, or of those of a directory that `pattern` says."""
    digest = hashlib.sha256()
    for path in [place] if place.is_file() else sorted(path for path in place.glob(pattern) if path.is_file()):
        stat = path.stat()
        digest.update(f"{path.relative_to(place)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def commits_of(model: str, cache: str | None = None) -> list[str]:
    """The commits of a model of the hub that are in its cache: `models--OWNER--NAME/snapshots/COMMIT`."""
    kept = _kept_of(model, cache)
    snapshots = kept / "snapshots" if kept else None
    return [path.name for path in snapshots.iterdir()] if snapshots and snapshots.is_dir() else []


def commit_at(model: str, revision: str, cache: str | None = None) -> str | None:
    """The commit that a branch, a tag or a commit of the hub is in its cache, if it is there: `refs/BRANCH` has it."""
    kept = _kept_of(model, cache)
    if kept is None:
        return None
    if (kept / "snapshots" / revision).is_dir():
        return revision
    branch = kept / "refs" / revision
    return branch.read_text().strip() if branch.is_file() else None


def _kept_of(model: str, cache: str | None) -> Path | None:
    if cache is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE as cache
        except ImportError:
            return None
    return Path(cache, f"models--{model.replace('/', '--')}")


def model_name(model: str, weights: str | None) -> str:
    """What a model is called wherever it lies: where its weights are named, of a place in the file system the last part alone."""
    place = Path(model)
    return place.name if weights and place.exists() else model
