"""Looks at the machine: compiler, backends, shared memory, file handles, and where runs go."""

import fcntl
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.core.native.library import BuildError, compiler
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.doctor.findings import Finding, failed, good, guarded, skipped

__all__ = ["machine"]

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED, ENOUGH_SHARED = 32 << 20, 1 << 30
LEAST_HANDLES = 1024
LEAST_ROOM = 1 << 30
WAIT = 20  # seconds for a compiler to say its name
LET_IN, KEPT_OUT, NO_LOCKS = 0, 1, 2


def machine(device: Device, runs: Path) -> Iterator[Finding]:
    """Yields what there is to say about the machine; a check that raises has failed.

    Args:
        device: that will be trained on.
        runs: folder that runs go to; it need not exist.
    """
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("compiler", _compiler),
        ("backends", lambda: _backends(device)),
        ("shared memory", lambda: _shared_memory(SHARED_MEMORY)),
        ("file handles", _file_handles),
        ("locks of the file system", lambda: _locks(folder)),
        ("room for runs", lambda: _room(folder)),
    ]
    for name, check in checks:
        yield guarded(name, check)


def _compiler() -> Finding:
    try:
        program, *arguments = compiler()
    except BuildError as error:
        return skipped("compiler", f"{error}; needed to build the C++ operators, if they are not")
    told = subprocess.run(
        [program, *arguments, "--version"],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    )
    return good("compiler", told.stdout.partition("\n")[0])


def _backends(device: Device) -> Finding:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    text = "torch.distributed has " + (", ".join(n for n, is_ in there.items() if is_) or "none")
    # Checkpoints and metrics talk through the CPU, also where tables are on GPUs.
    needed = ["gloo"] if device == "cpu" else ["gloo", "nccl"]
    missing = [name for name in needed if not there[name]]
    if missing:
        return failed("backends", f"{text}; --device {device} needs {', '.join(missing)}")
    return good("backends", text)


def _shared_memory(folder: Path) -> Finding:
    """Finds out whether processes can hand tensors to each other, as readers of data do."""
    name = "shared memory"
    if not folder.is_dir():
        return skipped(name, f"this system has no {folder}")
    use = shutil.disk_usage(folder)
    torch.zeros(1 << 18).share_memory_()
    text = f"{human_bytes(use.free)} of {human_bytes(use.total)} are free in {folder}"
    if use.free < LEAST_SHARED:
        return failed(name, f"{text}, must be at least {human_bytes(LEAST_SHARED)}; containers get "
                      "more by docker run --shm-size=8g")  # fmt: skip
    if use.free < ENOUGH_SHARED:
        text += "; readers (data.workers) of large batches and NCCL may want more: --shm-size=8g"
    return good(name, text)


def _file_handles() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may have {_limit(soft)} files open, {_limit(hard)} if it asks for more"
    if soft != resource.RLIM_INFINITY and soft < LEAST_HANDLES:
        return failed("file handles", f"{text}; must be at least {LEAST_HANDLES}: ulimit -n 65536")
    return good("file handles", text)


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else f"{value:,}"


def _locks(folder: Path) -> Finding:
    """Tries what keeps a second training out of the folder of a run."""
    name, where = "locks of the file system", f"flock on {_file_system(folder)}"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fusedrec_doctor_") as file:
        path = Path(file.name)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return failed(name, f"{where}: {error.strerror}; nothing keeps a second training out")
        while_locked = _second_process(path)
        fcntl.flock(file, fcntl.LOCK_UN)
        afterwards = _second_process(path)
    if while_locked == LET_IN:
        return failed(name, f"{where} lets a second process in; so would a second training be")
    if (while_locked, afterwards) != (KEPT_OUT, LET_IN):
        return failed(name, f"{where} does not let a second process in when it is free")
    return good(name, f"{where} keeps a second process out, and lets it in afterwards")


def _second_process(path: Path) -> int:
    """Returns whether another process gets the lock of a file."""
    child = os.fork()
    if child == 0:
        code = NO_LOCKS
        try:
            fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
            code = LET_IN
        except BlockingIOError:
            code = KEPT_OUT
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _room(folder: Path) -> Finding:
    use = shutil.disk_usage(folder)
    text = f"{human_bytes(use.free)} of {human_bytes(use.total)} are free where runs go"
    if use.free < LEAST_ROOM:
        return failed("room for runs", f"{text}, must be at least {human_bytes(LEAST_ROOM)}")
    return good("room for runs", text)


def _file_system(folder: Path) -> str:
    """Returns the kind of file system that a folder is on, and not where that is."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "this file system"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else "this file system"
