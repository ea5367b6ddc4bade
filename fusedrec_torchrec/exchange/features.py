"""What the user passed in, checked and put in canonical order.

The canonical order is that of the module's slots, so that everything behind it can work on
contiguous ranges.  A feature of two tables stands in it twice.  The order of a batch's own keys
does not matter and may change from batch to batch.

What a look at shapes, names and types can tell is checked here; what needs a look at the ids is
checked on the device, see ``keys``.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

__all__ = ["CanonicalFeatures"]

ID_TYPES = (torch.int32, torch.int64)


class CanonicalFeatures:
    """Checks batches and reorders their features.

    Args:
        names: the feature of each slot of the module, in order.
        known: features of all modules that share batches with this one; others are extra.
        refuse_extra: whether an extra feature is an error.
        weighted: whether ids carry weights.
        device: where batches must be.
    """

    def __init__(
        self,
        names: Sequence[str],
        known: set[str],
        refuse_extra: bool,
        weighted: bool,
        device: torch.device,
    ) -> None:
        self.names = list(names)
        self._known = known
        self._refuse_extra = refuse_extra
        self._weighted = weighted
        self._device = device
        self._orders: dict[tuple[str, ...], list[int] | None] = {}

    def __call__(self, features: KeyedJaggedTensor | TensorDict) -> KeyedJaggedTensor:
        """The batch in canonical order.

        Raises:
            ValueError: naming the feature, what is wrong and what is expected.
        """
        if isinstance(features, TensorDict):
            self._check_names(list(features.keys()))
            features = maybe_td_to_kjt(features, list(dict.fromkeys(self.names)))
        elif not isinstance(features, KeyedJaggedTensor):
            raise ValueError(
                f"features are a {type(features).__name__}, must be a KeyedJaggedTensor or a "
                "TensorDict of jagged tensors"
            )
        keys = tuple(features.keys())
        if keys not in self._orders:
            self._check_names(keys)
            indices = [keys.index(name) for name in self.names]
            self._orders[keys] = None if indices == list(range(len(keys))) else indices
        self._check_tensors(features)
        order = self._orders[keys]
        if order is None:
            return features
        if features.lengths().numel() == 0:  # permute cannot reshape what has no elements
            return self._without_ids(features, stride=0)
        canonical = features.permute(order)
        # HACK: permute drops the inverse indices; they go by name, so they are still right.
        canonical._inverse_indices = features.inverse_indices_or_none()
        return canonical

    def ignore_weights(self) -> None:
        """Batches need no weights from now on, because something else provides them."""
        self._weighted = False

    def stand_in(self, features: object) -> KeyedJaggedTensor:
        """An empty batch that takes the place of a bad one, so that collectives still match."""
        if isinstance(features, KeyedJaggedTensor):
            return self._without_ids(features, stride=1)
        return self._without_ids(None, stride=1)

    def _without_ids(self, features: KeyedJaggedTensor | None, stride: int) -> KeyedJaggedTensor:
        slots = len(self.names)
        variable = features is not None and features.variable_stride_per_key()
        unique_names = list(dict.fromkeys(self.names))
        return KeyedJaggedTensor(
            keys=self.names,
            values=torch.empty(0, dtype=torch.int64, device=self._device),
            weights=torch.empty(0, device=self._device) if self._weighted else None,
            lengths=torch.zeros(slots * stride, dtype=torch.int32, device=self._device),
            stride=None if variable else stride,
            stride_per_key_per_rank=[[stride]] * slots if variable else None,
            inverse_indices=(
                unique_names,
                torch.zeros(len(unique_names), stride, dtype=torch.int64, device=self._device),
            )
            if variable
            else None,
        )

    def _check_names(self, keys: Sequence[str]) -> None:
        missing = [name for name in dict.fromkeys(self.names) if name not in keys]
        if missing:
            raise ValueError(
                f"feature {missing[0]!r} is missing from the batch, which has {sorted(keys)}"
                + (f"; also missing: {missing[1:]}" if missing[1:] else "")
            )
        repeated = [name for name in dict.fromkeys(keys) if list(keys).count(name) > 1]
        if repeated:
            raise ValueError(f"feature {repeated[0]!r} stands more than once in the batch")
        extra = [name for name in keys if name not in self._known]
        if extra and self._refuse_extra:
            raise ValueError(
                f"feature {extra[0]!r} belongs to no table; tables have {sorted(self._known)}. "
                "Leave it out of the batch, or pass extra_features='ignore' to the sharders"
            )

    def _check_tensors(self, features: KeyedJaggedTensor) -> None:
        values, keys = features.values(), features.keys()
        if values.dtype not in ID_TYPES:
            raise ValueError(
                f"ids of features {keys} are {values.dtype}, must be one of {list(ID_TYPES)}"
            )
        if values.device.type != self._device.type:
            raise ValueError(f"ids are on {values.device}, must be on {self._device}")
        lengths = features.lengths()
        variable = features.variable_stride_per_key()
        if variable:
            expected = sum(features.stride_per_key())
            if features.inverse_indices_or_none() is None:
                raise ValueError(
                    "inverse_indices is None, must be given with a variable batch size per feature"
                )
        else:
            expected = features.stride() * len(keys)
        if lengths.numel() != expected:
            raise ValueError(
                f"there are {lengths.numel()} lengths for {len(keys)} features, must be {expected}"
            )
        # On CUDA this is the synchronisation TorchRec's own split of the batch needs anyway.
        if lengths.device.type == "cpu" and bool((lengths < 0).any()):
            where = int((lengths < 0).nonzero()[0])
            raise ValueError(f"lengths[{where}] is {int(lengths[where])}, must be at least 0")
        total = sum(features.length_per_key()) if lengths.numel() else 0
        if total != values.numel():
            raise ValueError(
                f"lengths add up to {total}, must be {values.numel()}, the number of ids"
            )
        self._check_weights(features)

    def _check_weights(self, features: KeyedJaggedTensor) -> None:
        if not self._weighted:
            return
        weights = features.weights_or_none()
        if weights is None:
            raise ValueError(
                "weights are missing from the batch, tables with is_weighted need them"
            )
        if not weights.is_floating_point():
            raise ValueError(f"weights are {weights.dtype}, must be a floating point type")
        if weights.numel() != features.values().numel():
            raise ValueError(
                f"there are {weights.numel()} weights, must be {features.values().numel()}, "
                "one for each id"
            )
