"""Names come from the field: words that could stand for anything name nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fusedrec_torchrec

PACKAGE = Path(fusedrec_torchrec.__file__).parent
VAGUE = {"together", "each", "found", "magnitude"}


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of whatever a file gives a name to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def vague_names(package: Path) -> list[str]:
    """Returns where a file of a package binds a name that says nothing, as text."""
    return [
        f"{file.relative_to(package)}:{line} binds {name}"
        for file in sorted(package.rglob("*.py"))
        for line, name in bindings(ast.parse(file.read_text()))
        if VAGUE & set(name.split("_"))
    ]


def test_no_name_could_stand_for_anything() -> None:
    assert vague_names(PACKAGE) == []


def test_a_vague_name_is_noticed_however_it_is_bound(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import math as magnitude\n"
        "def together(on_each):\n"
        "    self.found = [found for found in on_each]\n"
        "    return self.foundation\n"
    )
    assert sorted(vague_names(tmp_path)) == [
        "a.py:1 binds magnitude",
        "a.py:2 binds on_each",
        "a.py:2 binds together",
        "a.py:3 binds found",
        "a.py:3 binds found",
    ]
