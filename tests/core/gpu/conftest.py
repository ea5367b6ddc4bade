"""Marks tests of kernels: on a GPU they are tests for GPUs, elsewhere the interpreter runs them."""

from pathlib import Path

import pytest

from tests.emulated_cuda import is_emulated

HERE = Path(__file__).parent
INTERPRETED_ELSEWHERE = pytest.mark.skip(reason="the emulated GPU computes nothing; see make test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(INTERPRETED_ELSEWHERE if is_emulated() else pytest.mark.gpu)
