"""Settings that make no sense are refused, by name, value and what is allowed."""

from typing import Any

import pytest

from fusedrec_torchrec import ExchangeOptions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_dist": "fast"}, r"input_dist is 'fast', must be one of \('single_shot', 'exact"),
        ({"extra_features": "drop"}, r"extra_features is 'drop', must be one of \('error', 'ign"),
        ({"hash_ids": "t1"}, r"hash_ids is the string 't1', must be True, False or a list"),
        ({"capacity_slack": -0.1}, r"capacity_slack is -0.1, must be in \[0, 10\]"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangeOptions(**settings)


def test_hashed_tables_by_flag_or_name() -> None:
    assert ExchangeOptions(hash_ids=True).hashes("a")
    assert not ExchangeOptions().hashes("a")
    assert ExchangeOptions(hash_ids=["a"]).hashes("a")
    assert not ExchangeOptions(hash_ids=["a"]).hashes("b")
