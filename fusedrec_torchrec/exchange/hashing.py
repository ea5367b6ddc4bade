"""Category-salted hashing of raw 64-bit ids into the rows of a table.

FusedRec tells categories apart by salting the hash with the category.  Here the category is
the table: the salt comes from the table's name, so features that share a table share rows,
and equal raw ids of different tables fall on unrelated rows.

The result depends on the table's name, the id, the number of rows and the seed only - not on
the run, the platform, the device or the world size.  It is therefore part of what a trained
table means; tests pin it with known vectors.
"""

import hashlib

import torch

__all__ = ["hash_ids", "table_salt"]


def table_salt(table_name: str, seed: int = 0) -> int:
    """Returns a signed 64-bit salt for a table: the first 8 bytes of BLAKE2b over seed and name."""
    digest = hashlib.blake2b(f"{seed}:{table_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _signed(value: int) -> int:
    """Returns the two's complement int64 of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts in zeros: int64 ``>>`` is arithmetic, the mask drops copies of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_ids(ids: torch.Tensor, salts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows of raw ids: SplitMix64's finalizer of ``(id + gamma) ^ salt``, modulo ``rows``.

    Args:
        ids: raw ids, any int64 (int32 is widened), negative ones included.
        salts: int64 salt of each id's table, broadcastable to ``ids``.
        rows: int64 number of rows of each id's table, broadcastable to ``ids``.

    Returns:
        int64 rows in ``[0, rows)``.
    """
    x = (ids.long() + _GAMMA) ^ salts  # int64 arithmetic wraps around, as wanted
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    x = x ^ _logical_shift_right(x, 31)
    return (x & ((1 << 63) - 1)) % rows
