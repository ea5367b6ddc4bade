"""The list of examples has all of them, each with a command that starts it."""

import re
import shlex

from tests.cli.command import ROOT

FOLDER = ROOT / "examples"
ROW = re.compile(r"^\| \[([\w/.]+)\]\(\1\) \|.*\| `([^`]+)` \|$", re.MULTILINE)


def test_every_example_is_listed_with_a_command_that_starts_it() -> None:
    text = (FOLDER / "README.md").read_text()
    listed = dict(ROW.findall(text))
    files = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*")
        if path.suffix in (".py", ".sh", ".ipynb", ".sbatch", ".yaml") and "runs" not in path.parts
    }
    assert files == {*listed, "minimal_stock.py"}
    for file, command in listed.items():
        words = shlex.split(command)
        assert f"examples/{file}" in words
        for word in words:
            if word.startswith(("configs/", "examples/")):
                assert (ROOT / word).is_file(), command


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (FOLDER / "README.md").read_text()):
        assert (FOLDER / link).exists(), link


def test_examples_that_are_started_directly_can_be() -> None:
    assert (FOLDER / "multi_node.sh").stat().st_mode & 0o111
