"""Learned weights of ids by their positions in bags, for all features at once, on CUDA.

TorchRec looks up the weights of each feature by itself, for which it cuts the batch in pieces: a
dozen kernels for each feature, forward and backward.  Here the weights of all features are one
tensor, and each direction is one kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import Function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.kept import Kept
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["PositionWeights"]


class PositionWeights:
    """Gives the ids of batches their weights.

    Args:
        find: returns the weights of positions by feature, which may be others from batch to batch.
        names: the feature of each slot; all must have weights.
    """

    def __init__(
        self, find: Callable[[], Mapping[str, torch.Tensor]], names: Sequence[str]
    ) -> None:
        self._find = find
        weights = find()
        self._device = next(iter(weights.values())).device
        starts = accumulate((weight.numel() for weight in weights.values()), initial=0)
        places = dict(zip(weights, starts, strict=False))
        self._slots = [(places[name], weights[name].numel()) for name in names]
        # Of the last batch, by the bags of its slots: what the kernels want to know of them.
        self._known = Kept[torch.Tensor](lambda slots_S4: [slots_S4], most=1)

    @classmethod
    def of(
        cls, find: Callable[[], Mapping[str, torch.Tensor] | None], names: Sequence[str]
    ) -> "PositionWeights | None":
        """Returns it; None if the processors are others, or kernels cannot do what they do."""
        weights = find()
        if not weights or not all(name in weights for name in names):
            return None
        tensors = weights.values()
        if any(not t.is_cuda or t.dim() != 1 or t.dtype != torch.float32 for t in tensors):
            return None
        return cls(lambda: find() or {}, names)

    @property
    def available(self) -> bool:
        """Whether there are kernels for it, now."""
        names = ("position_weights", "position_sums", "slot_weight_sums")
        return operators.available_on(self._device, *names)

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the weight of each id of a batch in canonical form, and how it is learned."""
        strides = features.stride_per_key()
        weights_N: torch.Tensor = _Weights.apply(
            torch.cat(list(self._find().values())),
            self._slots_S4(strides),
            features.offsets().int().contiguous(),
            max(strides),
            features.values().numel(),
        )
        return weights_N

    def _slots_S4(self, strides: list[int]) -> torch.Tensor:
        """Returns for each slot its first bag, its number of bags, and where its weights are."""

        def make() -> torch.Tensor:
            firsts = accumulate(strides, initial=0)
            numbers = [
                number
                for first, stride, slot in zip(firsts, strides, self._slots, strict=False)
                for number in (first, stride, *slot)
            ]
            return to_device(numbers, self._device).view(-1, 4)

        return self._known.get(tuple(strides), make)


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights_P: torch.Tensor,
        slots_S4: torch.Tensor,
        offsets_B1: torch.Tensor,
        batch: int,
        ids: int,
    ) -> torch.Tensor:
        ctx.of_batch, ctx.weights = (slots_S4, offsets_B1, batch), weights_P.numel()
        weights_N: torch.Tensor = torch.ops.fusedrec.position_weights(
            weights_P, slots_S4, offsets_B1, batch, ids
        )
        return weights_N

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums_P = torch.zeros(ctx.weights, dtype=torch.float32, device=gradient_N.device)
        torch.ops.fusedrec.position_sums(gradient_N.contiguous(), *ctx.of_batch, sums_P)
        return sums_P, None, None, None, None
