"""The notebook runs from top to bottom; what is kept of its last run is whole and small."""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.command import ROOT
from tests.training.data.criteo_text import lines, write
from tests.warm import interpreter

NOTEBOOK = ROOT / "examples" / "profile_plan_train.ipynb"
MOST_BYTES = 400_000


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook: Any) -> str:
    """Returns all text that cells have printed."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def pictures_of(notebook: Any) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("data", ["generated", pytest.param("criteo", marks=pytest.mark.slow)])
def test_it_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = next(
        i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])
    )
    own = [f"folder = {str(tmp_path / 'run')!r}", "steps, batch_size = 40, 512"]
    own += ["import sys", f"sys.executable = {interpreter()!r}"]  # which has imported everything
    if data == "criteo":
        own.append(f"criteo = {str(write(tmp_path / 'train.txt', lines(8000)))!r}")
    notebook.cells.insert(parameters + 1, nbformat.v4.new_code_cell("\n".join(own)))
    NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    printed = outputs_of(notebook)
    assert pictures_of(notebook) == 5
    assert re.search(r"^planned +log loss 0\.\d+  AUC 0\.\d+$", printed, re.MULTILINE)
    assert re.search(r"^planned +\d+ collectives a step$", printed, re.MULTILINE)


def test_what_is_kept_of_a_run_is_whole_and_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))  # one run, from top to bottom
    assert pictures_of(notebook) == 5
    kinds = {output.output_type for cell in code_cells(notebook) for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    text = outputs_of(notebook)
    assert "/home/" not in text and "/root" not in text and "/work" not in text
    assert "/tmp/" not in text and "Warning" not in text
