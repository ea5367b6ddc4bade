"""Help that reads like a manual page: what for, options, examples that run, where to read on."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedrec_torchrec.cli.commands import COMMANDS
from fusedrec_torchrec.cli.main import main, parser_of
from tests.cli.command import ROOT, fusedrec
from tests.training.data.criteo_text import lines, write

Named = Iterator[tuple[str, argparse.ArgumentParser]]


def parsers() -> Named:
    """All commands, with the actions of those that have some."""
    yield from below("fusedrec", parser_of())


def below(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from below(f"{name} {word}", inner)


PARSERS = dict(parsers())


def examples(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"^    (fusedrec .*)$", parser.format_help(), re.MULTILINE)


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_says_what_for_with_examples_and_where_to_read_on(name: str) -> None:
    parser = PARSERS[name]
    text = parser.format_help()
    assert text.startswith("usage: fusedrec")
    about = parser.description or ""
    assert len(about) > 80 and about.endswith((".", ".yaml"))
    assert 2 <= len(examples(parser)) <= 4
    (documents,) = re.findall(r"^read on: (.*)$", text, re.MULTILINE)
    assert all((ROOT / document).is_file() for document in documents.split(", "))
    for action in parser._actions:  # every option is explained
        assert action.help or isinstance(action, argparse._SubParsersAction), action


@pytest.mark.parametrize(
    "example", sorted({example for parser in PARSERS.values() for example in examples(parser)})
)
def test_examples_are_commands_with_files_that_are_there(example: str) -> None:
    words = shlex.split(example)[1:]
    if "--help" not in words:
        parser_of([words[0]]).parse_args(words)
    for word in words:
        if word.startswith(("configs/", "benchmarks/")):
            assert (ROOT / word).is_file(), word


def test_the_list_of_commands_is_that_of_the_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they are not imported, as for ``fusedrec --help``."""
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == PARSERS["fusedrec"].format_help()
    assert {name.partition(" ")[2] for name in PARSERS if name.count(" ") == 1} == set(COMMANDS)


LONG = ("bench benchmarks/", "calibrate")  # minutes; tests/bench and tests/planner have short ones


@pytest.mark.slow
def test_examples_run(tmp_path: Path) -> None:
    """One after another, since some work with what others before them have written."""
    for name in ("configs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    write(tmp_path / "train.txt", lines(20_000, values=500))
    done = set()
    for parser in PARSERS.values():
        for example in examples(parser):
            words = shlex.split(example)[1:]
            if example in done or " ".join(words).startswith(LONG) or words[-1] == "--web":
                continue
            told = fusedrec(*words, cwd=tmp_path)
            assert told.returncode == 0, f"{example}\n{told.stdout}\n{told.stderr}"
            assert told.stdout, example
            done.add(example)
    assert len(done) > 30
