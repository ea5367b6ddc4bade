"""One FBGEMM call for all dimensions gives what a call for each gives."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from fusedrec_torchrec.compat.bucket_table import BucketTable
from fusedrec_torchrec.compat.joint_table import JointTable
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.exchange import lookup
from fusedrec_torchrec.exchange.lookup import FusedLookup
from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.emulated_cuda import is_emulated
from tests.parity import local_parts, run_and_check, train_step
from tests.sharding.modules.test_pipelines import compare as compare_pipelines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

# Four dimensions; a table of one row, of which one rank has none; rows and bags in one dimension.
ROWS = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16),
    Table("c", 1, dim=4),
    Table("d", 40, dim=32),
    Table("e", 20, dim=8),
)
MIX = (
    *ROWS,
    Table("f", 30, dim=8, sharding="fused_table_wise"),
    Table("g", 45, dim=16, pooling="mean", sharding="fused_column_wise"),
    Table("h", 25, dim=32, sharding="fused_table_wise"),
    Table("i", 12, dim=16, sharding="fused_table_wise"),
)
BAGS = tuple(dataclasses.replace(t, sharding="fused_table_wise") for t in ROWS)
SUMS = tuple(dataclasses.replace(t, pooling="sum") for t in MIX)
FOUND = {"rows": ROWS, "rows and bags": MIX, "bags": BAGS}


def on_gpus(cluster: Cluster, tables: tuple[Table, ...] = MIX, **settings: Any) -> Case:
    sizes = settings.pop("batch_sizes", (7, 5))[: cluster.world_size]
    given = {"optimizer": "rowwise_adagrad", "integers": False, "device": "cuda", **settings}
    return Case(tables=tables, batch_sizes=sizes, **given)


@contextmanager
def a_call_for_each() -> Iterator[None]:
    """Has lookups made that call each physical table by itself."""
    with mock.patch.object(lookup, "joint_tables", return_value=[]):
        yield


@contextmanager
def counted_calls() -> Iterator[dict[str, int]]:
    """Counts calls of FBGEMM, of joint tables and of others."""
    calls = {"joint": 0, "bucket": 0}
    forwards = {"joint": JointTable.forward, "bucket": BucketTable.forward}

    def counting(kind: str) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return forwards[kind](self, *args, **kwargs)

        return forward

    with (
        mock.patch.object(JointTable, "forward", counting("joint")),
        mock.patch.object(BucketTable, "forward", counting("bucket")),
    ):
        yield calls


def bits(model: Any) -> list[torch.Tensor]:
    """Returns weights and all optimizer state on this rank."""
    states = model.fused_optimizer.state_dict()["state"]
    values = [*model.state_dict().values(), *(v for of in states.values() for v in of.values())]
    return [part.clone() for value in values for _, part in local_parts(value)]


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares bits; on a real GPU sums are not taken in the same order in every run."""
    if is_emulated():
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def same(got: Any, want: Any) -> None:
    assert bits(want)
    for one, other in zip(bits(got), bits(want), strict=True):
        equal(one, other)


Step = Callable[[Any, int], None]


def nothing(model: Any, step: int) -> None:
    """Is done before a step."""


def train_both(case: Case, before: Step = nothing) -> dict[str, int]:
    """Trains with one call and with a call for each; returns how many there were with one."""
    with a_call_for_each():
        apart = sharded(case)
    joint = sharded(case)
    counted: dict[str, int] = {}
    for step in range(case.steps):
        outputs = []
        for model in (joint, apart):
            before(model, step)
            with counted_calls() as calls:
                outputs.append(train_step(case, model, step, model.fused_optimizer))
                if case.grid is not None:
                    model.sync()
            if model is joint:
                counted = calls
            else:
                assert not calls["joint"]
        for name in outputs[1]:
            equal(outputs[0][name], outputs[1][name])
        same(joint, apart)
    return counted


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("tables", FOUND)
def test_one_call_does_what_a_call_for_each_does(
    gpu_cluster: Cluster, tables: str, optimizer: str
) -> None:
    case = on_gpus(gpu_cluster, FOUND[tables], optimizer=optimizer)
    assert gpu_cluster.run(train_both, case) == [{"joint": 1, "bucket": 0}] * len(case.batch_sizes)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("tables", FOUND)
def test_training_equals_unsharded(gpu_cluster: Cluster, tables: str, optimizer: str) -> None:
    # Row-wise AdaGrad has one sum for a row, which columns on several ranks have each of their own.
    whole = tuple(
        dataclasses.replace(t, sharding="fused_table_wise")
        if t.sharding == "fused_column_wise" and optimizer == "rowwise_adagrad"
        else t
        for t in FOUND[tables]
    )
    gpu_cluster.run(run_and_check, on_gpus(gpu_cluster, whole, optimizer=optimizer))


@pytest.mark.parametrize(
    "settings",
    [
        {"tables": SUMS, "weighted": True},
        {"tables": SUMS, "weighted": True, "optimizer": "adam"},
        {"vbe": True},
        {"batch_sizes": (0, 5)},
        {"id_dtype": "int32", "length_dtype": "int64"},
        {"repeated": True, "optimizer": "sgd"},
        {"output_dtype": "fp16", "tables": ROWS},
        {"settings": (("gradient_clipping", True), ("max_gradient", 0.7))},
        {"settings": (("weight_decay", 0.1),)},
        {"input_dist": "exact_counts"},
    ],
    ids=str,
)
def test_all_kinds_of_batches_and_settings(gpu_cluster: Cluster, settings: dict[str, Any]) -> None:
    counts = gpu_cluster.run(train_both, on_gpus(gpu_cluster, **settings))
    assert counts == [{"joint": 1, "bucket": 0}] * gpu_cluster.world_size


def test_fewer_rows_than_buckets(gpu_cluster: Cluster) -> None:
    """There FBGEMM divides by zero in variable batches; Adam's steps are counted all the same."""
    case = on_gpus(gpu_cluster, optimizer="adam", batch_sizes=(6, 4))
    for lengths in ((0,), (*[0] * 30, 1), (*[0] * 10, 1), (*[0] * 6, 1)):
        few = dataclasses.replace(case, lengths=lengths)
        gpu_cluster.run(train_both_with_few_rows, case, few)


def train_both_with_few_rows(case: Case, few: Case) -> None:
    def before(model: Any, step: int) -> None:
        if step in (0, 2):
            train_step(few, model, step, model.fused_optimizer)

    assert train_both(case, before)["joint"] == 1


def test_half_precision_tables(gpu_cluster: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, dtype="fp16", pooling="sum") for t in MIX)
    gpu_cluster.run(train_both, on_gpus(gpu_cluster, tables, integers=True))


def test_other_optimizers_keep_a_call_for_each(gpu_cluster: Cluster) -> None:
    case = on_gpus(gpu_cluster, ROWS, optimizer="adagrad")
    assert gpu_cluster.run(train_both, case)[0] == {"joint": 0, "bucket": 4}


def test_tables_in_host_memory_keep_a_call_for_each(gpu_cluster: Cluster) -> None:
    kernels = ("fused", "fused", "fused_uvm", "fused_uvm_caching", "fused")
    tables = tuple(
        dataclasses.replace(t, kernel=kernel) for t, kernel in zip(ROWS, kernels, strict=True)
    )
    case = on_gpus(gpu_cluster, tables)
    assert gpu_cluster.run(train_both, case)[0] == {"joint": 1, "bucket": 2}


def test_frozen_tables_have_a_call_of_their_own(gpu_cluster: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, frozen=t.name in "bdfg") for t in MIX)
    case = on_gpus(gpu_cluster, tables, optimizer="sgd")
    assert gpu_cluster.run(train_both, case)[0] == {"joint": 2, "bucket": 0}
    gpu_cluster.run(run_and_check, case)


# ------------------------------------------------------------ settings that change


def schedule(model: Any, step: int) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.5 / (1 + step)


def different_rates(model: Any, step: int) -> None:
    """In some steps every bucket has its own."""
    for i, group in enumerate(model.fused_optimizer.param_groups):
        group["lr"] = 0.5 / (1 + step + (i if step % 2 else 0))


def decay(model: Any, step: int) -> None:
    """Other settings than the rate, and the number of the step, for all buckets."""
    for fused in lookups_of(model):
        assert isinstance(fused, FusedLookup)
        for kernel in fused.kernels:
            kernel.optimizer.update_hyper_parameters({"eps": 0.01 * (1 + step)})
            if step == 1:
                kernel.optimizer.set_optimizer_step(7)


@pytest.mark.parametrize("before", [schedule, different_rates, decay])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_settings_may_change(gpu_cluster: Cluster, before: Step, optimizer: str) -> None:
    case = on_gpus(gpu_cluster, optimizer=optimizer, learning_rate=0.5)
    for calls in gpu_cluster.run(train_both, case, before):
        assert calls["joint"] == 1  # the last step is one in which all have the same rate


def apart_while_rates_differ(case: Case) -> list[dict[str, int]]:
    model, counts = sharded(case), []
    for step in range(2):
        different_rates(model, step)
        with counted_calls() as calls:
            train_step(case, model, step, model.fused_optimizer)
        counts.append(calls)
    return counts


def test_calls_are_apart_while_rates_differ(gpu_cluster: Cluster) -> None:
    case = on_gpus(gpu_cluster, ROWS, optimizer="adam")
    for counts in gpu_cluster.run(apart_while_rates_differ, case):
        assert counts == [{"joint": 1, "bucket": 0}, {"joint": 0, "bucket": 4}]


# ------------------------------------------------------------ what looks at tables


@pytest.mark.parametrize("options", [fr.HotOptions(), fr.HotOptions(hot_batches=True)])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_hot_rows(gpu_cluster: Cluster, options: fr.HotOptions, optimizer: str) -> None:
    tables = tuple(
        dataclasses.replace(t, hot=tuple(range(0, t.rows, 7)))
        if t.sharding == "fused_row_wise"
        else t
        for t in MIX
    )
    case = on_gpus(gpu_cluster, tables, optimizer=optimizer, hot_options=options)
    gpu_cluster.run(train_both, case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "grid",
    [
        fr.GridOptions(sharding_group_size=1, sync="weights"),
        fr.GridOptions(sharding_group_size=1, sync="weights", sync_every=2),
        fr.GridOptions(sharding_group_size=1, sync="weights", overlap="until_lookup"),
        fr.GridOptions(sharding_group_size=1, sync="gradients"),
    ],
    ids=str,
)
def test_2d(gpu_cluster: Cluster, grid: fr.GridOptions) -> None:
    tables = tuple(dataclasses.replace(t, sharding="fused_row_wise") for t in MIX)
    case = on_gpus(gpu_cluster, tables, grid=grid)
    for calls in gpu_cluster.run(train_both, case):
        assert bool(calls["joint"]) == (grid.sync == "weights")


def touched(case: Case) -> None:
    """Notes the rows that each way of looking up tells of."""
    with a_call_for_each():
        apart = sharded(case)
    joint = sharded(case)
    found = []
    for model in (joint, apart):
        features = batch(case, 0, dist.get_rank()).to(local_device(case))
        with torch.no_grad():
            model(features)
        assert not model.replicas._touched._size
        model(features)
        found.append(model.replicas._touched.rows().unique())
    assert found[0].numel() > 5
    assert torch.equal(*found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_of_the_one_call_are_noted_for_the_next_sync(gpu_cluster: Cluster) -> None:
    grid = fr.GridOptions(sharding_group_size=1, sync="weights")
    gpu_cluster.run(touched, on_gpus(gpu_cluster, grid=grid))


def saved_and_loaded(case: Case, folder: str, joint_first: bool) -> None:
    """Saves with one call and loads with a call for each, or the other way round."""

    def made(joint: bool) -> Any:
        if joint:
            return sharded(case)
        with a_call_for_each():
            return sharded(case)

    first, second = made(joint_first), made(not joint_first)
    for step in range(3):
        train_step(case, first, step, first.fused_optimizer)
    save_checkpoint(folder, first, first.fused_optimizer, step=3)
    train_step(case, second, 17, second.fused_optimizer)
    load_checkpoint(folder, second, second.fused_optimizer)
    same(second, first)
    if case.optimizer != "adam":  # whose number of steps no checkpoint of TorchRec's has
        for step in range(3, 5):
            for model in (first, second):
                train_step(case, model, step, model.fused_optimizer)
        same(second, first)


@pytest.mark.parametrize("joint_first", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_checkpoints_fit_both(
    gpu_cluster: Cluster, tmp_path: Path, optimizer: str, joint_first: bool
) -> None:
    case = on_gpus(gpu_cluster, optimizer=optimizer)
    gpu_cluster.run(saved_and_loaded, case, str(tmp_path / "checkpoint"), joint_first)


def evaluated(case: Case) -> None:
    with a_call_for_each():
        apart = sharded(case)
    joint = sharded(case)
    features = batch(case, 0, dist.get_rank()).to(local_device(case))
    for mode in (torch.no_grad, torch.inference_mode):
        outputs = []
        for model in (joint, apart):
            with mode():
                outputs.append(model.eval()(features))
        for name in outputs[1]:
            equal(outputs[0][name], outputs[1][name])
    same(joint, apart)
    for model in (joint, apart):
        train_step(case, model.train(), 1, model.fused_optimizer)
    same(joint, apart)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_evaluation(gpu_cluster: Cluster, optimizer: str) -> None:
    gpu_cluster.run(evaluated, on_gpus(gpu_cluster, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"])
def test_pipelines(gpu_cluster: Cluster, name: str, optimizer: str) -> None:
    case = on_gpus(gpu_cluster, SUMS, batch_sizes=(6, 6), optimizer=optimizer)
    gpu_cluster.run(compare_pipelines, case, name)


def memory_is_shared(case: Case) -> None:
    """Parts of the memory count writes by themselves, and are as large as before."""
    (fused,) = lookups_of(sharded(case))
    assert isinstance(fused, FusedLookup)
    first, second = (kernel.table.row_tensors()[0] for kernel in fused.kernels[:2])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    before = second._version
    first.add_(1)
    assert second._version == before
    elements = [kernel.table.row_tensors()[0].numel() for kernel in fused.kernels]
    assert first.untyped_storage().nbytes() == 4 * sum(elements)


def test_buckets_are_parts_of_one_memory(gpu_cluster: Cluster) -> None:
    gpu_cluster.run(memory_is_shared, on_gpus(gpu_cluster, ROWS))
