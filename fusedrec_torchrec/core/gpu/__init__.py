"""Triton kernels for the hot loops on CUDA, as implementations of the operators of ``native``.

Triton comes with torch on machines with a GPU.  Without it, where
``torch.use_deterministic_algorithms`` asks for the same sums in every run, and with
``FUSEDREC_TRITON=0``, torch's own operators do the same in many more launches.

Nobody has run these kernels on a GPU yet.  Tests run them in Triton's interpreter against torch,
and compile them.  docs/gpu.md says what that does and does not show.

Files, in the order of the data path:

- ``checks``: lengths of bags that do not fit the ids;
- ``row_numbers``: ids to keys, unique keys and the row of each id;
- ``messages``: rows into messages and out of them;
- ``sums``: rows to sums of bags, gradients of bags to sums of rows.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from fusedrec_torchrec.core import native

__all__ = ["SCHEMAS", "available"]

SCHEMAS = {
    "bad_lengths": "(Tensor lengths, int[] strides, int[] counts) -> Tensor",
    "number_rows": "(Tensor ids, Tensor lengths, int[] counts, Tensor rows, Tensor starts, "
    "Tensor shifts, Tensor part_starts, Tensor? hot_table, int[] slot_ends, int batch) "
    "-> (Tensor, Tensor, Tensor[], Tensor, Tensor)",
    "pack_rows": "(Tensor keys, Tensor counts, Tensor part_starts, int[] starts, "
    "Tensor(a!) words) -> ()",
    "write_headers": "(Tensor[] statuses, Tensor counts, Tensor(a!) messages, int capacity, "
    "int granule, int slack, bool stale) -> ()",
    "collect_headers": "(Tensor messages, int header, Tensor counts, Tensor statuses) -> Tensor",
    "unpack": "(Tensor messages, int header, int[] sizes, int segments) -> Tensor[]",
    "row_addresses": "(Tensor like, int[] counts, int[] dims) -> Tensor",
    "bag_sums": "(Tensor flat, Tensor? addresses, int dim, Tensor rows, Tensor? offsets, "
    "Tensor? weights, Tensor? divisor, int width, int column, Tensor(a!) out) -> ()",
    "row_sums": "(Tensor gradient, int width, int column, Tensor rows, Tensor? offsets, "
    "Tensor? weights, Tensor? divisor, Tensor? addresses, int num_rows, int dim, "
    "float scale, Tensor(a!) out) -> ()",
}
"""The operators that there are kernels for; C++ has the same, but for those of ``ONLY_HERE``."""
ONLY_HERE = ("bad_lengths", "write_headers", "collect_headers", "row_addresses")


def available() -> bool:
    """Tells whether the operators can be used for tensors on CUDA, now."""
    return _registered() and not torch.are_deterministic_algorithms_enabled()


@cache
def _registered() -> bool:
    """Registers the operators on the first call."""
    if os.environ.get("FUSEDREC_TRITON", "1") == "0" or find_spec("triton") is None:
        return False
    from fusedrec_torchrec.core.gpu import checks, messages, row_numbers, sums

    in_cpp = () if not native.available() else SCHEMAS.keys() - set(ONLY_HERE)
    definitions = torch.library.Library("fusedrec", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if name not in in_cpp:
            definitions.define(name + schema)
    _LIBRARIES.append(definitions)
    kernels = torch.library.Library("fusedrec", "IMPL", "CUDA")
    for name, function in {
        "bad_lengths": checks.bad_lengths,
        "number_rows": row_numbers.number_rows,
        "pack_rows": messages.pack_rows,
        "write_headers": messages.write_headers,
        "collect_headers": messages.collect_headers,
        "unpack": messages.unpack,
        "row_addresses": sums.row_addresses,
        "bag_sums": sums.bag_sums,
        "row_sums": sums.row_sums,
    }.items():
        kernels.impl(name, function)
    _LIBRARIES.append(kernels)
    return True


_LIBRARIES: list[torch.library.Library] = []  # what they register goes with them
