"""Stands in for ``python``: hands its arguments to the server, and ends as the program ends.

A copy of this file lies beside the server's socket.  It imports next to nothing, which is its use.
It ends with the process that has started it, and so does the program.
"""

import ctypes
import os
import signal
import socket
import sys
from types import FrameType

SOCKET = "socket"
LENGTH_BYTES = 8
MOST_FILES = 250
PR_SET_PDEATHSIG = 1


def _open_files(own: int) -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:  # that of the listing
            continue
        if number != own:
            found.append(number)
    assert len(found) <= MOST_FILES
    return found


def _main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(sys.argv[0]), SOCKET))

    def forward(number: int, _: FrameType | None) -> None:
        connection.send(bytes([number]))

    files = _open_files(connection.fileno())
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    numbers = ",".join(map(str, files))
    parts = [os.getcwd(), numbers, str(len(sys.argv) - 1), *sys.argv[1:], *environment]
    message = os.fsencode("\0".join(parts))
    socket.send_fds(connection, [len(message).to_bytes(LENGTH_BYTES, "big")], files)
    connection.sendall(message)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    answer = b""
    while len(answer) < 2:
        more = connection.recv(2 - len(answer))
        if not more:
            sys.exit("the server of warm programs is gone")
        answer += more
    by_signal, code = answer
    if by_signal:
        if code != signal.SIGKILL:
            signal.signal(code, signal.SIG_DFL)
        os.kill(os.getpid(), code)
    os._exit(code)


if __name__ == "__main__":
    _main()
