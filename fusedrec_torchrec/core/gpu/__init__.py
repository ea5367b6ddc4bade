"""Triton kernels for the hot loops on CUDA, as implementations of the operators of ``native``.

Triton comes with torch on machines with a GPU.  Without it, where
``torch.use_deterministic_algorithms`` asks for the same sums in every run, and with
``FUSEDREC_TRITON=0``, torch's own operators do the same in many more launches.

Nobody has run these kernels on a GPU yet.  Tests run them in Triton's interpreter against torch,
and compile them.  docs/gpu.md says what that does and does not show.

Files, in the order of the data path:

- ``kernel``: what makes a kernel of a function, compiled once for batches of all sizes;
- ``starts``: where messages begin, which is the same for many batches;
- ``checks``: lengths of bags that do not fit the ids;
- ``slots``: a batch slot after slot, whatever its features, and raw ids to rows;
- ``segments``: how ids are put in order by row;
- ``row_numbers``: ids to keys, unique keys, the row of each id, and how many ids a row has;
- ``bags``: distinct bags, and what owners that pool are asked for;
- ``messages``: rows into messages and out of them;
- ``number_formats``: rows in fewer bits, for all ranks and buckets at once, and back;
- ``entries``: entries of rows that reach a threshold, into messages and out of them;
- ``slot_sums``: rows to sums of bags, for all slots of a batch;
- ``row_gradients``: gradients of these bags to sums of rows;
- ``sums``: both for the bags of one bucket, in any order;
- ``positions``: weights of ids by their positions in bags, and gradients of these weights;
- ``replica_sums``: gradients of the places of a replica, from all ranks;
- ``touched``: rows that replicas have used, their union, and the means that they get;
- ``traffic``: bytes that each of them reads and writes, counted from shapes.
"""

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch

from fusedrec_torchrec.core import native

__all__ = ["FORMATS", "SCHEMAS", "available"]

FORMATS = ("fp32", "fp16", "bf16", "int8")
"""The formats of rows that there are kernels for; operators know them by their number."""

SCHEMAS = {
    "bad_lengths": "(Tensor lengths, Tensor offsets, int ids, int[] strides, int[] counts) "
    "-> Tensor",
    "number_batch_rows": "(Tensor ids, Tensor offsets, int batch, Tensor rows, Tensor? salts, "
    "Tensor starts, Tensor shifts, Tensor part_starts, Tensor? hot_table) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "number_rows": "(Tensor ids, Tensor lengths, int[] counts, Tensor rows, Tensor starts, "
    "Tensor shifts, Tensor part_starts, Tensor? hot_table, int[] slot_ends, int batch) "
    "-> (Tensor, Tensor, Tensor[], Tensor, Tensor)",
    "pack_rows": "(Tensor keys, Tensor counts, Tensor part_starts, int[] starts, "
    "Tensor(a!) words) -> ()",
    "take_slots": "(Tensor ids, Tensor? weights, Tensor offsets, Tensor places, int bags, "
    "int room, Tensor? refused) -> (Tensor, Tensor, Tensor, Tensor)",
    "hash_slots": "(Tensor ids, Tensor ends, Tensor rows, Tensor salts) -> Tensor",
    "ask_bags": "(Tensor ids, Tensor starts, Tensor? weights, Tensor places, int cells, "
    "Tensor tables, Tensor rows, Tensor? means, Tensor ends, Tensor shards, int buckets, "
    "int ranks, Tensor? refused) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "pack_units": "(Tensor ids, Tensor? weights, Tensor places, Tensor ends, Tensor shards, "
    "Tensor starts, Tensor sums, Tensor counts, Tensor? row_counts, int[] word_starts, "
    "Tensor(a!) words, Tensor? refused) -> ()",
    "write_headers": "(Tensor[] statuses, Tensor counts, Tensor(a!) messages, int capacity, "
    "int granule, int slack, bool stale, int bag_buckets, int words_per_id) -> ()",
    "ask_owners": "(Tensor[] statuses, Tensor counts, int ranks, int row_buckets, bool stale) "
    "-> Tensor",
    "collect_headers": "(Tensor messages, int header, Tensor counts, Tensor statuses, "
    "int bag_buckets, int words_per_id) -> Tensor",
    "unpack": "(Tensor messages, int header, int[] sizes, int segments) -> Tensor[]",
    "encode_rows": "(Tensor flat, int[] counts, int[] dims, int[] formats, float[] scales) "
    "-> Tensor",
    "decode_rows": "(Tensor wire, int[] counts, int[] dims, int[] formats, float[] scales, "
    "Tensor(a!) out) -> ()",
    "encode_entries": "(Tensor rows, Tensor threshold, int[] counts, int[] rooms, bool relative, "
    "int index_bytes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "decode_entries": "(Tensor values, Tensor where, Tensor columns, int[] counts, int[] rooms, "
    "int index_bytes, Tensor(a!) out) -> Tensor",
    "take_entries": "(Tensor rows, Tensor positions) -> Tensor",
    "put_entries": "(Tensor values, Tensor positions, Tensor(a!) out) -> ()",
    "row_addresses": "(Tensor like, int[] counts, int[] dims) -> Tensor",
    "slot_bag_sums": "(Tensor flat, Tensor? addresses, int[] dims, Tensor slots, Tensor rows, "
    "Tensor offsets, Tensor? weights, int batch, Tensor(a!) out) -> ()",
    "slot_row_sums": "(Tensor gradient, Tensor? addresses, int[] dims, Tensor slots, Tensor rows, "
    "Tensor offsets, Tensor? weights, Tensor ranks, Tensor segments, Tensor cursors, "
    "int batch, int bags, int num_rows, float scale, Tensor(a!) out) -> ()",
    "slot_weight_sums": "(Tensor gradient, Tensor flat, Tensor? addresses, int[] dims, "
    "Tensor slots, Tensor rows, Tensor offsets, int batch, Tensor(a!) out) -> ()",
    "position_weights": "(Tensor weights, Tensor slots, Tensor offsets, int batch, int ids) "
    "-> Tensor",
    "position_sums": "(Tensor gradient, Tensor slots, Tensor offsets, int batch, Tensor(a!) out) "
    "-> ()",
    "bag_sums": "(Tensor flat, Tensor? addresses, int dim, Tensor rows, Tensor? offsets, "
    "Tensor? weights, Tensor? divisor, int width, int column, Tensor(a!) out) -> ()",
    "row_sums": "(Tensor gradient, int width, int column, Tensor rows, Tensor? offsets, "
    "Tensor? weights, Tensor? divisor, Tensor? addresses, int num_rows, int dim, "
    "float scale, Tensor(a!) out) -> ()",
    "sum_replicas": "(Tensor messages, int[] place_starts, int[] counts, Tensor rows, "
    "int[] row_starts, int dim, int capacity) -> (Tensor, Tensor)",
    "list_flags": "(Tensor flags, Tensor ends) -> Tensor",
    "list_touched": "(Tensor[] numbers, int[] first_rows, Tensor ends, int rows, int room) "
    "-> Tensor",
    "unite_touched": "(Tensor messages, Tensor ends, int rows) -> (Tensor, Tensor)",
    "write_means": "(Tensor sums, Tensor rows, int first_row, int replicas, Tensor(a!) table) "
    "-> ()",
}
"""The operators that there are kernels for; C++ has the same, but for those of ``ONLY_HERE``."""
ONLY_HERE = (
    "bad_lengths",
    "number_batch_rows",
    "take_slots",
    "hash_slots",
    "ask_bags",
    "pack_units",
    "write_headers",
    "ask_owners",
    "collect_headers",
    "encode_rows",
    "decode_rows",
    "encode_entries",
    "decode_entries",
    "take_entries",
    "put_entries",
    "row_addresses",
    "slot_bag_sums",
    "slot_row_sums",
    "slot_weight_sums",
    "position_weights",
    "position_sums",
    "sum_replicas",
    "list_flags",
    "list_touched",
    "unite_touched",
    "write_means",
)


def available() -> bool:
    """Tells whether the operators can be used for tensors on CUDA, now."""
    return _registered() and not torch.are_deterministic_algorithms_enabled()


@cache
def _registered() -> bool:
    """Registers the operators on the first call."""
    if os.environ.get("FUSEDREC_TRITON", "1") == "0" or find_spec("triton") is None:
        return False
    from fusedrec_torchrec.core.gpu import (
        bags,
        checks,
        entries,
        messages,
        number_formats,
        positions,
        replica_sums,
        row_gradients,
        row_numbers,
        slot_sums,
        slots,
        sums,
        touched,
    )

    in_cpp = () if not native.available() else SCHEMAS.keys() - set(ONLY_HERE)
    definitions = torch.library.Library("fusedrec", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if name not in in_cpp:
            definitions.define(name + schema)
    _LIBRARIES.append(definitions)
    kernels = torch.library.Library("fusedrec", "IMPL", "CUDA")
    implementations: dict[str, Callable[..., Any]] = {
        "bad_lengths": checks.bad_lengths,
        "number_rows": row_numbers.number_rows,
        "number_batch_rows": row_numbers.number_batch_rows,
        "pack_rows": messages.pack_rows,
        "take_slots": slots.take_slots,
        "hash_slots": slots.hash_slots,
        "ask_bags": bags.ask_bags,
        "pack_units": bags.pack_units,
        "write_headers": messages.write_headers,
        "ask_owners": messages.ask_owners,
        "collect_headers": messages.collect_headers,
        "unpack": messages.unpack,
        "encode_rows": number_formats.encode_rows,
        "decode_rows": number_formats.decode_rows,
        "encode_entries": entries.encode_entries,
        "decode_entries": entries.decode_entries,
        "take_entries": entries.take_entries,
        "put_entries": entries.put_entries,
        "row_addresses": sums.row_addresses,
        "slot_bag_sums": slot_sums.slot_bag_sums,
        "slot_row_sums": row_gradients.slot_row_sums,
        "slot_weight_sums": slot_sums.slot_weight_sums,
        "position_weights": positions.position_weights,
        "position_sums": positions.position_sums,
        "bag_sums": sums.bag_sums,
        "row_sums": sums.row_sums,
        "sum_replicas": replica_sums.sum_replicas,
        "list_flags": touched.list_flags,
        "list_touched": touched.list_touched,
        "unite_touched": touched.unite_touched,
        "write_means": touched.write_means,
    }
    for name, function in implementations.items():
        kernels.impl(name, _on_device_of_tensors(function))
    _LIBRARIES.append(kernels)
    return True


def _on_device_of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, made to launch on the device that its tensors are on.

    Torch's own operators do so.  Triton launches on the current device, which is another one for
    whoever has not called ``torch.cuda.set_device``.
    """

    @wraps(function)
    def on_device(*args: Any) -> Any:
        device = _device_of(args)
        if device.index == torch.cuda.current_device():
            return function(*args)
        with torch.cuda.device(device):
            return function(*args)

    return on_device


def _device_of(args: tuple[Any, ...]) -> torch.device:
    """Returns the device of the first tensor among arguments, or in their lists."""
    for argument in args:
        first = argument[0] if isinstance(argument, list) and argument else argument
        if isinstance(first, torch.Tensor):
            return first.device
    raise AssertionError("an operator of no tensors")


_LIBRARIES: list[torch.library.Library] = []  # what they register goes with them
