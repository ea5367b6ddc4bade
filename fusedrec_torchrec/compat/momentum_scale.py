"""Momentum-scaled row-wise AdaGrad, for 2D parallelism, on FBGEMM's row-wise AdaGrad.

Row-wise AdaGrad divides a row's step by the root of v, the sum of its mean squared gradients.  With
M groups that train alone each gradient is of a batch M times smaller, so its square is larger, and
v grows about M times as fast as with one large batch: steps become too small.  Momentum scaling
divides v by c, which is M by default ("Two-dimensional sparse parallelism", Meta, 2025).

The paper's step is lr / sqrt(v / c + eps).  FBGEMM has eps outside of the root, lr / (sqrt(v) +
eps); with lr' = sqrt(c) lr and eps' = sqrt(c) eps that is lr / (sqrt(v / c) + eps), without another
kernel.  The two differ only where v / c is not much larger than eps: in a row's first steps, if
gradients are tiny.  Optimizer state is v itself, so checkpoints fit plain row-wise AdaGrad.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from fusedrec_torchrec.compat.lookups import lookups_of

__all__ = [
    "MomentumScaledRowWiseAdagrad",
    "resolve_fused_params",
    "resolve_parameters",
    "resolve_sharder",
    "scale_lookups",
    "scale_table",
    "without_scale",
]

# What FBGEMM takes where a user says nothing.
LEARNING_RATE, EPS = 0.01, 1.0e-8
# Decays that do not go through the step, so must not be scaled with it.
DECOUPLED = (WeightDecayMode.DECOUPLE, WeightDecayMode.DECOUPLE_GLOBAL)
DECOUPLED_NUMBERS = [mode.value for mode in DECOUPLED]
NOT_SCALABLE = (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP)


class MomentumScaledRowWiseAdagrad(RowWiseAdagrad):
    """Row-wise AdaGrad that divides its sum of squares by ``momentum_scale``.

    For tables, name it in ``apply_optimizer_in_backward`` or in ``fused_params``; FBGEMM does the
    work.  In itself it is plain torch, for dense parameters::

        fused_sharders(fused_params={
            "optimizer": fr.MomentumScaledRowWiseAdagrad, "learning_rate": 0.05, "eps": 1e-8,
        })

    Args:
        params: parameters.
        momentum_scale: c; for tables None is the number of groups, elsewhere 1.
        lr, eps, ...: as in TorchRec's ``RowWiseAdagrad``.
    """

    def __init__(self, params: Any, *args: Any, momentum_scale: float | None = None, **kwargs: Any):
        super().__init__(params, *args, **kwargs)
        self._root = math.sqrt(_checked(1.0 if momentum_scale is None else momentum_scale))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = [(group["lr"], group["eps"]) for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= self._root
            group["eps"] *= self._root
        try:
            return super().step(closure)
        finally:
            for group, (lr, eps) in zip(self.param_groups, before, strict=True):
                group["lr"], group["eps"] = lr, eps


class ScaledEps(float):
    """An eps that was scaled, and by what; it is how a scale gets to FBGEMM's tables."""

    momentum_scale: float

    def __new__(cls, eps: float, scale: float) -> "ScaledEps":
        self = super().__new__(cls, eps * math.sqrt(scale))
        self.momentum_scale = scale
        return self

    def __reduce__(self) -> Any:
        scale = self.momentum_scale
        return ScaledEps, (float(self) / math.sqrt(scale), scale)


def _checked(scale: float) -> float:
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"momentum_scale is {scale!r}, must be a number greater than 0")
    return float(scale)


def _scaled(settings: dict[str, Any], groups: int) -> dict[str, Any]:
    """Translates settings of momentum-scaled row-wise AdaGrad to FBGEMM's row-wise AdaGrad."""
    settings = dict(settings)
    scale = settings.pop("momentum_scale", None)
    scale = float(groups) if scale is None else _checked(scale)
    mode = settings.get("weight_decay_mode", WeightDecayMode.NONE)
    if mode in NOT_SCALABLE:
        raise ValueError(
            f"weight_decay_mode is {mode.name} with MomentumScaledRowWiseAdagrad, must be NONE, "
            "L2 or DECOUPLE"
        )
    root = math.sqrt(scale)
    rate = settings.pop("lr", settings.get("learning_rate", LEARNING_RATE))
    settings["learning_rate"] = rate * root
    settings["eps"] = ScaledEps(settings.get("eps", EPS), scale)
    if mode in DECOUPLED:
        settings["weight_decay"] = settings.get("weight_decay", 0.0) / root
    return settings


def _is_ours(optimizer: Any) -> bool:
    return isinstance(optimizer, type) and issubclass(optimizer, MomentumScaledRowWiseAdagrad)


def without_scale(fused_params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns settings as planners understand them: the same memory and the same speed."""
    if fused_params is None or not _is_ours(fused_params.get("optimizer")):
        return fused_params
    others = {k: v for k, v in fused_params.items() if k != "momentum_scale"}
    return {**others, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def resolve_fused_params(fused_params: dict[str, Any] | None, groups: int) -> dict[str, Any] | None:
    """Returns settings that FBGEMM understands.

    Args:
        fused_params: the user's.
        groups: of 2D parallelism, 1 without.
    """
    if fused_params is None or not _is_ours(fused_params.get("optimizer")):
        return fused_params
    return {**_scaled(fused_params, groups), "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def resolve_sharder(sharder: Any, groups: int) -> Any:
    """Returns a sharder whose settings FBGEMM understands; the user's own stays as it is."""
    inner = getattr(sharder, "_ebc_sharder", None)
    if inner is not None:
        sharder = copy.copy(sharder)
        sharder._ebc_sharder = resolve_sharder(inner, groups)
    if _is_ours((getattr(sharder, "_fused_params", None) or {}).get("optimizer")):
        sharder = copy.copy(sharder)
        sharder._fused_params = resolve_fused_params(sharder._fused_params, groups)
    return sharder


def resolve_parameters(module: nn.Module, groups: int) -> None:
    """Resolves what ``apply_optimizer_in_backward`` has attached to a module's parameters."""
    for parameter in module.parameters():
        if any(map(_is_ours, getattr(parameter, "_optimizer_classes", []))):
            parameter._optimizer_classes = [RowWiseAdagrad]  # type: ignore[attr-defined]
            parameter._optimizer_kwargs = [  # type: ignore[attr-defined]
                _scaled(parameter._optimizer_kwargs[0], groups)  # type: ignore[attr-defined]
            ]


class _MomentumScaled:
    """Learning rates of a scaled table are the user's; what FBGEMM gets is scaled."""

    optimizer_args: Any

    @property
    def _root(self) -> float:
        return math.sqrt(self.optimizer_args.eps.momentum_scale)

    def _set_learning_rate(self, lr: float) -> float:
        return float(super()._set_learning_rate(lr * self._root))  # type: ignore[misc]

    def get_learning_rate(self) -> float:
        return float(super().get_learning_rate()) / self._root  # type: ignore[misc]

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        values = dict(params_dict)
        if "eps" in values:
            values["eps"] = ScaledEps(values["eps"], self.optimizer_args.eps.momentum_scale)
        if "weight_decay" in values and self.optimizer_args.weight_decay_mode in DECOUPLED_NUMBERS:
            values["weight_decay"] /= self._root
        super().update_hyper_parameters(values)  # type: ignore[misc]


def scale_table(table: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    """Makes a table that was built with a scaled eps keep to it when its learning rate is set.

    Returns:
        whether it is one, and did not before.
    """
    scaled = isinstance(table.optimizer_args.eps, ScaledEps)
    if not scaled or isinstance(table, _MomentumScaled):
        return False
    plain = type(table)
    table.__class__ = type(f"MomentumScaled{plain.__name__}", (_MomentumScaled, plain), {})
    return True


def scale_lookups(module: nn.Module) -> None:
    """Scales the tables of a sharded module's stock lookups, and their optimizers' rates."""
    kernels: list[Any] = [
        k for look in lookups_of(module) for k in getattr(look, "_emb_modules", [])
    ]
    for kernel in kernels:
        table = getattr(kernel, "_emb_module", None)
        if isinstance(table, SplitTableBatchedEmbeddingBagsCodegen) and scale_table(table):
            for group in kernel.fused_optimizer.param_groups:
                group["lr"] = table.get_learning_rate()
