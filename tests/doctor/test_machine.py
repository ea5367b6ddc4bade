"""What the doctor looks at besides the installation: the machine, and where runs go."""

import fcntl
import resource
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from fusedrec_torchrec.doctor import machine as checks
from fusedrec_torchrec.doctor.findings import Finding
from fusedrec_torchrec.doctor.machine import machine


class Use(NamedTuple):
    total: int
    used: int
    free: int


def found(runs: Path, device: Any = "cpu") -> dict[str, Finding]:
    return {finding.name: finding for finding in machine(device, runs)}


def test_a_good_machine(tmp_path: Path) -> None:
    """The folder of runs need not be there, and nothing is left in it."""
    findings = found(tmp_path / "no" / "runs")
    for name in ("shared memory", "file handles", "locks of the file system", "backends"):
        assert findings[name].outcome == "good", findings[name]
    assert "keeps a second process out, and lets it in afterwards" in (
        findings["locks of the file system"].detail
    )
    assert not list(tmp_path.iterdir())
    assert all(str(tmp_path) not in finding.detail for finding in findings.values())


def test_too_little_shared_memory_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Use(64 << 20, 54 << 20, 10 << 20))
    findings = found(tmp_path)
    assert findings["shared memory"].outcome == "failed"
    assert "10.0 MiB of 64.0 MiB" in findings["shared memory"].detail
    assert "must be at least 32.0 MiB" in findings["shared memory"].detail
    assert "--shm-size" in findings["shared memory"].detail
    assert findings["room for runs"].outcome == "failed"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Use(64 << 20, 0, 64 << 20))
    assert found(tmp_path)["shared memory"].detail.endswith("may want more: --shm-size=8g")


def test_too_few_file_handles_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = found(tmp_path)["file handles"]
    assert finding.outcome == "failed"
    assert "256 files open, 4,096 if it asks for more; must be at least 1024" in finding.detail


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ((checks.LET_IN, checks.LET_IN), "lets a second process in; so would a second training"),
        ((checks.KEPT_OUT, checks.KEPT_OUT), "does not let a second process in when it is free"),
    ],
)
def test_locks_that_do_not_lock_have_failed(
    second: tuple[int, int], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(second)
    monkeypatch.setattr(checks, "_second_process", lambda _: next(answers))
    finding = found(tmp_path)["locks of the file system"]
    assert finding.outcome == "failed" and problem in finding.detail


def test_a_file_system_without_locks_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    finding = found(tmp_path)["locks of the file system"]
    assert finding.outcome == "failed"
    assert "No locks available; nothing keeps a second training out" in finding.detail


def test_the_compiler_is_named_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cc"
    program.write_text("#!/bin/sh\necho some compiler 12.2\necho more\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    finding = found(tmp_path)["compiler"]
    assert (finding.outcome, finding.detail) == ("good", "some compiler 12.2")
    monkeypatch.setenv("CXX", "no_such_program")
    finding = found(tmp_path)["compiler"]
    assert finding.outcome == "skipped" and "CXX is 'no_such_program'" in finding.detail


def test_a_backend_that_is_missing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert found(tmp_path, "cpu")["backends"].outcome == "good"
    finding = found(tmp_path, "cuda")["backends"]
    assert finding.outcome == "failed" and "--device cuda needs nccl" in finding.detail
