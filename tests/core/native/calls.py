"""Good calls of all operators, and what can be done to spoil one."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

Arguments = dict[str, Any]
DIM = 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def number_rows() -> Arguments:
    return {
        "ids": torch.tensor([0, 5, 9, 2, 1]),
        "lengths": ints(2, 1, 0, 2),
        "counts": [3, 2],
        "rows": torch.tensor([10, 4]),
        "starts": torch.tensor([[0, 5], [0, 2]]),
        "shifts": torch.tensor([[0, 0], [12, 14]]),
        "part_starts": ints(0, 5, 10, 12, 14, 16, 30),
        "hot_table": torch.ops.fusedrec.hot_table(ints(5, 12), ints(10, 20)),
        "slot_ends": [1, 2],
        "batch": 2,
    }


def in_range() -> Arguments:
    return {
        "ids": torch.tensor([0, 9, 4]),
        "counts": torch.tensor([2, 1]),
        "rows": torch.tensor([10, 5]),
    }


def hot_table() -> Arguments:
    return {"keys": ints(3, 5, 8), "replicas": ints(20, 21, 22)}


def pack_rows() -> Arguments:
    return {
        "keys": ints(1, 3, 5, 12, 25),
        "counts": torch.tensor([[2, 1, 0], [1, 0, 1]]),
        "part_starts": ints(0, 4, 10, 11, 15, 20, 30),
        "starts": [3, 11],
        "words": torch.zeros(16, dtype=torch.int32),
    }


def unpack() -> Arguments:
    messages = torch.arange(16, dtype=torch.int32).view(2, 8)
    return {"messages": messages, "header": 4, "sizes": [3, 0, 2, 2], "segments": 2}


def distinct_bags() -> Arguments:
    """Two slots of one table with two bags each; the last is like the first."""
    return {
        "ids": torch.tensor([4, 7, 2, 4, 7]),
        "lengths": ints(2, 1, 0, 2),
        "weights": torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0]),
        "bags": [2, 2],
        "tables": torch.tensor([0, 0]),
        "looks": torch.tensor([True, True]),
        "worth": 0.25,
    }


def bag_units() -> Arguments:
    """Two slots: the table of the first is on one rank, that of the second on two."""
    return {
        "lengths": ints(2, 1, 3),
        "distinct": torch.tensor([2, 1]),
        "ends": torch.tensor([1, 3]),
        "shards": torch.tensor([[0, 0, 0], [1, 0, 1], [0, 5, 9]]),
        "buckets": 1,
        "ranks": 2,
    }


def bag_cells() -> Arguments:
    return {
        "numbers": ints(0, 1, 2, -1),
        "bags": [2, 2],
        "shards": [1, 2],
        "unit_places": ints(0, 1, 2),
        "units": ints(1, 2, 0, 3),
        "empty": 4,
        "side_by_side": True,
    }


def pack_bags() -> Arguments:
    return {
        "rows": ints(4, 7, 2, 1, 1, 0),
        "lengths": ints(2, 1, 3),
        "weights": torch.ones(6),
        "bags": ints(2, 0, 1, 2),
        "first_rows": ints(5, 0, 0, 9),
        "units": torch.tensor([[1, 3]]),
        "ids": torch.tensor([[3, 6]]),
        "starts": [1, 8],
        "words": torch.zeros(24, dtype=torch.int32),
    }


def bag_sums() -> Arguments:
    """Three rows; two lines of two bags with 0 to 2 ids each, behind a column that is not ours."""
    return {
        "flat": torch.arange(3.0 * DIM),
        "addresses": torch.tensor([0, 8, 4]),
        "dim": DIM,
        "rows": ints(0, 2, 1, 1),
        "offsets": ints(0, 2, 2, 3, 4),
        "weights": torch.ones(4),
        "divisor": torch.ones(4),
        "width": 2,
        "column": 1,
        "out": torch.zeros(2, 2 * DIM + 1),
    }


def row_sums() -> Arguments:
    call = bag_sums()
    flat, out = call.pop("flat"), call.pop("out")
    return call | {"gradient": out, "num_rows": 3, "scale": 0.5, "out": flat}


def select_entries() -> Arguments:
    return {
        "numbers": torch.arange(12.0).view(3, 4),
        "threshold": torch.tensor(6.0),
        "counts": [1, 2],
        "rooms": [2, 7],
    }


def to_bits() -> Arguments:
    return {"at": torch.tensor([0, 9, 12, 40]), "rows": 3, "dim": 12}


def from_bits() -> Arguments:
    bits = torch.tensor([1, 2, 0, 15, 128, 0], dtype=torch.uint8)
    return {"bits": bits, "dim": 12, "counts": [1, 2], "rooms": [2, 6]}


GOOD: dict[str, Callable[[], Arguments]] = {
    each.__name__: each
    for each in (
        *(number_rows, in_range, hot_table, distinct_bags, bag_units, bag_cells, pack_bags),
        *(pack_rows, unpack, bag_sums, row_sums),
        *(select_entries, to_bits, from_bits),
    )
}
NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 17, 2**31 - 1, 2**62, 2**63 - 1]
# A number of rows or of places for entries is also the size of what comes back.
SIZES = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 17, 2**62, 2**63 - 1]
TYPES = [torch.int32, torch.int64, torch.float32, torch.float16, torch.uint8, torch.bool]


def call(name: str, arguments: Arguments) -> Any:
    return getattr(torch.ops.fusedrec, name)(**arguments)


@st.composite
def spoiled(draw: st.DrawFn, name: str) -> Arguments:
    """The arguments of a good call, of which up to three were changed at random."""
    arguments = GOOD[name]()
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.sampled_from(sorted(arguments)))
        value = arguments[which]
        if isinstance(value, torch.Tensor):
            changes = [_element, _type, _shape]
            arguments[which] = draw(st.sampled_from(changes))(draw, value)
        elif isinstance(value, list):
            arguments[which] = _changed_list(draw, value)
        elif isinstance(value, torch.dtype):
            arguments[which] = draw(st.sampled_from(TYPES))
        elif isinstance(value, int):
            arguments[which] = draw(st.sampled_from(SIZES))
        if which in ("addresses", "offsets", "weights", "divisor", "hot_table"):
            arguments[which] = draw(st.sampled_from([arguments[which], None]))
    return arguments


def _element(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return tensor
    changed = tensor.clone(memory_format=torch.contiguous_format)
    place = draw(st.integers(0, tensor.numel() - 1))
    number = draw(st.sampled_from(NUMBERS))
    if not tensor.is_floating_point():
        limits = torch.iinfo(tensor.dtype)
        number = min(max(number, limits.min), limits.max)
    changed.view(-1)[place] = number
    return changed


def _type(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(draw(st.sampled_from(TYPES)))


def _shape(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    choices = [
        flat,
        flat[:0],
        flat[:1],
        flat[:-1],
        torch.cat([flat, flat]),
        flat[None],
        flat[:, None],
    ]
    choices += [flat[::2], flat.expand(3, -1), flat.repeat_interleave(2)[::2]]
    if tensor.dim() == 2:
        choices += [tensor.t(), tensor[:1], tensor[:0], tensor[:, :1], tensor[:, :0], tensor[:, 1:]]
    return draw(st.sampled_from(choices))


def _changed_list(draw: st.DrawFn, values: list[int]) -> list[int]:
    kind = draw(st.sampled_from(["element", "shorter", "longer"]))
    if kind == "shorter" or not values:
        return values[:-1]
    number = draw(st.sampled_from(SIZES))
    if kind == "longer":
        return [*values, number]
    place = draw(st.integers(0, len(values) - 1))
    return [*values[:place], number, *values[place + 1 :]]
