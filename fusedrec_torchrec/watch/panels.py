"""Which figures of a run are drawn over its steps, with titles and units.

The terminal and the page show the same panels in the same order, and leave out those that no run
has anything for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["PANELS", "Panel", "Shown", "is_number", "value_of"]

Shown = Literal["number", "percent", "bytes", "count"]
"""How the values of a panel are written."""


@dataclass(frozen=True)
class Panel:
    """Is a small plot of one figure over the steps.

    Attributes:
        key: of the figure in the records.
        title: for people.
        unit: of the figure, for people.
        shown: how its values are written.
        from_zero: whether the axis begins at zero, where differences from zero matter.
    """

    key: str
    title: str
    unit: str
    shown: Shown = "number"
    from_zero: bool = False


PANELS = (
    Panel("log_loss", "Log loss", "nats; dots: held-out data"),
    Panel("auc", "AUC", "held-out data"),
    Panel("normalized_entropy", "Normalized entropy", "dots: held-out data"),
    Panel("calibration", "Calibration", "predicted / true clicks; dots: held-out data"),
    Panel("samples_per_second", "Throughput", "samples/s, all ranks", "count", True),
    Panel("waiting_for_data", "Waiting for data", "% of the time", "percent", True),
    Panel("bytes_sent_per_step", "Sent in a step", "bytes, first rank", "bytes", True),
    Panel("hot_share_of_rows", "Hit rate of hot rows", "% of distinct rows", "percent", True),
    Panel("early_share_of_rows", "Rows that came early", "% of remote rows", "percent", True),
    Panel("busiest_to_mean", "Busiest rank", "its rows / mean of all ranks"),
    Panel("rows_fewer_bytes", "Codec of rows", "times fewer bytes"),
    Panel("gradients_fewer_bytes", "Codec of gradients", "times fewer bytes"),
    Panel("dense_gradients_fewer_bytes", "Codec of dense gradients", "times fewer bytes"),
    Panel("skipped_steps", "Skipped steps", "steps so far", "count", True),
    Panel("failed_saves", "Failed saves", "checkpoints so far", "count", True),
    Panel("learning_rate_tables", "Learning rate of tables", "", "number", True),
    Panel("learning_rate_dense", "Learning rate of the dense part", "", "number", True),
)


def value_of(key: str, record: Mapping[str, Any]) -> float | None:
    """Returns the figure of a panel in a record; None if the record has none."""
    if key == "busiest_to_mean":
        return _busiest_to_mean(record.get("rows_looked_up_by_rank"))
    value = record.get(key)
    return float(value) if value is not None and is_number(value) else None


def is_number(value: Any) -> bool:
    """Returns whether a value of a record can be drawn; null is what was no finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _busiest_to_mean(loads: Any) -> float | None:
    if not isinstance(loads, list) or not all(map(is_number, loads)) or not sum(loads):
        return None
    return float(max(loads) * len(loads) / sum(loads))
