"""Forks programs, one for each client that connects.

A client sends its arguments and open files, then signals for the program; it hears how the program
ended.  A program whose client is gone is killed.
"""

import multiprocessing as mp
import os
import selectors
import signal
import socket
import struct
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.warm.client import LENGTH_BYTES, MOST_FILES
from tests.warm.program import Program

__all__ = ["serve"]


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
                    program.run(executable)
                for descriptor in program.files.values():
                    os.close(descriptor)
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
    length, files, _, _ = socket.recv_fds(client, LENGTH_BYTES, MOST_FILES)
    if len(length) < LENGTH_BYTES:
        return None
    message, wanted = b"", int.from_bytes(length, "big")
    while len(message) < wanted:
        more = client.recv(wanted - len(message))
        if not more:
            return None
        message += more
    folder, numbers, count, *rest = os.fsdecode(message).split("\0")
    arguments, variables = rest[: int(count)], rest[int(count) :]
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Program(
        client=struct.unpack("3i", credentials)[0],
        folder=folder,
        arguments=arguments,
        environment={name: value for name, _, value in (v.partition("=") for v in variables)},
        files=dict(zip(map(int, numbers.split(",")), files, strict=True)),
    )


def _forward(events: selectors.BaseSelector, client: socket.socket, pid: int | None) -> None:
    """Hands a signal to the program, or ends it if its client is gone."""
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
    """Tells the client how its program has ended."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with suppress(OSError):  # nobody listens any more
        client.sendall(bytes([code < 0, abs(code)]))
    # In any case: its descriptor will be that of another client.
    with suppress(KeyError, ValueError):
        events.unregister(client)
    client.close()
