"""Optimizers that FBGEMM has on CUDA only, in plain torch: Adam, LAMB, and their row-wise forms."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["UPDATES", "row_gradients", "update_rows"]

Rows = torch.Tensor


def _adam(weights: Rows, gradients: Rows, m: Rows, v: Rows, by: dict[str, Any]) -> Rows:
    """Returns new weights of rows; moments are changed in place, the second is [rows, 1 or D]."""
    weights -= by["lr"] * _direction(weights, gradients, m, v, by)
    return weights


def _lamb(weights: Rows, gradients: Rows, m: Rows, v: Rows, by: dict[str, Any]) -> Rows:
    """Returns new weights of rows, which change in proportion to their norm."""
    direction = _direction(weights, gradients, m, v, by)
    ratio = weights.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
    weights -= by["lr"] * ratio * direction
    return weights


def _direction(weights: Rows, gradients: Rows, m: Rows, v: Rows, by: dict[str, Any]) -> Rows:
    squares = gradients * gradients
    if v.size(1) != gradients.size(1):  # one for each row
        squares = squares.mean(dim=1, keepdim=True)
    m += (1 - by["beta1"]) * (gradients - m)
    v += (1 - by["beta2"]) * (squares - v)
    first = m / (1 - by["beta1"] ** by["steps"])
    second = v / (1 - by["beta2"] ** by["steps"])
    return first / (second.sqrt() + by["eps"]) + by["weight_decay"] * weights


UPDATES: dict[str, tuple[Callable[..., Rows], bool]] = {
    "partial_rowwise_adam": (_adam, True),
    "partial_rowwise_lamb": (_lamb, True),
    "adam": (_adam, False),
    "lamb": (_lamb, False),
}
"""The function of each optimizer, and whether it keeps one second moment for each row.

Names that are part of others come last.
"""


def row_gradients(arguments: dict[str, Any]) -> dict[int, tuple[torch.Tensor, torch.Tensor, int]]:
    """Returns rows, their gradients, and the feature, of each table that FBGEMM's backward has.

    Tables are named by where their weights begin.
    """
    grad, indices, offsets = (arguments[k] for k in ("grad_output", "indices", "offsets"))
    begins = arguments["weights_offsets"].tolist()
    features = len(begins)
    batch = (offsets.numel() - 1) // features
    lengths = offsets.diff()
    bag_of = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    factors = torch.ones(indices.numel())
    if arguments.get("pooling_mode") == 1:
        factors /= lengths[bag_of]
    weights = arguments.get("indice_weights")
    if weights is not None and weights.numel():
        factors *= weights
    found: dict[int, tuple[list[torch.Tensor], list[torch.Tensor], int]] = {}
    for feature, begin in enumerate(begins):
        at = slice(int(offsets[feature * batch]), int(offsets[(feature + 1) * batch]))
        if "D_offsets" in arguments:
            first, last = arguments["D_offsets"][feature : feature + 2].tolist()
            gradients = grad[bag_of[at] - feature * batch, first:last]
        else:  # sequences
            gradients = grad[at]
        rows, parts, _ = found.setdefault(begin, ([], [], feature))
        rows.append(indices[at].long())
        parts.append(gradients.float() * factors[at, None])
    result = {}
    for begin, (rows, parts, feature) in found.items():
        distinct, inverse = torch.cat(rows).unique(return_inverse=True)
        gradients = torch.cat(parts)
        sums = torch.zeros(distinct.numel(), gradients.size(1)).index_add_(0, inverse, gradients)
        result[begin] = distinct, sums, feature
    return result


def update_rows(name: str, arguments: dict[str, Any]) -> None:
    """Updates weights and moments in place, as FBGEMM's backward of this name does on CUDA."""
    if "vbe" in name or arguments.get("use_rowwise_bias_correction"):
        raise NotImplementedError(f"{name}: only plain batches and the plain Adam are known here")
    optimizer = next(o for o in UPDATES if o in name)
    function, per_row = UPDATES[optimizer]
    by = {key: arguments[key] for key in ("eps", "beta1", "beta2", "weight_decay")}
    by |= {"lr": float(arguments["learning_rate_tensor"]), "steps": arguments["iter"]}
    weights, m, v = (
        _own(arguments, kind) for kind in ("{}_weights", "momentum1_{}", "momentum2_{}")
    )
    for begin, (rows, gradients, feature) in row_gradients(arguments).items():
        dim = gradients.size(1)
        m_begin = int(arguments["momentum1_offsets"][feature])
        v_begin = int(arguments["momentum2_offsets"][feature])
        at, m_at = _places(begin, rows, dim), _places(m_begin, rows, dim)
        v_at = _places(v_begin, rows, 1 if per_row else dim)
        m_rows, v_rows = m[m_at].float(), v[v_at].float()
        weights[at] = function(weights[at].float(), gradients, m_rows, v_rows, by).to(weights.dtype)
        m[m_at], v[v_at] = m_rows.to(m.dtype), v_rows.to(v.dtype)


def _own(arguments: dict[str, Any], kind: str) -> torch.Tensor:
    dev: torch.Tensor = arguments[kind.format("dev")]
    uvm: torch.Tensor = arguments[kind.format("uvm")]
    return dev if dev.numel() else uvm


def _places(begin: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    return begin + rows[:, None] * columns + torch.arange(columns)
