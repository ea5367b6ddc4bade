"""Measures the quality of predicted clicks: log loss, normalized entropy, calibration, AUROC.

Sums follow ``torchrec.metrics.ne``, AUROC is torchmetrics' exact one.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchrec.metrics.ne import compute_ne, get_ne_states

__all__ = ["ClickMetrics", "ClickSums"]

ETA = 1e-12
NAMES = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")


class ClickSums:
    """Sums up metrics of this rank's samples; nothing is synchronised before ``compute``."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(NAMES) + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds the samples of a batch."""
        predictions = torch.sigmoid(logits.detach().double()).unsqueeze(0)
        labels = labels.detach().double().unsqueeze(0)
        states = get_ne_states(labels, predictions, torch.ones_like(labels), ETA)
        values = [states[name] for name in NAMES] + [predictions.sum(dim=-1)]
        self._sums += torch.cat(values)

    def compute(self) -> dict[str, float]:
        """Returns the metrics over all ranks, which all must call it; empty without samples."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        return _metrics(sums)

    def compute_beside(
        self, summed: Sequence[float], own: Sequence[float]
    ) -> tuple[dict[str, float], list[float], list[list[float]]]:
        """Returns the metrics and, from the same collective, other numbers of all ranks.

        Args:
            summed: numbers to add up over all ranks, as many on every rank.
            own: numbers of this rank, for all to know, as many on every rank.

        Returns:
            The metrics, the sums, and ``own`` of every rank in rank order.
        """
        ranks, rank, size = dist.get_world_size(), dist.get_rank(), len(own)
        slots = [0.0] * (ranks * size)
        slots[rank * size : (rank + 1) * size] = own
        beside = torch.tensor([*summed, *slots], dtype=self._sums.dtype)
        sums = torch.cat([self._sums, beside.to(self._sums.device)])
        dist.all_reduce(sums)
        begin = len(self._sums)
        numbers: list[float] = sums[begin:].tolist()
        by_rank = numbers[len(summed) :]
        return (
            _metrics(sums[:begin]),
            numbers[: len(summed)],
            [by_rank[r * size : (r + 1) * size] for r in range(ranks)],
        )

    def reset(self) -> None:
        """Begins anew."""
        self._sums.zero_()

    def state(self) -> list[list[float]]:
        """Returns the sums of every rank; must be called on all ranks."""
        gathered = [torch.empty_like(self._sums) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, self._sums)
        return [sums.tolist() for sums in gathered]

    def load(self, state: list[list[float]]) -> None:
        """Takes over what ``state`` returned, also that of another number of ranks."""
        sums = torch.tensor(state, dtype=torch.float64)
        if len(state) == dist.get_world_size():
            mine = sums[dist.get_rank()]
        else:
            mine = sums.sum(dim=0) if dist.get_rank() == 0 else torch.zeros_like(self._sums)
        self._sums.copy_(mine)


class ClickMetrics(ClickSums):
    """Adds the area under the ROC curve, which keeps all predictions in memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._auc = BinaryAUROC().to(device)

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        super().update(logits, labels)
        self._auc.update(torch.sigmoid(logits.detach()), labels.detach().int())

    def compute(self) -> dict[str, float]:
        values = super().compute()
        return {**values, "auc": float(self._auc.compute())} if values else {}

    def reset(self) -> None:
        super().reset()
        self._auc.reset()


def _metrics(sums: torch.Tensor) -> dict[str, float]:
    """Returns what the sums of all samples say; nothing without samples."""
    cross_entropy, samples, clicks, _, predicted = sums.tolist()
    if not samples:
        return {}
    rate = clicks / samples
    ne = compute_ne(sums[0], sums[1], sums[2], sums[3], ETA)
    return {
        # TorchRec's cross entropy is in bits, a log loss is usually in nats.
        "log_loss": cross_entropy / samples * math.log(2),
        "normalized_entropy": float(ne) if 0 < rate < 1 else math.nan,
        "click_rate": rate,
        "calibration": predicted / clicks if clicks else math.nan,
    }
