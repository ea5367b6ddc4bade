"""FBGEMM's lookups of variable batches, as plain lookups in one table after another.

FBGEMM's own CPU implementation takes variable batches apart bag by bag, has no Adam, and wants the
features of a table to stand side by side.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from tests.emulated_cuda.fbgemm import STATES, look_up, update
from tests.emulated_cuda.oracles import oracle

__all__ = ["describe"]


@oracle("fbgemm::generate_vbe_metadata")
def describe(
    B_offsets_rank_per_feature: torch.Tensor,
    output_offsets_feature_rank: torch.Tensor,
    D_offsets: torch.Tensor,
    D: int,
    nobag: bool,
    info_B_num_bits: int,
    vbe_output_offsets: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where each bag goes in the output, and its feature and number in one word."""
    features = B_offsets_rank_per_feature.size(0)
    starts = vbe_output_offsets
    if starts is None:
        starts = output_offsets_feature_rank[:-1].view(-1, features)
    places, words = [], []
    for feature, ends in enumerate(B_offsets_rank_per_feature):
        dim = D if nobag else int(D_offsets[feature + 1] - D_offsets[feature])
        for rank, bags in enumerate(ends.diff().tolist()):
            places.append(starts[rank, feature] + torch.arange(bags) * dim)
        words.append((feature << info_B_num_bits) | torch.arange(int(ends[-1])))
    return torch.cat(places).long(), torch.cat(words).int()


class _Batch:
    """A variable batch, by features.

    Args:
        arguments: of one of FBGEMM's operators.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._bags = [0, *accumulate(arguments["vbe_B_offsets_rank_per_feature"][:, -1].tolist())]
        self._dims = arguments["D_offsets"].diff().tolist()
        self.features = range(len(self._dims))

    def features_of_tables(self) -> list[list[int]]:
        """Returns the features of each table."""
        begins = self._arguments["weights_offsets"].tolist()
        return [[f for f in self.features if begins[f] == begin] for begin in dict.fromkeys(begins)]

    def places(self, features: Sequence[int]) -> torch.Tensor:
        """Returns where the columns of the bags of some features are in the output."""
        offsets, bags = self._arguments["vbe_row_output_offsets"], self._bags
        firsts = torch.cat([offsets[bags[f] : bags[f + 1]] for f in features])
        return firsts[:, None] + torch.arange(self._dims[features[0]])

    def plain(self, func: Any, features: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Returns the plain operator, and its arguments for some features of one table."""
        name = func._schema.name.partition("::")[2].replace("_vbe", "")
        operator = getattr(torch.ops.fbgemm, name).default
        given = {
            argument.name: self._arguments[argument.name]
            for argument in operator._schema.arguments
            if argument.name in self._arguments
        }
        given |= self._ids(features) | self._table(features[0])
        if "grad_output" in given:
            given["grad_output"] = given["grad_output"].reshape(-1)[self.places(features)]
        return operator, {name: value for name, value in given.items() if name in _names(operator)}

    def _ids(self, features: Sequence[int]) -> dict[str, Any]:
        offsets = self._arguments["offsets"]
        bounds = [(self._bags[f], self._bags[f + 1]) for f in features]
        lengths = torch.cat([offsets[first : last + 1].diff() for first, last in bounds])
        own = {"offsets": torch.cat([offsets.new_zeros(1), lengths.cumsum(0).to(offsets.dtype)])}
        for name in ("indices", "indice_weights"):
            values = self._arguments.get(name)
            if values is not None and values.numel():
                own[name] = torch.cat([values[offsets[a] : offsets[b]] for a, b in bounds])
        return own

    def _table(self, feature: int) -> dict[str, Any]:
        arguments, dim = self._arguments, self._dims[feature]
        weights = arguments["dev_weights"]
        weights = weights if weights.numel() else arguments["uvm_weights"]
        rows = (weights.numel() - int(arguments["weights_offsets"][feature])) // dim
        own: dict[str, Any] = {
            "D_offsets": torch.tensor([0, dim], dtype=torch.int32),
            "total_D": dim,
            "max_D": dim,
            "mixed_D": False,
            "hash_size_cumsum": torch.tensor([0, rows]),
            "total_hash_size_bits": rows.bit_length(),
        }
        for prefix in ("weights", *STATES):
            for name in (f"{prefix}_offsets", f"{prefix}_placements"):
                if name in arguments:
                    own[name] = arguments[name][feature : feature + 1]
        asks = arguments.get("feature_requires_grad")
        if asks is not None and asks.numel():
            own["feature_requires_grad"] = asks[feature : feature + 1]
        return own


def _names(operator: Any) -> set[str]:
    return {argument.name for argument in operator._schema.arguments}


@oracle("split_embedding_variable_forward")
def look_up_all(func: Any, **arguments: Any) -> torch.Tensor:
    """Looks up the features one after another, and puts their bags where they belong."""
    batch, out = _Batch(arguments), arguments.get("vbe_output")
    for feature in batch.features:
        operator, given = batch.plain(func, [feature])
        pooled = look_up(operator, **given)
        if out is None:
            out = pooled.new_empty(arguments["vbe_output_size"])
        out[batch.places([feature])] = pooled
    assert out is not None
    return out


@oracle("split_embedding_variable_backward")
def update_all(func: Any, **arguments: Any) -> Any:
    """Updates the tables one after another, or returns the gradients of weights."""
    batch = _Batch(arguments)
    if "grad_indice_weights" in func._schema.name:
        gradients = []
        for feature in batch.features:
            operator, given = batch.plain(func, [feature])
            gradients.append(update(operator, **given))
        return torch.cat(gradients)
    for features in batch.features_of_tables():
        operator, given = batch.plain(func, features)
        update(operator, **given)
    return []
