"""FBGEMM's update of rows whose gradients are at hand.

FBGEMM updates rows in the backward pass of a lookup.  Where gradients come from elsewhere there is
no such lookup, and to make one takes longer than the update itself.  On CPU the operator behind the
backward pass can be called alone.  On CUDA FBGEMM has an operator that does nothing but the update,
for row-wise AdaGrad and rows that come once: one kernel, where lookup and backward take 17.
"""

from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from fusedrec_torchrec.compat.bucket_table import BucketTable
from fusedrec_torchrec.compat.dispatch import argument_names
from fusedrec_torchrec.compat.optimizers import OPTIMIZERS

__all__ = ["DistinctUpdate", "Update", "distinct_update_of", "update_of"]

# Rows, offsets (one row per bag) and their gradients.
Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Rows, each once, and their gradients.
DistinctUpdate = Callable[[torch.Tensor, torch.Tensor], None]

MOST_COLUMNS = 1024  # of FBGEMM's operator for distinct rows


def update_of(table: BucketTable) -> Update:
    """Returns what updates rows of a table, with its settings as they are now."""
    direct = _direct(table)
    return direct if direct is not None else _through_a_lookup(table)


def _through_a_lookup(table: BucketTable) -> Update:
    def update(rows: torch.Tensor, offsets: torch.Tensor, gradients: torch.Tensor) -> None:
        # The last step's update may come with an evaluation.
        with torch.inference_mode(False), torch.enable_grad():
            table(indices=rows, offsets=offsets).backward(gradients)

    return update


def _direct(table: BucketTable) -> Update | None:
    """Returns None on other devices, or if this FBGEMM wants something that we do not know."""
    name = OPTIMIZERS[table.optimizer].cpu_operator
    overloads = None if name is None else getattr(torch.ops.fbgemm, name, None)
    # Clipping is not in the operator.
    if overloads is None or not table.weights_host.numel():
        return None
    if table.optimizer_args.gradient_clipping:
        return None
    operator = overloads.default
    wanted = argument_names(operator)
    settings = table.optimizer_args
    values = {
        "host_weights": table.weights_host.detach(),
        "weights_placements": table.weights_placements,
        "weights_offsets": table.weights_offsets,
        "D_offsets": table.D_offsets,
        "max_D": table.max_D,
        "hash_size_cumsum": table.hash_size_cumsum,
        "total_hash_size_bits": table.total_hash_size_bits,
        "pooling_mode": int(table.pooling_mode),
        "indice_weights": torch.empty(0),
        "stochastic_rounding": settings.stochastic_rounding,
        "learning_rate_tensor": table.learning_rate_tensor,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "weight_decay_mode": settings.weight_decay_mode,
        "max_norm": settings.max_norm,
        "output_dtype": table.output_dtype,
    }
    if table.optimizer != EmbOptimType.EXACT_SGD:
        values["momentum1_host"] = table.momentum1_host
        values["momentum1_placements"] = table.momentum1_placements
        values["momentum1_offsets"] = table.momentum1_offsets
    arguments: dict[str, Any] = {name: value for name, value in values.items() if name in wanted}
    if {*arguments, "grad_output", "indices", "offsets"} != set(wanted):
        return None

    def update(rows: torch.Tensor, offsets: torch.Tensor, gradients: torch.Tensor) -> None:
        with torch.no_grad():
            operator(grad_output=gradients, indices=rows, offsets=offsets, **arguments)

    return update


def distinct_update_of(table: BucketTable) -> DistinctUpdate | None:
    """Returns what updates distinct rows of a table, int64, with float32 gradients, on CUDA.

    The arithmetic is that of the backward pass.

    Returns:
        None if FBGEMM has no operator for it, or one that we do not know.
    """
    overloads = getattr(torch.ops.fbgemm, "split_embedding_rowwise_adagrad_update", None)
    if (
        overloads is None
        or table.optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD
        or not table.weights_dev.is_cuda
        or not table.weights_dev.numel()
        or table.weights_dev.dtype != torch.float32  # gradients have the type of weights
        or table.max_D > MOST_COLUMNS
        or table.optimizer_args.gradient_clipping
    ):
        return None
    operator, settings = overloads.default, table.optimizer_args
    arguments: dict[str, Any] = {
        "dev_weights": table.weights_dev.detach(),
        "uvm_weights": table.weights_uvm.detach(),
        "lxu_cache_weights": table.lxu_cache_weights,
        "weights_placement": table.weights_placements,
        "weights_offsets": table.weights_offsets,
        "max_D": table.max_D,
        "stochastic_rounding": settings.stochastic_rounding,
        "momentum1_dev": table.momentum1_dev,
        "momentum1_uvm": table.momentum1_uvm,
        "momentum1_placements": table.momentum1_placements,
        "momentum1_offsets": table.momentum1_offsets,
        "learning_rate_tensor": table.learning_rate_tensor,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "weight_decay_mode": settings.weight_decay_mode,
        "max_norm": settings.max_norm,
    }
    if {*arguments, "grad_dev_weights", "grad_dev_indices"} != set(argument_names(operator)):
        return None

    def update(rows: torch.Tensor, gradients: torch.Tensor) -> None:
        with torch.no_grad():
            operator(grad_dev_weights=gradients, grad_dev_indices=rows, **arguments)

    return update
