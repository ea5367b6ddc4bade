"""FBGEMM's fused optimizers: where each runs, and which state it keeps.

This is the one table that everybody asks: the lookup what it may offer, replicas what a row
consists of, the planner how much memory a row takes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad

__all__ = [
    "OPTIMIZERS",
    "REPLICABLE",
    "STATE_BYTES",
    "STATE_PREFIXES",
    "Optimizer",
    "optimizer_of",
    "optimizers_in_backward",
    "optimizers_of",
]

STATE_BYTES = 4  # FBGEMM keeps optimizer state in float32
# What FBGEMM calls the tensors that hold state of optimizers, per element, per row or as a count.
STATE_PREFIXES = ("momentum1", "momentum2", "prev_iter", "row_counter")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One of FBGEMM's optimizers.

    Attributes:
        per_element: how many states it keeps for each element of a row.
        per_row: how many states it keeps for each row.
        cpu_operator: the operator of FBGEMM that updates rows on CPU; None if there is none.
        on_cuda: whether FBGEMM has one for CUDA.
        replicated_states: what FBGEMM calls its states, if the update of a row depends on nothing
            but the row, these states and its gradient, so that replicas stay equal; else None.
        variable_batches: whether a call of FBGEMM can take another number of bags of each table, on
            CUDA.
    """

    per_element: int = 0
    per_row: int = 0
    cpu_operator: str | None = None
    on_cuda: bool = True
    replicated_states: tuple[str, ...] | None = None
    variable_batches: bool = False

    def state_bytes(self, dim: int) -> int:
        """Returns the bytes of a row's state."""
        return (self.per_element * dim + self.per_row) * STATE_BYTES


OPTIMIZERS: dict[EmbOptimType, Optimizer] = {
    EmbOptimType.EXACT_SGD: Optimizer(
        cpu_operator="split_embedding_backward_codegen_sgd_cpu",
        replicated_states=(),
        variable_batches=True,
    ),
    EmbOptimType.EXACT_ADAGRAD: Optimizer(
        per_element=1,
        cpu_operator="split_embedding_backward_codegen_adagrad_cpu",
        replicated_states=("momentum1",),
    ),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: Optimizer(
        per_row=1,
        cpu_operator="split_embedding_backward_codegen_rowwise_adagrad_cpu",
        replicated_states=("momentum1",),
        variable_batches=True,
    ),
    EmbOptimType.ADAM: Optimizer(per_element=2, variable_batches=True),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: Optimizer(per_element=1, per_row=1),
    EmbOptimType.LAMB: Optimizer(per_element=2),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: Optimizer(per_element=1, per_row=1),
    # FBGEMM knows its name, makes its state, and then raises NotImplementedError in the lookup.
    EmbOptimType.LARS_SGD: Optimizer(per_element=1, on_cuda=False),
}

REPLICABLE = tuple(
    kind for kind, optimizer in OPTIMIZERS.items() if optimizer.replicated_states is not None
)
"""Optimizers with which replicas of a row stay equal."""


def optimizers_of(device_type: str) -> tuple[EmbOptimType, ...]:
    """Returns the optimizers that fused tables can use on a device."""
    on_cuda = device_type == "cuda"
    return tuple(
        kind
        for kind, optimizer in OPTIMIZERS.items()
        if (optimizer.on_cuda if on_cuda else optimizer.cpu_operator)
    )


def optimizers_in_backward(
    weight: torch.Tensor,
) -> tuple[list[type] | None, list[dict[str, Any]]]:
    """Returns what ``apply_optimizer_in_backward`` has attached to a parameter.

    Returns:
        classes of optimizers, None if it has not, and the settings of each.
    """
    classes = getattr(weight, "_optimizer_classes", None)
    return classes, getattr(weight, "_optimizer_kwargs", [])


def optimizer_of(weight: torch.Tensor, default: Any) -> EmbOptimType:
    """Returns a table's optimizer.

    It is that of ``apply_optimizer_in_backward``, or else the sharder's, or else SGD.
    """
    classes, _ = optimizers_in_backward(weight)
    if not classes:
        return default or EmbOptimType.EXACT_SGD
    if classes[0] is MomentumScaledRowWiseAdagrad:
        return EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return optimizer_type_to_emb_opt_type(classes[0])
