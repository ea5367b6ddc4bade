"""How long the host is busy with a training step, on the emulated GPU.

    .venv-cuda/bin/emulated python -m tests.emulated_cuda.host_time

What counts is CPU time of the thread, forward, backward and update, without what the emulator
takes: oracles, collectives, and the way of each operator through its Python.  Host code of torch,
FBGEMM, Triton and TorchRec counts; the driver and NCCL are not there, so what they take does not.
Backward runs in the same thread, to be measured.  Other processes make a step slower, by caches and
clocks that they share: the least of many steps is printed beside the median.  What is done to save
time is switched off by turns, to see what it saves.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.case import batch, local_device, sharded
from tests.cluster import Cluster
from tests.emulated_cuda.call import Call
from tests.emulated_cuda.dispatch import EmulatedDispatch
from tests.emulated_cuda.test_budget import MIXED, SIMPLE, case_of

__all__ = ["WAYS", "HostTime", "host_times"]

WARM, STEPS, STEPS_OF_A_TURN, TRIES = 6, 40, 5, 2000


@dataclass
class HostTime:
    """Is the time of one step.

    Attributes:
        seconds: of the thread, without the emulator's.
        operators: that went through the emulator.
        by_name: seconds of their host code.
    """

    seconds: float = 0.0
    operators: int = 0
    by_name: dict[str, float] = field(default_factory=dict)


class _Clock:
    """Measures what is the emulator's; there is one for a process."""

    def __init__(self) -> None:
        self.emulator, self.operators = 0.0, 0
        self.host: dict[str, float] = defaultdict(float)
        self._inside = 0.0
        dispatch, run = EmulatedDispatch.__torch_dispatch__, Call.run

        def timed_dispatch(mode: Any, *args: Any) -> Any:
            begin, self._inside = time.thread_time(), 0.0
            try:
                return dispatch(mode, *args)
            finally:
                self.operators += 1
                self.emulator += time.thread_time() - begin - self._inside

        def timed_run(call: Call) -> Any:
            if call.computes_on_cpu or call.func.namespace == "c10d":  # type: ignore[attr-defined]
                return run(call)
            begin = time.thread_time()
            try:
                return run(call)
            finally:
                spent = time.thread_time() - begin
                self._inside += spent
                self.host[call.name] += spent

        on_cpu = Call.on_cpu

        def marked(call: Call) -> Call:
            copy = on_cpu(call)
            object.__setattr__(copy, "computes_on_cpu", True)
            return copy

        Call.computes_on_cpu = False  # type: ignore[attr-defined]
        for owner, name, function in (
            (EmulatedDispatch, "__torch_dispatch__", timed_dispatch),
            (Call, "run", timed_run),
            (Call, "on_cpu", marked),
        ):
            setattr(owner, name, function)

    def spent(self, begin: float) -> float:
        """Returns what is not the emulator's since ``begin``, when the clock was at zero."""
        return time.thread_time() - begin - self.emulator

    def reset(self) -> float:
        self.emulator, self.operators, self.host = 0.0, 0, defaultdict(float)
        return time.thread_time()

    def detour(self) -> float:
        """Returns what the way through Python takes that is not seen from inside, by operator."""
        x = torch.empty(8, device="cuda")
        begin = self.reset()
        for _ in range(TRIES):
            x.detach()
        return (self.spent(begin) - self.host["aten::detach"]) / TRIES


def _with_tritons_launcher() -> AbstractContextManager[Any]:
    from triton.runtime.jit import JITFunction

    from fusedrec_torchrec.core.gpu.kernel import Kernel

    return patch.object(Kernel, "__getitem__", JITFunction.__getitem__)


def _with_copies_of_known_numbers() -> AbstractContextManager[Any]:
    from fusedrec_torchrec.core.gpu import bags, messages
    from fusedrec_torchrec.core.transfer import to_device

    stack = ExitStack()
    for module in (bags, messages):
        stack.enter_context(patch.object(module, "starts_on_device", to_device))
    return stack


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Steps by turns: as it is, and without or with something that makes a difference.
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": nullcontext,
    "with Triton's launcher": _with_tritons_launcher,
    "with numbers copied that are known": _with_copies_of_known_numbers,
    "without garbage collection": _without_garbage_collection,
}


def host_times(workload: str, sharding: str, ways: Sequence[str]) -> dict[str, list[HostTime]]:
    """Measures steps of a rank; all ranks must call it, each in a process of its own."""
    case = case_of(workload, sharding)
    model = sharded(case)
    module: Any = model._dmp_wrapped_module
    clock = _Clock()
    detour = clock.detour()
    gradient, times = None, defaultdict(list)
    with torch.autograd.set_multithreading_enabled(False):
        for step in range(WARM + STEPS * len(ways)):
            way = ways[step // STEPS_OF_A_TURN % len(ways)]
            features = batch(case, step % WARM, dist.get_rank()).to(local_device(case))
            with WAYS[way]():
                begin = clock.reset()
                pooled = module.sparse(features).values()
                if gradient is None:
                    gradient = torch.ones_like(pooled)
                pooled.backward(gradient)
                seconds = clock.spent(begin) - detour * clock.operators
            if step >= WARM:
                times[way].append(HostTime(seconds, clock.operators, dict(clock.host)))
    return dict(times)


def main() -> None:
    shares = []
    print("| 26 tables | sharding | | operators | ms, least | ms, median |")
    print("| --- | --- | --- | --- | --- | --- |")
    for workload in (SIMPLE, MIXED):
        for sharding in ("fused_row_wise", "table_wise"):
            ways = list(WAYS) if sharding == "fused_row_wise" else ["as it is"]
            cluster = Cluster(2, backend="nccl")
            cluster.run(dist.get_rank)  # processes take their time to start
            times_by_way = cluster.run(host_times, workload, sharding, ways)[0]
            cluster.stop(kill=True)
            for way, times in times_by_way.items():
                seconds = [time.seconds for time in times]
                print(
                    f"| {workload} | {sharding} | {way} | {times[-1].operators} | "
                    f"{1e3 * min(seconds):.2f} | {1e3 * statistics.median(seconds):.2f} |",
                    flush=True,
                )
            shares.append(min(times_by_way["as it is"], key=lambda time: time.seconds))
    least = shares[0]
    print(f"\n{SIMPLE}, fused_row_wise, the least step, us:")
    print(f"{1e6 * (least.seconds - sum(least.by_name.values())):7.0f} outside of operators")
    for name, spent in sorted(least.by_name.items(), key=lambda item: -item[1])[:30]:
        print(f"{1e6 * spent:7.0f} {name}")


if __name__ == "__main__":
    main()
