"""Values that are kept for later batches: made once, and not kept without end."""

import torch

from fusedrec_torchrec.core.kept import Kept


def test_a_value_is_made_once_for_each_key() -> None:
    made: list[str] = []

    def make(key: str) -> torch.Tensor:
        made.append(key)
        return torch.tensor([len(made)])

    kept = Kept[torch.Tensor](lambda value: [value])
    values = [int(kept.get(key, lambda key=key: make(key))) for key in "abab"]  # type: ignore[misc]
    assert values == [1, 2, 1, 2] and made == ["a", "b"]


def test_no_more_values_are_kept_than_there_is_room_for() -> None:
    kept = Kept[int](lambda value: (), most=3)
    for key in range(100):
        assert kept.get(key, lambda key=key: key) == key  # type: ignore[misc]
        assert len(kept) <= 3


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    kept = Kept[None](lambda value: ())
    for _ in range(2):
        try:
            kept.get("a", lambda: next(iter(())))
        except StopIteration:
            assert not len(kept)
    assert kept.get("a", lambda: None) is None and len(kept) == 1
