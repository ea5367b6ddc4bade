"""What tests of hot rows share: looks at replicas, and the comparison with training without."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedTensor

from fusedrec_torchrec.hot.rows import HotRows
from tests.case import Case, sharded
from tests.parity import check, same_sums, train_step
from tests.reference import unsharded_run


def without_hot_rows(case: Case) -> Case:
    tables = tuple(dataclasses.replace(t, hot=None) for t in case.tables)
    return dataclasses.replace(case, tables=tables, hot_options=None)


def hot_rows(model: Any) -> HotRows:
    hot = model.module.sparse.fused.hot
    assert isinstance(hot, HotRows)
    return hot


def replica_bits(model: Any) -> list[torch.Tensor]:
    hot = hot_rows(model)
    hot._sync.finish()
    return [
        tensor[: replica.capacity].clone().view(torch.uint8)
        for replica in hot._replicas
        for tensor in replica.tensors
    ]


def same_on_all_ranks(bits: list[torch.Tensor]) -> None:
    for mine in bits:
        everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, mine.contiguous())
        for other in everywhere:
            assert torch.equal(mine, other)


def train_both(case: Case, learning_rates: tuple[float, ...] = ()) -> None:
    """Against fused training without hot rows, bit for bit."""
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    for step in range(case.steps):
        outputs = []
        for each, its_case in ((model, case), (plain, plain_case)):
            optimizer = each.fused_optimizer
            for group in optimizer.param_groups:
                group["lr"] = learning_rates[step] if learning_rates else case.learning_rate
            outputs.append(train_step(its_case, each, step, optimizer))
        same_on_all_ranks(replica_bits_in_flight(model))
        for name in outputs[0]:
            same_sums(outputs[0][name], outputs[1][name], (step, name))
    same(model.state_dict(), plain.state_dict())
    same(model.fused_optimizer.state_dict()["state"], plain.fused_optimizer.state_dict()["state"])


def replica_bits_in_flight(model: Any) -> list[torch.Tensor]:
    """As they are, with the last sync still on its way."""
    return [
        tensor[: replica.capacity].clone().view(torch.uint8)
        for replica in hot_rows(model)._replicas
        for tensor in replica.tensors
    ]


def train_and_compare(case: Case) -> None:
    """Against the unsharded run, and against fused training without hot rows.

    Bit for bit but where an all-reduce sums more than two numbers in an order of its own, and on
    real GPUs, where FBGEMM updates replicas by another kernel than tables.  Replicas of all ranks
    are the same to the last bit everywhere.
    """
    bit_for_bit = case.integers or dist.get_world_size() <= 2
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    plain_case = without_hot_rows(case)
    plain = sharded(plain_case)
    outputs = []
    for step in range(case.steps):
        outputs.append(train_step(case, model, step))
        same_on_all_ranks(replica_bits(model))
        want = train_step(plain_case, plain, step)
        for name, output in outputs[-1].items():
            if bit_for_bit:
                same_sums(output, want[name], (step, name))
    # The optimizer first: it must not need the model's state dict to be right.
    states = [each.fused_optimizer.state_dict()["state"] for each in (model, plain)]
    if bit_for_bit:
        same(*states)
        same(model.state_dict(), plain.state_dict())
    check(case, run, outputs, model)


def same(got: object, want: object) -> None:
    if isinstance(want, dict):
        assert isinstance(got, dict) and got.keys() == want.keys()
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, ShardedTensor):
        assert isinstance(got, ShardedTensor)
        for one, other in zip(got.local_shards(), want.local_shards(), strict=True):
            same_sums(one.tensor, other.tensor)
    elif isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        same_sums(got, want)
