"""Finds the private names of TorchRec, FBGEMM and torch that the package uses.

A private name begins with one underscore.  What a class uses of itself may be its own or inherited,
which the classes that it derives from tell.  What is used of any other object belongs to others.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

import fusedrec_torchrec
from fusedrec_torchrec.compat.momentum_scale import _MomentumScaled

PACKAGE = fusedrec_torchrec.__name__
FOLDER = Path(fusedrec_torchrec.__file__).parent
LIBRARIES = ("fbgemm_gpu", "torch", "torchrec")
OURS = (PACKAGE, "tests")
# Classes of ours, and those of theirs that they are joined with when the program runs.
JOINED = ((_MomentumScaled, SplitTableBatchedEmbeddingBagsCodegen),)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules() -> list[ModuleType]:
    """Imports every module of the package."""
    names = [found.name for found in pkgutil.walk_packages([str(FOLDER)], f"{PACKAGE}.")]
    if importlib.util.find_spec("triton") is None:  # which kernels cannot be imported without
        names = [name for name in names if not name.startswith(f"{PACKAGE}.core.gpu.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


@cache
def inherited_names() -> dict[tuple[str, str], str]:
    """Returns (class of theirs, private name) -> class of ours that uses it through ``self``."""
    classes = [
        ours
        for module in modules()
        for ours in vars(module).values()
        if inspect.isclass(ours) and ours.__module__ == module.__name__
    ]
    classes += [type("Joined", bases, {"__module__": "joined"}) for bases in JOINED]
    return {use: where for ours in classes for use, where in inherited_by(ours).items()}


def inherited_by(derived: type) -> dict[tuple[str, str], str]:
    """Returns the same for one class and all of ours that it derives from.

    A mixin may use what only the other classes beside it have.
    """
    uses = {}
    theirs = [c for c in derived.__mro__ if _library(c) in LIBRARIES]
    for ours in (c for c in derived.__mro__ if _library(c) in OURS):
        for name in _names_of_self(ours):
            # The first in the order of derivation: the one that introduced the name.
            first = next((c for c in reversed(theirs) if defines(c, name)), None)
            if first is not None:
                owner = f"{first.__module__}.{first.__qualname__}"
                uses[owner, name] = f"{ours.__module__}.{ours.__qualname__}"
    return uses


def _library(owner: type) -> str:
    return owner.__module__.partition(".")[0]


def defines(owner: type, name: str) -> bool:
    """Returns whether a class has an attribute, or its methods set one of that name."""
    return name in vars(owner) or name in _set_by(owner)


@cache
def _set_by(owner: type) -> set[str]:
    """Returns the names of attributes that the methods of a class mention."""
    try:
        return set(re.findall(r"self\.(\w+)", inspect.getsource(owner)))
    except (OSError, TypeError):  # a class of an extension
        return set()


def _names_of_self(ours: type) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(ours)))):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            names.add(node.name)
        else:
            names |= {
                name for of_what, name in _attributes(node) if _is_self(of_what, {ours.__name__})
            }
    return {name for name in names if is_private(name)}


def _is_self(node: ast.expr, classes: Container[str] = ()) -> bool:
    """Returns whether an object is the one whose method this is, its class, or one of these."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and (node.id in ("self", "cls") or node.id in classes)


def reached_names(folder: Path = FOLDER) -> Iterator[tuple[Path, int, str]]:
    """Yields file, line and private name of what is reached otherwise: of others' objects.

    A class that the file itself defines is no other, nor is ``self``.
    """
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            for name in _reached(node, classes):
                yield file.relative_to(folder), getattr(node, "lineno", 0), name


def attribute_uses() -> Iterator[tuple[Path, int, str, str]]:
    """Yields file, line, object and name of every attribute that the package reads or sets."""
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for of_what, name in _attributes(node):
                yield file.relative_to(FOLDER), of_what.lineno, ast.unparse(of_what), name


def _attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yields object and name of an attribute, also of one that is named by a text."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and _is_getattr(node):
        of_what, name, *_ = node.args
        if isinstance(name, ast.Constant):
            yield of_what, str(name.value)


def _is_getattr(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("getattr", "hasattr", "setattr")


def _reached(node: ast.AST, classes: Container[str]) -> Iterator[str]:
    for of_what, name in _attributes(node):
        if is_private(name) and not _is_self(of_what, classes):
            yield name
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
        ours = [name for name in modules if name.partition(".")[0] in LIBRARIES]
        yield from (part for name in ours for part in name.split(".") if is_private(part))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
        yield from (part for part in (node.module or "").split(".") if is_private(part))
        yield from (alias.name for alias in node.names if is_private(alias.name))
