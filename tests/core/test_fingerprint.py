"""Facts: the same text for the same value, another for another, whatever the value is."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusedrec_torchrec.core.fingerprint import facts_of


class Settings:
    """An object of a class that nobody knows."""

    def __init__(self, value: Any) -> None:
        self.inner = {"values": [value]}


@dataclass(slots=True)
class Slotted:
    value: int


def function(_: int) -> None:
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.int64(1), np.int64(2)),
        (np.float32(0.1), np.float32(0.2)),
        (np.arange(20), np.arange(20)[::-1]),
        (torch.arange(40), torch.arange(40) + 1),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.ones(3, device="meta"), torch.ones(4, device="meta")),
        (Settings(1), Settings(2)),
        ([Slotted(1)], [Slotted(2)]),
        (partial(function, 1), partial(function, 2)),
        ({"a": {1, 2}}, {"a": {1, 3}}),
        ("1", 1),
        (True, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_have_different_facts(one: Any, other: Any) -> None:
    assert facts_of("x", one) != facts_of("x", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.5, np.float32(0.5)),
        ([1, 2], (np.int32(1), np.int64(2))),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1}, {1, 3}),
        (Path("here"), Path("there")),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
        (Settings(1), Settings(1)),
        (function, function),
        (torch.ones(3), torch.ones(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_have_equal_facts(one: Any, other: Any) -> None:
    assert facts_of("x", one) == facts_of("x", other)


def test_objects_that_hold_each_other_end() -> None:
    first, second = Settings(None), Settings(None)
    first.inner["other"], second.inner["other"] = [second], [first]
    assert len(str(facts_of("x", first))) < 10_000
