"""What a checkpoint of a run holds besides weights and optimizer state, and which there are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fusedrec_torchrec.core.config import NO_OTHER_KEYS, from_mapping
from fusedrec_torchrec.core.folder_files import shown
from fusedrec_torchrec.core.json_file import read_json

__all__ = ["RUN_STATE", "RunState", "find_checkpoints", "read_run_state"]

RUN_STATE = "run.json"
VERSION = 1


@dataclass(frozen=True)
class RunState:
    """Holds what a run needs to go on as if it had not stopped, besides weights and their state.

    Attributes:
        step: steps done, which is also the position in the data.
        sums: of the training metrics since the last record, of every rank.
        config: the configuration of the run, as YAML holds it.
        data: identity of the data.
        world_size: ranks that wrote the checkpoint.
        rates: how hot and cold batches alternated so far, and the losses that decide on it.
        skipped: steps that were left out because of bad batches.
        version: of this format.
    """

    __pydantic_config__ = NO_OTHER_KEYS
    step: Annotated[int, Field(ge=0, lt=1 << 60)]
    sums: list[list[float]]
    config: dict[str, Any]
    data: dict[str, Any]
    world_size: Annotated[int, Field(ge=1, le=1 << 20)]
    rates: dict[str, Any] | None = None
    skipped: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    version: int = VERSION


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, the latest last."""
    named = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted((p for p in named if (p / RUN_STATE).is_file()), key=lambda p: int(p.name[5:]))


def read_run_state(path: Path) -> RunState:
    """Reads the state of a run from one of its checkpoints.

    Raises:
        ValueError: no checkpoint there, or a damaged one, or of another version.
    """
    try:
        data = read_json(path, RUN_STATE)
    except FileNotFoundError:
        raise ValueError(f"{path} is no checkpoint of a run ({RUN_STATE} is missing)") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path / RUN_STATE} is damaged: it holds no state of a run")
    state = from_mapping(RunState, data, f"{path / RUN_STATE} is damaged")
    if state.rates is not None and not _are_rates(state.rates):
        raise ValueError(f"{path / RUN_STATE} is damaged: rates is {shown(state.rates)}")
    if state.version != VERSION:
        raise ValueError(
            f"{path} has version {state.version}, this release reads version {VERSION}"
        )
    return state


def _are_rates(rates: Mapping[str, Any]) -> bool:
    """Returns whether hot and cold batches can alternate at these rates."""
    changes, losses = rates.get("changes"), rates.get("losses")
    return (
        isinstance(changes, list)
        and isinstance(losses, list)
        and all(isinstance(change, list) and len(change) == 2 for change in changes)
        and all(type(first) is int and type(rate) in (int, float) for first, rate in changes)
        and all(first >= 0 and 0 < rate <= 1 for first, rate in changes)
        and any(first == 0 for first, _ in changes)
        and all(type(loss) in (int, float) for loss in losses)
    )
