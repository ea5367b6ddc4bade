"""Planted races and missing ``record_stream`` are found, and mended ones are not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cluster import Cluster
from tests.emulated_cuda import is_emulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]


def missing_wait(is_mended: bool) -> None:
    """A side stream reads what the default stream has written."""
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    x.add_(1)
    if is_mended:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    y.add_(1)


def missing_wait_for_an_event(is_mended: bool) -> None:
    """The event is recorded before the write that it should cover."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.zeros(8, device="cuda")
    if not is_mended:
        event.record()
    x.add_(1)
    if is_mended:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.current_stream().wait_stream(side)


def view_of_what_is_written(is_mended: bool) -> None:
    """Views of one buffer: torch's own sanitizer sees two addresses."""
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[4:].sum()
    (x[:4] if is_mended else x[2:]).add_(1)
    torch.cuda.current_stream().wait_stream(side)


def buffer_written_again(is_mended: bool) -> None:
    """The next batch goes into a buffer that a side stream still reads."""
    side, buffer = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    for step in range(2):
        if step and is_mended:
            torch.cuda.current_stream().wait_stream(side)
        buffer.fill_(step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffer.sum()
    torch.cuda.current_stream().wait_stream(side)


def missing_record_stream(is_mended: bool) -> None:
    """Memory goes back to the default stream while a side stream may still read it."""
    side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if is_mended:
        x.record_stream(side)
    del x
    torch.empty(8, device="cuda")


def recorded_for_another_stream(is_mended: bool) -> None:
    """``record_stream`` names a stream that has not waited for the one that reads."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if is_mended:
        other.wait_stream(side)
    x.record_stream(other)
    del x
    torch.empty(8, device="cuda")


def allocated_before_waiting(is_mended: bool) -> None:
    """A wait is in time before the stream allocates again, and not after."""
    side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    del x
    if is_mended:
        torch.cuda.current_stream().wait_stream(side)
    torch.empty(8, device="cuda")
    torch.cuda.current_stream().wait_stream(side)


def collective_not_waited_for(is_mended: bool) -> None:
    """The output of a collective is read before its ``wait()``."""
    x, y = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    work: Any = dist.all_to_all_single(y, x, async_op=True)
    if is_mended:
        work.wait()
    y.sum()
    if not is_mended:
        work.wait()


def waited_for_on_another_stream(is_mended: bool) -> None:
    """NCCL's ``wait()`` has one stream wait, the current one, and not the host."""
    side = torch.cuda.Stream()
    x, y = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    work: Any = dist.all_to_all_single(y, x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    if is_mended:
        torch.cuda.current_stream().wait_stream(side)
    y.sum()
    torch.cuda.synchronize()


RACES = (
    missing_wait,
    missing_wait_for_an_event,
    view_of_what_is_written,
    buffer_written_again,
    collective_not_waited_for,
    waited_for_on_another_stream,
)
GIVEN_AWAY = (missing_record_stream, recorded_for_another_stream, allocated_before_waiting)


def looked_at(function: Any, is_mended: bool) -> tuple[int, int, list[str]]:
    from tests.emulated_cuda.hazards import hazards

    with hazards() as found:
        function(is_mended)
    return len(found.races), len(found.given_away), found.reports()


@pytest.mark.parametrize("function", [*RACES, *GIVEN_AWAY])
def test_what_is_planted_is_found_and_what_is_mended_is_clean(
    gpu_cluster: Cluster, function: Any
) -> None:
    for races, given_away, reports in gpu_cluster.run(looked_at, function, False):
        assert (races, given_away) == ((1, 0) if function in RACES else (0, 1)), reports
    for *_, reports in gpu_cluster.run(looked_at, function, True):
        assert not reports


def host_waits(wait: str) -> list[str]:
    from tests.emulated_cuda.hazards import hazards

    with hazards() as found:
        side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
        total = x.sum()
        if wait == "item":
            total.item()
        elif wait == "nonzero":
            x.nonzero()
        elif wait == "stream":
            torch.cuda.current_stream().synchronize()
        elif wait == "device":
            torch.cuda.synchronize()
        with torch.cuda.stream(side):
            x.sum()
            total.add_(1)
        torch.cuda.current_stream().wait_stream(side)
    return found.reports()


@pytest.mark.parametrize("wait", ["item", "nonzero", "stream", "device", ""])
def test_a_host_that_waits_orders_all_that_comes_later(gpu_cluster: Cluster, wait: str) -> None:
    for reports in gpu_cluster.run(host_waits, wait):
        assert bool(reports) == (not wait)


def address_of_nothing() -> None:
    from torch.cuda._sanitizer import ArgumentHandler

    from tests.emulated_cuda.hazards import hazards

    empty, handler = torch.zeros(0, device="cuda"), ArgumentHandler()
    handler._handle_argument(empty, is_write=True, metadata_only=False)
    assert handler.dataptrs_written == {id(empty)}
    with hazards() as found:
        empty.add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            empty.add_(1)
    assert not found.reports()


def test_empty_tensors_are_nobodys_memory(gpu_cluster: Cluster) -> None:
    """Torch's own sanitizer takes Python's ``id`` for their address, which the next one may get.

    That is what it reports of FBGEMM's prefetch, which begins with ``torch.zeros(0)``.
    """
    gpu_cluster.run(address_of_nothing)
