"""Bad input on one rank is the same ValueError on all ranks, in the same step, and no more."""

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange.options import InputDist
from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.parity import check, dense_optimizer, train_step
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
    if features.variable_stride_per_key():
        parts["stride_per_key_per_rank"] = features.stride_per_key_per_rank()
        parts["inverse_indices"] = features.inverse_indices()
    return KeyedJaggedTensor(**{**parts, **changes})


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


def no_lengths(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=None)


def ids_in_a_list(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, values=features.values().tolist())


def ids_in_two_dimensions(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, values=features.values().view(-1, 1))


def lengths_in_two_dimensions(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=features.lengths().view(2, -1))


def short_lengths(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=features.lengths().to(torch.int16))


def stale_length_per_key(features: KeyedJaggedTensor) -> object:
    a, b = features.length_per_key()
    return rebuilt(features, length_per_key=[a - 1, b + 1])


class Explosive(KeyedJaggedTensor):
    """Something whose error is not a ValueError."""

    def keys(self) -> list[str]:
        raise RuntimeError("boom")


def explosive(features: KeyedJaggedTensor) -> object:
    return Explosive(keys=["f_a"], values=torch.zeros(0).long(), lengths=torch.zeros(1).int())


def dense_in_tensor_dict(features: KeyedJaggedTensor) -> object:
    return TensorDict({"f_a": torch.zeros(6, 2), "f_b": torch.zeros(6, 2)})


def tensor_dict_without_a_feature(features: KeyedJaggedTensor) -> object:
    jagged = features["f_a"]
    nested = torch.nested.nested_tensor_from_jagged(jagged.values(), lengths=jagged.lengths())
    return TensorDict({"f_a": nested})


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
    no_lengths: r"the batch has neither lengths nor offsets, must have one of them: how many",
    ids_in_a_list: r"ids of features \['f_a', 'f_b'\] are a list, must be a Tensor",
    ids_in_two_dimensions: r"ids have 2 dimensions, must have 1",
    lengths_in_two_dimensions: r"lengths have 2 dimensions, must have 1",
    short_lengths: r"lengths are torch.int16, must be one of",
    stale_length_per_key: r"length_per_key is \[\d+, \d+\], must be \[\d+, \d+\], the sums",
    explosive: r"RuntimeError: boom",
    dense_in_tensor_dict: r"feature 'f_a' is a Tensor that is not jagged",
    tensor_dict_without_a_feature: r"feature 'f_b' is missing from the batch",
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
    dense = dense_optimizer(case, model)
    outputs, text = [], ""
    for step in range(case.steps):
        if step == first:
            features: object = batch(case, 99, rank).to(local_device(case))
            if rank in bad_ranks:
                features = spoil(batch(case, 98, rank).to(local_device(case)))
            text = error_of(model, features)
            total = torch.ones(1, device=local_device(case))
            dist.all_reduce(total)  # the process group still works
            assert int(total) == world_size
        outputs.append(train_step(case, model, step, dense))
    check(case, run, outputs, model)
    return text


# Of the tables' types: a fused table of rows, of bags, and one of each.
TYPES = {
    "rows": ("fused_row_wise", "fused_row_wise"),
    "tables": ("fused_table_wise", "fused_table_wise"),
    "columns": ("fused_column_wise", "fused_column_wise"),
    "rows and columns": ("fused_row_wise", "fused_column_wise"),
    "tables and rows": ("fused_table_wise", "fused_row_wise"),
}


def tables_of(types: str, tables: tuple[Table, ...] = TABLES) -> tuple[Table, ...]:
    return tuple(replace(t, sharding=s) for t, s in zip(tables, TYPES[types], strict=True))


# All of it for rows; for others what does not end before the exchange begins.
BAD_BY_TYPE = [
    pytest.param(spoil, types, first, id=f"{spoil.__name__}-{types}-{first}")
    for spoil in BAD
    for types in TYPES
    for first in (0, 3)
    if types == "rows" or (spoil in (too_large, huge, negative, missing_feature) and first == 3)
]


@pytest.mark.parametrize(("spoil", "types", "first"), BAD_BY_TYPE)
def test_bad_batch_on_one_rank(cluster_2: Cluster, spoil: Spoil, types: str, first: int) -> None:
    case = Case(tables=tables_of(types), batch_sizes=(6, 6), lengths=(1, 2, 4), repeated=True)
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=first)
    assert texts[0] == texts[1]

    assert re.search(r"^bad input on rank 1: .*" + BAD[spoil], texts[0]), texts[0]


@pytest.mark.parametrize("spoil", [too_large, missing_feature, lengths_too_small])
@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
@pytest.mark.parametrize("types", ["rows", "rows and columns"])
def test_bad_batch_on_several_of_four_ranks(
    cluster_4: Cluster, spoil: Spoil, input_dist: InputDist, types: str
) -> None:
    case = Case(
        tables=tables_of(types), batch_sizes=(6,) * 4, lengths=(1, 2, 4), input_dist=input_dist
    )
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


def nothing(features: KeyedJaggedTensor) -> object:
    return None


@pytest.mark.parametrize("spoil", [too_large, missing_feature, nothing, extra_feature, no_lengths])
@pytest.mark.parametrize("length_dtype", ["int32", "int64"])
@pytest.mark.parametrize("stock", ["table_wise", "row_wise"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_bad_batch_with_stock_tables_beside(
    cluster_2: Cluster, spoil: Spoil, length_dtype: str, stock: str, kind: str
) -> None:
    """Both ranks own stock tables, whose collectives must not stumble either."""
    tables: tuple[Table, ...] = (
        Table("a", 50, features=("f_a",), sharding=stock),
        Table("s", 40, features=("f_a",), sharding=stock),
        Table("b", 30),
    )
    if kind == "ebc":
        tables += (Table("c", 60, features=("f_b",), sharding="fused_table_wise"),)
    case = Case(
        tables=tables, batch_sizes=(6, 6), lengths=(1, 2), length_dtype=length_dtype, kind=kind
    )
    for first in (0, 2):
        texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=first)
        assert texts[0] == texts[1]
        what = "the batch has neither" if spoil is no_lengths else "feature"
        assert texts[0].startswith(f"bad input on rank 1: {what}")


def too_large_for_stock(features: KeyedJaggedTensor) -> object:
    values = features.values().clone()
    values[0] = -7  # an id of table a
    return rebuilt(features, values=values)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_bad_id_of_a_stock_table(cluster_2: Cluster, kind: str) -> None:
    tables = (Table("a", 50, sharding="table_wise"), Table("b", 30))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), kind=kind)
    texts = cluster_2.run(spoil_and_go_on, case, too_large_for_stock, bad_ranks=(0,), first=1)
    want = "bad input on rank 0: feature 'f_a' of table 'a': id -7 at position 0 is out of range "
    assert texts == [want + "[0, 50)"] * 2


def with_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return rebuilt(features, weights=torch.ones(features.values().numel()))


def weights_on_good_ranks_only(case: Case) -> str:
    """Weights that nobody asked for must not upset the collectives of stock tables."""
    model, rank = sharded(case), dist.get_rank()
    features: object = with_weights(batch(case, 0, rank))
    return error_of(model, missing_feature(batch(case, 0, rank)) if rank else features)


def test_bad_batch_where_others_carry_weights(cluster_2: Cluster) -> None:
    tables = (
        Table("a", 50),
        Table("b", 30),
        Table("s", 9, features=("f_a",), sharding="table_wise"),
    )
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2))
    texts = cluster_2.run(weights_on_good_ranks_only, case)
    assert texts[0] == texts[1]
    assert "feature 'f_b' is missing" in texts[0]


VBE_TABLES = (
    Table("a", 50, features=("x",)),
    Table("b", 30, dim=16, features=("y", "z")),
    Table("c", 40, features=("w", "x")),
)


def renamed(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, keys=["x", "y", "z", "other"])


def without_inverse_indices(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, inverse_indices=None)


def not_variable(features: KeyedJaggedTensor) -> object:
    """And has a length too many for four features of one size."""
    spare = (1 - features.lengths().numel()) % 4
    lengths = torch.cat([features.lengths(), torch.zeros(spare, dtype=torch.int32)])
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths)


def test_bad_batch_that_is_not_variable_where_others_are(cluster_2: Cluster) -> None:
    tables = (Table("s", 9, features=("x",), sharding="table_wise"), *VBE_TABLES)
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), vbe=True)
    texts = cluster_2.run(spoil_and_go_on, case, not_variable, bad_ranks=(1,), first=2)
    assert texts[0] == texts[1]
    assert "lengths for 4 features, must be" in texts[0]


def inverse_index_too_large(features: KeyedJaggedTensor) -> object:
    names, indices = features.inverse_indices()
    return rebuilt(features, inverse_indices=(names, indices + 100))


@pytest.mark.parametrize(
    "spoil",
    [
        *(huge, float_ids, renamed, no_lengths),
        *(without_inverse_indices, inverse_index_too_large, nothing),
    ],
)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_bad_batch_with_a_variable_batch_per_feature(
    cluster_2: Cluster, spoil: Spoil, first: int, kind: str
) -> None:
    tables = tuple(
        Table(t.name, t.rows, 8 if kind == "ec" else t.dim, t.features) for t in VBE_TABLES
    )
    if kind == "ebc":
        tables = (replace(tables[0], sharding="fused_column_wise"), *tables[1:])
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), vbe=True, kind=kind)
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=first)
    assert texts[0] == texts[1]
    assert texts[0].startswith("bad input on rank 1: ")


def with_extra_feature(case: Case) -> None:
    rank = dist.get_rank()
    model = sharded(case, fr.ExchangeOptions(extra_features="ignore"))
    features = batch(case, 0, rank)
    plain = model(features.to(local_device(case)))
    more = extra_feature(features)
    assert isinstance(more, KeyedJaggedTensor)
    extra = model(more.to(local_device(case)))
    assert plain.keys() == extra.keys()
    assert all(torch.equal(plain[name], extra[name]) for name in plain)


def test_extra_features_can_be_ignored(cluster_2: Cluster) -> None:
    cluster_2.run(with_extra_feature, Case(tables=TABLES, batch_sizes=(6, 6)))


def in_changing_order(case: Case) -> None:
    rank = dist.get_rank()
    model = sharded(case)
    features = batch(case, 0, rank).to(local_device(case))
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
