"""Sharded models with an optimizer for all of their tables, data-parallel ones included."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from fusedrec_torchrec.core.all_ranks import gather_from_all_ranks
from tests.case import Case, Table, local_device, prefix, sharded
from tests.parity import local_parts, train_step

TABLES = (
    Table("a", 50, dim=16),
    Table("b", 33, dim=8),
    Table("c", 7, dim=16),
    Table("d", 41, dim=8, dtype="fp16"),
)


def case_of(sharding: str, ranks: int, kind: str = "ebc", **changes: Any) -> Case:
    tables = TABLES if kind == "ebc" else tuple(dataclasses.replace(t, dim=16) for t in TABLES)
    settings: dict[str, Any] = {"optimizer": "rowwise_adagrad", "integers": False, **changes}
    case = Case(tables=tables, batch_sizes=(6,) * ranks, kind=kind, **settings)
    return case if sharding == "fused_row_wise" else case.only(sharding)


def optimizer_of(case: Case, model: DistributedModelParallel) -> KeyedOptimizer:
    """Returns the optimizer of all tables; data-parallel ones have torch's."""
    unfused = dict(in_backward_optimizer_filter(model.named_parameters()))
    if not unfused:
        return CombinedOptimizer([model.fused_optimizer])
    factories: dict[str, Any] = {
        "rowwise_adagrad": RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    factory = factories[case.optimizer]
    # Its own default is nothing in fp16.
    settings = {} if case.optimizer == "sgd" else {"eps": case.eps}
    wrapped = KeyedOptimizerWrapper(
        unfused, lambda p: factory(p, lr=case.learning_rate, **settings)
    )
    return CombinedOptimizer([model.fused_optimizer, wrapped])


def trained(case: Case, steps: int = 3) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    model = sharded(case)
    optimizer = optimizer_of(case, model)
    for step in range(steps):
        train_step(case, model, step, optimizer)
    return model, optimizer


def whole_weights(case: Case, model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Returns the weights of all ranks, by table; the same on every rank."""
    state = model.state_dict()
    return {
        t.name: _whole(case, state.get(f"sparse.{prefix(case)}.{t.name}.weight"), (t.rows, t.dim))
        for t in case.tables
    }


def whole_states(case: Case, optimizer: KeyedOptimizer) -> dict[str, torch.Tensor]:
    """Returns the first state of each table, in the shape it has."""
    mine: dict[str, Any] = {}
    for name, value in flatten_state_dict(dict(optimizer.state_dict()["state"]))[0].items():
        parts = name.split(".")
        if parts[-1] in ("momentum1", "sum"):
            mine[parts[parts.index("weight") - 1]] = value
    # Of a whole table only its owner has the state.
    sizes: dict[str, tuple[int, ...]] = {}
    for of_rank in gather_from_all_ranks(
        {name: tuple(value.size()) for name, value in mine.items()}
    ):
        sizes.update(of_rank)
    return {name: _whole(case, mine.get(name), sizes[name]) for name in sorted(sizes)}


def _whole(case: Case, value: Any, size: tuple[int, ...]) -> torch.Tensor:
    mine, seen = torch.zeros(2, *size, dtype=torch.float64, device=local_device(case))
    for where, part in [] if value is None else local_parts(value):
        mine[where] = part.detach().double()
        seen[where] = 1
    for tensor in (mine, seen):
        dist.all_reduce(tensor)
    assert bool((seen > 0).all())
    return (mine / seen).cpu()
