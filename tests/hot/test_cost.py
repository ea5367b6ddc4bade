"""The cost model: each way in which replication can pay, and the answer "nothing"."""

import dataclasses
import math

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


def counted_seconds(
    use: RowUse, ranks: int, options: CostOptions, sync_every: int, syncs: int = 200
) -> list[float]:
    """Seconds of a step for each prefix of one table's rows, from batches that are drawn."""
    (total,) = use.uses_per_table
    row_bytes, count = int(use.bytes_R[0]), len(use.uses_R)
    ids = round(total * options.batch_size)
    draws = np.random.default_rng(0).choice(
        count, p=use.uses_R / total, size=(syncs, sync_every, ranks, ids)
    )
    met = np.zeros((syncs, sync_every, ranks, count), bool)
    np.put_along_axis(met, draws, values=True, axis=-1)
    asked_WR = met.sum((0, 1))
    asked_WR[use.owner_R, np.arange(count)] = 0
    seconds = []
    for hot in range(count + 1):
        requests = [0] * ranks
        for row in range(hot, count):
            requests[use.owner_R[row]] += int(asked_WR[:, row].sum())
        asked = max(requests) * (2 * row_bytes + 4)
        touched = met[..., :hot].any(1).sum() / (syncs * ranks)
        sparse = (ranks - 1) * touched * (row_bytes + 4)
        dense = 2 * (ranks - 1) / ranks * hot * (row_bytes + 4)
        if sparse <= dense:
            sync = sparse / options.all_to_all_bandwidth
        else:
            sync = dense / options.all_reduce_bandwidth
        steps = syncs * sync_every
        seconds.append(asked / steps / options.all_to_all_bandwidth + sync / sync_every)
    return seconds


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
    """Four ranks send fewer bytes if they sum up all replicas than if they send touched rows."""
    use = dataclasses.replace(BALANCED, owner_R=np.arange(4))
    better = dataclasses.replace(BYTES, all_reduce_bandwidth=4e9)
    assert rows_to_replicate(use, 4, better) == 4
    assert rows_to_replicate(use, 4, BYTES) == 0


@pytest.mark.parametrize("bandwidth", [1e6, 4e9])
def test_the_speed_of_all_reduces_does_not_count_where_there_is_none(bandwidth: float) -> None:
    """With two ranks, touched rows are never more bytes than a sum of all replicas."""
    other = dataclasses.replace(BYTES, all_reduce_bandwidth=bandwidth)
    for sync_every in (1, 8):
        np.testing.assert_array_equal(
            seconds_of_prefixes(BALANCED, 2, other, sync_every, hot_batches=False),
            seconds_of_prefixes(BALANCED, 2, BYTES, sync_every, hot_batches=False),
        )


FOUR_FREQUENT_80_RARE = rows([1.0] * 4 + [5e-4] * 80, [i % 4 for i in range(84)])


def test_rows_that_batches_do_not_share_gain_nothing_from_rarer_syncs() -> None:
    counted = counted_seconds(FOUR_FREQUENT_80_RARE, 4, BYTES, 8)
    assert counted.index(min(counted)) == 4 and counted[84] > 1.5 * counted[4]
    assert rows_to_replicate(FOUR_FREQUENT_80_RARE, 4, BYTES, sync_every=8) == 4
    seconds = seconds_of_prefixes(FOUR_FREQUENT_80_RARE, 4, BYTES, 8, hot_batches=False)
    np.testing.assert_allclose(seconds, counted, rtol=0.05)


def test_touched_rows_gain_nothing_from_better_all_reduces() -> None:
    better = dataclasses.replace(BYTES, all_reduce_bandwidth=4e9)
    counted = counted_seconds(FOUR_FREQUENT_80_RARE, 4, better, 1, syncs=1000)
    assert counted.index(min(counted)) == 4 and counted[84] > 1.5 * counted[4]
    assert rows_to_replicate(FOUR_FREQUENT_80_RARE, 4, better) == 4
    seconds = seconds_of_prefixes(FOUR_FREQUENT_80_RARE, 4, better, 1, hot_batches=False)
    np.testing.assert_allclose(seconds, counted, rtol=0.05)


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
        ("batch_size", 0, "greater than or equal to 1"),
        ("all_to_all_bandwidth", -1.0, "greater than 0"),
        ("all_to_all_bandwidth", math.inf, "a finite number and greater than 0"),
        ("all_reduce_bandwidth", 0.0, "greater than 0"),
        ("latency", -1.0, "greater than or equal to 0"),
        ("latency", math.nan, "a finite number and greater than or equal to 0"),
        ("hidden", 1.5, "less than or equal to 1 and greater than or equal to 0"),
    ],
)
def test_bad_settings(field: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}: it should be {allowed}$"):
        CostOptions(**{field: value})  # type: ignore[arg-type]
