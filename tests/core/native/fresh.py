"""Processes in which the operators have not been loaded yet, at the price of a fork each.

A test that would crash its process, or that loads another library, runs there.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.warm.forks import CONTEXT

TIMEOUT_SECONDS = 200


@dataclass(frozen=True)
class Loaded:
    """What ``native.operators`` said in a fresh process, and what it logged."""

    origin: str
    explanation: str
    log: str


class CrashError(AssertionError):
    """The process ended without an answer."""


class Running:
    """A function at work in a fresh process."""

    def __init__(self, process: BaseProcess, answers: "Connection[Any, Any]") -> None:
        self.process = process
        self._answers = answers

    def answer(self) -> Any:
        """The next one that the function yields."""
        if not self._answers.poll(TIMEOUT_SECONDS):
            self.process.kill()
            raise CrashError(f"no answer within {TIMEOUT_SECONDS} s")
        try:
            found = self._answers.recv()
        except EOFError:
            self.process.join()
            raise CrashError(f"the process ended with {self.process.exitcode}") from None
        if isinstance(found, Exception):
            raise found
        return found


def start(
    function: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None
) -> Running:
    """Calls a generator function in a fresh process."""
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=_work, args=(send, environment or {}, function, arguments), daemon=True
    )
    process.start()
    send.close()
    return Running(process, receive)


def _work(
    send: "Connection[Any, Any]",
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    try:
        for answer in function(*arguments):
            send.send(answer)
    except Exception as error:
        send.send(error)


def load(**environment: str) -> Loaded:
    return start_loading(**environment).answer()


def start_loading(**environment: str) -> Running:
    return start(_load, environment=environment)


def _load() -> Any:
    from fusedrec_torchrec.core import native

    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fusedrec_torchrec").addHandler(handler)
    found = native.operators()
    if native.available():
        import torch

        torch.ops.fusedrec.hot_table(torch.arange(3), torch.arange(3))
    yield Loaded(found.origin, found.explanation, "\n".join(lines))
