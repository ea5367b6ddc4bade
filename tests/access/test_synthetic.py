"""Generated clicks: reproducible sample by sample, skewed and drifting as asked, learnable."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable

TABLES = [
    SyntheticTable(name="one", rows=1000),
    SyntheticTable(name="many", rows=300, pooling=4.5, drift=2.0),
    SyntheticTable(name="few", rows=50, pooling=0.4, zipf=0.0),
]


def data(seed: int = 0, tables: list[SyntheticTable] = TABLES, **options: float) -> SyntheticData:
    return SyntheticData(tables, 3, 100_000, seed=seed, **options)


def test_a_sample_does_not_depend_on_how_it_is_read() -> None:
    source = data()
    whole = source.read(1000, 3000)
    for start, stop in ((1000, 1001), (1001, 1500), (1500, 2993), (2993, 3000)):
        part = source.read(start, stop)
        same = whole.take(np.arange(start - 1000, stop - 1000))
        for name in ("dense", "labels", "ids", "lengths"):
            assert (getattr(part, name) == getattr(same, name)).all(), name


def test_seeds_differ_and_repeat() -> None:
    assert (data(1).read(0, 500).dense == data(1).read(0, 500).dense).all()
    assert not (data(1).read(0, 500).dense == data(2).read(0, 500).dense).any()
    assert (data(1).read(0, 500).labels != data(2).read(0, 500).labels).any()


def test_ids_are_in_range_and_bags_have_their_lengths() -> None:
    samples = data().read(0, 20_000)
    assert samples.lengths is not None
    assert samples.lengths[0].tolist() == [1] * 20_000
    assert samples.lengths[1].mean() == pytest.approx(4.5, rel=0.02)
    assert samples.lengths[1].min() == 1
    assert samples.lengths[2].mean() == pytest.approx(0.4, rel=0.03)
    assert set(samples.lengths[2].tolist()) == {0, 1}
    ends = np.cumsum(samples.lengths.sum(axis=1))
    for table, ids in zip(TABLES, np.split(samples.ids, ends[:-1]), strict=True):
        assert ids.min() >= 0 and ids.max() < table.rows
    assert samples.dense.mean() == pytest.approx(0, abs=0.02)
    assert samples.dense.std() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("zipf", [0.0, 0.6, 1.0, 1.3])
def test_popularity_follows_the_zipf_law(zipf: float) -> None:
    rows = 200
    samples = data(tables=[SyntheticTable(name="t", rows=rows, zipf=zipf)]).read(0, 100_000)
    counts = np.sort(np.bincount(samples.ids, minlength=rows))[::-1]
    edges = np.arange(1.0, rows + 2)
    # Of the continuous law on [1, rows + 1): its integral from rank to rank.
    area = np.diff(np.log(edges) if zipf == 1.0 else edges ** (1 - zipf) / (1 - zipf))
    expected = 100_000 * area / area.sum()
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected.max())
    assert counts[0] == pytest.approx(expected[0], rel=0.1 if zipf else 0.2)


def test_popular_rows_are_scattered_over_the_table() -> None:
    samples = data(tables=[SyntheticTable(name="t", rows=1000, zipf=1.2)]).read(0, 50_000)
    hot = np.argsort(-np.bincount(samples.ids, minlength=1000))[:100]
    shares = np.histogram(hot, bins=4, range=(0, 1000))[0]
    assert shares.min() >= 20


def hot_set(source: SyntheticData, start: int) -> set[int]:
    ids = source.read(start, start + 10_000).ids
    return set(np.argsort(-np.bincount(ids, minlength=2000))[:50].tolist())


def test_the_hot_set_drifts_only_when_asked() -> None:
    still = data(tables=[SyntheticTable(name="t", rows=2000)])
    assert len(hot_set(still, 0) & hot_set(still, 80_000)) > 40
    moving = data(tables=[SyntheticTable(name="t", rows=2000, drift=5.0)])
    assert len(hot_set(moving, 0) & hot_set(moving, 2_000)) > 30  # a little later much is left
    assert len(hot_set(moving, 0) & hot_set(moving, 80_000)) < 5  # 400 ranks later nothing


@pytest.mark.parametrize("click_rate", [0.05, 0.25, 0.5])
def test_click_rate_is_about_as_asked(click_rate: float) -> None:
    tables = [SyntheticTable(name=f"t{i}", rows=1000) for i in range(20)]
    rate = data(tables=tables, click_rate=click_rate).read(0, 50_000).labels.mean()
    assert rate == pytest.approx(click_rate, rel=0.3)


def test_the_planted_model_predicts_clicks_and_noise_does_not() -> None:
    for signal, low, high in ((2.0, 0.82, 0.95), (0.0, 0.48, 0.52)):
        source = data(signal=signal)
        labels = torch.from_numpy(source.read(0, 30_000).labels).int()
        probability = torch.from_numpy(source.click_probability(0, 30_000))
        auc = binary_auroc(probability, labels)
        assert low < float(auc) < high
        assert float(probability.mean()) == pytest.approx(float(labels.float().mean()), abs=0.01)


def test_the_hot_set_moves_by_exactly_the_drift() -> None:
    table = SyntheticTable(name="t", rows=997, zipf=2.0, drift=10.0)
    source = SyntheticData([table], 1, 100_000)
    still = SyntheticData([SyntheticTable(name="t", rows=997, zipf=2.0)], 1, 100_000)
    hottest = int(np.bincount(still.read(0, 1000).ids).argmax())
    second = int(np.bincount(still.read(0, 1000).ids, minlength=997).argsort()[-2])
    # After 50,000 samples rank r stands where rank r + 500 stood.
    step = (second - hottest) % 997
    moved = int(np.bincount(source.read(50_000, 50_050).ids, minlength=997).argmax())
    assert moved == (hottest + 500 * step) % 997


def test_samples_and_ids_of_a_bag_do_not_repeat() -> None:
    source = SyntheticData([SyntheticTable(name="t", rows=10**6, pooling=5, zipf=0)], 3, 9000)
    samples = source.read(0, 9000)
    assert len(np.unique(samples.dense, axis=0)) == 9000
    assert len(np.unique(samples.ids)) > 0.95 * len(samples.ids)
    assert source.blocks.sum() == 9000


def test_one_hot_data_has_no_lengths() -> None:
    assert data(tables=TABLES[:1]).read(0, 10).lengths is None


def bags_of(source: SyntheticData, count: int) -> list[tuple[int, ...]]:
    samples = source.read(0, count)
    assert samples.lengths is not None
    ends = np.cumsum(samples.lengths[0])
    return [tuple(bag.tolist()) for bag in np.split(samples.ids, ends[:-1])]


def test_repeated_bags_follow_from_their_first_id() -> None:
    table = SyntheticTable(name="t", rows=500, pooling=6, zipf=1.1, bags="repeated", drift=1.0)
    bags = bags_of(SyntheticData([table], 1, 20_000), 20_000)
    by_first = {bag[0]: bag for bag in bags}
    assert all(by_first[bag[0]] == bag for bag in bags)
    assert 300 < len(set(bags)) == len(by_first)
    assert min(min(bag) for bag in bags) >= 0 and max(max(bag) for bag in bags) < 500
    assert np.mean([len(bag) for bag in by_first.values()]) == pytest.approx(6, rel=0.1)
    # What comes after the first id is as skewed as ids are, and not the same in every bag.
    others = np.array([other for bag in by_first.values() for other in bag[1:]])
    assert np.bincount(others, minlength=500).max() > 5 * len(others) / 500
    assert len({bag[1:] for bag in by_first.values() if len(bag) > 3}) > 200


def test_fresh_bags_do_not_repeat() -> None:
    table = SyntheticTable(name="t", rows=500, pooling=6, zipf=1.1)
    bags = bags_of(SyntheticData([table], 1, 20_000), 20_000)
    assert len(set(bags)) > 0.9 * len(bags)


@pytest.mark.parametrize("pooling", [0.4, 1.0])
def test_bags_of_one_id_are_the_same_fresh_and_repeated(pooling: float) -> None:
    drawn = [
        SyntheticData([SyntheticTable(name="t", rows=99, pooling=pooling, bags=bags)], 1, 999)
        for bags in ("fresh", "repeated")
    ]
    fresh, repeated = (source.read(0, 999) for source in drawn)
    assert (fresh.ids == repeated.ids).all()
