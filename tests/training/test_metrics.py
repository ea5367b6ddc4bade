"""Quality metrics over ranks, against a computation in one place."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics.functional.classification import binary_auroc

from fusedrec_torchrec.training.metrics import ClickMetrics, ClickSums
from tests.cluster import Cluster

CPU = torch.device("cpu")


def predictions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1000, generator=generator)
    labels = (torch.rand(1000, generator=generator) < torch.sigmoid(logits)).float()
    return logits, labels


def compute(cuts: list[int]) -> dict[str, float]:
    """Metrics of predictions that are shared out unevenly, updated in two parts."""
    logits, labels = predictions()
    start, stop = cuts[dist.get_rank()], cuts[dist.get_rank() + 1]
    middle = (start + stop) // 2
    metrics = ClickMetrics(CPU)
    for part in (slice(start, middle), slice(middle, stop)):
        metrics.update(logits[part], labels[part])
    return metrics.compute()


@pytest.mark.parametrize("cuts", [[0, 500, 1000], [0, 10, 1000]])
def test_metrics_are_those_of_all_ranks_together(cluster_2: Cluster, cuts: list[int]) -> None:
    logits, labels = predictions()
    probability = torch.sigmoid(logits.double())
    loss = torch.nn.functional.binary_cross_entropy(probability, labels.double()).item()
    rate = labels.mean().item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    for result in cluster_2.run(compute, cuts):
        assert result["log_loss"] == pytest.approx(loss, rel=1e-9)
        assert result["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-6)
        assert result["click_rate"] == pytest.approx(rate)
        assert result["calibration"] == pytest.approx(
            probability.sum().item() / labels.sum().item()
        )
        assert result["auc"] == pytest.approx(binary_auroc(logits, labels.int()).item(), abs=1e-6)


def save_and_load() -> list[Any]:
    logits, labels = predictions()
    sums = ClickSums(CPU)
    sums.update(logits[dist.get_rank() :: 2], labels[dist.get_rank() :: 2])
    state = sums.state()
    again, fewer = ClickSums(CPU), ClickSums(CPU)
    again.load(state)
    fewer.load([*state, [0.0] * 5])  # as if three ranks had saved
    before = sums.compute()
    sums.reset()
    return [before, again.compute(), again.state() == state, fewer.compute(), sums.compute()]


def test_sums_are_saved_and_loaded_exactly(cluster_2: Cluster) -> None:
    for before, again, same, fewer, empty in cluster_2.run(save_and_load):
        assert again == before and same
        assert fewer == pytest.approx(before)
        assert empty == {}
