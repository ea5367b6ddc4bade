"""Access profiles of batches that a training script has at hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from fusedrec_torchrec.planner.model_tables import table_loads
from fusedrec_torchrec.sharding.sharding_type import FUSED, OWNER_POOLED

META = torch.device("meta")


class Model(nn.Module):
    """Has a table with two features, one with bags, and one with sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="page", num_embeddings=50, embedding_dim=8, feature_names=["seen", "liked"]
                ),
                EmbeddingBagConfig(
                    name="user", num_embeddings=40, embedding_dim=8, feature_names=["user"]
                ),
            ],
            device=META,
        )
        self.sequences = EmbeddingCollection(
            [EmbeddingConfig(name="item", num_embeddings=30, embedding_dim=8, feature_names=["i"])],
            device=META,
        )


def batch(**features: list[list[int]]) -> KeyedJaggedTensor:
    """Returns a batch of the bags of each feature."""
    bags = [bag for of_feature in features.values() for bag in of_feature]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([id_ for bag in bags for id_ in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
    )


# Features of other modules are among those of the batch, and in another order than the tables'.
FIRST = batch(
    other=[[900], []], i=[[1, 1], [2]], user=[[7], [8]], seen=[[1, 2], []], liked=[[2], [2]]
)
SECOND = batch(seen=[[3]], liked=[[]], user=[[7]], i=[[]])


def test_accesses_of_all_features_of_a_table_are_counted() -> None:
    profile = fr.profile_batches(Model(), [FIRST, SECOND])
    assert profile.table_rows == {"page": 50, "user": 40, "item": 30}
    assert profile.samples == profile.of_samples == 3
    assert profile.accesses == {"page": 5, "user": 3, "item": 3}
    counts = {
        name: dict(zip(profile.ids[name].tolist(), profile.counts[name].tolist(), strict=True))
        for name in profile.table_rows
    }
    assert counts == {"page": {2: 3, 1: 1, 3: 1}, "user": {7: 2, 8: 1}, "item": {1: 2, 2: 1}}
    assert profile.error == 0


def test_distinct_bags_of_whole_batches_are_counted() -> None:
    """128 samples whose bags are two: in batches of 64 there are two distinct ones each."""
    bags = [[1, 2, 3] if i % 3 else [4, 5] for i in range(64)]
    nothing: list[list[int]] = [[]] * 64
    one = batch(seen=bags, liked=nothing, user=[[i % 40] for i in range(64)], i=nothing)
    counted = fr.profile_batches(Model(), [one, one]).bags
    assert set(counted) == {"page"}, "bags of one id are as distinct as rows"
    page = counted["page"]
    assert page.samples_K.tolist() == [64] and page.batches_K.tolist() == [2]
    assert page.bags_K.tolist() == [4] and page.ids_K.tolist() == [2 * 5]
    assert page.all_bags == 128


def test_ids_are_hashed_as_the_exchange_does() -> None:
    raw = 1 << 40
    one = batch(seen=[[raw, -raw]], liked=[[]], user=[[3]], i=[[]])
    options = fr.ExchangeOptions(hash_ids=["page"], hash_seed=5)
    profile = fr.profile_batches(Model(), [one], options=options)
    salt, rows = torch.tensor(table_salt("page", 5)), torch.tensor(50)
    expected = hash_ids(torch.tensor([raw, -raw]), salt, rows)
    assert sorted(profile.ids["page"].tolist()) == sorted(expected.tolist())
    assert profile.ids["user"].tolist() == [3]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches have no samples"),
        ([batch(seen=[], liked=[], user=[], i=[])], "batches have no samples"),
        ([FIRST, batch(seen=[[1]], user=[[1]], i=[[]])], "batch 1 has no feature 'liked' of table"),
        (
            [batch(seen=[[1]], liked=[[50]], user=[[1]], i=[[]])],
            r"batch 0 has the id 50 of table 'page', must be in \[0, 50\)",
        ),
        (
            [batch(seen=[[1]], liked=[[1]], user=[[-1]], i=[[]])],
            r"batch 0 has the id -1 of table 'user', must be in \[0, 40\)",
        ),
    ],
)
def test_mistakes_are_named(batches: list[KeyedJaggedTensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fr.profile_batches(Model(), batches)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tables have the name 't'"):
        fr.profile_batches(nn.ModuleList([one_table(10), one_table(10)]), [batch(t=[[1]])])


def test_variable_batches_are_refused() -> None:
    variable = KeyedJaggedTensor(
        keys=["seen", "liked", "user", "i"],
        values=torch.tensor([1, 2]),
        lengths=torch.tensor([1, 1]),
        stride_per_key_per_rank=[[1], [1], [0], [0]],
    )
    with pytest.raises(ValueError, match="batch 0 has another number of samples for each feature"):
        fr.profile_batches(Model(), [variable])


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="module is a Linear without tables"):
        fr.profile_batches(nn.Linear(2, 2), [FIRST])


def long_bags(rows: int, repeat: bool) -> KeyedJaggedTensor:
    """Returns 256 bags of 20 ids of a table: all different, or of four kinds."""
    random = np.random.default_rng(0)
    bags = random.integers(0, rows, (4 if repeat else 256, 20))
    return batch(t=[bags[i % len(bags)].tolist() for i in range(256)])


def one_table(rows: int) -> nn.Module:
    model = nn.Module()
    model.bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["t"])],
        device=META,
    )
    return model


def test_few_samples_do_not_say_that_bags_never_repeat() -> None:
    model = one_table(2000)
    bags = [[(7 * i + 3 * j) % 2000 for j in range(4)] for i in range(32)]

    def is_counted(*batches: KeyedJaggedTensor) -> bool:
        profile = fr.profile_batches(model, batches)
        return table_loads(model, fr.fused_sharders(), profile)[0].bags_are_counted

    assert not is_counted(batch(t=bags))
    assert is_counted(batch(t=bags), batch(t=bags))


@pytest.mark.parametrize("rows", [100, 10**6])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_batch_tells_the_planner_what_it_would_not_know(rows: int, repeat: bool) -> None:
    """Owners pool wherever a batch has fewer distinct bags than distinct rows."""
    model, topology = one_table(rows), Topology(2, "cpu", local_world_size=2)

    def planned(profile: fr.AccessProfile | None = None) -> str:
        planner = fr.FusedShardingPlanner(topology=topology, batch_size=256, profile=profile)
        plan: Any = planner.plan(model, fr.fused_sharders())
        return str(plan.plan["bags"]["t"].sharding_type)

    assert planned() == FUSED
    owners_pool = repeat or rows > 100
    pooled_by_owners = planned(fr.profile_batches(model, [long_bags(rows, repeat)])) in OWNER_POOLED
    assert pooled_by_owners == owners_pool
