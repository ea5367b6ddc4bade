"""Settings that make no sense are refused, by name, value and what is allowed."""

from typing import Any

import pytest

from fusedrec_torchrec import ExchangeOptions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_dist": "fast"}, "input_dist is 'fast': it should be 'single_shot' or 'exact_"),
        ({"extra_features": "drop"}, "extra_features is 'drop': it should be 'error' or 'ignore'"),
        ({"hash_ids": "t1"}, r"hash_ids is the string 't1', must be True, False or a list"),
        (
            {"capacity_slack": -0.1},
            "capacity_slack is -0.1: it should be greater than or equal to 0 and less than or "
            "equal to 10",
        ),
        ({"capacity_slack": float("nan")}, "capacity_slack is nan: it should be a finite number"),
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
