"""Allocators: what ranks find in their environment when they start."""

import ctypes.util
import os
import time
from pathlib import Path

import pytest

from fusedrec_torchrec.bench.allocators import (
    Allocator,
    allocator_environment,
    missing_allocator,
)
from fusedrec_torchrec.bench.links import hosts
from fusedrec_torchrec.bench.ranks import Ranks
from fusedrec_torchrec.bench.run import run_suite
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig

KEPT = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def variables_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process has started with.

    For a moment, a process that is being started has none.
    """
    give_up = time.monotonic() + 60
    while not (given := Path(f"/proc/{pid}/environ").read_bytes()):
        assert time.monotonic() < give_up, f"process {pid} has no environment"
        time.sleep(0.01)
    return dict(line.split("=", 1) for line in given.decode().split("\0") if "=" in line)


@pytest.mark.parametrize("allocator", ["default", "keep"])
def test_ranks_start_with_the_environment_of_their_allocator(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    """glibc reads it when a process starts, so that what counts is what the kernel was given."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    workload = WorkloadConfig(systems=["table_wise"])
    with (
        hosts(2, "") as places,
        Ranks("table_wise", SuiteConfig(), workload, None, places, allocator) as ranks,
    ):
        assert len(ranks._processes) == 2
        for process in ranks._processes:
            variables = variables_of(process.pid)
            malloc = {k: v for k, v in variables.items() if k.startswith("MALLOC_")}
            assert malloc == (KEPT if allocator == "keep" else {})
            assert variables["WORLD_SIZE"] == "2"


def test_jemalloc_comes_before_other_libraries() -> None:
    made = allocator_environment("jemalloc", {"LD_PRELOAD": "other.so", "A": "b"})
    assert made == {"LD_PRELOAD": "libjemalloc.so.2 other.so", "A": "b"}
    assert allocator_environment("default", {"LD_PRELOAD": "other.so"})["LD_PRELOAD"] == "other.so"
    assert allocator_environment("default", {"GLIBC_TUNABLES": "x"}) == {}


def test_an_allocator_that_is_missing_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert "needs libjemalloc.so.2" in str(missing_allocator("jemalloc"))
    assert missing_allocator("keep") is None
    suite = SuiteConfig(allocators=["jemalloc"])
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert "libjemalloc" in document["left_out"]["zipf"]
    assert not document["results"]
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libjemalloc.so.2")
    assert missing_allocator("jemalloc") is None


def test_this_process_is_left_alone() -> None:
    before = dict(os.environ)
    allocator_environment("keep", os.environ)
    assert dict(os.environ) == before
