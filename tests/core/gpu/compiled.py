"""Compiles all kernels without a GPU: registers, shared memory and spills of each.

    python -m tests.core.gpu.compiled            a table of all kernels, for docs/gpu.md

It needs ptxas, which comes with Triton.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)  # A100 and H100
# What an SM has, the same for both: registers, threads, and blocks at a time.
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
SHARED_KIB = {80: 164, 90: 228}
WARP = 32
WARPS_OF = {"_arrange": 16}  # of kernels that have others than four


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture.

    Attributes:
        kernel: its name.
        architecture: compute capability, in tenths.
        registers: of a thread.
        spilled: bytes that did not fit in them.
        shared: bytes of shared memory of a block.
        warps: of a block.
    """

    kernel: str
    architecture: int
    registers: int
    spilled: int
    shared: int
    warps: int

    @property
    def occupancy(self) -> float:
        """Threads that an SM can have at a time, of all that it has room for."""
        threads = self.warps * WARP
        registers = -(-self.registers // 8) * 8 * threads
        shared = SHARED_KIB[self.architecture] * 1024 // max(self.shared + 1024, 1)
        blocks = min(REGISTERS // registers, THREADS // threads, BLOCKS, shared)
        return blocks * threads / THREADS


def kernels() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Returns every kernel with the types of its arguments and its constants."""
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
    from fusedrec_torchrec.core.gpu.segments import FEW, PIECE

    longs = (
        "ends counts slot_ends rows salts starts shifts pieces part_starts bag_ends tables "
        "hashes runs sums shard_buckets out_firsts out_steps part_cells shard_owners first_rows "
        "row_counts word_starts firsts"
    )
    of_bags = {"ids": "*i64", "weights": "*i32", "starts": "*i32", "table_of_bag": "*i32",
               "refused": "*i1",
               "held_by": "*i32", "first_of": "*i32", "place_of_bag": "*i32", "bad": "*u8",
               "means": "*u8", "cells": "*i32", "divisor": "*fp32", "words": "*i32"}  # fmt: skip
    flags = {"PLAIN": False, "BAGS": True, "WEIGHTED": True, "DIVIDED": True}
    weighted = {"WEIGHTED": True, "STEPS": 5}
    of_entries = {
        "FIELDS": entries.FIELDS, "RELATIVE": True, "INDEXED": False,
        "COLUMNS": 128,
    }  # fmt: skip
    found = [
        (
            checks._bad_lengths,
            {"lengths": "*i32", "offsets": "*i32", "bad": "*u8"},
            {"COUNTED": True, "BLOCK": 1024},
        ),
        *(
            (
                row_numbers._insert,
                {"ids": "*i64", "hot_table": "*i32", "part_starts": "*i32", "table": "*i32",
                 "number_of_place": "*i32", "place_of_id": "*i32", "ranks_of_ids": "*i32",
                 "bad": "*u8"},
                {"HASHED": True, "HOT": True, "GROUPED": grouped, "STEPS": 5,
                 "BY_BLOCK": grouped, "BLOCK": row_numbers.INSERTED},
            )
            for grouped in (True, False)
        ),
        (
            row_numbers._rows_of_ids,
            {"table": "*i32", "part_starts": "*i32", "number_of_place": "*i32",
             "cursors": "*i32", "rows": "*i32", "keys": "*i32", "segments": "*i32"},
            {"BY_BUCKET": True, "PADDED": True, "GROUPED": True, "FEW": FEW, "PIECE": PIECE,
             "BLOCK": 256},
        ),
        *(
            (bags._hash_bags, of_bags, {"IDS": ids, "BLOCK": bags.ELEMENTS // ids, **weighted})
            for ids in (1, bags.MOST_IDS)
        ),
        (bags._insert_bags, of_bags, {"WEIGHTED": True, "BLOCK": bags.BLOCK}),
        (bags._mark_units, of_bags, {"STEPS": 5, "BLOCK": bags.BLOCK}),
        (bags._cells, of_bags, {"MEAN": True, "STEPS": 5, "BLOCK": bags.BLOCK}),
        *(
            (bags._pack_units, of_bags, {"IDS": ids, "BLOCK": bags.ELEMENTS // ids, **weighted})
            for ids in (1, bags.MOST_IDS)
        ),
        (
            messages._pack,
            {"keys": "*i32", "part_starts": "*i32", "words": "*i32"},
            {"BLOCK": 512},
        ),
        (
            messages._write_headers,
            {"status": "*u8", "other": "*i32", "messages": "*i32"},
            {"EXACT": False, "BLOCK": 8},
        ),
        (
            messages._collect_headers,
            {"messages": "*i32", "statuses": "*i32", "out": "*i32"},
            {"BLOCK": 512},
        ),
        (
            messages._ask_owners,
            {"status": "*u8", "other": "*i32", "out": "*i32"},
            {"BLOCK": 8},
        ),
        (messages._unpack, {"messages": "*i32", "out": "*i32"}, {"BLOCK": 512}),
        (
            number_formats._largest,
            {"rows": "*fp32", "largest": "*i32"},
            {"FIELDS": number_formats.FIELDS, "BLOCK": 1024},
        ),
        *(
            (
                kernel,
                {first: "*fp32", "wire": "*u8", "largest": "*i32"},
                {"WIDE": True, "NARROW": True, "BYTES": True, "FIELDS": number_formats.FIELDS,
                 "BLOCK": 1024, "COLUMNS": 128, **programs},
            )
            for kernel, first, programs in (
                (number_formats._encode, "rows", {"PROGRAMS": number_formats.MOST_PROGRAMS}),
                (number_formats._decode, "out", {}),
            )
        ),
        *(
            (
                kernel,
                {"rows": "*fp32", "threshold": "*fp32", "in_row": "*i32", "ranks": "*i64",
                 "first_of_row": "*i64", "ties_of_row": "*i32", "limits": "*i32",
                 "totals": "*i64", "positions": "*i64", "values": "*fp32", "where": "*u8",
                 "columns": "*u8", "out": "*fp32"},
                {name: value for name, value in {**of_entries, "BLOCK": block, "ROWS": rows}.items()
                 if name in kernel.arg_names},
            )
            for kernel, block, rows in (
                (entries._count, 0, 8), (entries._arrange, 512, entries.ARRANGED // 128),
                (entries._write, 1024, 4),
                (entries._find, 512, 0), (entries._read, 1024, 8), (entries._take, 1024, 0),
                (entries._put, 1024, 0),
            )
        ),
        (sums._row_addresses, {"out": "*i64"}, {"BLOCK": 512}),
        *(
            (
                kernel,
                {"flat": "*fp32", "gradient": "*fp32", "addresses": "*i64", "slots": "*i64",
                 "rows": "i32" if kernel is row_gradients._slot_row_sums else "*i32",
                 "offsets": "*i32", "weights": "*fp32", "out": "*fp32", "scale": "fp32",
                 "bag_of_place": "*i32", "weight_of_place": "*fp32", "segments": "*i32",
                 "row_of_piece": "*i32", "cursors": "*i32"},
                {
                    "PLAIN": plain, "WEIGHTED": True, "VARIABLE": varies,
                    "BLOCK": min(512 // columns, slot_sums.MOST_BAGS)
                    // (2 if varies and others else 1),
                    "COLUMNS": columns, **others,
                },
            )
            for kernel, others in (
                (slot_sums._slot_bag_sums, {}),
                (row_gradients._slot_row_sums, {"FEW": FEW, "PIECE": PIECE, "STEPS": 5}),
            )
            for plain, columns in ((False, 16), (False, 32), (True, 64), (True, 128))
            for varies in (False, True)
        ),
        *(
            (
                slot_sums._slot_weight_sums,
                {"gradient": "*fp32", "flat": "*fp32", "addresses": "*i64", "slots": "*i64",
                 "rows": "*i32", "offsets": "*i32", "out": "*fp32"},
                {"PLAIN": False, "VARIABLE": varies, "TILES": 4,
                 "BLOCK": min(slot_sums.PRODUCTS // columns, slot_sums.MOST_BAGS),
                 "COLUMNS": columns},
            )
            for columns in (16, 32)
            for varies in (False, True)
        ),
        *(
            (
                kernel,
                {first: "*fp32", "slots": "*i64", "offsets": "*i32", "out": "*fp32"},
                {"IDS": positions.IDS, "BLOCK": positions.BAGS},
            )
            for kernel, first in (
                (positions._position_weights, "weights"), (positions._position_sums, "gradient")
            )
        ),
        (
            slots._take_lengths,
            {"offsets": "*i32", "refused": "*i1", "lengths": "*i32"},
            {"STEPS": 5, "BLOCK": slots.BLOCK},
        ),
        *(
            (
                slots._take_ids,
                {"ids": "*i64", "weights": "*fp32", "offsets": "*i32", "starts": "*i32",
                 "refused": "*i1", "out": "*i64", "out_weights": "*fp32"},
                {"IDS": ids, "BLOCK": slots.ELEMENTS // ids, **weighted},
            )
            for ids in (1, slots.MOST_IDS)
        ),
        (
            slots._hash_slots,
            {"ids": "*i64", "slot_ends": "*i32", "out": "*i64"},
            {"STEPS": 5, "BLOCK": slots.BLOCK},
        ),
        *(
            (
                row_gradients._place_bags,
                {"rows": "*i32", "ranks": "*i32", "segments": "*i32", "offsets": "*i32",
                 "slots": "*i64", "addresses": "*i64", "weights": "*fp32",
                 "bag_of_place": "*i32", "weight_of_place": "*fp32", "row_of_piece": "*i32",
                 "out": "*fp32"},
                {"PLAIN": False, "WEIGHTED": True, "VARIABLE": varies, "STEPS": 5, "PIECE": PIECE,
                 "IDS": ids, "BLOCK": row_gradients.PLACED // ids},
            )
            for ids in (1, row_gradients.MOST_IDS)
            for varies in (False, True)
        ),
        *(
            (
                kernel,
                {first: "*fp32", "addresses": "*i64", "rows": "*i32", "offsets": "*i32",
                 "weights": "*fp32", "divisor": "*fp32", "out": "*fp32", "scale": "fp32"},
                {**flags, "BLOCK": 512 // dim, "COLUMNS": dim},
            )
            for kernel, first in ((sums._bag_sums, "flat"), (sums._row_sums, "gradient"))
            for dim in (64, 128)
        ),
        (
            replica_sums._note_places,
            {"messages": "*i32", "noted": "*i32"},
            {"FIELDS": replica_sums.FIELDS, "BLOCK": replica_sums.BLOCK},
        ),
        *(
            (
                replica_sums._sum_places,
                {"messages": "*i32", "rows": "*fp32", "noted": "*i32", "places": "*i64",
                 "sums": "*fp32"},
                {"FIELDS": replica_sums.FIELDS, "COLUMNS": columns,
                 "BLOCK": max(min(replica_sums.ELEMENTS // columns, replica_sums.MOST_PLACES), 1)},
            )
            for columns in (4, 16, 32, 128, 1024)
        ),
        (touched._mark, {"numbers": "*i32", "flags": "*u8"}, {"BLOCK": touched.MARKED}),
        (
            touched._mark_messages,
            {"messages": "*i32", "flags": "*u8", "headers": "*i32"},
            {"HEADER": 32, "BLOCK": touched.MARKED},
        ),
        (
            touched._count_flags,
            {"flags": "*u8", "counts": "*i32", "rows": "i32"},
            {"BLOCK": touched.BLOCK},
        ),
        (
            touched._list_flags,
            {"flags": "*u8", "counts": "*i32", "header": "*i32", "out": "*i32", "rows": "i32"},
            {"PROGRAMS": touched.MOST_PROGRAMS, "BLOCK": touched.BLOCK},
        ),
        *(
            (
                touched._write_means,
                {"sums": "*fp32", "rows": "*i32", "target": "*fp32"},
                {"BLOCK": touched.ELEMENTS // columns, "COLUMNS": columns},
            )
            for columns in (1, 64, 128)
        ),
    ]  # fmt: skip
    of_keys = ("table", "hot_table", "part_starts", "keys")
    wide = [
        (kernel, {name: "*i64" if name in of_keys else type_ for name, type_ in types.items()}, c)
        for kernel, types, c in found
        if set(types) & set(of_keys)
    ]
    compiled = []
    for kernel, types, constants in found + wide:
        signature = {
            name: "constexpr"
            if name in constants
            else types.get(name, "*i64" if name in longs.split() else "i32")
            for name in kernel.arg_names
        }
        compiled.append((kernel, signature, constants))
    return compiled


def compile_all(architectures: tuple[int, ...] = ARCHITECTURES) -> list[Compiled]:
    """Compiles all kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    results = []
    for kernel, signature, constants in kernels():
        name = kernel.__name__.removeprefix("_")
        if constants.get("GROUPED"):
            name += ", grouped"
        if "IDS" in constants:
            name += f", {constants['IDS']} ids"
        if constants.get("VARIABLE"):
            name += ", variable batch"
        if "COLUMNS" in constants:
            name += f", {constants['COLUMNS']} columns"
        if "*i64" in (signature.get("table"), signature.get("keys")):
            name += ", 64-bit keys"
        for architecture in architectures:
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": WARPS_OF.get(kernel.__name__, 4)}
            target = GPUTarget("cuda", architecture, WARP)
            made = triton.compile(source, target=target, options=options)
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(made.asm["ptx"])
                file.flush()
                sm = re.search(r"\.target (\w+)", made.asm["ptx"])
                assert sm is not None
                told = subprocess.run(
                    [ptxas, "-v", f"--gpu-name={sm[1]}", file.name, "-o", os.devnull],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stderr
            results.append(
                Compiled(
                    name,
                    architecture,
                    _number(r"Used (\d+) registers", told),
                    _number(r"(\d+) bytes spill stores", told),
                    made.metadata.shared,
                    made.metadata.num_warps,
                )
            )
    return results


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1])


def table(results: list[Compiled]) -> str:
    """Returns the results as a table in Markdown."""
    lines = ["| kernel | sm | registers | spilled | shared memory | occupancy |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    lines += [
        f"| {one.kernel} | {one.architecture} | {one.registers} | {one.spilled} B | "
        f"{one.shared} B | {one.occupancy:.0%} |"
        for one in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    everything = compile_all()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps([asdict(one) for one in everything]))
    else:
        print(table(everything))
