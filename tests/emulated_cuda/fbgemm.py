"""What FBGEMM's operators compute that have no CPU implementation, or another one on CPU."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.emulated_cuda import device
from tests.emulated_cuda.call import DISTINCT_UPDATE, Call
from tests.emulated_cuda.memory import cpu_view
from tests.emulated_cuda.oracles import LEAVE, oracle
from tests.emulated_cuda.updates import UPDATES, update_rows

__all__ = ["with_size"]

STATES = ("momentum1", "momentum2", "prev_iter", "row_counter")
INDEX_SELECT = "fbgemm::keyed_jagged_index_select_dim1_forward"


def with_size(call: Call) -> Call:
    """Returns the call with the size of its output, where the host code would ask the device."""
    if call.name != INDEX_SELECT or call.named().get("selected_lengths_sum") is not None:
        return call
    device.mark("sync", f"size of {call.name}")
    named = call.named()
    lengths = cpu_view(named["lengths"]).view(-1, named["batch_size"])
    size = int(lengths[:, cpu_view(named["indices"]).long()].sum())
    return Call(call.func, (), {**named, "selected_lengths_sum": size})


# ------------------------------------------------------------ tables


@oracle("split_embedding_forward")
def look_up(func: Any, **arguments: Any) -> Any:
    """Looks rows up in a table that FBGEMM believes to be in host memory."""
    own = arguments["dev_weights"]
    arguments["host_weights"] = own if own.numel() else arguments["uvm_weights"]
    arguments["dev_weights"] = arguments["uvm_weights"] = own.new_empty(0)
    return func(**arguments)


@oracle("split_embedding_backward")
def update(func: Any, **arguments: Any) -> Any:
    """Updates a table that FBGEMM believes to be in host memory; it has all rows, uncached."""
    name = func._schema.name
    if any(optimizer in name for optimizer in UPDATES):  # not on CPU
        update_rows(name, arguments)
        return []
    places = [("dev_weights", "host_weights", "uvm_weights")]
    places += [(f"{state}_dev", f"{state}_host", f"{state}_uvm") for state in STATES]
    for dev, host, uvm in places:
        if dev in arguments:
            own = arguments[dev] if arguments[dev].numel() else arguments[uvm]
            arguments[host] = own
            arguments[dev] = arguments[uvm] = own.new_empty(0)
    weights = arguments.get("weights")
    if isinstance(weights, list | tuple):  # FBGEMM 1.9: dev or host, ..., uvm, cache
        weights = list(weights)
        if not weights[0].numel() and len(weights) > 3:
            weights[0], weights[3] = weights[3], weights[3].new_empty(0)
        if len(weights) > 4:
            weights[4] = weights[4].new_empty(0)
        arguments["weights"] = weights
    return func(**arguments)


@oracle(DISTINCT_UPDATE)
def update_distinct(
    dev_weights: torch.Tensor,
    grad_dev_weights: torch.Tensor,
    grad_dev_indices: torch.Tensor,
    max_D: int,
    momentum1_dev: torch.Tensor,
    learning_rate_tensor: torch.Tensor,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: int = 0,
    max_norm: float = 0.0,
    **_: Any,
) -> None:
    """Updates rows of the one table by the operator behind FBGEMM's backward pass on CPU."""
    rows = momentum1_dev.numel()
    nothing, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
        grad_output=grad_dev_weights,
        host_weights=dev_weights,
        weights_placements=nothing,
        weights_offsets=zero,
        D_offsets=torch.tensor([0, max_D], dtype=torch.int32),
        max_D=max_D,
        hash_size_cumsum=torch.tensor([0, rows]),
        total_hash_size_bits=rows.bit_length(),
        indices=grad_dev_indices,
        offsets=torch.arange(grad_dev_indices.numel() + 1),
        pooling_mode=0,
        indice_weights=torch.empty(0),
        stochastic_rounding=False,
        output_dtype=0,
        momentum1_host=momentum1_dev,
        momentum1_placements=nothing,
        momentum1_offsets=zero,
        learning_rate_tensor=learning_rate_tensor,
        eps=eps,
        weight_decay=weight_decay,
        weight_decay_mode=weight_decay_mode,
        max_norm=max_norm,
    )


@oracle("fbgemm::lxu_cache_lookup")
def nothing_is_cached(linear_cache_indices: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.full_like(linear_cache_indices, -1, dtype=torch.int32)


@oracle(
    "fbgemm::get_unique_indices",
    "fbgemm::lfu_cache_populate",
    "fbgemm::lru_cache_populate",
    "fbgemm::lxu_cache_flush",
    "fbgemm::lxu_cache_locations_update",
    "fbgemm::lxu_cache_locking_counter_decrement",
    "fbgemm::reset_weight_momentum",
)
def the_cache_stays_empty(**_: Any) -> object:
    return LEAVE


# ------------------------------------------------------------ jagged tensors


@oracle(INDEX_SELECT)
def index_select(
    values: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    batch_size: int,
    weights: torch.Tensor | None = None,
    **_: Any,
) -> list[torch.Tensor]:
    """Returns the bags of all features that the indices pick, feature after feature."""
    features = lengths.numel() // batch_size
    picked = [f * batch_size + i for f in range(features) for i in indices.tolist()]
    bags = [torch.arange(int(offsets[b]), int(offsets[b]) + int(lengths[b])) for b in picked]
    at = torch.cat(bags) if bags else torch.empty(0, dtype=torch.long)
    selected = [values[at], lengths[picked]]
    return selected if weights is None else [*selected, weights[at]]


# By the indices of a forward: numbers of indices, rows and columns of its inputs.
_SELECTED: dict[tuple[int, ...], tuple[list[int], list[int], list[int]]] = {}


@oracle("fbgemm::batch_index_select_dim0_forward_cuda_impl")
def batch_select(
    inputs: torch.Tensor,
    indices: torch.Tensor,
    input_num_indices: Sequence[int],
    input_rows: Sequence[int],
    input_columns: Sequence[int],
    permute_output_dim_0_1: bool,
) -> Any:
    """Returns rows of several matrices; the rest of what FBGEMM returns is for its backward."""
    sizes = list(input_num_indices), list(input_rows), list(input_columns)
    _SELECTED[tuple(indices.tolist())] = sizes
    rows, *_ = torch.ops.fbgemm.batch_index_select_dim0_forward_cpu_impl(
        inputs, indices, *sizes, permute_output_dim_0_1
    )
    return [rows]


@oracle("fbgemm::batch_index_select_dim0_backward_cuda_impl")
def batch_select_backward(
    grad_output: torch.Tensor, indices: torch.Tensor, permute_output_dim_0_1: bool, **_: Any
) -> torch.Tensor:
    numbers, rows, columns = _SELECTED[tuple(indices.tolist())]
    if permute_output_dim_0_1:
        parts = list(grad_output.view(numbers[0], -1).split(columns, dim=1))
    else:
        sizes = [n * c for n, c in zip(numbers, columns, strict=True)]
        flat = grad_output.split(sizes)
        parts = [p.view(n, c) for p, n, c in zip(flat, numbers, columns, strict=True)]
    gradients, first = [], 0
    for part, n, r, c in zip(parts, numbers, rows, columns, strict=True):
        at = indices[first : first + n].long()
        gradients.append(torch.zeros(r, c).index_add_(0, at, part).view(-1))
        first += n
    return torch.cat(gradients)
