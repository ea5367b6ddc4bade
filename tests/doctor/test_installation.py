"""Versions that the doctor takes are those of the documentation; kernels are called as they are."""

import re
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.core import gpu
from fusedrec_torchrec.doctor import installation as checks
from fusedrec_torchrec.doctor.installation import LINES, installation
from tests.cluster import Cluster

INSTALL = Path(__file__).parents[2] / "docs" / "install.md"


def test_versions_are_those_of_the_documentation() -> None:
    lines = re.findall(
        r"^\| C.* \| (2\.\d+)\S* \| (\d\.\d+)\S* \| \S+ (\d\.\d+)", INSTALL.read_text(), re.M
    )
    assert set(lines) == set(LINES)


def test_versions_that_do_not_go_together_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"torch": "2.14.1", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "not installed"}
    monkeypatch.setattr(checks, "_version", of.__getitem__)
    finding = next(iter(installation("cpu")))
    assert (finding.name, finding.outcome) == ("versions", "failed")
    assert "must be 2.13/1.8/1.8 or 2.14/1.9/1.9" in finding.detail


def test_a_check_that_raises_has_failed_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise OSError("no such library")

    monkeypatch.setattr("fusedrec_torchrec.core.native.operators", broken)
    found = {finding.name: finding for finding in installation("cpu")}
    assert found["C++ operators"].outcome == "failed"
    assert found["C++ operators"].detail == "OSError: no such library"
    assert found["versions"].outcome == found["FBGEMM operators"].outcome == "good"
    assert all(found[name].outcome == "skipped" for name in ("GPUs", "NCCL", "Triton kernels"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are made for the interpreter")
def test_a_kernel_is_called_and_judged() -> None:
    """The same call as on a GPU, computed by Triton's interpreter."""
    pytest.importorskip("triton")
    assert gpu.available()
    from fusedrec_torchrec.core.gpu.checks import bad_lengths

    library = torch.library.Library("fusedrec", "IMPL", "CPU")
    try:
        library.impl("bad_lengths", bad_lengths)
        assert checks._triton("cpu").outcome == "good"
    finally:
        library._destroy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_gpu_computes_and_its_kernels_do(gpu_cluster: Cluster) -> None:
    for check in (checks._cuda, checks._triton):
        for finding in gpu_cluster.run(check):
            assert finding.outcome == "good", finding.detail
