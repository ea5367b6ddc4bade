"""Rows that travel in two messages come together as if they had come in one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.exchange.early_rows import EarlyRows, Split


def pieces(dims: list[int], counts: list[list[int]]) -> list[torch.Tensor]:
    """Returns every unit's row, in the order (rank, bucket), each with numbers of its own."""
    units = [dim for row in counts for n, dim in zip(row, dims, strict=True) for _ in range(n)]
    return [100.0 * number + torch.arange(dim) for number, dim in enumerate(units)]


def flat_of(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *rows])


@given(
    st.integers(1, 3).flatmap(
        lambda buckets: st.tuples(
            st.lists(st.sampled_from([4, 8, 12]), min_size=buckets, max_size=buckets),
            st.lists(
                st.lists(st.integers(0, 3), min_size=buckets, max_size=buckets),
                min_size=1,
                max_size=3,
            ),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_early_and_late_rows_join_in_the_order_of_units(
    shape: tuple[list[int], list[list[int]]], random: object
) -> None:
    dims, counts = shape
    rows = pieces(dims, counts)
    early = [bool(random.getrandbits(1)) for _ in rows]  # type: ignore[attr-defined]
    split = Split(torch.tensor(early, dtype=torch.bool), counts, dims)
    early_flat = flat_of([row for row, is_early in zip(rows, early, strict=True) if is_early])
    late_flat = flat_of([row for row, is_early in zip(rows, early, strict=True) if not is_early])

    assert torch.equal(split.late_of(flat_of(rows)), late_flat)
    room = torch.full((early_flat.numel() + late_flat.numel(),), torch.nan)
    waited = []

    def arrive() -> None:
        room[: early_flat.numel()] = early_flat
        waited.append(True)

    batch = EarlyRows(split, split, room, early_flat.numel(), arrive, since=0)
    batch.room_for_late.copy_(late_flat)
    out = torch.full_like(room, torch.nan)
    batch.join(out)
    assert waited == [True]
    assert torch.equal(out, flat_of(rows))


def test_units_are_counted_by_rank_and_bucket() -> None:
    split = Split(torch.tensor([True, False, True, True, False]), [[2, 0], [1, 2]], [4, 8])
    assert split.early == [[1, 0], [1, 1]]
    assert split.late == [[1, 0], [0, 1]]
