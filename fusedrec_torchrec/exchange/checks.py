"""What a look at names, shapes and types of a batch can tell; ids are checked on the device.

Functions that check raise a ``ValueError`` that names what is wrong and what is expected.  What
only a GPU can tell stays there, and goes into the status word of the batch (``device_reports``),
which ranks read when the batch has been sent.  Until then kernels work with numbers that may be
wrong, so they must do no harm: ours overrun nothing whatever the lengths are, and inverse indices
are clamped.  Where kernels of others work on the lengths, the host counts ids and waits for that,
and learns of bad lengths with the counts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.gpu import segments
from fusedrec_torchrec.core.transfer import ToHost, to_device

__all__ = [
    "DeviceReports",
    "InverseIndices",
    "Report",
    "check_batch",
    "check_names",
    "check_number_of_ids",
    "check_tensor_dict",
    "device_reports",
]

Report = tuple[torch.Tensor, Callable[[], str]]
"""Whether something is wrong with a batch, a tensor that stays on its device, and what."""

InverseIndices = tuple[list[str], torch.Tensor]
"""Names of features, and for each of them which of its bags each sample has."""

INTEGER_TYPES = (torch.int32, torch.int64)


def check_names(
    keys: Sequence[str], wanted: Sequence[str], known: set[str], refuse_extra: bool
) -> None:
    """Checks that every wanted feature is there once, and no unknown ones."""
    missing = [name for name in wanted if name not in keys]
    if missing:
        raise ValueError(
            f"feature {missing[0]!r} is missing from the batch, which has {sorted(keys)}"
            + (f"; also missing: {missing[1:]}" if missing[1:] else "")
        )
    repeated = [name for name in dict.fromkeys(keys) if list(keys).count(name) > 1]
    if repeated:
        raise ValueError(f"feature {repeated[0]!r} stands more than once in the batch")
    extra = [name for name in keys if name not in known]
    if extra and refuse_extra:
        raise ValueError(
            f"feature {extra[0]!r} belongs to no table; tables have {sorted(known)}. "
            "Leave it out of the batch, or pass extra_features='ignore' to the sharders"
        )


def check_tensor_dict(features: TensorDict, names: Sequence[str]) -> None:
    """Checks that every feature is jagged."""
    for name in names:
        value = features[name]
        if not isinstance(value, JaggedTensor) and not getattr(value, "is_nested", False):
            raise ValueError(
                f"feature {name!r} is a {type(value).__name__} that is not jagged, must be a "
                "jagged nested tensor or a JaggedTensor"
            )


def check_batch(
    features: KeyedJaggedTensor, weighted: bool, device: torch.device, counted: bool
) -> None:
    """Checks that ids, lengths, weights and inverse indices fit each other."""
    values, keys = features.values(), features.keys()
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"ids of features {keys} are a {type(values).__name__}, must be a Tensor")
    if values.dtype not in INTEGER_TYPES:
        raise ValueError(
            f"ids of features {keys} are {values.dtype}, must be one of {list(INTEGER_TYPES)}"
        )
    _check_device("ids", values, device)
    if values.dim() != 1:
        raise ValueError(f"ids have {values.dim()} dimensions, must have 1")
    _check_lengths(features, device, counted)
    if features.variable_stride_per_key():
        _check_inverse_indices(features, device)
    if weighted:
        _check_weights(features, device)


def check_number_of_ids(ids: int, times: int) -> None:
    """Checks that kernels can count the ids of a batch, each as often as ``times``."""
    most = segments.MOST_IDS // times
    if ids > most:
        raise ValueError(
            f"the batch has {ids} ids, must have at most {most}: on CUDA, 32 bits number them"
            + (f", {times} times, for a feature that has as many tables" if times > 1 else "")
        )


def _check_device(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuses tensors of another device, also of another GPU of the same machine."""
    if tensor.device != device:
        raise ValueError(f"{what} are on {tensor.device}, must be on {device}")


def _check_lengths(features: KeyedJaggedTensor, device: torch.device, counted: bool) -> None:
    keys, offsets = features.keys(), features.offsets_or_none()
    if offsets is None and features.lengths_or_none() is None:
        raise ValueError(
            f"the batch has neither lengths nor offsets, must have one of them: how many of its "
            f"{features.values().numel()} ids belong to each sample of features {keys}"
        )
    # If there are offsets only, the lengths come of them, where they are.
    lengths = features.lengths()
    _check_device("lengths", lengths, device)
    if lengths.dtype not in INTEGER_TYPES:
        raise ValueError(f"lengths are {lengths.dtype}, must be one of {list(INTEGER_TYPES)}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths have {lengths.dim()} dimensions, must have 1")
    strides = features.stride_per_key()
    if lengths.numel() != sum(strides):
        raise ValueError(
            f"there are {lengths.numel()} lengths for {len(keys)} features, must be {sum(strides)}"
        )
    # A batch can carry its own idea of how many ids each feature has.
    claimed = features.length_per_key_or_none()
    if not lengths.numel():
        _check_sum(0, features.values().numel())
    elif lengths.device.type == "cpu":
        _check_length_values(keys, lengths, strides, claimed)
        if counted:
            _check_sum(sum(features.length_per_key()), features.values().numel())
    elif counted:  # else ``device_reports`` tells
        bad = ToHost(_bad_lengths(features).view(1))
        # This waits for the device, unless the batch has the numbers: the verdict has come, then.
        per_key = features.length_per_key()
        if any(bad.numbers()):
            _check_bad_lengths(features)
        _check_sum(sum(per_key), features.values().numel())


def _check_sum(lengths: int, ids: int) -> None:
    if lengths != ids:
        raise ValueError(f"lengths add up to {lengths}, must be {ids}, the number of ids")


def _check_length_values(
    keys: Sequence[str],
    lengths: torch.Tensor,
    strides: Sequence[int],
    claimed: Sequence[int] | None,
) -> None:
    """Checks lengths that are on the host.

    Args:
        keys: names of the features.
        lengths: of all bags, feature after feature.
        strides: bags of each feature.
        claimed: how many ids the batch says that each feature has; None if it says nothing.
    """
    if int(lengths.min()) < 0:
        where = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths[{where}] is {int(lengths[where])}, must be at least 0")
    if claimed is None:
        return
    sums = (
        [int(part.sum()) for part in lengths.split(list(strides))]
        if len(set(strides)) > 1
        else lengths.view(len(keys), -1).sum(1).tolist()
    )
    if sums != list(claimed):
        raise ValueError(
            f"length_per_key is {list(claimed)}, must be {sums}, the sums of the lengths "
            f"of features {keys}"
        )


def _check_inverse_indices(features: KeyedJaggedTensor, device: torch.device) -> None:
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "inverse_indices is None, must be given with a variable batch size per feature"
        )
    keys, (names, indices) = features.keys(), inverse
    _check_device("inverse_indices", indices, device)
    missing = [name for name in keys if name not in names]
    if missing:
        raise ValueError(
            f"feature {missing[0]!r} is missing from the inverse indices, which have {names}"
        )
    if indices.dim() != 2 or indices.size(0) != len(names):
        raise ValueError(
            f"inverse_indices have shape {tuple(indices.shape)}, must have {len(names)} rows, one "
            "for each feature"
        )
    if indices.numel():
        for name, stride in zip(keys, features.stride_per_key(), strict=True):
            if not stride:
                raise ValueError(
                    f"inverse_indices have {indices.size(1)} samples, must have none: feature "
                    f"{name!r} has no bag for them"
                )
    if indices.device.type == "cpu" and indices.numel():  # on CUDA, ``device_reports`` tells
        _check_inverse_values(features, names, indices)


def _check_inverse_values(
    features: KeyedJaggedTensor, names: Sequence[str], indices: torch.Tensor
) -> None:
    """Checks inverse indices that are on the host."""
    strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    for name, row in zip(names, indices, strict=True):
        low, high = int(row.min()), int(row.max())
        if name in strides and (low < 0 or high >= strides[name]):
            raise ValueError(
                f"inverse index {low if low < 0 else high} of feature {name!r} is out of range "
                f"[0, {strides[name]})"
            )


def _bad_lengths(features: KeyedJaggedTensor) -> torch.Tensor:
    """Returns whether lengths on a GPU are wrong: a 0-dim tensor there, without a wait."""
    lengths, ids, strides = features.lengths(), features.values().numel(), features.stride_per_key()
    claimed, device = features.length_per_key_or_none(), lengths.device
    if operators.available_on(device, "bad_lengths"):
        bad: torch.Tensor = torch.ops.fusedrec.bad_lengths(
            lengths.contiguous(), features.offsets().contiguous(), ids, strides, claimed or []
        )
        return bad
    # Sums in double precision do not overflow, whatever the lengths are.
    if claimed is None:
        is_wrong = lengths.sum(dtype=torch.float64) != ids
    else:
        sums = torch.segment_reduce(
            lengths.double(), "sum", lengths=to_device(strides, device), unsafe=True
        )
        is_wrong = (sums != to_device(claimed, device)).any()
    return (lengths < 0).any() | is_wrong


def _check_bad_lengths(features: KeyedJaggedTensor) -> None:
    """Checks lengths that the device has refused, to tell what is wrong with them."""
    lengths = features.lengths().cpu()
    claimed = features.length_per_key_or_none()
    _check_length_values(features.keys(), lengths, features.stride_per_key(), claimed or None)
    _check_sum(int(lengths.sum(dtype=torch.int64)), features.values().numel())
    if not features.offsets().cpu().diff().equal(lengths):
        raise ValueError("offsets do not fit the lengths, must be the sums of those before")


class DeviceReports(NamedTuple):
    """What only the device of a batch knows.

    Attributes:
        reports: what may be wrong with its numbers.
        refused: whether its lengths are; None if the host has checked them.
        inverse_indices: none of them outside of its feature's bags: on a GPU those that are wrong
            are clamped, since they are used before ranks tell each other of them.
    """

    reports: list[Report]
    refused: torch.Tensor | None
    inverse_indices: InverseIndices | None


def device_reports(features: KeyedJaggedTensor, counted: bool) -> DeviceReports:
    """Returns what may be wrong with the numbers of a batch on a GPU, which the host does not see.

    Args:
        features: a batch that has passed ``check_batch``.
        counted: whether ids were counted on the host, and lengths checked with that.
    """
    lengths, inverse = features.lengths(), features.inverse_indices_or_none()
    if lengths.device.type == "cpu" or not lengths.numel():
        return DeviceReports([], None, inverse)
    reports: list[Report] = []
    refused = None
    if not counted:
        refused = _bad_lengths(features)
        reports.append((refused, lambda: _message(_check_bad_lengths, features)))
    if inverse is not None and inverse[1].numel():
        names, indices = inverse
        known = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        any_ = torch.iinfo(indices.dtype)  # of features that the batch does not have
        firsts = [0 if name in known else any_.min for name in names]
        lasts = [known[name] - 1 if name in known else any_.max for name in names]
        limits_2F1 = to_device([*firsts, *lasts], indices.device).view(2, -1, 1)
        clamped = indices.clamp(limits_2F1[0], limits_2F1[1]).to(indices.dtype)
        reports.append(
            (
                (clamped != indices).any(),
                lambda: _message(_check_inverse_values, features, names, indices.cpu()),
            )
        )
        inverse = names, clamped
    return DeviceReports(reports, refused, inverse)


def _message(check: Callable[..., None], *args: object) -> str:
    """Returns what a check says of a batch that is bad."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    raise AssertionError("the device has refused a batch that the host finds nothing wrong with")


def _check_weights(features: KeyedJaggedTensor, device: torch.device) -> None:
    weights, ids = features.weights_or_none(), features.values().numel()
    if weights is None:
        raise ValueError("weights are missing from the batch, tables with is_weighted need them")
    _check_device("weights", weights, device)
    if not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype}, must be a floating point type")
    if weights.dim() != 1 or weights.numel() != ids:
        raise ValueError(
            f"weights have shape {tuple(weights.shape)}, must be {(ids,)}, one for each id"
        )
