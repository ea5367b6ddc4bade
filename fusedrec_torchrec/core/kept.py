"""Tensors that are made once and used for many batches, by whatever stream.

A batch may be sent by another stream than the one before: a plain evaluation by the default stream,
a pipeline by one of its own.  So whoever uses what another stream has made waits until it is
written, and tells the allocator, which must not give its memory away too early.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

__all__ = ["Kept"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Made(Generic[T]):
    """A value, and when it was made.

    Attributes:
        value: what was asked for.
        tensors: those of its tensors that are on CUDA.
        stream: that has made them; None if there are none.
        written: when they are there.
    """

    value: T
    tensors: list[torch.Tensor]
    stream: torch.cuda.Stream | None
    written: torch.cuda.Event | None

    def use(self) -> None:
        """Has the current stream wait for the tensors, and their memory wait for the stream."""
        if self.stream is None or self.written is None:
            return
        stream = torch.cuda.current_stream(self.tensors[0].device)
        if stream != self.stream:
            stream.wait_event(self.written)
            for tensor in self.tensors:
                tensor.record_stream(stream)


class Kept(Generic[T]):
    """Values by keys.

    Args:
        tensors_of: returns the tensors of a value.
        most: how many are kept.  When there is no room for another one, all are forgotten: keys of
            batches are either few, or each of them comes once.
    """

    def __init__(
        self, tensors_of: Callable[[T], Iterable[torch.Tensor | None]], most: int = 64
    ) -> None:
        self._tensors_of = tensors_of
        self._most = most
        self._made: dict[Hashable, _Made[T]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the value of a key, for the current stream to use; makes it if there is none."""
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= self._most:
                self._made.clear()
            made = self._made[key] = self._noted(make())
        made.use()
        return made.value

    def _noted(self, value: T) -> _Made[T]:
        tensors = [tensor for tensor in self._tensors_of(value) if tensor is not None]
        tensors = [tensor for tensor in tensors if tensor.is_cuda]
        if not tensors:
            return _Made(value, tensors, None, None)
        stream = torch.cuda.current_stream(tensors[0].device)
        written = torch.cuda.Event()
        written.record(stream)
        return _Made(value, tensors, stream, written)
