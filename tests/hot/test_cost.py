"""The cost model: each way in which replication can pay, and the answer "nothing"."""

import dataclasses

import numpy as np
import pytest

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.hot.cost import (
    CostOptions,
    RowUse,
    rows_to_replicate,
    seconds_of_prefixes,
)

# Links of one speed, nothing beside the sync, no latency: bytes alone decide.
BYTES = CostOptions(batch_size=100, hidden=0.0, latency=0.0)


def rows(
    uses: list[float], owners: list[int], tables: list[int] | None = None, rest: float = 0.0
) -> RowUse:
    tables = tables or [0] * len(uses)
    totals = np.zeros(max(tables) + 1)
    np.add.at(totals, tables, uses)
    return RowUse(
        uses_R=np.array(uses),
        bytes_R=np.full(len(uses), 256),
        owner_R=np.array(owners),
        table_R=np.array(tables),
        uses_per_table=totals + rest / 100,
        rest_requests=rest,
        rest_bytes=256.0,
    )


BALANCED = rows([1.0, 1.0, 0.01, 0.01], [0, 1, 0, 1])


def test_after_dedup_bytes_alone_never_pay() -> None:
    for ranks, owners in ((2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])):
        use = dataclasses.replace(BALANCED, owner_R=np.array(owners))
        assert rows_to_replicate(use, ranks, BYTES) == 0


def test_bytes_of_a_step() -> None:
    """Two ranks, two rows in every batch: by hand."""
    use = rows([100.0, 100.0], [0, 1])
    seconds = seconds_of_prefixes(use, 2, BYTES, 1, hot_batches=False) * 1e9
    # Fetch, gradient and id of the row that the other rank owns, half of the time each.
    assert seconds[0] == pytest.approx(2 * (2 * 256 + 4) / 2)
    # Both rows to the other rank, with their places; a dense sum of both is the same.
    assert seconds[2] == pytest.approx(2 * (256 + 4))
    # One of each; the owner of the row that is left sets the pace.
    assert seconds[1] == pytest.approx((256 + 4) + 2 * (2 * 256 + 4) / 2)


def test_rows_of_a_batch_are_those_that_the_planner_reckons_with() -> None:
    """Ids of a batch are so many draws, also where few ids make that differ from a mean."""
    uses = [0.8, 0.8, 0.4, 0.4, 0.1, 0.1]
    options = dataclasses.replace(BYTES, batch_size=2)
    use = rows(uses, [0, 1, 0, 1, 0, 1])
    (total,) = use.uses_per_table
    classes = RowClasses(np.ones(len(uses)), np.array(uses) / total)
    want = classes.unique(2 * total) * (2 * 256 + 4) / 2
    seconds = seconds_of_prefixes(use, 2, options, 1, hot_batches=False) * 1e9
    assert seconds[0] == pytest.approx(want)


def test_a_row_of_every_sample_is_in_every_batch() -> None:
    """And a table without any use has no rows in any."""
    use = rows([1.0, 0.0], [0, 1], tables=[0, 1])
    options = dataclasses.replace(BYTES, batch_size=1)
    seconds = seconds_of_prefixes(use, 2, options, 1, hot_batches=False) * 1e9
    assert seconds[0] == pytest.approx(2 * (2 * 256 + 4) / 2)


def test_it_pays_off_the_critical_path() -> None:
    hidden = dataclasses.replace(BYTES, hidden=0.9)
    assert rows_to_replicate(BALANCED, 2, hidden) == 4


def test_it_pays_on_better_links() -> None:
    better = dataclasses.replace(BYTES, all_reduce_bandwidth=4e9)
    assert rows_to_replicate(BALANCED, 2, better) == 4


def test_it_pays_if_synced_less_often() -> None:
    assert rows_to_replicate(BALANCED, 2, BYTES, sync_every=8) == 4


def test_it_pays_for_the_row_that_overloads_its_owner() -> None:
    """One hot row on rank 0, the rest spread evenly over 4 ranks."""
    use = rows([1.0, *[0.01] * 8], [0, *([0, 1, 2, 3] * 2)])
    assert rows_to_replicate(use, 4, BYTES) == 1


def test_it_pays_for_batches_without_an_exchange() -> None:
    use = rows([0.9, 0.1, 0.9, 0.1], [0, 1, 1, 0], tables=[0, 0, 1, 1])
    latency = dataclasses.replace(BYTES, latency=1e-3, hidden=0.8)
    assert rows_to_replicate(use, 2, latency, hot_batches=True) == 4
    # Samples with other ids, too: half of the table's accesses are rows that nobody lists.
    few = rows([0.9, 0.1, 0.9, 0.1], [0, 1, 1, 0], tables=[0, 0, 1, 1], rest=100.0)
    seconds = [seconds_of_prefixes(each, 2, latency, 1, True) for each in (use, few)]
    saved = [each[0] - each[4] for each in seconds]
    assert saved[0] > 0 and saved[0] > 2 * saved[1]


def test_rows_that_nobody_asks_for_twice_are_left_alone() -> None:
    rare = rows([1e-5] * 100, [i % 2 for i in range(100)], rest=1000.0)
    assert rows_to_replicate(rare, 2, dataclasses.replace(BYTES, latency=1e-4)) == 0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("batch_size", 0, "more than 0"),
        ("all_to_all_bandwidth", -1.0, "more than 0"),
        ("all_reduce_bandwidth", 0.0, "more than 0"),
        ("latency", -1.0, "at least 0"),
        ("hidden", 1.5, r"in \[0, 1\]"),
    ],
)
def test_bad_settings(field: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}, must be {allowed}"):
        CostOptions(**{field: value})  # type: ignore[arg-type]
