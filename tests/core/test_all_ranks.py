"""The same error on all ranks, also in a group of some of them."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.all_ranks import (
    MESSAGE_BYTES,
    on_first_rank,
    raise_bad_input,
    raise_naming_ranks,
)
from tests.cluster import Cluster


def raise_in_group(text: str) -> str | None:
    group = dist.new_group([2, 3])
    rank = dist.get_rank()
    if rank < 2:
        return None
    try:
        raise_bad_input(group, [1], text if rank == 3 else None, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def test_ranks_are_those_of_the_group(cluster_4: Cluster) -> None:
    want = "bad input on rank 1: öh"
    assert cluster_4.run(raise_in_group, "öh") == [None, None, want, want]


def test_long_messages_are_cut(cluster_4: Cluster) -> None:
    want = "bad input on rank 1: " + "x" * MESSAGE_BYTES
    assert cluster_4.run(raise_in_group, "x" * 5000)[2:] == [want, want]


def text_of(function: Callable[[], object]) -> str:
    """What a function returns, or the text of its error."""
    try:
        return f"returned {function()}"
    except (ValueError, OSError) as error:
        return str(error)


def first_of_group(fails: bool) -> str | None:
    """What the first rank of a group without rank 0 gives to the others."""
    group = dist.new_group([1, 3])
    rank = dist.get_rank()

    def function() -> int:
        assert rank == 1
        if fails:
            raise FileNotFoundError("no file on rank 1")
        return 10 + rank

    return text_of(lambda: on_first_rank(function, group)) if rank in (1, 3) else None


def test_all_get_what_the_first_rank_of_a_group_gets(cluster_4: Cluster) -> None:
    assert cluster_4.run(first_of_group, False) == [None, "returned 11", None, "returned 11"]


def test_all_raise_what_the_first_rank_of_a_group_raises(cluster_4: Cluster) -> None:
    want = "no file on rank 1"
    assert cluster_4.run(first_of_group, True) == [None, want, None, want]


class DetailedError(Exception):
    """An error that says more than its text."""

    def __init__(self, text: str, detail: object = None) -> None:
        self.detail = detail
        super().__init__(text)


class DemandingError(Exception):
    """An error that pickle cannot make anew."""

    def __init__(self, *, number: int) -> None:
        super().__init__(f"the number is {number}")


ERRORS: dict[str, Callable[[], Exception]] = {
    "value": lambda: ValueError("a bad value"),
    "file": lambda: FileNotFoundError("no file"),
    "detail": lambda: DetailedError("a detail", 3),
    "local": lambda: DetailedError("a detail", lambda: 3),
    "demanding": lambda: DemandingError(number=3),
}


def error_on_first_rank(kind: str) -> tuple[str, str, object]:
    def function() -> None:
        raise ERRORS[kind]()

    try:
        on_first_rank(function, carried=(Exception,))
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "detail", None)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("value", ("ValueError", "a bad value", None)),
        ("file", ("FileNotFoundError", "no file", None)),
        ("detail", ("DetailedError", "a detail", 3)),
        ("local", ("RuntimeError", "DetailedError: a detail", None)),
        ("demanding", ("RuntimeError", "DemandingError: the number is 3", None)),
    ],
)
def test_an_error_is_the_same_on_all_ranks_if_it_can_be(
    cluster_2: Cluster, kind: str, want: tuple[str, str, object]
) -> None:
    assert cluster_2.run(error_on_first_rank, kind) == [want, want]


def named(problems: list[str | None]) -> str:
    return text_of(lambda: raise_naming_ranks(problems[dist.get_rank()]))


@pytest.mark.parametrize(
    ("problems", "want"),
    [
        ([None] * 4, "returned None"),
        ([None, None, "a", None], "on rank 2: a"),
        ([None, "b", "a", None], "on rank 1 (rank 2, too): b"),
        (["a", "a", "b", "a"], "on rank 0 (ranks 1, 2, 3, too): a"),
        (["a", "a", "a", "a"], "a"),
    ],
)
def test_ranks_with_problems_are_named(
    cluster_4: Cluster, problems: list[str | None], want: str
) -> None:
    assert cluster_4.run(named, problems) == [want] * 4
