"""The public names of the package: all there, imported when they are used."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fusedrec_torchrec as fr

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json, sys
import fusedrec_torchrec as fr
before = sorted(sys.modules)
for name in fr.__all__:
    getattr(fr, name)
print(json.dumps({"before": before, "after": sorted(sys.modules)}))
"""


def loaded() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_import_loads_the_plugin_when_it_is_used_and_no_more() -> None:
    result = loaded()
    assert [name for name in result["before"] if name.startswith(("fusedrec", "torch"))] == [
        "fusedrec_torchrec"
    ]
    parts = tuple(f"fusedrec_torchrec.{part}" for part in ("training", "bench", "cli"))
    others = ("matplotlib", "plotly", "pyarrow")
    assert [name for name in result["after"] if name.startswith((*parts, *others))] == []
    assert "fusedrec_torchrec.planner.planner" in result["after"]


@pytest.mark.parametrize("name", fr.__all__)
def test_public_names_are_where_the_package_says(name: str) -> None:
    assert getattr(fr, name).__name__ == name
    assert name in dir(fr)


def test_type_checkers_see_the_public_names() -> None:
    """They read the imports of ``__init__``, the interpreter a table: both must say the same."""
    tree = ast.parse(Path(str(fr.__file__)).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: str(node.module).removeprefix("fusedrec_torchrec.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == fr._DEFINED_IN
    assert sorted(imported) == sorted(fr.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'fusedrec_torchrec' has no attribute 'fused'"):
        getattr(fr, "fused")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from fusedrec_torchrec import fused")
