"""A training step asks no more of the device than it did.

What is counted is one step, forward, backward and update, of one rank of two, on a batch that is on
the device already.  When a step asks for less than its budget, lower the budget.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

import fusedrec_torchrec as fr
from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

TABLES = 26
HOT_ROWS = tuple(range(10))
STEPS = 6


class Budget(NamedTuple):
    """The most of each that a step may take."""

    kernels: int
    syncs: int
    pageable_copies: int
    collectives: int


WORKLOADS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one dimension, one id per bag": ((16,), (1,)),
    "four dimensions, 0 to 4 ids": ((16, 32, 64, 128), (0, 1, 2, 3, 4)),
}
SIMPLE, MIXED = WORKLOADS
SHARDINGS: dict[str, Budget] = {
    f"{SIMPLE} | fused_row_wise": Budget(33, 1, 0, 3),
    f"{SIMPLE} | table_wise": Budget(52, 8, 8, 5),
    f"{MIXED} | fused_row_wise": Budget(35, 1, 0, 3),
    f"{MIXED} | table_wise": Budget(55, 8, 8, 5),
}
DCT = fr.CodecOptions(type="dct")
# On top of fused_row_wise with one dimension.
SETTINGS: dict[str, tuple[dict[str, Any], Budget]] = {
    "fused_table_wise": ({"sharding": "fused_table_wise"}, Budget(40, 1, 0, 3)),
    "hot rows": ({"hot": fr.HotOptions()}, Budget(39, 1, 0, 4)),
    "hot rows, hot_batches": ({"hot": fr.HotOptions(hot_batches=True)}, Budget(40, 2, 0, 5)),
    "hot rows, sync_every 2, a sync": ({"hot": fr.HotOptions(sync_every=2)}, Budget(42, 2, 0, 6)),
    "hot rows, adapt in every step": (
        {"hot": fr.HotOptions(adapt=fr.AdaptOptions(every=1, sample=1))},
        Budget(98, 24, 13, 6),
    ),
    "hot rows, codec dct": ({"hot": fr.HotOptions(codec=DCT)}, Budget(64, 1, 0, 4)),
    "codec dct": ({"codec": DCT}, Budget(52, 1, 0, 3)),
    "codec int8": ({"codec": fr.CodecOptions(type="int8")}, Budget(36, 1, 0, 3)),
    "codec fp16": ({"codec": fr.CodecOptions(type="fp16")}, Budget(36, 1, 0, 3)),
    "2D, gradients": ({"grid": "gradients"}, Budget(38, 1, 0, 6)),
    "2D, weights, a sync": ({"grid": "weights"}, Budget(45, 2, 0, 6)),
}
# Other modules, tables and batches: see ``case_of_kind``.
KINDS: dict[str, tuple[dict[str, Any], Budget]] = {
    "fused_table_wise": ({"shardings": ["fused_table_wise"]}, Budget(55, 1, 0, 3)),
    "fused_column_wise": ({"shardings": ["fused_column_wise"]}, Budget(58, 1, 0, 3)),
    "fused_row_wise and fused_table_wise": (
        {"shardings": ["fused_row_wise", "fused_table_wise"]},
        Budget(65, 1, 0, 3),
    ),
    "features of two tables": ({"shared": True}, Budget(40, 1, 0, 3)),
    "features of no table": ({"extra": True}, Budget(40, 1, 0, 3)),
    # The copies are FBGEMM's, which TorchRec asks to put samples together.
    "variable batches": ({"vbe": True}, Budget(69, 1, 4, 3)),
    "learned position weights": ({"kind": "fp_ebc"}, Budget(58, 1, 0, 3)),
    "sequences": ({"kind": "ec"}, Budget(35, 1, 0, 3)),
    "sequences, features of two tables": ({"kind": "ec", "shared": True}, Budget(40, 1, 0, 3)),
    "sequences, variable batches": ({"kind": "ec", "vbe": True}, Budget(57, 1, 0, 3)),
    "beside table_wise": (
        {"shardings": ["fused_row_wise", "table_wise"]},
        Budget(68, 7, 6, 8),
    ),
}


def case_of_kind(
    shardings: tuple[str, ...] = ("fused_row_wise",),
    kind: str = "ebc",
    vbe: bool = False,
    shared: bool = False,
    extra: bool = False,
) -> tuple[Case, Case]:
    """Returns a case, and one whose batches it gets.

    Args:
        shardings: of its tables, by turns.
        kind: of its module.
        vbe: whether the batch size varies by feature.
        shared: whether the last table has the feature of the first one.
        extra: whether batches have a feature that no table wants.
    """
    case = replace(case_of(MIXED, "fused_row_wise"), kind=kind, vbe=vbe)
    tables = [
        replace(
            table, sharding=shardings[i % len(shardings)], dim=16 if kind == "ec" else table.dim
        )
        for i, table in enumerate(case.tables)
    ]
    if shared:
        tables[-1] = replace(tables[-1], features=tuple(tables[0].feature_names))
    case = replace(case, tables=tuple(tables))
    others = (Table("other", 1000),) if extra else ()
    return case, replace(case, tables=(*others, *tables))


def case_of(workload: str, sharding: str, hot: bool = False, grid: Any = None) -> Case:
    dims, lengths = WORKLOADS[workload]
    tables = tuple(
        Table(
            f"t{i}",
            1000,
            dim=dims[i % len(dims)],
            sharding=sharding,
            hot=HOT_ROWS if hot else None,
        )
        for i in range(TABLES)
    )
    return Case(
        tables=tables,
        batch_sizes=(64, 64),
        lengths=lengths,
        optimizer="rowwise_adagrad",
        device="cuda",
        grid=None if grid is None else fr.GridOptions(sharding_group_size=1, sync=grid),
    )


def count_step(
    case: Case,
    hot: fr.HotOptions | None = None,
    codec: fr.CodecOptions | None = None,
    batches: Case | None = None,
) -> tuple[Budget, dict[str, int]]:
    """Counts the last step of a few; also where it waits for the device."""
    codecs = None if codec is None else fr.Codecs(forward=codec)
    options = fr.ExchangeOptions(
        codecs=codecs, extra_features="error" if batches is None else "ignore"
    )
    model = sharded(case, options, hot)
    module: Any = model._dmp_wrapped_module
    while not hasattr(module, "sparse"):
        module = module.module
    for step in range(STEPS):
        features = batch(batches or case, step, dist.get_rank()).to(local_device(case))
        with counted() as forward:
            outputs = values_of(module.sparse(features))
        gradients = [torch.ones_like(output) for output in outputs]
        with counted() as backward:
            torch.autograd.backward(outputs, gradients)
            if case.grid is not None:
                model.sync()
        module.zero_grad()
    both = (forward, backward)
    numbers = Budget(*(sum(getattr(counts, what) for counts in both) for what in Budget._fields))
    return numbers, dict(forward.sync_places + backward.sync_places)


def values_of(output: Any) -> list[torch.Tensor]:
    """Returns the values of pooled embeddings, or those of all sequences."""
    output = output.wait() if isinstance(output, LazyAwaitable) else output
    if isinstance(output, KeyedTensor):
        return [output.values()]
    return [sequence.values() for sequence in output.values()]


def judge(
    title: str,
    counted_steps: Mapping[str, tuple[Budget, dict[str, int]]],
    budgets: Mapping[str, Budget],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prints what was counted as a table, and fails if it is more than it may be."""
    lines, over = ["", f"| {title} | kernels | syncs | pageable copies | collectives |"], []
    lines.append("|" + "---|" * lines[-1].count(" | ") + "---|")
    for name, (used, places) in counted_steps.items():
        lines.append(f"| {name} | " + " | ".join(map(str, used)) + " |")
        for what, number, most in zip(Budget._fields, used, budgets[name], strict=True):
            if number > most:
                over.append(f"{name}: {what} {number}, at most {most}")
        if over and over[-1].startswith(f"{name}:"):
            over += [f"  waits {times}: {place}" for place, times in places.items()]
    with capsys.disabled():
        print("\n".join(lines))
    assert not over, "\n" + "\n".join(over)


def test_shardings_stay_within_their_budgets(
    gpu_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}
    for name in SHARDINGS:
        workload, sharding = name.split(" | ")
        steps[name] = gpu_cluster.run(count_step, case_of(workload, sharding))[0]
    judge("26 tables | sharding", steps, SHARDINGS, capsys)


def test_settings_stay_within_their_budgets(
    gpu_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}
    for name, (given, _) in SETTINGS.items():
        sharding = given.get("sharding", "fused_row_wise")
        case = case_of(SIMPLE, sharding, "hot" in given, given.get("grid"))
        steps[name] = gpu_cluster.run(count_step, case, given.get("hot"), given.get("codec"))[0]
    budgets = {name: budget for name, (_, budget) in SETTINGS.items()}
    judge(f"26 tables, {SIMPLE}", steps, budgets, capsys)


def test_other_modules_tables_and_batches_stay_within_their_budgets(
    gpu_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}
    for name, (given, _) in KINDS.items():
        case, batches = case_of_kind(**given)
        steps[name] = gpu_cluster.run(count_step, case, None, None, batches)[0]
    judge(
        f"26 tables, {MIXED}", steps, {name: budget for name, (_, budget) in KINDS.items()}, capsys
    )
