"""Ends processes that would outlive those they work for."""

import os
import select
import threading
import time

__all__ = ["die_with"]

POLL_SECONDS = 2.0


def die_with(pid: int) -> None:
    """Ends this process when another one ends, however that does: also if it is killed.

    A reader that a fork server has started is not the child of its rank, and would wait for it
    for ever.
    """
    threading.Thread(target=_watch, args=(pid,), daemon=True, name="die_with").start()


def _watch(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not on Linux, or an old one
        while _is_alive(pid):
            time.sleep(POLL_SECONDS)
        os._exit(1)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while not waiting.poll():
        pass
    os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
