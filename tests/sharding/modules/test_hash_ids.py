"""Raw ids that are hashed train the rows that their hashes name, on any number of ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from tests.case import Case, Table, batch, coefficients, initial_weight, local_device, sharded
from tests.cluster import Cluster
from tests.parity import local_parts

ROWS = {"f_a": ("a", 50), "f_b": ("b", 33)}


def raw(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Ids as a data set has them: any 64-bit number."""
    values = features.values() * 0x5DEECE66D - 2**40
    return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


def hashed(features: KeyedJaggedTensor, seed: int) -> KeyedJaggedTensor:
    parts = [
        hash_ids(features[key].values(), torch.tensor(table_salt(table, seed)), torch.tensor(rows))
        for key, (table, rows) in ROWS.items()
    ]
    return KeyedJaggedTensor(features.keys(), torch.cat(parts), lengths=features.lengths())


def compare(case: Case, seed: int) -> None:
    rank = dist.get_rank()
    inside = sharded(case, fr.ExchangeOptions(hash_ids=True, hash_seed=seed))
    outside = sharded(case)
    for step in range(case.steps):
        features = raw(batch(case, step, rank))
        results = []
        for model, ids in ((inside, features), (outside, hashed(features, seed))):
            outputs = model(ids.to(local_device(case)))
            sum(
                (out * coefficients(case, step, rank, name, out).to(out.device)).sum()
                for name, out in outputs.items()
            ).backward()
            results.append(outputs)
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    for key, value in inside.state_dict().items():
        for (_, got), (_, want) in zip(
            local_parts(value), local_parts(outside.state_dict()[key]), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("seed", [0, 7])
def test_hashing_inside_equals_hashing_outside(
    clusters: Callable[[int], Cluster], kind: str, seed: int
) -> None:
    for world_size in (1, 2, 4):
        case = Case(
            tables=(Table("a", 50), Table("b", 33)), batch_sizes=(4,) * world_size, kind=kind
        )
        clusters(world_size).run(compare, case, seed)


def train_on_fixed_batches() -> dict[str, list[float]]:
    """Trains on the same samples however many ranks share them; returns whole tables."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = Case(tables=(Table("a", 50), Table("b", 33)), batch_sizes=(4,) * ranks)
    model = sharded(case, fr.ExchangeOptions(hash_ids=True))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(-(2**62), 2**62, (2, 8), generator=generator)
        mine = ids[:, 8 * rank // ranks : 8 * (rank + 1) // ranks]
        features = KeyedJaggedTensor(
            keys=["f_a", "f_b"],
            values=mine.flatten(),
            lengths=torch.ones(mine.numel(), dtype=torch.int32),
        )
        # The mean over ranks of sums, times their number, is the sum.
        (sum(out.sum() for out in model(features).values()) * ranks).backward()
    tables = {}
    for i, name in enumerate("ab"):
        whole = torch.zeros_like(initial_weight(case, i))
        for where, part in local_parts(model.state_dict()[f"sparse.embedding_bags.{name}.weight"]):
            whole[where] = part
        dist.all_reduce(whole)
        tables[name] = whole.flatten().tolist()
    return tables


def test_hashed_training_is_the_same_on_any_number_of_ranks(
    clusters: Callable[[int], Cluster],
) -> None:
    one, two, four = (clusters(n).run(train_on_fixed_batches)[0] for n in (1, 2, 4))
    assert one == two == four
