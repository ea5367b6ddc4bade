"""Checkpoints go from every sharding and number of ranks to every other, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from tests.checkpoint.models import case_of, trained, whole_states, whole_weights
from tests.cluster import Cluster
from tests.parity import train_step

Clusters = Callable[[int], Cluster]
OWNER_POOLED = ("fused_table_wise", "fused_column_wise")
STOCK = ("table_wise", "row_wise", "column_wise", "data_parallel")
SHARDINGS = ("fused_row_wise", *OWNER_POOLED, *STOCK)
Numbers = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train_and_save(sharding: str, ranks: int, folder: str, settings: dict[str, Any]) -> Numbers:
    case = case_of(sharding, ranks, **settings)
    model, optimizer = trained(case)
    save_checkpoint(folder, model, optimizer, step=3)
    return whole_weights(case, model), whole_states(case, optimizer)


def load_and_save(
    sharding: str, ranks: int, folder: str, target: str | None, settings: dict[str, Any]
) -> tuple[Numbers, list[str]]:
    """Into a model that has been trained on something else."""
    case = case_of(sharding, ranks, **settings)
    model, optimizer = trained(case, steps=1)
    train_step(case, model, 17, optimizer)
    report = load_checkpoint(folder, model, optimizer)
    if target is not None:
        save_checkpoint(target, model, optimizer)
    return (whole_weights(case, model), whole_states(case, optimizer)), report.converted


def equal(got: Numbers, want: Numbers) -> None:
    assert want[0]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name].view(tensor.shape), tensor), name


def there_and_back(
    clusters: Clusters,
    folder: Path,
    first: tuple[str, int],
    second: tuple[str, int],
    **settings: Any,
) -> list[str]:
    """first -> second -> first; returns what the second had to convert."""
    there, back = str(folder / "there"), str(folder / "back")
    want = clusters(first[1]).run(train_and_save, *first, there, settings)[0]
    (between, converted), *_ = clusters(second[1]).run(
        load_and_save, *second, there, back, settings
    )
    for name, weight in want[0].items():
        assert torch.equal(between[0][name], weight), name
    if "data_parallel" in (first[0], second[0]):
        # Torch's optimizers keep the state of fp16 parameters in fp16.
        rounded = [line for line in converted if "rounded from torch.float32" in line]
        assert len(rounded) == (first[0] != "data_parallel" and bool(want[1]))
        if want[1]:
            want[1]["d"] = want[1]["d"].half().double()
    (got, _), *_ = clusters(first[1]).run(load_and_save, *first, back, None, settings)
    equal(got, want)
    return converted


@pytest.mark.parametrize("other", SHARDINGS)
def test_fused_to_every_sharding_and_back(clusters: Clusters, tmp_path: Path, other: str) -> None:
    converted = there_and_back(clusters, tmp_path, ("fused_row_wise", 2), (other, 2))
    assert bool(converted) == (other.endswith("column_wise") or other == "data_parallel")


@pytest.mark.parametrize("other", SHARDINGS[1:])
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_other_optimizers(clusters: Clusters, tmp_path: Path, other: str, optimizer: str) -> None:
    there_and_back(clusters, tmp_path, ("fused_row_wise", 2), (other, 2), optimizer=optimizer)


@pytest.mark.parametrize("other", ["fused_row_wise", *STOCK])
def test_sequences(clusters: Clusters, tmp_path: Path, other: str) -> None:
    there_and_back(clusters, tmp_path, ("fused_row_wise", 2), (other, 2), kind="ec")


WORLDS = [(first, second) for first in (1, 2, 4) for second in (1, 2, 4)]


@pytest.mark.parametrize(("first", "second"), WORLDS)
@pytest.mark.parametrize(
    "other",
    [
        "fused_row_wise",
        *(pytest.param(sharding, marks=pytest.mark.slow) for sharding in SHARDINGS[1:]),
    ],
)
def test_every_number_of_ranks(
    clusters: Clusters, tmp_path: Path, first: int, second: int, other: str
) -> None:
    there_and_back(clusters, tmp_path, ("fused_row_wise", first), (other, second))


@pytest.mark.parametrize(("first", "second"), [OWNER_POOLED, OWNER_POOLED[::-1]])
def test_owner_pooled_to_owner_pooled(
    clusters: Clusters, tmp_path: Path, first: str, second: str
) -> None:
    there_and_back(clusters, tmp_path, (first, 2), (second, 4), optimizer="adagrad")


@pytest.mark.parametrize("first", SHARDINGS[1:])
@pytest.mark.parametrize("second", SHARDINGS[1:])
@pytest.mark.slow
def test_other_to_other(clusters: Clusters, tmp_path: Path, first: str, second: str) -> None:
    # Column shards have numbers of their own, whose mean is what other shardings have.
    optimizer = "adagrad" if first.endswith("column_wise") else "rowwise_adagrad"
    there_and_back(clusters, tmp_path, (first, 2), (second, 4), optimizer=optimizer)
