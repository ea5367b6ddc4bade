"""Hot sets, hot and cold batches, and their alternation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.recorder import Recorder
from fusedrec_torchrec.access.recorder import merged as merged_profiles
from fusedrec_torchrec.access.samples import Samples, ids_by_feature
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.training.data.alternation import Alternation, Rates
from fusedrec_torchrec.training.data.hot_first import HotFirst
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.separate import separate
from fusedrec_torchrec.training.data.separated_loader import SeparatedLoader
from tests.training.data.criteo_text import lines, write

TABLES = {"a": 40, "b": 60}


def synthetic(pooling: float = 1.0, samples: int = 4096) -> SyntheticData:
    tables = [SyntheticTable(name=n, rows=r, zipf=1.3, pooling=pooling) for n, r in TABLES.items()]
    return SyntheticData(tables, dense_features=2, samples=samples)


def profile_of(source: SyntheticData) -> AccessProfile:
    recorder = Recorder(source.table_rows, 1000)
    samples = source.read(0, source.samples)
    recorder.add(list(ids_by_feature(samples, 2)), len(samples))
    return recorder.profile()


@pytest.mark.parametrize("pooling", [1.0, 3.0, 0.5])
def test_a_sample_is_hot_if_all_of_its_ids_are(pooling: float) -> None:
    source = synthetic(pooling)
    hot_set = HotSet.most_used(profile_of(source), 12)
    samples = source.read(0, 500)
    got = hot_set.hot_samples(samples)
    lengths = np.ones((2, 500), int) if samples.lengths is None else samples.lengths
    ids = [
        np.split(f, np.cumsum(n)[:-1])
        for f, n in zip(ids_by_feature(samples, 2), lengths, strict=True)
    ]
    hot = [set(hot_set.ids[name].tolist()) for name in TABLES]
    want = [all(set(ids[t][i].tolist()) <= hot[t] for t in range(2)) for i in range(500)]
    assert got.tolist() == want
    assert 0 < got.sum() < 500


def test_the_most_used_rows_are_hot() -> None:
    source = synthetic()
    profile = profile_of(source)
    hot_set = HotSet.most_used(profile, 10)
    assert hot_set.rows == 10
    samples = source.read(0, source.samples)
    counts = {
        name: np.bincount(ids, minlength=TABLES[name])
        for name, ids in zip(TABLES, ids_by_feature(samples, 2), strict=True)
    }
    inside = min(counts[n][i] for n, ids in hot_set.ids.items() for i in ids)
    outside = max(c for n in TABLES for i, c in enumerate(counts[n]) if i not in hot_set.ids[n])
    assert inside >= outside


def test_hot_sets_and_profiles_are_files(tmp_path: Path) -> None:
    profile = profile_of(synthetic())
    profile.save(tmp_path / "p.npz")
    again = AccessProfile.load(tmp_path / "p.npz")
    hot_set = HotSet.most_used(again, 7)
    hot_set.save(tmp_path / "h.npz")
    loaded = HotSet.load(tmp_path / "h.npz")
    assert loaded.table_rows == TABLES
    for name in TABLES:
        assert loaded.ids[name].tolist() == hot_set.ids[name].tolist()
        assert again.ids[name].tolist() == profile.ids[name].tolist()
        assert again.counts[name].tolist() == profile.counts[name].tolist()
    with pytest.raises(ValueError, match="no access profile"):
        AccessProfile.load(tmp_path / "h.npz")
    with pytest.raises(ValueError, match="no hot set"):
        HotSet.load(tmp_path / "p.npz")
    (tmp_path / "x.npz").write_text("x")
    for kind in (HotSet, AccessProfile):
        with pytest.raises(ValueError, match="does not exist"):
            kind.load(tmp_path / "missing.npz")
        with pytest.raises(ValueError, match="is no"):
            kind.load(tmp_path / "x.npz")


def test_a_profile_of_other_tables_is_refused() -> None:
    profile = profile_of(synthetic())
    hot_set = HotSet.most_used(profile, 7)
    profile.check({"a": 40})
    hot_set.check(TABLES)
    for each in (profile, hot_set):
        with pytest.raises(ValueError, match="has no table 'c'"):
            each.check({"c": 40})
        with pytest.raises(ValueError, match="table 'a' with 40 rows"):
            each.check({"a": 41})


def _with_few_counters(source: SyntheticData, start: int) -> AccessProfile:
    recorder = Recorder(TABLES, 12)
    recorder.add(list(ids_by_feature(source.read(start, start + 1000), 2)), 1000)
    return recorder.profile()


def test_profiles_of_parts_make_one_of_the_whole() -> None:
    source = synthetic()
    parts = []
    for start in (0, 1000, 2000):
        recorder = Recorder(TABLES, 1000)
        samples = source.read(start, start + 1000)
        recorder.add(list(ids_by_feature(samples, 2)), 1000)
        parts.append(recorder.profile())
    merged = merged_profiles(parts)
    recorder = Recorder(TABLES, 1000)
    recorder.add(list(ids_by_feature(source.read(0, 3000), 2)), 3000)
    whole = recorder.profile()
    assert merged.samples == 3000 and merged.accesses == whole.accesses
    for name in TABLES:
        pairs = [
            dict(zip(each.ids[name].tolist(), each.counts[name].tolist(), strict=True))
            for each in (merged, whole)
        ]
        assert pairs[0] == pairs[1]
    few = [_with_few_counters(source, start) for start in (0, 1000)]
    assert all(part.error > 0 for part in few)
    merged = merged_profiles(few)
    for name in TABLES:
        true = np.bincount(
            np.concatenate(
                [
                    list(ids_by_feature(source.read(s, s + 1000), 2))[list(TABLES).index(name)]
                    for s in (0, 1000)
                ]
            ),
            minlength=TABLES[name],
        )
        counted = np.zeros(TABLES[name], int)
        counted[merged.ids[name]] = merged.counts[name]
        assert (counted <= true).all() and (true - counted <= merged.error).all()
    assert merged.error >= max(part.error for part in few)
    other = Recorder({"a": 41, "b": 60}, 10).profile()
    with pytest.raises(ValueError, match="same tables"):
        merged_profiles([merged, other])


# ---------------------------------------------------------------- alternation


@given(
    st.integers(0, 30), st.integers(0, 30), st.sampled_from([1 / 64, 0.1, 0.5, 1.0]),
    st.lists(st.floats(0.1, 1.0), max_size=12), st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_every_batch_comes_once_whatever_the_rates(
    hot: int, cold: int, rate: float, losses: list[float], adaptive: bool
) -> None:
    rates = Rates(adaptive, [(100, 0.3), (0, rate)][1:])
    kinds = []
    waiting = iter(losses)
    for number, is_hot in enumerate(Alternation(hot, cold, rates, first=100)):
        kinds.append(is_hot)
        if number % 3 == 2 and (loss := next(waiting, None)) is not None:
            rates.evaluated(100 + number + 1, loss)
    assert sum(kinds) == hot and len(kinds) == hot + cold
    # And again from what a checkpoint keeps.
    again = Rates(adaptive, list(rates.changes))
    assert list(Alternation(hot, cold, again, first=100)) == kinds


def test_runs_are_the_rate_s_share_of_a_kind() -> None:
    kinds = list(Alternation(4, 8, Rates(False, [(0, 0.5)])))
    assert kinds == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2


def test_a_rising_loss_halves_the_rate_and_falling_ones_double_it() -> None:
    rates = Rates(True, [(0, 0.25)])
    for number, loss in enumerate([0.5, 0.6, 0.5, 0.4, 0.3, 0.2]):
        rates.evaluated(10 * (number + 1), loss)
    assert rates.changes == [(0, 0.25), (20, 0.125), (60, 0.25)]
    assert [rates.at(n) for n in (0, 19, 20, 59, 60, 1000)] == [
        0.25,
        0.25,
        0.125,
        0.125,
        0.25,
        0.25,
    ]
    fixed = Rates(False, [(0, 0.25)])
    fixed.evaluated(5, 9.0)
    fixed.evaluated(6, 10.0)
    assert fixed.changes == [(0, 0.25)]


def test_rates_stay_in_their_limits() -> None:
    rates = Rates(True, [(0, 1.0)])
    for number in range(40):
        rates.evaluated(number, float(number))
    assert rates.at(1000) == 1 / 64
    for number in range(60):
        rates.evaluated(100 + number, -float(number))
    assert rates.at(1000) == 1.0


# ---------------------------------------------------------------- loaders


def rows(batches: Iterator[Any]) -> list[list[tuple[float, ...]]]:
    return [[tuple(row) for row in batch.dense_features.tolist()] for batch in batches]


def stream_loader(
    source: Any, hot: HotFirst | None, rank: int = 0, world_size: int = 1, workers: int = 0
) -> Loader:
    return Loader(
        source, (0, source.samples), batch_size=64, lanes=4, rank=rank, world_size=world_size,
        shuffle=True, chunk_batches=8, workers=workers, hot=hot,
    )  # fmt: skip


def hot_first(source: SyntheticData) -> HotFirst:
    hot_set = HotSet.most_used(profile_of(source), 25)
    return HotFirst(hot_set, Rates(False, [(0, 0.5)]))


def is_hot_batch(hot: HotFirst, batch: Any) -> bool:
    ids = batch.sparse_features.values().numpy()
    samples = Samples(np.zeros((len(batch.labels), 1), np.float32), batch.labels.numpy(), ids)
    return bool(hot.hot_set.hot_samples(samples).all())


def test_streaming_keeps_every_sample_in_its_chunk() -> None:
    source = synthetic()
    hot, plain = stream_loader(source, hot_first(source)), stream_loader(source, None)
    assert hot.batches == plain.batches == 64
    got, want = rows(hot.read(0, 128)), rows(plain.read(0, 128))
    for chunk in range(0, 128, 8):
        places = slice(chunk, chunk + 8)
        together = [sorted(row for b in each[places] for row in b) for each in (got, want)]
        assert together[0] == together[1]
    assert len({row for batch in got[:64] for row in batch}) == 4096


def test_streaming_gives_the_same_kind_to_all_ranks() -> None:
    source = synthetic()
    hot = hot_first(source)
    kinds = [
        [is_hot_batch(hot, b) for b in stream_loader(source, hot, rank, 2).read(0, 64)]
        for rank in range(2)
    ]
    whole = [is_hot_batch(hot, b) for b in stream_loader(source, hot).read(0, 64)]
    assert [a and b for a, b in zip(*kinds, strict=True)] == whole
    share = float(hot.hot_set.hot_samples(source.read(0, 4096)).mean())
    assert 0.2 < share < 0.8
    assert sum(whole) / 64 > share - 0.15
    assert not all(whole[:8]) and any(whole[:8])


@pytest.mark.parametrize("start", [0, 3, 8, 21, 70])
def test_streaming_goes_on_from_any_batch(start: int) -> None:
    source = synthetic()
    loader = stream_loader(source, hot_first(source))
    assert rows(loader.read(start, start + 20)) == rows(loader.read(0, start + 20))[start:]


def test_streaming_with_readers() -> None:
    source = synthetic()
    hot = hot_first(source)
    want = rows(stream_loader(source, hot).read(5, 20))
    assert rows(stream_loader(source, hot, workers=1).read(5, 20)) == want


def separated(tmp_path: Path) -> tuple[PreparedData, PreparedData, HotSet]:
    text = write(tmp_path / "text.tsv", lines(2000, values=12))
    data = prepare([text], tmp_path / "data", progress=False)
    recorder = Recorder(data.table_rows, 10**6)
    recorder.add(list(ids_by_feature(data.read(0, 2000), 26)), 2000)
    hot_set = HotSet.most_used(recorder.profile(), 26 * 11)
    return data, separate(data, hot_set, tmp_path / "separated", 0.1, progress=False), hot_set


def test_separating_moves_hot_samples_to_the_front(tmp_path: Path) -> None:
    data, sorted_data, hot_set = separated(tmp_path)
    assert sorted_data.hot_samples is not None
    hot, held_out = sorted_data.hot_samples
    before, after = data.read(0, 2000), sorted_data.read(0, 2000)
    is_hot = hot_set.hot_samples(before)
    assert held_out == 0.1 and hot == is_hot[:1800].sum() and 0 < hot < 1800
    order = np.concatenate(
        [np.flatnonzero(is_hot[:1800]), np.flatnonzero(~is_hot[:1800]), np.arange(1800, 2000)]
    )
    want = before.take(order)
    for field in ("dense", "labels", "ids"):
        assert np.array_equal(getattr(after, field), getattr(want, field)), field
    assert sorted_data.table_rows == data.table_rows
    assert HotSet.load(tmp_path / "separated" / "hot_set.npz").rows == hot_set.rows
    assert sorted_data.identity != data.identity
    with pytest.raises(ValueError, match="is not empty, must be a new folder"):
        separate(data, hot_set, tmp_path / "separated", 0.1, progress=False)


def separated_loader(data: PreparedData, rate: float = 0.25) -> SeparatedLoader:
    assert data.hot_samples is not None
    hot = data.hot_samples[0] // 32 * 32

    def loader(part: tuple[int, int]) -> Loader:
        return Loader(
            data, part, batch_size=32, lanes=4, rank=0, world_size=1, shuffle=True, chunk_batches=4
        )

    return SeparatedLoader(loader((0, hot)), loader((hot, 1800 - hot)), Rates(False, [(0, rate)]))


def test_separated_data_comes_once_in_an_epoch(tmp_path: Path) -> None:
    _, data, hot_set = separated(tmp_path)
    loader = separated_loader(data)
    assert loader.batches == 1800 // 32
    batches = list(loader.read(0, loader.batches))
    seen = [tuple(r) for b in batches for r in b.sparse_features.values().view(26, -1).t().tolist()]
    training = data.read(0, 1800).ids.reshape(26, -1).T.tolist()
    assert len(seen) == loader.batches * 32
    for row in map(tuple, training):
        if row in seen:
            seen.remove(row)
    assert not seen  # nothing twice, nothing held out
    hot = HotFirst(hot_set, Rates(False, [(0, 1.0)]))
    assert data.hot_samples is not None
    assert sum(is_hot_batch(hot, b) for b in batches) == data.hot_samples[0] // 32


@pytest.mark.parametrize("start", [0, 7, 56, 60])
def test_separated_data_goes_on_from_any_batch(tmp_path: Path, start: int) -> None:
    loader = separated_loader(separated(tmp_path)[1])
    assert rows(loader.read(start, start + 9)) == rows(loader.read(0, start + 9))[start:]
