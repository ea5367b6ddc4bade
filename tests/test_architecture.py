"""The folder listing is the architecture: a part imports only from the parts before it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fusedrec_torchrec

PACKAGE = Path(fusedrec_torchrec.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"
# In the order of the table of parts.
PARTS = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of every module of the package that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == PACKAGE.name:
                yield from ((node.lineno, f"{PACKAGE.name}.{alias.name}") for alias in node.names)
            elif node.module is not None:
                yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def wrong_imports(package: Path) -> list[str]:
    """Returns imports that go from a part to one behind it, as text."""
    wrong = []
    for file in sorted(package.rglob("*.py")):
        part = file.relative_to(package).parts[0]
        if part not in PARTS:  # the file of public names
            continue
        for line, module in imported_modules(ast.parse(file.read_text())):
            first, _, rest = module.partition(".")
            imported = rest.partition(".")[0]
            if first != PACKAGE.name or imported == part:
                continue
            if imported not in PARTS or PARTS.index(imported) > PARTS.index(part):
                wrong.append(f"{file.relative_to(package)}:{line} imports {module}")
    return wrong


def imports_by_name(package: Path) -> list[str]:
    """Returns where modules are imported by a text, which no syntax tree tells."""
    return [
        f"{file.relative_to(package)}:{getattr(node, 'lineno', 0)} uses {name}"
        for file in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
        if name in ("import_module", "__import__")
    ]


def test_parts_import_only_from_parts_before_them() -> None:
    assert wrong_imports(PACKAGE) == []


def test_only_the_file_of_public_names_imports_modules_by_their_names() -> None:
    files = {use.partition(":")[0] for use in imports_by_name(PACKAGE)}
    assert files == {"__init__.py"}


def test_every_folder_is_a_part() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(PARTS)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py"}


def test_a_wrong_import_is_noticed_wherever_it_stands(tmp_path: Path) -> None:
    for part in PARTS:
        (tmp_path / part).mkdir()
    (tmp_path / "core/a.py").write_text("from fusedrec_torchrec.compat import b")
    (tmp_path / "core/b.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fusedrec_torchrec.hot.rows import HotRows\n"
    )
    (tmp_path / "hot/c.py").write_text("def f():\n    from fusedrec_torchrec import grid\n")
    (tmp_path / "hot/d.py").write_text("import fusedrec_torchrec.unknown.e")
    assert wrong_imports(tmp_path) == [
        "core/b.py:3 imports fusedrec_torchrec.hot.rows",
        "hot/c.py:2 imports fusedrec_torchrec.grid",
        "hot/d.py:1 imports fusedrec_torchrec.unknown.e",
    ]


def test_an_import_by_name_is_noticed_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import importlib\nimportlib.import_module('fusedrec_torchrec.hot.rows')\n"
    )
    (tmp_path / "b.py").write_text("from importlib import import_module as load\nload('c')\n")
    (tmp_path / "c.py").write_text("rows = __import__('fusedrec_torchrec.hot.rows')\n")
    assert imports_by_name(tmp_path) == [
        "a.py:2 uses import_module",
        "b.py:1 uses import_module",
        "c.py:1 uses __import__",
    ]


def wrong_listing(init: Path) -> str:
    """Returns what is wrong with the list of files in a folder's docstring, empty if nothing is.

    A list is a table whose rows begin with a file, or has points that begin with some and a colon.
    What stands behind may mention a file that belongs there.
    """
    text = ast.get_docstring(ast.parse(init.read_text())) or ""
    heads = re.findall(r"^(``\w+/?``) |^- ([^:]+):", text, re.MULTILINE)
    listed = re.findall(r"``(\w+)/?``", " ".join(map("".join, heads)))
    mentioned = set(re.findall(r"``(\w+)/?``", text))
    files = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
    there = files | {path.parent.name for path in init.parent.glob("*/__init__.py")}
    wrong = {
        "does not list": there - mentioned,
        "lists what is gone": set(listed) - there,
        "lists twice": {name for name in listed if listed.count(name) > 1},
    }
    return ", ".join(f"{what} {sorted(names)}" for what, names in wrong.items() if names)


def test_every_folder_lists_its_files_in_reading_order() -> None:
    inits = [init for init in PACKAGE.rglob("__init__.py") if init.parent != PACKAGE]
    wrong = {str(init.relative_to(PACKAGE)): wrong_listing(init) for init in inits}
    assert {name: text for name, text in wrong.items() if text} == {}


def test_a_listing_that_is_not_that_of_the_folder_is_noticed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").touch()
    init = tmp_path / "__init__.py"
    init.write_text('"""X.\n\n``a``  one, see ``d``\n``b``  two\n``c``  three\n"""')
    assert wrong_listing(init) == ""
    init.write_text('"""X.\n\n- ``a``,\n  ``b``: some (``c``: another)\n"""')
    assert wrong_listing(init) == ""
    wrong = "does not list ['c'], lists what is gone ['gone'], lists twice ['a']"
    init.write_text('"""X.\n\n``a``  one\n``b``  two\n``a``  three\n``gone``  four\n"""')
    assert wrong_listing(init) == wrong
    init.write_text('"""X.\n\n- ``a``, ``b``: two\n- ``gone``,\n  ``a``: three\n"""')
    assert wrong_listing(init) == wrong
