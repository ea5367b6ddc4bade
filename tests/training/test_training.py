"""Training runs: they learn, resume bit for bit, and do not depend on ranks or sharding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.main import open_checked
from fusedrec_torchrec.training.run_state import find_checkpoints, read_run_state
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import CPU, small, train, whole_state

TIMING = ("samples_per_second", "waiting_for_data", "stage_ms")


def log(folder: Path, traffic: bool = True) -> list[dict[str, Any]]:
    """The records of a run without what depends on the clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in record.items()
            if key not in TIMING and (traffic or not key.endswith(("_per_step", "_by_rank")))
        }
        for record in records
    ]


@pytest.mark.parametrize("architecture", ["dlrm", "dlrm_dcn", "dlrm_projection"])
def test_every_architecture_learns(cluster_2: Cluster, tmp_path: Path, architecture: str) -> None:
    model = {
        **small(tmp_path)["model"],
        "architecture": architecture,
        "dcn_low_rank": 8,
        "projection_branches": [[16], [24]],
    }
    data = small(tmp_path, model=model, steps=150, eval_every=0, eval_batches=None)
    data["optimizer"] = {"dense": {"learning_rate": 0.01}}
    for result in cluster_2.run(train, data):
        assert result["result"]["auc"] > 0.75


@pytest.mark.parametrize(
    ("ranks", "asynchronous"),
    [
        (1, False),
        (2, True),
        (4, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    clusters: Callable[[int], Cluster], tmp_path: Path, ranks: int, asynchronous: bool
) -> None:
    """Weights, optimizer state, learning rates and metrics; step 7 is between two records."""
    cluster = clusters(ranks)
    checkpoint = {"every": 7, "keep": 3, "asynchronous": asynchronous}
    straight = cluster.run(train, small(tmp_path / "a"))
    whole = cluster.run(train, small(tmp_path / "b", checkpoint=checkpoint))
    saved = [path.name for path in find_checkpoints(tmp_path / "b" / "checkpoints")]
    assert saved == ["step_00000014", "step_00000021", "step_00000024"]
    first = str(tmp_path / "b" / "checkpoints" / "step_00000014")
    assert read_run_state(Path(first)).step == 14
    resumed = cluster.run(train, small(tmp_path / "b", checkpoint=checkpoint), first)
    for one, two, three in zip(straight, whole, resumed, strict=True):
        assert one["state"].keys() == three["state"].keys()
        for key, value in one["state"].items():
            assert torch.equal(value, two["state"][key]), key  # saving changes nothing
            assert torch.equal(value, three["state"][key]), key
        quality = ("auc", "log_loss", "normalized_entropy", "calibration")
        assert [one["result"][k] for k in quality] == [three["result"][k] for k in quality]
    # Traffic is counted in one step of a record's steps, not always in the same one.
    assert log(tmp_path / "a", traffic=False) == log(tmp_path / "b", traffic=False)


def test_resuming_in_the_first_steps_is_exact_too(cluster_4: Cluster, tmp_path: Path) -> None:
    """DistributedDataParallel changes its buckets in the first steps."""
    straight = cluster_4.run(train, small(tmp_path / "a", steps=6, eval_every=0))
    run = small(tmp_path / "b", steps=6, eval_every=0, checkpoint={"every": 1, "keep": 9})
    cluster_4.run(train, run)
    for step in (1, 2, 3):
        first = str(tmp_path / "b" / "checkpoints" / f"step_{step:08d}")
        resumed = cluster_4.run(train, run, first)
        for one, two in zip(straight, resumed, strict=True):
            for key, value in one["state"].items():
                assert torch.equal(value, two["state"][key]), (step, key)


def test_quality_does_not_depend_on_ranks(
    clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    results = [clusters(n).run(train, small(tmp_path / str(n)))[0]["result"] for n in (1, 2, 4)]
    for other in results[1:]:
        assert other["auc"] == pytest.approx(results[0]["auc"], abs=1e-5)
        assert other["log_loss"] == pytest.approx(results[0]["log_loss"], abs=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        "rowwise_adagrad",
        pytest.param("adagrad", marks=pytest.mark.slow),
        pytest.param("sgd", marks=pytest.mark.slow),
    ],
)
def test_quality_does_not_depend_on_sharding(
    cluster_2: Cluster, tmp_path: Path, optimizer: str
) -> None:
    results = {}
    for sharding in ("fused_row_wise", "table_wise", "row_wise", "column_wise", "data_parallel"):
        data = small(tmp_path / sharding, sharding={"type": sharding})
        data["optimizer"]["embedding"] = {"type": optimizer}
        results[sharding] = cluster_2.run(train, data)[0]["result"]
        plan, _ = read_plan(tmp_path / sharding / "plan.yaml")
        assert {table.sharding for table in plan.tables.values()} == {sharding}
    for sharding, result in results.items():
        for name in ("auc", "log_loss"):
            fused = results["fused_row_wise"][name]
            assert result[name] == pytest.approx(fused, abs=1e-5), (sharding, name)


def test_tables_may_be_sharded_one_by_one(cluster_2: Cluster, tmp_path: Path) -> None:
    sharding = {"tables": {"a": "data_parallel", "b": "auto", "c": "table_wise"}}
    cluster_2.run(train, small(tmp_path, sharding=sharding))
    tables = read_plan(tmp_path / "plan.yaml")[0].tables
    assert tables["a"].sharding == "data_parallel" and tables["a"].rows_per_rank is None
    assert tables["c"].sharding == "table_wise" and len(tables["c"].ranks or []) == 1
    assert tables["b"].sharding in FUSED_TYPES


def test_records_have_quality_speed_traffic_and_rates(cluster_2: Cluster, tmp_path: Path) -> None:
    cluster_2.run(train, small(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if record["kind"] == "train"]
    evaluation = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in training] == [5, 10, 15, 20, 24]
    assert [record["step"] for record in evaluation] == [12, 24]
    for record in training:
        assert record["all_to_all_per_step"] == 3
        assert record["all_reduce_per_step"] == 1
        # With the two that agree on bad batches, or one where there is no next batch.
        assert record["collectives_per_step"] - record["all_gather_per_step"] == 4
        assert record["all_gather_per_step"] in (1, 2)
        assert record["bytes_sent_per_step"] == (
            record["all_to_all_bytes_per_step"]
            + record["all_reduce_bytes_per_step"]
            + record["all_gather_bytes_per_step"]
        )
        assert record["samples_per_second"] > 0 and 0 <= record["waiting_for_data"] <= 1
    # Warm-up of 5 steps from 0.1, decay from step 10 to 24; the rate of the step to come.
    rates = [record["learning_rate_tables"] for record in training]
    assert rates == pytest.approx(
        [0.1, 0.1, 0.1 * (1 - 0.9 * 5 / 14), 0.1 * (1 - 0.9 * 10 / 14), 0.01]
    )
    assert {"auc", "log_loss", "normalized_entropy"} <= evaluation[0].keys()


def test_the_schedule_reaches_the_kernel(cluster_2: Cluster, tmp_path: Path) -> None:
    """A warm-up from 0 changes no table in its first step."""
    states = []
    for start, steps in ((0.0, 1), (1.0, 1), (0.0, 2)):
        data = small(tmp_path, steps=steps, eval_every=0)
        data["optimizer"] = {
            "embedding": {"type": "sgd"},
            "schedule": {"warmup_steps": 10, "warmup_start": start},
        }
        states.append(cluster_2.run(train, data)[0]["state"])
    tables = [key for key in states[0] if ".embedding_bags." in key and key.startswith("model")]
    assert tables
    untouched = cluster_2.run(initial, small(tmp_path))[0]
    for key in tables:
        assert torch.equal(states[0][key], untouched[key])
        assert not torch.equal(states[1][key], untouched[key])
        assert not torch.equal(states[2][key], untouched[key])


def initial(data: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = from_mapping(TrainConfig, data)
    return whole_state(Training(config, open_source(config), CPU, None))


def test_a_changed_schedule_takes_effect_on_resume(cluster_2: Cluster, tmp_path: Path) -> None:
    """Also when the saved position is in a stage that the new schedule does not have."""
    run = small(tmp_path, checkpoint={"every": 18}, eval_every=0)
    cluster_2.run(train, run)
    saved = str(tmp_path / "checkpoints" / "step_00000018")
    for schedule, expected in (
        ({}, 0.1),
        ({"decay_start": 20, "decay_end": 30, "decay_factor": 0.0}, 0.1 * (1 - 4 / 10)),
        ({"warmup_steps": 5}, 0.1),
    ):
        run["optimizer"] = {"schedule": schedule}
        cluster_2.run(train, run, saved)
        last = [record for record in log(tmp_path) if record["kind"] == "train"][-1]
        assert last["step"] == 24
        assert last["learning_rate_tables"] == pytest.approx(expected), schedule


def test_a_record_is_about_its_own_steps(cluster_2: Cluster, tmp_path: Path) -> None:
    data = small(tmp_path, steps=10, eval_every=0)
    source = open_source(from_mapping(TrainConfig, data))
    cluster_2.run(train, data)
    first, second = (r["click_rate"] for r in log(tmp_path) if r["kind"] == "train")
    assert first == pytest.approx(source.read(0, 640).labels.mean())
    assert second == pytest.approx(source.read(640, 1280).labels.mean())


def test_evaluations_have_the_batches_asked_for(cluster_2: Cluster, tmp_path: Path) -> None:
    """2,000 samples are held out: 15 whole batches of 128."""
    for batches, samples in ((4, 512), (None, 15 * 128), (99, 15 * 128)):
        data = small(tmp_path, steps=5, eval_every=0, eval_batches=batches)
        source = open_source(from_mapping(TrainConfig, data))
        result = cluster_2.run(train, data)[0]["result"]
        expected = source.read(18_000, 18_000 + samples).labels.mean()
        assert result["click_rate"] == pytest.approx(expected)


def steps_and_dense_weights(data: dict[str, Any]) -> tuple[int, torch.Tensor]:
    config = from_mapping(TrainConfig, data)
    training = Training(config, open_source(config), CPU, None)
    weights = [p for key, p in training.model.named_parameters() if "dense_arch" in key]
    return training.steps, weights[0].detach().clone()


def test_epochs_and_seed_have_their_effect(cluster_1: Cluster, tmp_path: Path) -> None:
    (steps, weights), *_ = cluster_1.run(
        steps_and_dense_weights, small(tmp_path, steps=None, epochs=2)
    )
    assert steps == 2 * (18_000 // 128)
    (_, others), *_ = cluster_1.run(steps_and_dense_weights, small(tmp_path, seed=1))
    assert not torch.equal(weights, others)


def test_a_finished_run_is_not_evaluated_twice(cluster_2: Cluster, tmp_path: Path) -> None:
    data = small(tmp_path, checkpoint={"every": 12})
    first = cluster_2.run(train, data)[0]["result"]
    records = log(tmp_path)
    last = str(tmp_path / "checkpoints" / "step_00000024")
    again = cluster_2.run(train, data, last)[0]["result"]
    assert log(tmp_path) == records
    assert again["auc"] == first["auc"]
    # Stopped between a checkpoint and its evaluation, it is made up for.
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    cluster_2.run(train, data, last)
    assert log(tmp_path) == records


def test_throughput_is_known_even_when_every_step_is_logged(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    data = small(tmp_path, eval_every=0)
    data["logging"]["log_every"] = 1
    cluster_2.run(train, data)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if record["kind"] == "train"]
    assert len(training) == 24
    assert sum("samples_per_second" in record for record in training) >= 18
    assert 3 <= sum("collectives_per_step" in record for record in training) <= 6


def error_of_nan(data: dict[str, Any]) -> str:
    try:
        train(data)
    except ValueError as error:
        return str(error)
    return f"no error on rank {dist.get_rank()}"


def test_a_loss_that_is_no_number_stops_all_ranks(cluster_2: Cluster, tmp_path: Path) -> None:
    data = small(tmp_path)
    data["optimizer"] = {"dense": {"type": "sgd", "learning_rate": 1e30}}
    for text in cluster_2.run(error_of_nan, data):
        assert "gradients of the embeddings are not finite" in text
        assert "learning rates that are too high" in text
    data["bad_batches"] = {"gradients": False}
    data["logging"]["directory"] = str(tmp_path / "unchecked")
    for text in cluster_2.run(error_of_nan, data):
        assert "the training loss is nan at step" in text
        assert "optimizer.dense.learning_rate" in text


PLAN = """\
version: 1
ranks: 2
ranks_per_node: 2
input_dist: exact_counts
tables:
  a: {rows: 50, columns: 8, sharding: fused_row_wise, rows_per_rank: "9, 41"}
  b: {rows: 3000, columns: 8, sharding: fused_row_wise, rows_per_rank: "3000, 0"}
  c: {rows: 400, columns: 8, sharding: table_wise, ranks: [1], rows_per_rank: 400}
"""


def test_a_plan_file_is_trained_with(cluster_2: Cluster, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    usual = cluster_2.run(train, small(tmp_path / "usual"))[0]["result"]
    planned = cluster_2.run(train, small(tmp_path / "planned", plan=str(plan)))
    assert planned[0]["result"]["auc"] == pytest.approx(usual["auc"], abs=1e-5)
    # Each rank has what the plan gives it.
    for rank, (of_a, of_b) in enumerate(((9, 3000), (41, 0))):
        parts = {
            key.rpartition("embedding_bags.")[2]: value.shape[0]
            for key, value in planned[rank]["state"].items()
            if "embedding_bags." in key and key.startswith("model")
        }
        rows = {name.split(".")[0]: count for name, count in parts.items()}
        assert rows["a"] == of_a and rows.get("b", 0) == of_b
    again, _ = read_plan(tmp_path / "planned" / "plan.yaml")
    assert again == read_plan(plan)[0]
    last = log(tmp_path / "planned")[-1]
    assert last["step"] == 24


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ranks: 2\n", "ranks: 4\n", "is a plan for 4 ranks, here are 2"),
        ("  a:", "  x:", "plans table 'x', which the model does not have"),
        ("columns: 8", "columns: 16", "with 50 x 16, the model's has 50 x 8"),
    ],
)
def test_a_plan_for_something_else_is_refused_before_ranks_start(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.replace(old, new, 1))
    config = from_mapping(TrainConfig, small(tmp_path, plan=str(plan)))
    with pytest.raises(ValueError, match=problem):
        open_checked(config, 2, progress=False)


def test_a_plan_and_other_shardings_contradict(tmp_path: Path) -> None:
    for name, value in (("type", "row_wise"), ("hot", {"sync_every": 2})):
        data = small(tmp_path, plan="plan.yaml", sharding={name: value})
        with pytest.raises(ValueError, match=f"sharding.{name} and plan are both set"):
            from_mapping(TrainConfig, data)
