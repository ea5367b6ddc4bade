"""What is different between two plan files."""

from collections.abc import Iterator
from typing import Any

from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.sharding.plan_file import PlanFile

__all__ = ["differences"]


def differences(first: PlanFile, second: PlanFile) -> Iterator[tuple[str, str, str]]:
    """Yields settings that differ: name, what it is in the first file, what in the second."""
    a, b = to_mapping(first), to_mapping(second)
    tables_a, tables_b = a.pop("tables"), b.pop("tables")
    yield from _differences("", a, b)
    for name in dict.fromkeys([*tables_a, *tables_b]):
        if name not in tables_a or name not in tables_b:
            yield name, *("planned" if name in tables else "-" for tables in (tables_a, tables_b))
        else:
            yield from _differences(f"{name}.", tables_a[name], tables_b[name])


def _differences(
    prefix: str, a: dict[str, Any], b: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    for key in dict.fromkeys([*a, *b]):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(f"{prefix}{key}.", left, right)
        elif left != right:
            yield f"{prefix}{key}", _text(left), _text(right)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
