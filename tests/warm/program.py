"""What a forked process does to become the program that a client has asked for."""

import atexit
import ctypes
import fcntl
import io
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import re
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Program"]

# Descriptors from here on are for a moment only.
ABOVE_ALL = 1000


@dataclass(frozen=True)
class Program:
    """What a client asks for.

    Attributes:
        client: its process.
        folder: the working directory.
        arguments: those of ``python``.
        environment: all of it.
        files: what is open here of what the client has open, by the client's number for it.
    """

    client: int
    folder: str
    arguments: list[str]
    environment: dict[str, str]
    files: dict[int, int]

    def run(self, executable: str) -> None:
        """Runs to its end and ends this process, which should do nothing else.

        Args:
            executable: what the program starts others with.
        """
        code = 1
        try:
            os.setsid()
            self._take_files()
            self._join_namespaces()
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update(self.environment)
            self._prepare_modules(executable)
            self._execute()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException as error:
            traceback.print_exc()
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            try:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code & 0xFF)

    def _take_files(self) -> None:
        """Has the client's files open under their numbers, and none of the server's."""
        moved = {n: fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE_ALL) for n, fd in self.files.items()}
        os.closerange(3, ABOVE_ALL)
        for number, descriptor in moved.items():
            os.dup2(descriptor, number)
            os.close(descriptor)

    def _join_namespaces(self) -> None:
        """Is on the emulated machine where the client is."""
        kinds = [
            kind
            for kind in ("net", "uts", "mnt")
            if os.readlink(f"/proc/self/ns/{kind}") != os.readlink(f"/proc/{self.client}/ns/{kind}")
        ]
        opened = [os.open(f"/proc/{self.client}/ns/{kind}", os.O_RDONLY) for kind in kinds]
        libc = ctypes.CDLL(None, use_errno=True)
        for kind, descriptor in zip(kinds, opened, strict=True):
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"cannot join the {kind} namespace")
            os.close(descriptor)

    def _prepare_modules(self, executable: str) -> None:
        """Undoes what modules have kept of the server, or read from its environment."""
        sys.executable = executable
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = _output(1), _output(2, errors="backslashreplace")
        multiprocessing.set_start_method(None, force=True)
        multiprocessing.spawn.set_executable(executable)
        multiprocessing.resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        multiprocessing.forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        if "OMP_NUM_THREADS" in self.environment:
            import torch

            torch.set_num_threads(int(self.environment["OMP_NUM_THREADS"]))

    def _execute(self) -> None:
        kind, *rest = without_flags(self.arguments)
        folder = os.getcwd() if kind in ("-m", "-c") else str(Path(kind).absolute().parent)
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder, *filter(None, path)]
        if kind == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)  # runs anew, as the main module
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [kind, *rest]
            runpy.run_path(kind, run_name="__main__")


def without_flags(arguments: list[str]) -> list[str]:
    """What comes after those of ``python``'s options that make no difference here."""
    first = 0
    while re.match("-[^mc]", arguments[first]):
        first += 2 if arguments[first] in ("-X", "-W") else 1
    return arguments[first:]


def _output(number: int, **options: Any) -> TextIO:
    """Text is written at once, as with ``PYTHONUNBUFFERED``."""
    stream = os.fdopen(number, "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(stream, write_through=True, **options)
