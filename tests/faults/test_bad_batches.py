"""Bad batches in the middle of training: an error on all ranks, or left out by all of them."""

import json
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.bad_batches import BadBatches
from fusedrec_torchrec.training.config import BadBatchesConfig, TrainConfig
from fusedrec_torchrec.training.data.batch_check import BatchCheck, CheckedBatch
from fusedrec_torchrec.training.data.faulty import KINDS
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import find_checkpoints
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated
from tests.faults.faulty import train_faulty
from tests.training.runs import small, train

STEPS, BATCH = 12, 128
# Without shuffling, batch after batch comes from the front of each of four lanes.
STEP = 7


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    data = small(folder, **changes)
    data["steps"], data["eval_every"] = STEPS, 0
    data["checkpoint"] = {"every": STEP, "keep": 10, "asynchronous": False}
    return data


def sample_of(folder: Path, step: int, rank: int = 1) -> int:
    """Number of a sample that this rank has in this step, of two ranks."""
    from fusedrec_torchrec.training.data.split import split
    from fusedrec_torchrec.training.loaders import train_loader
    from fusedrec_torchrec.training.source import open_source

    settings = from_mapping(TrainConfig, config(folder))
    source = open_source(settings)
    _, samples = split(source, settings.data.held_out)[0]
    wanted = next(iter(train_loader(settings, source, rank, 2).read(step, step + 1)))
    for number in range(samples):
        if (source.read(number, number + 1).dense == wanted.dense_features[3].numpy()).all():
            return number
    raise AssertionError("no such sample")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> int:
    return sample_of(tmp_path_factory.mktemp("data"), STEP)


@pytest.mark.parametrize("kind", KINDS)
def test_error_is_the_default_and_names_the_batch(
    cluster_2: Cluster, tmp_path: Path, sample: int, kind: str
) -> None:
    found = cluster_2.run(train_faulty, config(tmp_path), {sample: kind})
    problems = {
        "nan": "dense feature 0 of sample 3 is nan, must be a finite number",
        "inf": "dense feature 0 of sample 3 is inf",
        "id": "feature 'a' has id 1000000000, which is out of range [0, 50)",
        "negative": "feature 'a' has id -1, which is out of range [0, 50)",
        "label": "the label of sample 3 is nan, must be in [0, 1]",
        "gradient": "gradients of the embeddings are not finite, or too large to be squared",
    }
    assert found[0] == found[1]
    assert f"of step {STEP + 1}, rank 1: {problems[kind]}" in found[0]["error"]


def without_the_step(cluster: Cluster, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """A run that has never seen the step: resumed after it, with the state from before it."""
    data = config(folder, **changes)
    cluster.run(train, {**data, "steps": STEP})
    before = folder / "checkpoints" / f"step_{STEP:08d}"
    state = json.loads((before / "run.json").read_text())
    (before / "run.json").write_text(json.dumps({**state, "step": STEP + 1}))
    data["checkpoint"] = {"every": 0}
    return cluster.run(train, data, str(before))


@pytest.mark.parametrize(
    "sharding", ["fused_row_wise", pytest.param("table_wise", marks=pytest.mark.slow)]
)
def test_a_skipped_step_is_as_if_it_had_not_been(
    cluster_2: Cluster, tmp_path: Path, sample: int, sharding: str
) -> None:
    changes = {"sharding": {"type": sharding}}
    want = without_the_step(cluster_2, tmp_path / "reference", **changes)
    for kind in KINDS:
        data = config(tmp_path / kind, **changes)
        data["bad_batches"] = {"policy": "skip"}
        found = cluster_2.run(train_faulty, data, {sample: kind})
        for got, wanted in zip(found, want, strict=True):
            assert got["skipped"] == 1
            for name, tensor in wanted["state"].items():
                assert torch.equal(got["state"][name], tensor), (kind, name)
        last = [r for r in read_log(tmp_path / kind) if r["kind"] == "train"][-1]
        assert last["skipped_steps"] == 1 and last["log_loss"] < 1


def test_held_out_batches_are_checked(cluster_2: Cluster, tmp_path: Path) -> None:
    data = config(tmp_path / "error")
    faults = dict.fromkeys(range(18000, 20000, 97), "nan")
    found = cluster_2.run(train_faulty, data, faults)
    assert found[0] == found[1] and "bad held-out batch number 1, rank " in found[0]["error"]
    some = {18_000: "nan", 18_001: "id"}
    data = config(tmp_path / "skip")
    data["bad_batches"] = {"policy": "skip"}
    found = cluster_2.run(train_faulty, data, some)
    assert found[0]["skipped"] == 0 and found[0]["result"]["log_loss"] < 1


def held_out(problems: list[str | None]) -> list[bool]:
    """Which batches of an evaluation count."""
    guard = BadBatches(BadBatchesConfig(policy="skip"))
    good: deque[bool] = deque()
    batches = [
        CheckedBatch(torch.zeros(2, 1), no_ids(), torch.zeros(2), problem) for problem in problems
    ]
    assert len(list(guard.held_out(batches, len(batches), good))) == len(batches)
    return list(good)


def no_ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.zeros(0), lengths=torch.zeros(2, dtype=torch.int32))


def test_bad_held_out_batches_do_not_count(cluster_2: Cluster) -> None:
    for good in cluster_2.run(held_out, [None, "bad", None]):
        assert good == [True, False, True]


def test_an_evaluation_of_nothing_but_bad_batches(cluster_2: Cluster, tmp_path: Path) -> None:
    data = {**config(tmp_path), "eval_batches": 1, "bad_batches": {"policy": "skip"}}
    found = cluster_2.run(train_faulty, data, dict.fromkeys(range(18000, 20000, 3), "nan"))
    assert "auc" not in found[0]["result"] and found[0]["skipped"] == 0


def test_a_bad_held_out_batch_does_not_cost_the_last_checkpoint(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    data = config(tmp_path)
    data["checkpoint"] = {"every": STEPS, "asynchronous": True}
    found = cluster_2.run(train_faulty, data, dict.fromkeys(range(18000, 20000, 3), "nan"))
    assert "bad held-out batch" in found[0]["error"]
    assert [p.name for p in find_checkpoints(tmp_path / "checkpoints")] == [f"step_{STEPS:08d}"]


def test_ids_are_hashed_in_fused_tables_only(
    cluster_2: Cluster, tmp_path: Path, sample: int
) -> None:
    sharding = {"type": "fused_row_wise", "tables": {"a": "table_wise"}}
    data = config(tmp_path, sharding={**sharding, "exchange": {"hash_ids": True}})
    found = cluster_2.run(train_faulty, data, {sample: "id"})
    assert f"of step {STEP + 1}, rank 1: feature 'a' has id 1000000000" in found[0]["error"]


def only_the_dense_part(policy: Any) -> list[Any]:
    """Gate 3, by itself."""
    guard = BadBatches(BadBatchesConfig(policy=policy))
    batch = CheckedBatch(torch.zeros(2, 1), None, torch.zeros(2))
    seen: list[Any] = []
    for gradient in (1.0, float("nan"), 1e17):  # squares of the last, summed up, are none
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.tensor([0.0, gradient, 0.0])
        list(guard.watch([batch], 0, 1))
        try:
            seen.append(guard.may_update([parameter]))
        except ValueError as error:
            seen.append(str(error))
    return [*seen, guard.skipped]


def test_gradients_of_the_dense_part_alone(cluster_2: Cluster) -> None:
    assert cluster_2.run(only_the_dense_part, "skip") == [[True, False, False, 2]] * 2
    for good, nan, large, skipped in cluster_2.run(only_the_dense_part, "error"):
        assert good is True and skipped == 0
        for text in (nan, large):
            assert "bad gradients of step 1: gradients of the dense part are not finite" in text


def guarded_steps(policy: Any, gradients: list[list[float]]) -> tuple[list[Any], list[int]]:
    """Gates 2 and 3 on CUDA: what reached the tables, what the host was told, and its waits.

    Args:
        policy: of bad batches.
        gradients: of each step, one for each rank.
    """
    device = torch.device("cuda", dist.get_rank())
    guard = BadBatches(BadBatchesConfig(policy=policy))
    module = torch.nn.Identity()
    guard.guard(module)
    batch = CheckedBatch(torch.zeros(2, 1), None, torch.zeros(2))
    seen: list[Any] = []
    waits: list[int] = []
    for gradient in gradients:
        rows = torch.ones(2, 3, device=device, requires_grad=True)
        dense = torch.nn.Parameter(torch.ones(3, device=device))
        dense.grad = torch.ones(3, device=device)
        factor = torch.full((2, 3), gradient[dist.get_rank()], device=device)
        list(guard.watch([batch], 0, 1))
        with counted() if is_emulated() else nullcontext() as counts:
            module(rows * 1.0).backward(factor)
            try:
                told: Any = guard.may_update([dense])
            except ValueError as error:
                told = str(error)
        assert rows.grad is not None
        seen.append((told, rows.grad.abs().max().item()))
        waits.append(0 if counts is None else counts.syncs)
    return seen, waits


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_cuda_take_one_wait(gpu_cluster: Cluster) -> None:
    nan = float("nan")
    steps = [[1.0, 2.0], [1.0, nan], [1e17, 1.0], [nan, nan], [2.0, 1.0]]
    for rank, (seen, waits) in enumerate(gpu_cluster.run(guarded_steps, "skip", steps)):
        good = [True, False, False, False, True]
        grads = [steps[0][rank], 0.0, 0.0, 0.0, steps[-1][rank]]
        assert seen == list(zip(good, grads, strict=True))
        assert not is_emulated() or waits == [1] * len(steps)
    found = gpu_cluster.run(guarded_steps, "error", steps[:2])
    for seen, _ in found:
        assert seen[0][0] is True
        text, largest = seen[1]
        assert text.startswith("bad gradients of step 1, rank 1: gradients of the embeddings are")
        assert largest == 0.0


def test_skips_survive_a_restart_and_have_a_limit(
    cluster_2: Cluster, tmp_path: Path, sample: int
) -> None:
    data = config(tmp_path / "run")
    data["bad_batches"] = {"policy": "skip", "most": 1}
    other = sample_of(tmp_path, STEP - 3, rank=0)
    found = cluster_2.run(train_faulty, data, {sample: "nan", other: "id"})
    assert found[0] == found[1]
    assert (
        "2 steps were skipped, bad_batches.most is 1; the last one: batch of step 8"
        in (found[0]["error"])
    )
    data["bad_batches"]["most"] = 2
    data["logging"]["directory"] = str(tmp_path / "other")
    found = cluster_2.run(train_faulty, {**data, "steps": STEP}, {other: "id"})
    assert found[0]["skipped"] == 1
    checkpoint = tmp_path / "other" / "checkpoints" / f"step_{STEP:08d}"
    found = cluster_2.run(train_faulty, data, {sample: "nan"}, str(checkpoint))
    assert found[0]["skipped"] == found[1]["skipped"] == 2


def test_a_state_of_zero_must_not_meet_a_gradient_of_zero(tmp_path: Path) -> None:
    data = small(tmp_path, bad_batches={"policy": "skip"})
    data["optimizer"] = {"embedding": {"eps": 0}}
    with pytest.raises(ValueError, match=r"optimizer\.embedding\.eps is 0, must be more where"):
        from_mapping(TrainConfig, data)


def test_hashed_ids_may_be_anything(tmp_path: Path) -> None:
    from fusedrec_torchrec.training.loaders import train_loader
    from fusedrec_torchrec.training.source import open_source

    settings = from_mapping(TrainConfig, small(tmp_path))
    batch = next(iter(train_loader(settings, open_source(settings), 0, 2).read(0, 1)))
    batch.sparse_features.values()[0] = -5
    assert BatchCheck({"a": None, "b": 3000, "c": 400})(batch) is None
    problem = BatchCheck({"a": 50, "b": 3000, "c": 400})(batch)
    assert problem == "feature 'a' has id -5, which is out of range [0, 50)"
