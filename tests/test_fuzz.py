"""Damaged files of every kind are read or refused, and change nothing."""

from pathlib import Path

import pytest

from tests.fuzz import READERS, fuzz_once, make_files

DAMAGES = 150


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("fuzz") / "files")


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_refused_by_name(files: Path, kind: str) -> None:
    refused = sum(fuzz_once(files, kind, seed) for seed in range(DAMAGES))
    assert refused > 0
