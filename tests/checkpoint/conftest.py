"""A small checkpoint for tests that spoil a copy of it."""

import shutil
from pathlib import Path

import pytest

from tests.hostile import small_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("small") / "it")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))
