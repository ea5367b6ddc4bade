"""Raw ids that are hashed train the rows that their hashes name, on any number of ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from tests.case import Case, Table, batch, coefficients, sharded
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


def compare(case: Case, seed: int) -> list[float]:
    """Hashing inside equals hashing outside; returns a digest of the global result."""
    rank = dist.get_rank()
    inside = sharded(case, fr.ExchangeOptions(hash_ids=True, hash_seed=seed))
    outside = sharded(case)
    for step in range(case.steps):
        features = raw(batch(case, step, rank))
        results = []
        for model, ids in ((inside, features), (outside, hashed(features, seed))):
            outputs = model(ids)
            sum(
                (out * coefficients(case, step, rank, name, out)).sum()
                for name, out in outputs.items()
            ).backward()  # type: ignore[union-attr]
            results.append(outputs)
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    digests = []
    for key, value in inside.state_dict().items():
        for (_, got), (_, want) in zip(
            local_parts(value), local_parts(outside.state_dict()[key]), strict=True
        ):
            assert torch.equal(got, want)
        total = torch.stack([part.double().sum() for _, part in local_parts(value)]).sum()
        dist.all_reduce(total)
        digests.append(float(total))
    return digests


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("seed", [0, 7])
def test_hashing_inside_equals_hashing_outside(
    clusters: Callable[[int], Cluster], kind: str, seed: int
) -> None:
    for world_size in (1, 2, 4):
        case = Case(
            tables=(Table("a", 50), Table("b", 33)), batch_sizes=(4,) * world_size, kind=kind
        )
        digests = clusters(world_size).run(compare, case, seed)
        assert all(digest == digests[0] for digest in digests)
