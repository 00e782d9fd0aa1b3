"""What our package takes from vLLM, compared with the sources of a version of it: nothing is imported, so any version will do."""

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

OURS = Path(__file__).parents[2] / "python" / "python" / "kvbm_rs" / "vllm"

# What our variables are of vLLM's, by how we write them.
_KV_CACHE = ("vllm.v1.core.kv_cache_manager", "KVCacheManager")
_POOL = ("vllm.v1.core.block_pool", "BlockPool")
_BLOCK = ("vllm.v1.core.kv_cache_utils", "KVCacheBlock")
_REQUEST = ("vllm.v1.request", "Request")
_CONTEXT = ("vllm.v1.kv_offload.base", "ReqContext")
_JOB = ("vllm.v1.kv_offload.tiering.base", "TransferJob")
RECEIVERS = {
    "connector/scheduler.py": {
        "self._kv": _KV_CACHE,
        "self._pool": _POOL,
        "pool": _POOL,
        "request": _REQUEST,
        "known.request": _REQUEST,
        "output": ("vllm.v1.core.sched.output", "SchedulerOutput"),
        "cached": ("vllm.v1.core.sched.output", "CachedRequestData"),
        "block": _BLOCK,
        "RequestStatus": ("vllm.v1.request", "RequestStatus"),
    },
    "connector/shadow.py": {"pool": _POOL, "block": _BLOCK, "kept": _BLOCK, "computed": _BLOCK},
    "connector/events.py": {"request": _REQUEST},
    "connector/hints.py": {"request": _REQUEST},
    "connector/adapters.py": {"adapter": ("vllm.lora.request", "LoRARequest")},
    "policy.py": {"req_context": _CONTEXT},
    "tier.py": {
        "req_context": _CONTEXT,
        "request": _CONTEXT,
        "job": _JOB,
        "job_metadata": _JOB,
        "context": ("vllm.v1.kv_offload.base", "ScheduleEndContext"),
    },
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class:
    """A class of vLLM's, with what it has from its bases."""

    def __init__(self, sources: "Sources", module: str, node: ast.ClassDef) -> None:
        self.name = node.name
        self._node = node
        self._bases = [found for base in node.bases if (found := sources.named(module, ast.unparse(base)))]

    @cached_property
    def methods(self) -> dict[str, _Function]:
        inherited = {name: method for base in reversed(self._bases) for name, method in base.methods.items()}
        return inherited | {node.name: node for node in self._node.body if isinstance(node, _Function)}

    @cached_property
    def fields(self) -> list[str]:
        """Annotated in the class's body, in order."""
        own = [node.target.id for node in self._node.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        return [name for base in self._bases for name in base.fields] + own

    @cached_property
    def attributes(self) -> set[str]:
        found = {*self.methods, *self.fields}
        for node in self._node.body:
            if isinstance(node, ast.Assign):
                found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        for node in ast.walk(self._node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.add(node.attr)
        return found.union(*(base.attributes for base in self._bases))

    @property
    def abstract(self) -> set[str]:
        return {name for name, method in self.methods.items() if "abstractmethod" in map(ast.unparse, method.decorator_list)}


class Sources:
    """A version of vLLM: a directory with its package."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cache
    def tree(self, module: str) -> ast.Module | None:
        place = self._root.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return ast.parse(file.read_text())
        return None

    @cache
    def names(self, module: str) -> dict[str, ast.AST]:
        """What a module defines or imports, by name."""
        found: dict[str, ast.AST] = {}
        for node in _outside_functions(self.tree(module) or ast.Module([], [])):
            if isinstance(node, (ast.ClassDef, *_Function.__args__)):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found |= self.names(self._absolute(module, node))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update((alias.asname or alias.name, node) for alias in node.names)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update((target.id, node) for target in targets if isinstance(target, ast.Name))
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that `node`, in `module`, imports from."""
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(*module.split("."), "__init__.py").exists()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    def named(self, module: str, name: str) -> Class | None:
        """The class that `name` is in `module`, wherever it is defined."""
        node = self.names(module).get(name)
        if isinstance(node, ast.ClassDef):
            return Class(self, module, node)
        if isinstance(node, ast.ImportFrom):
            real = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
            return self.named(self._absolute(module, node), real)
        return None

    def has(self, module: str, name: str) -> bool:
        return name in self.names(module) or self.tree(f"{module}.{name}") is not None


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.ClassDef, *_Function.__args__)):
            yield from _outside_functions(child)


def differences(sources: Sources, ours: Path = OURS) -> Iterator[str]:
    """What of our package does not fit this version, a sentence for each."""
    for file in sorted(ours.rglob("*.py")):
        place = str(file.relative_to(ours))
        tree = ast.parse(file.read_text())
        optional = _with_a_fallback(tree)
        known: dict[str, Class] = {}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"):
                continue
            for alias in node.names:
                found = sources.named(node.module, alias.name)
                if found:
                    known[alias.asname or alias.name] = found
                elif not sources.has(node.module, alias.name) and node not in optional:
                    yield f"{place}: {node.module} has no {alias.name}"
        for name, owner in RECEIVERS.get(place, {}).items():
            found = sources.named(*owner)
            if found:
                known[name] = found
            else:
                yield f"{place}: {owner[0]} has no {owner[1]}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from (f"{place}: {said}" for said in _class(node, known))
            elif isinstance(node, ast.Attribute) and (owner := known.get(ast.unparse(node.value))):
                if isinstance(node.ctx, ast.Load) and node.attr not in owner.attributes and not node.attr.startswith("__"):
                    yield f"{place}: {owner.name} has no {node.attr}"
            elif isinstance(node, ast.Call):
                yield from (f"{place}: {said}" for said in _call(node, known))


def _with_a_fallback(tree: ast.Module) -> set[ast.AST]:
    """Imports of what not every version has: we do without, or import it only where an older version is found."""
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    tries = [node for node in tries if any(handler.type and ast.unparse(handler.type) == "ImportError" for handler in node.handlers)]
    found = {child for node in tries for statement in node.body for child in ast.walk(statement)}
    # `kv_cache_layout` asks an older version.
    olds = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "kv_cache_layout"]
    return found | {child for node in olds for child in ast.walk(node)}


def _class(node: ast.ClassDef, known: dict[str, Class]) -> Iterator[str]:
    bases = [known[name] for name in map(ast.unparse, node.bases) if name in known]
    own = {method.name: method for method in node.body if isinstance(method, _Function)}
    for base in bases:
        for name in sorted(base.abstract - own.keys()):
            if not any(name in other.methods and name not in other.abstract for other in bases):
                yield f"{node.name} lacks {name}, which {base.name} leaves open"
        for name, theirs in base.methods.items():
            if name in own and name != "__init__":
                yield from (f"{node.name}.{name} {said}" for said in _override(own[name], theirs))


def _override(ours: _Function, theirs: _Function) -> Iterator[str]:
    """What they call theirs with, ours takes: by place, and by name."""
    mine, wanted = _parameters(ours), _parameters(theirs)
    takes_more = ours.args.vararg is not None
    for at, name in enumerate(wanted):
        if at >= len(mine):
            if not takes_more:
                yield f"does not take {name}"
        elif mine[at] != name:
            yield f"takes {mine[at]} where vLLM gives {name}"
    required = len(mine) - len(ours.args.defaults)
    yield from (f"wants {name}, which vLLM does not give" for name in mine[len(wanted) : required])
    named = {argument.arg for argument in ours.args.kwonlyargs} | set(mine)
    if not ours.args.kwarg:
        yield from (f"does not take {one.arg}" for one in theirs.args.kwonlyargs if one.arg not in named)
    if theirs.args.kwarg and not ours.args.kwarg:
        yield "does not take what else vLLM names"
    for kind in ("classmethod", "staticmethod", "property"):
        if (kind in map(ast.unparse, ours.decorator_list)) != (kind in map(ast.unparse, theirs.decorator_list)):
            yield f"is a {kind} in one of both only"


def _parameters(function: _Function) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def _call(node: ast.Call, known: dict[str, Class]) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in known:
        owner = known[function.id]
        made = owner.methods.get("__init__")
        names = _parameters(made)[1:] if made else owner.fields
        required = _required(made)[1:] if made else []
        if not names:
            # Made by a base that is not vLLM's, as of an enumeration.
            return
        yield from _arguments(owner.name, node, names, required, made)
    elif isinstance(function, ast.Attribute) and (owner := known.get(ast.unparse(function.value))):
        method = owner.methods.get(function.attr)
        if method is not None:
            yield from _arguments(f"{owner.name}.{function.attr}", node, _parameters(method)[1:], _required(method)[1:], method)


def _required(method: _Function) -> list[str]:
    names = _parameters(method)
    return names[: len(names) - len(method.args.defaults)]


def _arguments(what: str, node: ast.Call, names: list[str], required: list[str], method: _Function | None) -> Iterator[str]:
    by_name = {keyword.arg for keyword in node.keywords}
    only_named = {argument.arg for argument in method.args.kwonlyargs} if method else set()
    is_open = None in by_name or any(isinstance(argument, ast.Starred) for argument in node.args)
    if is_open or (method and method.args.kwarg):
        return
    if len(node.args) > len(names) and not (method and method.args.vararg):
        yield f"{what} takes {len(names)} arguments, and gets {len(node.args)}"
    yield from (f"{what} does not take {name}" for name in sorted(by_name - {*names, *only_named}))
    given = {*names[: len(node.args)], *by_name}
    yield from (f"{what} wants {name}" for name in required if name not in given)
