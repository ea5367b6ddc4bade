"""Finds races between streams, and memory that is given away while a stream may still use it.

On the emulated device everything happens at once, in the order of the calls, so a missing wait does
no harm there.  This is noticed all the same: every operator says which bytes it reads and writes,
on which stream, and torch's CUDA sanitizer keeps account of which stream has waited for which.  Two
operators race if they use the same bytes, one of them writes, and neither has waited for the other.
Torch's own sanitizer compares addresses of tensors; here bytes of storages are compared, so that a
view of a buffer meets the buffer.

The caching allocator gives freed memory to the stream that it was allocated on.  Whoever has used
it on another stream must have called ``record_stream``, or that stream must have waited before it
allocates again.

Collectives have streams of their own, as NCCL's have: one for each group, which waits for the
stream that calls, and which ``wait()`` of the work has the current stream wait for.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
import torch.distributed as dist
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.emulated_cuda.call import Call
from tests.emulated_cuda.collectives import forget_waited
from tests.emulated_cuda.counts import place
from tests.emulated_cuda.memory import is_on_device

__all__ = ["Hazards", "hazards"]

# Operators that use no memory, although they have tensors.
ONLY_SHAPES = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "fbgemm::new_")

# Operators that copy to the host, if their output is there.
TO_HOST = ("aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_")


@dataclass
class Hazards:
    """What was found.

    Attributes:
        races: pairs of operators that use the same bytes on two streams, and how often.
        given_away: operators that may still use memory which another stream gets.
        streams: how many operators each stream has had; negative ones are those of collectives.
        failures: errors of the checker itself.
    """

    races: Counter[str] = field(default_factory=Counter)
    given_away: Counter[str] = field(default_factory=Counter)
    streams: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def reports(self) -> list[str]:
        """Returns everything that was found, as text."""
        return [
            *(f"race: {text}" for text in self.races),
            *(f"given away: {text}" for text in self.given_away),
            *(f"checker: {text}" for text in self.failures),
        ]


@dataclass(frozen=True)
class Use:
    """Bytes that an operator has read or written.

    Attributes:
        first, last: which bytes of the storage; the last one is not used any more.
        writes: whether the operator has written to them.
        stream: the stream of the operator.
        number: of the operator, in the order of calls.
        text: the operator, and the lines of code that called it.
    """

    first: int
    last: int
    writes: bool
    stream: int
    number: int
    text: str


@dataclass
class Block:
    """Memory of one storage.

    Attributes:
        owner: the stream that it was allocated on, which gets it back; None if nobody saw that.
        recorded: streams that ``record_stream`` has named.
        uses: the last use of the same bytes in the same way, for each stream.
    """

    owner: int | None = None
    recorded: set[int] = field(default_factory=set)
    uses: dict[tuple[int, int, bool, int], Use] = field(default_factory=dict)


class _Checker(TorchDispatchMode):
    """Sees every operator, before the emulated device does."""

    def __init__(self, found: Hazards) -> None:
        super().__init__()
        self.found = found
        self.syncs = StreamSynchronizations()
        self.blocks: dict[int, Block] = {}
        self.number = 0
        self.lock = threading.RLock()
        self.groups: dict[str, int] = {}
        self.works: dict[int, tuple[dist.Work, dict[int, int]]] = {}
        self.free: dict[int, list[Use]] = {}  # by the stream that gets it

    # -------------------------------------------------------- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        if not call.on_device():
            return call.run()
        stream = _current_stream()
        if call.plain_name == "aten::record_stream":
            self.record(call)
            return call.run()
        if func.namespace == "c10d":
            return self.collective(call, stream)
        if func.is_view or call.plain_name.startswith(ONLY_SHAPES):
            return call.run()
        # Copies to the host end with a wait for them; others wait before their last kernel.
        number = self.begin(stream) if call.plain_name in TO_HOST else None
        outputs = call.run()
        with self.lock:
            number = number or self.begin(stream)
            written = {id(call.values[i]) for i in call.written_to()}
            self.launch(
                stream,
                number,
                call.name,
                [v for v in call.values if is_on_device(v) and id(v) not in written],
                [v for v in call.values if is_on_device(v) and id(v) in written]
                + [v for v in tree_flatten(outputs)[0] if is_on_device(v)],
            )
            if call.size_from_values():  # the emulated device leaves out the host code that waits
                self.syncs.all_streams_wait_for_stream(stream)
        return outputs

    def begin(self, stream: int) -> int:
        """Returns the number of a new operator."""
        with self.lock:
            self.number += 1
            self.found.streams[stream] += 1
            self.syncs.update_seq_num(stream, self.number)
            return self.number

    def launch(
        self,
        stream: int,
        number: int,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        """Notes what an operator uses, and compares it with what others have used."""
        text = f"{name} on stream {{}} ({place()})"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                first, last = _bytes_of(tensor)
                if first < last:
                    use = Use(first, last, is_write, stream, number, text)
                    self.use(tensor.untyped_storage().data_ptr(), use)

    def use(self, address: int, use: Use) -> None:
        block = self.blocks.setdefault(address, Block())
        for other in block.uses.values():
            if (
                other.stream != use.stream
                and (other.writes or use.writes)
                and other.first < use.last
                and use.first < other.last
                and not self.waited(use.stream, other)
            ):
                self.found.races[f"{self.told(use)} and {self.told(other)}"] += 1
        block.uses[use.first, use.last, use.writes, use.stream] = use

    def waited(self, stream: int, use: Use) -> bool:
        return self.syncs.is_ordered_after(stream, use.number, use.stream)

    def told(self, use: Use) -> str:
        names = ("default", *("collectives" for _ in self.groups))
        streams = sorted(s for s in self.found.streams if s > 0)
        name = names[-use.stream] if use.stream <= 0 else f"{streams.index(use.stream) + 1}"
        return ("writes " if use.writes else "reads ") + use.text.format(name)

    # -------------------------------------------------------- memory

    def record(self, call: Call) -> None:
        tensor, stream = call.args
        handle = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        ).cuda_stream
        with self.lock:
            block = self.blocks.setdefault(tensor.untyped_storage().data_ptr(), Block())
            block.recorded.add(handle)

    def allocated(self, address: int) -> None:
        owner = _current_stream()
        self.blocks[address] = Block(owner)
        # It may get any memory that is free on this stream, whatever the sizes are here.
        for use in self.free.pop(owner, ()):
            if not self.waited(owner, use):
                self.found.given_away[self.told(use)] += 1

    def freed(self, address: int) -> None:
        block = self.blocks.pop(address, None)
        if block is None or block.owner is None:
            return
        self.free.setdefault(block.owner, []).extend(
            use
            for use in block.uses.values()
            # The allocator itself waits for what recorded streams have had to do until now.
            if not any(self.waited(stream, use) for stream in (block.owner, *block.recorded))
        )

    # -------------------------------------------------------- collectives

    def collective(self, call: Call, stream: int) -> Any:
        groups = [v for v in call.values if isinstance(v, torch.ScriptObject)]
        name = dist.ProcessGroup.unbox(groups[0]).group_name
        with self.lock:
            own = self.groups.setdefault(name, -1 - len(self.groups))
            self.syncs.create_stream(own)
            states = self.syncs.current_sync_states
            _wait(states[own], states[stream])
            inputs = {
                id(value)
                for argument, values in call.named().items()
                if argument.startswith("input")
                for value in tree_flatten(values)[0]
            }
            tensors = [v for v in call.values if is_on_device(v)]
            self.launch(
                own,
                self.begin(own),
                call.name,
                [v for v in tensors if id(v) in inputs],
                [v for v in tensors if id(v) not in inputs],
            )
            state = states[own].copy()
        results = call.run()
        for value in tree_flatten(results)[0]:
            if isinstance(value, torch.ScriptObject):
                work = dist.Work.unbox(value)
                self.works[id(work)] = work, state
        return results

    def waited_for_work(self, work: dist.Work) -> None:
        _, state = self.works.pop(id(work), (None, None))
        if state is not None:
            with self.lock:
                stream = _current_stream()
                self.syncs.create_stream(stream)
                _wait(self.syncs.current_sync_states[stream], state)
        forget_waited()


def _wait(state: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        state[stream] = max(state.get(stream, -1), number)


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of its storage that a tensor uses, and the one behind the last."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


# ------------------------------------------------------------ what the runtime tells

_current: _Checker | None = None
_is_listening = False


def _listen() -> None:
    """Has torch tell of waits and of memory, from now on; once in a process."""
    global _is_listening
    if _is_listening:
        return
    _is_listening = True
    torch._C._activate_gpu_trace()

    def told(handler: Callable[..., None]) -> Callable[..., None]:
        def tell(*args: int) -> None:
            checker = _current
            if checker is None:
                return
            try:
                with checker.lock:
                    handler(checker, *args)
            except Exception as error:  # torch would only log it
                checker.found.failures.append(f"{type(error).__name__}: {error}")

        return tell

    handlers: dict[str, Callable[..., None]] = {
        "event_creation": lambda c, event: c.syncs.create_event(event),
        "event_deletion": lambda c, event: c.syncs.delete_event(event),
        "event_record": lambda c, event, stream: c.syncs.record_state(event, stream),
        "event_wait": lambda c, event, stream: c.syncs.stream_wait_for_event(stream, event),
        "event_synchronization": lambda c, event: c.syncs.all_streams_wait_for_event(event),
        "stream_creation": lambda c, stream: c.syncs.create_stream(stream),
        "stream_synchronization": lambda c, stream: c.syncs.all_streams_wait_for_stream(stream),
        "device_synchronization": lambda c: c.syncs.sync_all_streams(),
        "memory_allocation": _Checker.allocated,
        "memory_deallocation": _Checker.freed,
    }
    for what, handler in handlers.items():
        getattr(gpu_trace, f"register_callback_for_{what}")(told(handler))

    work_type: Any = dist.Work
    wait = work_type.wait

    def wait_and_tell(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        if _current is not None:
            _current.waited_for_work(work)
        return result

    work_type.wait = wait_and_tell


@contextmanager
def hazards() -> Iterator[Hazards]:
    """Looks for hazards in what happens inside, also in threads of autograd's.

    Not inside of itself, and only with ``install`` done, in the same process.  What was allocated
    before is looked at for races only.
    """
    global _current
    found = Hazards()
    torch.cuda.synchronize()
    _listen()
    checker = _Checker(found)
    _current = checker
    try:
        with checker:
            yield found
    finally:
        _current = None
