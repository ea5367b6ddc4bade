"""Operators refuse what they cannot work on; no call ends the process."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.core.native.bad_calls import (
    BAD,
    bad_calls,
    call_everything,
    search_in_a_full_table,
    throw,
)
from tests.core.native.calls import GOOD, call
from tests.core.native.compiler import needs_operators
from tests.core.native.fresh import CrashError, start

pytestmark = needs_operators
EXAMPLES = 300


@pytest.fixture(scope="module")
def said() -> list[str]:
    running = start(bad_calls)
    found: list[str] = []
    while len(found) < len(BAD):
        try:
            found += [running.answer()]
        except CrashError as crash:
            found += [str(crash)] * (len(BAD) - len(found))
    return found


@pytest.mark.parametrize("number", range(len(BAD)), ids=[f"{name}-{text}" for name, _, text in BAD])
def test_an_error_says_what_is_wrong(said: list[str], number: int) -> None:
    name, _, text = BAD[number]
    assert said[number].startswith(f"fusedrec::{name}: ")
    assert text in said[number]


@pytest.mark.parametrize("name", GOOD)
def test_good_calls_are_good(name: str) -> None:
    call(name, GOOD[name]())


def test_a_full_hot_table_ends_a_search() -> None:
    """A key that is not there would otherwise be looked for without an end."""
    assert start(search_in_a_full_table).answer() == [0, 5, 9, 13, 16]


@pytest.mark.parametrize("name", GOOD)
def test_spoiled_calls_are_refused_or_harmless(name: str) -> None:
    results: dict[str, Any] = start(throw, name, EXAMPLES).answer()
    assert results["refused"] > EXAMPLES // 5


@pytest.mark.slow
def test_no_call_has_undefined_behaviour(tmp_path: Path) -> None:
    """Finds what only a sanitizer sees, such as a copy of nothing from nowhere."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    sanitized = {
        "CXX": f"{compiler} -fsanitize=undefined -fno-sanitize=vptr -fno-sanitize-recover=all",
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    assert start(call_everything, EXAMPLES // 3, environment=sanitized).answer() == "built now"
