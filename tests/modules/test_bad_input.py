"""Bad input on one rank is the same ValueError on all ranks, in the same step, and no more."""

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.parity import check, train_step
from tests.reference import unsharded_run

TABLES = (Table("a", 50, dim=8), Table("b", 30, dim=16, pooling="mean"))
EC_TABLES = (Table("a", 50), Table("b", 30))
Spoil = Callable[[KeyedJaggedTensor], object]


def rebuilt(features: KeyedJaggedTensor, **changes: object) -> KeyedJaggedTensor:
    parts: dict[str, object] = {
        "keys": features.keys(),
        "values": features.values(),
        "lengths": features.lengths(),
        "weights": features.weights_or_none(),
    }
    return KeyedJaggedTensor(**{**parts, **changes})  # type: ignore[arg-type]


def with_id(value: int) -> Spoil:
    def spoil(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values = features.values().clone()
        values[-1] = value  # an id of table b, which has 30 rows
        return rebuilt(features, values=values)

    return spoil


def too_large(features: KeyedJaggedTensor) -> object:
    return with_id(30)(features)


def huge(features: KeyedJaggedTensor) -> object:
    return with_id(2**62)(features)


def negative(features: KeyedJaggedTensor) -> object:
    return with_id(-1)(features)


def missing_feature(features: KeyedJaggedTensor) -> object:
    return features.split([1, 1])[0]


def extra_feature(features: KeyedJaggedTensor) -> object:
    other = rebuilt(features.split([1, 1])[0], keys=["other"])
    return KeyedJaggedTensor.concat([features, other])


def repeated_feature(features: KeyedJaggedTensor) -> object:
    return KeyedJaggedTensor.concat([features, features.split([1, 1])[0]])


def float_ids(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, values=features.values().float())


def lengths_too_small(features: KeyedJaggedTensor) -> object:
    lengths = features.lengths().clone()
    lengths[lengths.argmax()] -= 1
    return rebuilt(features, lengths=lengths)


def negative_length(features: KeyedJaggedTensor) -> object:
    lengths = features.lengths().clone()
    lengths[0], lengths[1] = -1, lengths[0] + lengths[1] + 1
    return rebuilt(features, lengths=lengths)


def odd_number_of_lengths(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=torch.cat([features.lengths(), torch.zeros(1).int()]))


def not_features(features: KeyedJaggedTensor) -> object:
    return {"f_a": features.values()}


BAD: dict[Spoil, str] = {
    too_large: r"feature 'f_b' of table 'b': id 30 at position \d+ is out of range \[0, 30\)",
    huge: r"feature 'f_b' of table 'b': id 4611686018427387904 .* is out of range \[0, 30\)",
    negative: r"feature 'f_b' of table 'b': id -1 at position \d+ is out of range \[0, 30\)",
    missing_feature: r"feature 'f_b' is missing from the batch, which has \['f_a'\]",
    extra_feature: r"feature 'other' belongs to no table; tables have \['f_a', 'f_b'\]",
    repeated_feature: r"feature 'f_a' stands more than once",
    float_ids: r"ids of features .* are torch.float32, must be one of .*int32.*int64",
    lengths_too_small: r"lengths add up to \d+, must be \d+, the number of ids",
    negative_length: r"lengths\[0\] is -1, must be at least 0",
    odd_number_of_lengths: r"there are 13 lengths for 2 features, must be 12",
    not_features: r"features are a dict, must be a KeyedJaggedTensor",
}


def error_of(model: torch.nn.Module, features: object) -> str:
    start = time.monotonic()
    try:
        model(features)
    except ValueError as error:
        assert time.monotonic() - start < 20
        return str(error)
    raise AssertionError("no error")


def spoil_and_go_on(case: Case, spoil: Spoil, bad_ranks: tuple[int, ...], first: int) -> str:
    """Trains; in step ``first`` the batch of some ranks is bad; then trains on as if nothing was.

    Returns the error's text.  The run must equal one that never saw the bad batch.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    run = unsharded_run(case, world_size)
    model = sharded(case)
    outputs, text = [], ""
    for step in range(case.steps):
        if step == first:
            features: object = batch(case, 99, rank)
            if rank in bad_ranks:
                features = spoil(batch(case, 98, rank))
            text = error_of(model, features)
            total = torch.ones(1)
            dist.all_reduce(total)  # the process group still works
            assert int(total) == world_size
        outputs.append(train_step(case, model, step))
    check(case, run, outputs, model)
    return text


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", [0, 3])
def test_bad_batch_on_one_rank(cluster_2: Cluster, spoil: Spoil, first: int) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 6), lengths=(1, 2, 4))
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=first)
    assert texts[0] == texts[1]

    assert re.search(r"^bad input on rank 1: .*" + BAD[spoil], texts[0]), texts[0]


@pytest.mark.parametrize("spoil", [too_large, missing_feature, lengths_too_small])
@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
def test_bad_batch_on_several_of_four_ranks(
    cluster_4: Cluster, spoil: Spoil, input_dist: str
) -> None:
    case = Case(tables=TABLES, batch_sizes=(6,) * 4, lengths=(1, 2, 4), input_dist=input_dist)
    texts = cluster_4.run(spoil_and_go_on, case, spoil, bad_ranks=(1, 3), first=2)
    assert len(set(texts)) == 1
    assert texts[0].startswith("bad input on rank 1: ")
    assert texts[0].endswith("(bad input on ranks 3, too)")


@pytest.mark.parametrize("spoil", [too_large, missing_feature, float_ids])
def test_bad_batch_of_an_embedding_collection(cluster_2: Cluster, spoil: Spoil) -> None:
    case = Case(tables=EC_TABLES, batch_sizes=(6, 6), lengths=(1, 2, 4), kind="ec")
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(0,), first=1)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "bad input on rank 0: feature 'f_b'" if spoil != float_ids else "bad"
    )


@pytest.mark.parametrize("spoil", [too_large, missing_feature])
def test_bad_batch_with_stock_tables_beside(cluster_2: Cluster, spoil: Spoil) -> None:
    tables = (Table("a", 50, sharding="table_wise"), Table("b", 30))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2, 4))
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=1)
    assert texts[0] == texts[1]


def without_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=None)


def integer_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=features.weights().long())


def too_few_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=features.weights()[:-1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (without_weights, "weights are missing from the batch"),
        (integer_weights, "weights are torch.int64, must be a floating point type"),
        (too_few_weights, "one for each id"),
    ],
)
def test_bad_weights(cluster_2: Cluster, spoil: Spoil, text: str) -> None:
    tables = tuple(Table(t.name, t.rows, t.dim) for t in TABLES)
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), weighted=True)
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=1)
    assert texts[0] == texts[1]
    assert text in texts[0]


def with_extra_feature(case: Case) -> None:
    rank = dist.get_rank()
    model = sharded(case, fr.ExchangeOptions(extra_features="ignore"))
    plain = model(batch(case, 0, rank))
    extra = model(extra_feature(batch(case, 0, rank)))
    assert plain.keys() == extra.keys()
    assert all(torch.equal(plain[name], extra[name]) for name in plain)


def test_extra_features_can_be_ignored(cluster_2: Cluster) -> None:
    cluster_2.run(with_extra_feature, Case(tables=TABLES, batch_sizes=(6, 6)))


def in_changing_order(case: Case) -> None:
    rank = dist.get_rank()
    model = sharded(case)
    features = batch(case, 0, rank)
    want = model(features)
    for order in ([1, 0], [0, 1], [1, 0]):
        got = model(features.permute(order))
        assert all(torch.equal(want[name], got[name]) for name in want)


def test_order_of_features_may_change_between_batches(cluster_2: Cluster) -> None:
    cluster_2.run(in_changing_order, Case(tables=TABLES, batch_sizes=(6, 6)))


def weights_make_no_difference(case: Case) -> None:
    """Modules that are not weighted ignore weights, as unsharded ones do."""
    model, features = sharded(case), batch(case, 0, dist.get_rank())
    want = model(features)
    got = model(rebuilt(features, weights=torch.full((features.values().numel(),), 3.0)))
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_weights_of_unweighted_modules_are_ignored(cluster_2: Cluster, kind: str) -> None:
    tables = TABLES if kind == "ebc" else EC_TABLES
    cluster_2.run(weights_make_no_difference, Case(tables=tables, batch_sizes=(6, 6), kind=kind))


def error_of_options(case: Case, options: fr.ExchangeOptions) -> str:
    return error_of(sharded(case, options), batch(case, 0, dist.get_rank()))


def test_hash_ids_of_a_table_that_does_not_exist(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 6))
    texts = cluster_2.run(error_of_options, case, fr.ExchangeOptions(hash_ids=["a", "c"]))
    want = "hash_ids names table 'c', must be among the fused tables ['a', 'b']"
    assert texts == [want, want]
