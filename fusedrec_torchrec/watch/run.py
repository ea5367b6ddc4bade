"""The folder of a run: what it is about, how far it is, and whether it still trains."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from fusedrec_torchrec.core.json_file import read_json
from fusedrec_torchrec.core.safe_yaml import read_yaml
from fusedrec_torchrec.training.logs import RECORDS
from fusedrec_torchrec.training.summary import SUMMARY
from fusedrec_torchrec.watch.records import RecordReader

__all__ = ["State", "WatchedRun", "open_runs"]

State = Literal["waiting", "running", "finished", "stopped"]
CONFIG, LOCK = "config.yaml", ".lock"
SIGNS = (RECORDS, CONFIG, SUMMARY, LOCK)  # any of them makes a folder that of a run
MOST_NAMED = 5
RECENT = 60.0  # seconds


class WatchedRun:
    """Is a run as its folder shows it.

    Args:
        folder: of the run.
        name: by which it is shown.

    Raises:
        ValueError: there is no such folder, or it is not that of a run; with what to do.
    """

    def __init__(self, folder: Path, name: str) -> None:
        _check_is_run(folder)
        self.folder, self.name = folder, name
        self._reader = RecordReader(folder)
        self._config = _Document(folder / CONFIG, read_yaml)
        self._summary = _Document(folder / SUMMARY, lambda path: read_json(folder, path.name))

    def refresh(self) -> None:
        """Reads what was written since the last time."""
        self._reader.refresh()
        self._config.refresh()
        self._summary.refresh()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in order."""
        return self._reader.records

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run, empty while there is none."""
        return self._config.content

    @property
    def damaged(self) -> int:
        """How many lines of the records could not be read."""
        return self._reader.damaged

    @property
    def step(self) -> int:
        """The step of the last record."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def steps(self) -> int | None:
        """The step at which the run ends; None if the length of the data decides."""
        steps = self.config.get("steps")
        if isinstance(steps, int):
            return steps
        return self.step if self.state == "finished" else None

    @property
    def state(self) -> State:
        """Whether the run trains.

        A training on this machine holds a lock on its folder.  Of others it is known when they
        last wrote something.
        """
        if is_locked(self.folder / LOCK):
            return "running" if self.records else "waiting"
        if self.records and self._summary.content.get("steps") == self.step:
            return "finished"
        if not self.records:
            return "waiting"
        written = self._reader.written or 0.0
        return "running" if time.time() - written < RECENT else "stopped"

    @property
    def remaining_seconds(self) -> float | None:
        """How long the run will take at its present speed, evaluations not counted."""
        batch = _within(self.config, "data", "batch_size")
        speeds = [r["samples_per_second"] for r in self.records if r.get("samples_per_second")]
        if self.state != "running" or self.steps is None or not speeds or not batch:
            return None
        return max(self.steps - self.step, 0) * float(batch) / float(speeds[-1])

    def about(self) -> dict[str, Any]:
        """Returns what the configuration says, as far as it is there: ranks, batch and so on."""
        launch = self.config.get("launch") or {}
        ranks, nodes = launch.get("ranks"), launch.get("nodes")
        return {
            "ranks": ranks * nodes if isinstance(ranks, int) and isinstance(nodes, int) else None,
            "batch_size": _within(self.config, "data", "batch_size"),
            "sharding": _within(self.config, "sharding", "type"),
            "log_every": _within(self.config, "logging", "log_every"),
        }


def open_runs(folders: Sequence[Path]) -> list[WatchedRun]:
    """Returns the runs of folders, which are named as shortly as tells them apart.

    Raises:
        ValueError: a folder is not that of a run, or named twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is named twice; each run can be shown once")
    names = [path.name for path in paths]
    return [
        WatchedRun(folder, path.name if names.count(path.name) == 1 else str(folder))
        for folder, path in zip(folders, paths, strict=True)
    ]


def is_locked(path: Path) -> bool:
    """Returns whether a process of this machine holds a lock on a file.

    Nobody who wants the lock is kept from it, as trying to take it would.
    """
    try:
        about = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    return any(device in line.split() for line in locks.splitlines() if "->" not in line)


def _check_is_run(folder: Path) -> None:
    wanted = "must be the folder of a run (logging.directory of a training), such as runs/tiny"
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; it {wanted}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; it {wanted}")
    if any((folder / sign).exists() for sign in SIGNS):
        return
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    hint = f"it has neither {RECORDS} nor {CONFIG}; it {wanted}"
    if inside:
        named = ", ".join(str(path) for path in inside[:MOST_NAMED])
        hint = f"but it holds runs: {named}" + ", ..." * (len(inside) > MOST_NAMED)
    raise ValueError(f"{folder} is no run, {hint}")


class _Document:
    """Holds what a file says, read again when it has changed; nothing while it is not whole."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self._path, self._read = path, read
        self._seen: tuple[int, int] | None = None
        self.content: dict[str, Any] = {}

    def refresh(self) -> None:
        try:
            about = self._path.stat()
        except OSError:
            self._seen, self.content = None, {}
            return
        if self._seen == (about.st_mtime_ns, about.st_size):
            return
        try:
            content = self._read(self._path)
        except (OSError, ValueError):
            self._seen, self.content = None, {}
            return
        self._seen = about.st_mtime_ns, about.st_size
        self.content = content if isinstance(content, dict) else {}


def _within(config: dict[str, Any], section: str, key: str) -> Any:
    inner = config.get(section)
    return inner.get(key) if isinstance(inner, dict) else None
