"""The stub says what the module has, and the module what the stub says."""

import ast
import inspect
from pathlib import Path

import kvbm_rs
from kvbm_rs import _native

STUB = ast.parse((Path(kvbm_rs.__file__).parent / "_native.pyi").read_text())
# What Python derives by itself, or PyO3 adds to every class.
DERIVED = {"__module__", "__doc__", "__hash__", "__new__", "__init__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"}


def stub_names(body: list[ast.stmt]) -> set[str]:
    named = (ast.ClassDef, ast.FunctionDef)
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return fields | {node.name for node in body if isinstance(node, named)}


def native_names(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_") or name.startswith("__")}


def public_names() -> set[str]:
    return {name for name in stub_names(STUB.body) if not name.startswith("_")}


def stub_classes() -> list[ast.ClassDef]:
    return [node for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_every_public_name_is_in_both() -> None:
    public = {name for name in vars(_native) if not name.startswith("_")}
    assert public == public_names()


def test_every_member_of_every_class_is_in_both() -> None:
    for node in stub_classes():
        members = native_names(getattr(_native, node.name))
        assert members - DERIVED == stub_names(node.body) - DERIVED, node.name


def test_parameters_are_the_same_by_name_and_kind() -> None:
    for node in stub_classes():
        native = getattr(_native, node.name)
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and (not function.name.startswith("__") or function.name == "__new__"):
                member = native if function.name == "__new__" else getattr(native, function.name)
                if not callable(member):
                    continue
                signature = inspect.signature(member)
                arguments = function.args
                skip = 0 if any(getattr(mark, "id", "") == "staticmethod" for mark in function.decorator_list) else 1
                expected = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][skip:]
                expected += [argument.arg for argument in arguments.kwonlyargs]
                found = [name for name in signature.parameters if name != "self"]
                assert found == expected, f"{node.name}.{function.name}"


def test_everything_public_has_a_docstring() -> None:
    for name in public_names():
        thing = getattr(_native, name)
        assert thing.__doc__, name
        if inspect.isclass(thing):
            for member in native_names(thing):
                if not member.startswith("__"):
                    assert getattr(thing, member).__doc__, f"{name}.{member}"


def test_the_package_exports_what_it_names() -> None:
    for name in kvbm_rs.__all__:
        assert hasattr(kvbm_rs, name)
