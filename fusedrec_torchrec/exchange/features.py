"""What the user passed in, checked and put in canonical form.

The canonical order is that of the module's slots, so that everything behind it can work on
contiguous ranges.  A feature of two tables stands in it twice.  The order of a batch's own keys
does not matter and may change from batch to batch.  On CUDA kernels put it into that order without
a count of its ids on the host (``taken_slots``).  Where they find a slot by its name, and the batch
has every slot once, it is left in its own order.

Stock tables of the same module send the batch's tensors as they are, so ranks must agree on which
there are and of what type, also when one rank's batch is bad or empty: beside stock tables, ids
become int64 and lengths int32.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from fusedrec_torchrec.compat.jagged_tensor import set_inverse_indices
from fusedrec_torchrec.core.kept import Kept
from fusedrec_torchrec.exchange.checks import (
    DeviceReports,
    InverseIndices,
    check_batch,
    check_names,
    check_number_of_ids,
    check_tensor_dict,
    device_reports,
)
from fusedrec_torchrec.exchange.slot_bags import are_counted_on_device
from fusedrec_torchrec.exchange.taken_slots import TakenSlots

__all__ = ["CanonicalFeatures"]

_Order = tuple[list[int], torch.Tensor]  # where each slot stands in a batch, also on its device


class CanonicalFeatures:
    """Checks batches and puts them in canonical form.

    Args:
        names: the feature of each slot of the module, in order.
        known: features of all modules that share batches with this one; others are extra.
        refuse_extra: whether an extra feature is an error.
        weighted: whether ids carry weights; if not, weights of a batch are dropped.
        needs_weights: whether the batch must bring them, and nothing else provides them.
        beside_stock: whether the module has stock tables, too.
        device: where batches must be.
        counted: whether the host must know how many ids each feature has, whatever the batch; else
            only if there are no kernels for CUDA.
        any_order: whether kernels find a slot by its name, if each feature is there once.
    """

    def __init__(
        self,
        names: Sequence[str],
        known: set[str],
        refuse_extra: bool,
        weighted: bool,
        needs_weights: bool,
        beside_stock: bool,
        device: torch.device,
        counted: bool,
        any_order: bool,
    ) -> None:
        self.names = list(names)
        self._counted = counted
        self._any_order = any_order
        self._known = known
        self._refuse_extra = refuse_extra
        self._needs_weights = needs_weights
        self._drops_weights = not weighted
        self._beside_stock = beside_stock
        self._device = torch.empty(0, device=device).device  # with its number
        self._unique_names = list(dict.fromkeys(names))
        self._taken_slots = TakenSlots(names, self._device)
        # By the names of a batch: where each slot stands in it, if it is not in order already.
        self._orders = Kept[_Order | None](lambda order: () if order is None else order[1:])
        self._inverse_orders = Kept[torch.Tensor](lambda order: [order])
        self._last_was_variable: bool | None = None

    def __call__(
        self, features: KeyedJaggedTensor | TensorDict
    ) -> tuple[KeyedJaggedTensor, DeviceReports]:
        """Returns the batch in canonical form, and what only its device knows to be wrong with it.

        Raises:
            ValueError: naming the feature, what is wrong and what is expected.
        """
        if isinstance(features, TensorDict):
            self._check_names(list(features.keys()))
            check_tensor_dict(features, self._unique_names)
            features = maybe_td_to_kjt(features, self._unique_names)
        elif not isinstance(features, KeyedJaggedTensor):
            raise ValueError(
                f"features are a {type(features).__name__}, must be a KeyedJaggedTensor or a "
                "TensorDict of jagged tensors"
            )
        keys = tuple(features.keys())
        order = self._orders.get(keys, lambda: self._order(keys))
        counted = self._counted or not are_counted_on_device(features)
        check_batch(features, self._needs_weights, self._device, counted)
        if self._device.type == "cuda":
            check_number_of_ids(features.values().numel(), self._taken_slots.times)
        told = device_reports(features, counted)
        variable = features.variable_stride_per_key()
        features = self._in_agreed_types(features)
        finds_slots = not counted and self._any_order and not variable
        if order is None or (finds_slots and sorted(order[0]) == list(range(len(keys)))):
            canonical = features
        elif counted:
            canonical = _permuted(features, *order)
        else:
            canonical = self._taken_slots(features, order[0], told.refused)
        if variable:
            assert told.inverse_indices is not None
            set_inverse_indices(canonical, self._in_slot_order(told.inverse_indices))
        self._last_was_variable = variable
        return canonical, told

    def stand_in(self, features: object) -> KeyedJaggedTensor:
        """Returns an empty batch in the place of a bad one, so that collectives still match."""
        slots = len(self.names)
        variable = self._last_was_variable  # what the other ranks' batches look like, most likely
        if variable is None and isinstance(features, KeyedJaggedTensor):
            variable = features.variable_stride_per_key()
        inverse = torch.zeros(len(self._unique_names), 1, dtype=torch.int64, device=self._device)
        return KeyedJaggedTensor(
            keys=self.names,
            values=torch.empty(0, dtype=torch.int64, device=self._device),
            weights=torch.empty(0, device=self._device) if self._needs_weights else None,
            lengths=torch.zeros(slots, dtype=torch.int32, device=self._device),
            stride=None if variable else 1,
            stride_per_key_per_rank=[[1]] * slots if variable else None,
            inverse_indices=(self._unique_names, inverse) if variable else None,
        )

    def _order(self, keys: Sequence[str]) -> _Order | None:
        """Returns where each slot stands in a batch with these names, which are checked."""
        self._check_names(keys)
        indices = [keys.index(name) for name in self.names]
        if indices == list(range(len(keys))):
            return None
        return indices, torch.tensor(indices, dtype=torch.int32, device=self._device)

    def _check_names(self, keys: Sequence[str]) -> None:
        check_names(keys, self._unique_names, self._known, self._refuse_extra)

    def _in_agreed_types(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = None if self._drops_weights else features.weights_or_none()
        dropped = weights is not features.weights_or_none()
        if not dropped and not self._beside_stock:
            return features
        values = features.values()
        if self._beside_stock:
            values, weights = values.long(), None if weights is None else weights.float()
        return _with_ids(features, values, weights)

    def _in_slot_order(self, inverse_indices: InverseIndices) -> InverseIndices:
        """Returns inverse indices in the order of the slots, each feature once.

        TorchRec works out how they belong to its outputs with the first batch only.
        """
        names, indices = inverse_indices

        def make() -> torch.Tensor:
            return torch.tensor(
                [names.index(name) for name in self._unique_names], device=indices.device
            )

        order = self._inverse_orders.get(tuple(names), make)
        return self._unique_names, indices.index_select(0, order)


def _with_ids(
    features: KeyedJaggedTensor, values: torch.Tensor, weights: torch.Tensor | None
) -> KeyedJaggedTensor:
    """Returns a batch with other ids and weights; lengths become int32."""
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=weights,
        lengths=features.lengths().int(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        length_per_key=_counts_of(features),
        inverse_indices=features.inverse_indices_or_none(),
    )


def _counts_of(features: KeyedJaggedTensor) -> list[int] | None:
    """Returns how many ids each feature has, if the host knows."""
    return features.length_per_key_or_none() if features.lengths().numel() else None


def _permuted(
    features: KeyedJaggedTensor, indices: list[int], indices_S: torch.Tensor
) -> KeyedJaggedTensor:
    """Returns some features of a batch, each as often as it is asked for.

    The backward of FBGEMM's operator, which TorchRec uses, takes the order for a permutation: it
    writes to wherever that leads if a feature comes twice or is left out.  So weights that need
    gradients are gathered by their places.
    """
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return features.permute(indices, indices_S)
    places = torch.arange(weights.numel(), device=weights.device)
    moved = _with_ids(features, places, None).permute(indices, indices_S)
    places = moved.values()
    return _with_ids(moved, features.values()[places], weights[places])
