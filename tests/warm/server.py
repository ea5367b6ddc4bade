"""Forks programs, one for each client that connects.

A client sends its arguments and standard streams, then signals for the program; it hears how the
program ended.  A program whose client is gone is killed.
"""

import atexit
import multiprocessing as mp
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TextIO

from tests.warm.client import LENGTH_BYTES

__all__ = ["serve"]


@dataclass(frozen=True)
class Program:
    """What a client asks for."""

    folder: str
    arguments: list[str]
    environment: dict[str, str]
    streams: list[int] = field(default_factory=list)


def serve(address: str, executable: str, ready: "Connection[Any, Any]") -> None:
    """Serves until the process that started it has ended.

    Args:
        address: where to listen.
        executable: path of the client, for programs that start others.
        ready: hears when clients may connect.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ready.send(None)
    ready.close()
    parent = mp.parent_process()
    assert parent is not None
    events = selectors.DefaultSelector()
    events.register(parent.sentinel, selectors.EVENT_READ)
    events.register(listener, selectors.EVENT_READ, "listener")
    pids: dict[socket.socket, int] = {}
    while True:
        for key, _ in events.select():
            if key.data is None:
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if key.data == "listener":
                client, _ = listener.accept()
                program = _receive(client)
                if program is None:  # killed before it could ask
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    events.close()
                    for other in (listener, client, *pids):
                        other.close()
                    _run(program, executable)
                for stream in program.streams:
                    os.close(stream)
                pids[client] = pid
                events.register(client, selectors.EVENT_READ, "client")
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
            elif key.data == "client":
                assert isinstance(key.fileobj, socket.socket)
                _forward(events, key.fileobj, pids.get(key.fileobj))
            else:
                assert isinstance(key.fileobj, int)
                events.unregister(key.fileobj)
                os.close(key.fileobj)
                _answer(events, key.data, pids.pop(key.data))


def _receive(client: socket.socket) -> Program | None:
    length, streams, _, _ = socket.recv_fds(client, LENGTH_BYTES, 3)
    if len(length) < LENGTH_BYTES:
        return None
    message, wanted = b"", int.from_bytes(length, "big")
    while len(message) < wanted:
        more = client.recv(wanted - len(message))
        if not more:
            return None
        message += more
    folder, count, *rest = os.fsdecode(message).split("\0")
    arguments, variables = rest[: int(count)], rest[int(count) :]
    environment = {name: value for name, _, value in (each.partition("=") for each in variables)}
    return Program(folder, arguments, environment, streams)


def _forward(events: selectors.BaseSelector, client: socket.socket, pid: int | None) -> None:
    """A signal for the program, or the end of its client."""
    if pid is None:
        return  # it has just ended
    try:
        signals = client.recv(16)
    except ConnectionError:
        signals = b""
    for number in signals or [signal.SIGKILL]:
        os.kill(pid, number)
    if not signals:
        events.unregister(client)


def _answer(events: selectors.BaseSelector, client: socket.socket, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        client.sendall(bytes([code < 0, abs(code)]))
        events.unregister(client)
    except (OSError, KeyError, ValueError):
        pass  # nobody listens any more
    client.close()


def _run(program: Program, executable: str) -> None:
    """Becomes the program; does not return."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(program.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(program.folder)
        os.environ.clear()
        os.environ.update(program.environment)
        sys.executable = executable
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = _output(1), _output(2, errors="backslashreplace")
        _set_threads(program.environment)
        _execute(program.arguments)
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


def _output(number: int, **options: Any) -> TextIO:
    """Lines are written at once, as ``PYTHONUNBUFFERED`` would."""
    stream = os.fdopen(number, "w", closefd=False, **options)
    stream.reconfigure(write_through=True)
    return stream


def _set_threads(environment: dict[str, str]) -> None:
    """What a library reads from the environment when it is loaded."""
    import torch

    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _execute(arguments: list[str]) -> None:
    if arguments[0] == "-u":  # all output is written at once
        del arguments[0]
    kind, *rest = arguments
    folder = os.getcwd() if kind in ("-m", "-c") else os.path.dirname(os.path.abspath(kind))
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
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
