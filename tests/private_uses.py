"""Finds the private names of TorchRec, FBGEMM and torch that the package uses.

A private name begins with one underscore.  Names of other libraries are told from ours by where
they are defined: in a class of theirs that one of ours derives from, or nowhere in the package.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import fusedrec_torchrec

PACKAGE = fusedrec_torchrec.__name__
FOLDER = Path(fusedrec_torchrec.__file__).parent
LIBRARIES = ("fbgemm_gpu", "torch", "torchrec")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules() -> list[ModuleType]:
    """Imports every module of the package."""
    names = [found.name for found in pkgutil.walk_packages([str(FOLDER)], f"{PACKAGE}.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


@cache
def inherited_names() -> dict[tuple[str, str], str]:
    """Returns (class of theirs, private name) -> class of ours that uses it through ``self``."""
    uses = {}
    for module in modules():
        for ours in vars(module).values():
            if not inspect.isclass(ours) or ours.__module__ != module.__name__:
                continue
            theirs = [c for c in ours.__mro__ if c.__module__.partition(".")[0] in LIBRARIES]
            for name in _names_of_self(ours):
                # The first in the order of derivation: the one that introduced the name.
                first = next((c for c in reversed(theirs) if defines(c, name)), None)
                if first is not None:
                    owner = f"{first.__module__}.{first.__qualname__}"
                    uses[owner, name] = f"{ours.__module__}.{ours.__qualname__}"
    return uses


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
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def reached_names() -> Iterator[tuple[Path, int, str]]:
    """Yields file, line and private name of what is reached otherwise: of others' objects.

    Names that the file itself defines are left out.
    """
    for file in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(file.read_text())
        own = set(_defined(tree))
        for node in ast.walk(tree):
            for name in _reached(node):
                if name not in own:
                    yield file.relative_to(FOLDER), getattr(node, "lineno", 0), name


def attribute_uses() -> Iterator[tuple[Path, int, str, str]]:
    """Yields file, line, object and name of every attribute that the package reads or sets."""
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                where, of_what, name = node.lineno, node.value, node.attr
            elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_getattr(node):
                if not isinstance(node.args[1], ast.Constant):
                    continue
                where, of_what, name = node.lineno, node.args[0], str(node.args[1].value)
            else:
                continue
            yield file.relative_to(FOLDER), where, ast.unparse(of_what), name


def _is_getattr(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("getattr", "hasattr", "setattr")


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _reached(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_self(node.value):
        yield node.attr
    elif isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
        ours = [name for name in modules if name.partition(".")[0] in LIBRARIES]
        yield from (part for name in ours for part in name.split(".") if is_private(part))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
        yield from (part for part in (node.module or "").split(".") if is_private(part))
        yield from (alias.name for alias in node.names if is_private(alias.name))
    elif isinstance(node, ast.Call) and _is_getattr(node):
        name = node.args[1]
        if isinstance(name, ast.Constant) and is_private(str(name.value)):
            yield str(name.value)
