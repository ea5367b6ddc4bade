"""Hashing of raw ids is the same everywhere and for ever, and spreads well."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt

MASK = (1 << 64) - 1
KNOWN_SALT = 3201412397577024130
KNOWN_ROWS = [977, 845, 352, 268, 263, 196]


def by_hand(raw: int, salt: int, rows: int) -> int:
    """The same hash in Python's unbounded integers."""
    x = ((raw + 0x9E3779B97F4A7C15) & MASK) ^ (salt & MASK)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return (x & (MASK >> 1)) % rows


def test_known_salts() -> None:
    assert table_salt("t_cat_0") == KNOWN_SALT
    assert table_salt("t_cat_0", seed=1) != KNOWN_SALT
    assert table_salt("t_cat_1") != KNOWN_SALT


def test_known_vectors() -> None:
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    rows = hash_ids(ids, torch.tensor(table_salt("t_cat_0")), torch.tensor(1000))
    assert rows.tolist() == KNOWN_ROWS


@given(
    raw=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    name=st.text(max_size=10),
    rows=st.integers(1, 2**40),
)
def test_equals_the_definition(raw: list[int], name: str, rows: int) -> None:
    salt = table_salt(name)
    got = hash_ids(torch.tensor(raw), torch.tensor(salt), torch.tensor(rows))
    assert got.tolist() == [by_hand(r, salt, rows) for r in raw]


def test_int32_ids_hash_as_int64_ids() -> None:
    ids = torch.tensor([-5, 0, 7, 2**31 - 1])
    salt, rows = torch.tensor(table_salt("a")), torch.tensor(97)
    assert hash_ids(ids.int(), salt, rows).equal(hash_ids(ids, salt, rows))


@pytest.mark.parametrize("stride", [1, 2, 1024, 2**20])
def test_regular_ids_spread_evenly(stride: int) -> None:
    rows, draws = 64, 64_000
    ids = torch.arange(draws) * stride
    hashed = hash_ids(ids, torch.tensor(table_salt("a")), torch.tensor(rows))
    counts = torch.bincount(hashed, minlength=rows).double()
    chi_square = float(((counts - draws / rows) ** 2 / (draws / rows)).sum())
    assert chi_square < 120  # 63 degrees of freedom: mean 63, standard deviation 11


def test_tables_are_independent() -> None:
    ids, rows = torch.arange(10_000), torch.tensor(100)
    a = hash_ids(ids, torch.tensor(table_salt("a")), rows)
    b = hash_ids(ids, torch.tensor(table_salt("b")), rows)
    assert 50 < int((a == b).sum()) < 150  # one in a hundred by chance
