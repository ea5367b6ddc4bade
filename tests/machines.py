"""Machines of a small cluster: network namespaces whose host names resolve to loopback.

Debian and Ubuntu write ``127.0.1.1 name`` into /etc/hosts, so a machine's own name does not say at
which address others reach it.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusedrec_torchrec.bench.links import hosts, unavailable
from tests.cli.command import ROOT
from tests.warm import interpreter

LINK = "1gbit"
DEADLINE_SECONDS = 240
# Mounts and names end with the process: neither /etc/hosts nor the name of this machine changes.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'

needs_machines = pytest.mark.skipif(
    unavailable(LINK) is not None, reason=f"several machines: {unavailable(LINK)}"
)


@dataclass(frozen=True)
class Machine:
    """A machine of its own as far as the network sees it.

    Args:
        name: its host name, which resolves to 127.0.1.1 on it and to its address elsewhere.
        address: where the other machines reach it.
        prefix: what a command that runs on it starts with.
        folder: for the output of its commands.
    """

    name: str
    address: str
    prefix: tuple[str, ...]
    folder: Path

    def run(self, *command: str) -> None:
        """Runs a short command on this machine."""
        subprocess.run([*self.prefix, *command], check=True, capture_output=True)

    def start(self, *arguments: object) -> "Run":
        """Starts ``fusedrec`` on this machine."""
        command = [interpreter(), "-m", "fusedrec_torchrec.cli.main", *map(str, arguments)]
        # Into a file: nobody reads a pipe while the run goes on, and a full one would stop it.
        output = self.folder / f"{self.name}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*self.prefix, *command],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )
        return Run(process, output)


@dataclass(frozen=True)
class Run:
    """A command on a machine, and the file it writes to."""

    process: subprocess.Popen[bytes]
    output: Path


def finish(runs: list[Run]) -> list[tuple[int, str]]:
    """Waits for commands; returns the exit code of each and all that it has written."""
    try:
        codes = [run.process.wait(DEADLINE_SECONDS) for run in runs]
    finally:
        for run in runs:
            run.process.kill()
    return [(code, run.output.read_text()) for code, run in zip(codes, runs, strict=True)]


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Machines at 10.77.0.1, 10.77.0.2 and so on, which end with the context."""
    names = [f"machine{number}" for number in range(count)]
    addresses = [f"10.77.0.{number + 1}" for number in range(count)]
    with hosts(count, LINK) as places:
        found = []
        for name, address, place in zip(names, addresses, places, strict=True):
            known = dict(zip(names, addresses, strict=True)) | {name: "127.0.1.1"}
            table = folder / f"{name}.hosts"
            lines = [
                f"{where} {who}\n" for who, where in {"localhost": "127.0.0.1", **known}.items()
            ]
            table.write_text("".join(lines))
            enter = ("unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", str(table), name)
            found.append(Machine(name, address, (*place.prefix, *enter), folder))
        yield found
