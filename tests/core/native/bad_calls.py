"""Bad calls of the operators, made in a process of their own (``fresh``), which may crash.

Nothing here loads the operators when it is imported.
"""

from collections.abc import Iterator

import torch
from hypothesis import given, settings

from fusedrec_torchrec.core import native
from tests.core.native.calls import GOOD, Arguments, call, ints, spoiled

# Of a good call these arguments are changed, and this is what the operator says.
BAD: list[tuple[str, Arguments, str]] = [
    ("number_rows", {"ids": torch.zeros(5)}, "ids must be Int or Long, not Float"),
    ("number_rows", {"ids": torch.arange(10)[::2]}, "ids must be contiguous"),
    ("number_rows", {"ids": torch.arange(4)}, "ids must have 5 elements, not 4"),
    ("number_rows", {"counts": [7, -2]}, "counts must be at least 0, not -2"),
    ("number_rows", {"counts": [2**63 - 1, 2**63 - 1]}, "the sum of counts is too large"),
    ("number_rows", {"counts": [5]}, "counts must have 2 elements, not 1"),
    ("number_rows", {"rows": torch.tensor([10])}, "counts must have 1 elements, not 2"),
    ("number_rows", {"starts": torch.zeros(2, 3).long()}, "starts and shifts must have a line"),
    ("number_rows", {"starts": torch.zeros(4).long()}, "starts must have 2 dimensions, not 1"),
    ("number_rows", {"lengths": ints(2, 1, 0)}, "lengths must have 4 elements, not 3"),
    ("number_rows", {"lengths": ints(2, 1, 3, -1)}, "lengths must be at least 0"),
    ("number_rows", {"lengths": ints(2, 2, 0, 1)}, "lengths of slot 0 must add up to 3, not to 4"),
    ("number_rows", {"lengths": torch.ones(4).long()}, "lengths must be Int, not Long"),
    ("number_rows", {"batch": -1}, "batch must be at least 0, not -1"),
    ("number_rows", {"batch": 2**62}, "lengths are too many: 2 times 4611686018427387904"),
    ("number_rows", {"slot_ends": [2, 1]}, "slot_ends must not descend, and end with 2"),
    ("number_rows", {"slot_ends": [-1, 2]}, "slot_ends must not descend, and end with 2"),
    ("number_rows", {"slot_ends": []}, "slot_ends must not descend, and end with 2"),
    ("number_rows", {"slot_ends": [0, 1, 1, 2]}, "as many parts for each of 4 buckets, not of 6"),
    (
        "number_rows",
        {"shifts": torch.tensor([[0, 0], [28, 28]])},
        "keys and those of replicas must be in [0, 30)",
    ),
    ("number_rows", {"part_starts": ints(0)}, "the number of part_starts must be at least 2"),
    ("number_rows", {"part_starts": ints(0, 5, 4, 12, 14, 16, 30)}, "part_starts must not descend"),
    ("number_rows", {"part_starts": torch.arange(7)}, "hot_table must be Long, not Int"),
    ("number_rows", {"hot_table": ints(1, 2)[None]}, "hot_table must be a power of two of pairs"),
    ("number_rows", {"hot_table": torch.zeros(2, 2)}, "hot_table must be Int, not Float"),
    ("in_range", {"rows": torch.tensor([10])}, "rows must have 2 elements, not 1"),
    ("in_range", {"counts": torch.tensor([2, 2])}, "ids must have 4 elements, not 3"),
    ("hot_table", {"keys": ints(3, -1, 8)}, "a key must be at least 0, not -1"),
    ("hot_table", {"replicas": ints(1)}, "replicas must have 3 elements, not 1"),
    ("hot_table", {"replicas": torch.arange(3)}, "replicas must be Int, not Long"),
    ("distinct_bags", {"lengths": ints(2, 1, 0)}, "lengths must have 4 elements, not 3"),
    ("distinct_bags", {"lengths": ints(2, 1, -1, 3)}, "lengths must be at least 0"),
    ("distinct_bags", {"ids": torch.arange(4)}, "ids must have 5 elements, not 4"),
    ("distinct_bags", {"weights": torch.ones(4)}, "weights must have 5 elements, not 4"),
    ("distinct_bags", {"tables": torch.tensor([0])}, "tables must have 2 elements, not 1"),
    ("distinct_bags", {"looks": torch.ones(2)}, "looks must be Bool, not Float"),
    ("bag_units", {"distinct": torch.tensor([2, 2])}, "lengths must have 4 elements, not 3"),
    ("bag_units", {"ends": torch.tensor([1, 4])}, "ends must be in [0, 4), but element 1 is 4"),
    ("bag_units", {"ends": torch.tensor([3, 1])}, "ends must not descend"),
    ("bag_units", {"ranks": 1}, "owners of shards must be in [0, 1)"),
    ("bag_units", {"buckets": 0}, "buckets of shards must be in [0, 0)"),
    ("bag_cells", {"numbers": ints(0, 1, 3, -1)}, "every number must be that of a distinct bag"),
    ("bag_cells", {"unit_places": ints(0, 1, 3)}, "every number must be that of a distinct bag"),
    ("bag_cells", {"bags": [1, 3]}, "bags must be equally many side by side"),
    ("bag_cells", {"shards": [1, 0]}, "shards must be at least 1, not 0"),
    ("pack_bags", {"starts": [1, 20]}, "the words of owner 1 do not fit"),
    ("pack_bags", {"starts": [-1, 8]}, "the words of owner 0 do not fit"),
    ("pack_bags", {"bags": ints(2, 0, 3, 2)}, "bags must be in [0, 3), but element 2 is 3"),
    ("pack_bags", {"ids": torch.tensor([[2, 6]])}, "ids are fewer than the units have"),
    ("pack_bags", {"ids": torch.tensor([[3, 5]])}, "ids are fewer than the units have"),
    ("pack_bags", {"ids": torch.tensor([[4, 6]])}, "ids are more than the units have"),
    ("pack_bags", {"rows": ints(4, 7), "weights": None}, "rows must have 6 elements, not 2"),
    ("pack_rows", {"starts": [3, 16]}, "the 1 rows of owner 1 do not fit from 16 on"),
    ("pack_rows", {"starts": [-1, 11]}, "the 3 rows of owner 0 do not fit from -1 on"),
    ("pack_rows", {"keys": ints(1, 3, 5, 12)}, "counts are of 5 keys, but there are 4"),
    ("pack_rows", {"keys": ints(1, 4, 5, 12, 25)}, "every key must be in the part"),
    ("pack_rows", {"part_starts": ints(0, 4, 10)}, "part_starts must have 7 elements, not 3"),
    ("pack_rows", {"starts": [0, 4, 8, 12]}, "starts must be for at most 3 owners, not for 4"),
    ("pack_rows", {"counts": torch.tensor([[9, 1, 0], [1, 0, -6]])}, "counts must be at least 0"),
    ("unpack", {"sizes": [3, 0, 2, 3]}, "damaged message of rank 1"),
    ("unpack", {"sizes": [-1, 4, 0, 0]}, "sizes must be at least 0, not -1"),
    ("unpack", {"sizes": [3]}, "sizes must have 4 elements, not 1"),
    ("unpack", {"header": 9}, "header must be in [0, 8], not 9"),
    ("bag_sums", {"rows": ints(0, 3, 1, 1)}, "rows must be in [0, 3), but element 1 is 3"),
    ("bag_sums", {"rows": ints(0, 2, 1, -1)}, "rows must be in [0, 3), but element 3 is -1"),
    ("bag_sums", {"rows": ints(0, 2, 2**28, 1), "addresses": None}, "but element 2 is 268435456"),
    ("bag_sums", {"rows": torch.zeros(4).long()}, "rows must be Int, not Long"),
    ("bag_sums", {"offsets": None, "rows": ints(0)}, "rows must have 4 elements, not 1"),
    (
        "bag_sums",
        {"addresses": torch.tensor([0, 9, 4])},
        "addresses must be in [0, 9), but element",
    ),
    ("bag_sums", {"offsets": ints(0, 2, 1, 3, 4)}, "offsets must not descend"),
    ("bag_sums", {"offsets": ints(0, 2, 2, 3, 9)}, "offsets must run from 0 to 4, not from 0 to 9"),
    ("bag_sums", {"offsets": ints(-1, 2, 2, 3, 4)}, "offsets must run from 0 to 4, not from -1 to"),
    ("bag_sums", {"offsets": ints(0, 4)}, "offsets must have 5 elements, not 2"),
    ("bag_sums", {"weights": torch.ones(3)}, "weights must have 4 elements, not 3"),
    ("bag_sums", {"divisor": torch.ones(3)}, "divisor must have 4 elements, not 3"),
    ("bag_sums", {"width": 0}, "width must be at least 1, not 0"),
    ("bag_sums", {"dim": 0}, "dim must be at least 1, not 0"),
    ("bag_sums", {"column": 2}, "out has 9 columns, which 2 bags of 4 from column 2 on do not fit"),
    ("bag_sums", {"column": -1}, "out has 9 columns"),
    ("bag_sums", {"width": 2**62}, "out has 9 columns"),
    ("bag_sums", {"out": torch.zeros(9, 2).t()}, "the columns of out must lie one after another"),
    ("bag_sums", {"flat": torch.zeros(12).double()}, "flat must be Float, not Double"),
    ("row_sums", {"rows": ints(0, 3, 1, 1)}, "rows must be in [0, 3), but element 1 is 3"),
    ("row_sums", {"num_rows": 2}, "rows must be in [0, 2), but element 1 is 2"),
    ("row_sums", {"num_rows": 4}, "num_rows must be in [0, 3], not 4"),
    ("row_sums", {"num_rows": -1}, "num_rows must be in [0, 3], not -1"),
    ("row_sums", {"out": torch.zeros(8)}, "addresses must be in [0, 5), but element 1 is 8"),
    ("row_sums", {"gradient": torch.zeros(1, 9)}, "offsets must have 3 elements, not 5"),
    ("select_entries", {"counts": [1, 3]}, "counts must sum to 3, not be [1, 3]"),
    ("select_entries", {"counts": [4, -1]}, "counts must be at least 0, not -1"),
    ("select_entries", {"rooms": [2]}, "rooms must have 2 elements, not 1"),
    ("select_entries", {"rooms": [-2, 7]}, "rooms must be at least 0, not -2"),
    ("select_entries", {"threshold": torch.zeros(0)}, "threshold must have 1 elements, not 0"),
    ("select_entries", {"numbers": torch.zeros(3, 4).half()}, "numbers must be Float, not Half"),
    ("to_bits", {"at": torch.tensor([-1])}, "positions must not descend, nor be negative"),
    ("to_bits", {"at": torch.tensor([30, 2])}, "positions must not descend, nor be negative"),
    ("to_bits", {"rows": 2**62}, "numbers are too many: 4611686018427387904 times 12"),
    ("to_bits", {"dim": 0}, "dim must be at least 1, not 0"),
    ("from_bits", {"bits": torch.zeros(5).byte()}, "bits must have 6 elements, not 5"),
    ("from_bits", {"bits": torch.full((6,), 255).byte()}, "row 0 has bits behind its 12 columns"),
    ("from_bits", {"rooms": [1, 6]}, "more entries than there is room for"),
    ("from_bits", {"counts": [4, -1]}, "counts must be at least 0, not -1"),
]


def bad_calls() -> Iterator[str]:
    """What the operators say to ``BAD``."""
    assert native.available()
    for name, changes, _ in BAD:
        try:
            call(name, GOOD[name]() | changes)
            yield "no error"
        except RuntimeError as error:
            yield str(error)


def search_in_a_full_table() -> Iterator[list[int]]:
    assert native.available()
    arguments = GOOD["number_rows"]() | {"hot_table": ints(1, 1, 2, 2).view(2, 2)}
    yield call("number_rows", arguments)[0].tolist()


def throw(name: str, examples: int) -> Iterator[dict[str, int]]:
    """Calls an operator with spoiled arguments; says how often it refused and how often not."""
    assert native.available()
    results = {"refused": 0, "taken": 0}

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(spoiled(name))
    def try_one(arguments: Arguments) -> None:
        try:
            call(name, arguments)
            results["taken"] += 1
        except RuntimeError:
            results["refused"] += 1

    try_one()
    yield results


def call_everything(examples: int) -> Iterator[str]:
    """Good, bad and spoiled calls of all operators; says where the operators came from."""
    origin = native.operators().origin
    assert origin != "none", native.operators()
    for name, good in GOOD.items():
        call(name, good())
        list(throw(name, examples))
    empty = torch.zeros(2, 4, dtype=torch.int32)
    assert (
        call("unpack", {"messages": empty, "header": 4, "sizes": [0, 0], "segments": 1})[0].numel()
        == 0
    )
    list(bad_calls())
    yield origin
