"""A kernel that remembers its variants launches the one that Triton would choose."""

from typing import Any

import pytest
import torch

from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

NUMBERS = (0, 1, 2, 16, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**40 + 1)
CONSTANTS: tuple[dict[str, Any], ...] = ({"BLOCK": 64}, {"BLOCK": 64, "num_warps": 8})


def launches() -> list[tuple[Any, ...]]:
    """Returns arguments of the kernel: tensors, of some type and alignment, and numbers."""
    memory = torch.zeros(64, device="cuda")
    tensors = (memory, memory[1:], memory[4:], memory.double(), memory.half())
    return [
        *((x, y, None, 5, 3) for x in tensors for y in tensors[:2]),
        *((memory, memory, weights, 5, 3) for weights in tensors),
        *((memory, memory, None, n, 3) for n in NUMBERS),
        *((memory, memory, None, 5, m) for m in (*NUMBERS, 0.5, 1.0, True)),
    ]


def variants() -> tuple[int, list[str]]:
    """Returns how many were launched, and which arguments got another one than from Triton."""
    from fusedrec_torchrec.core.gpu.kernel import Variant
    from tests.emulated_cuda.tripled import tripling

    triple = tripling()
    launched: list[Any] = []
    launch, wrong = Variant.launch, []

    def noting(variant: Variant, *args: Any) -> None:
        launched.append(variant.compiled)
        launch(variant, *args)

    Variant.launch = noting  # type: ignore[method-assign, assignment]
    try:
        for constants in CONSTANTS:
            for given in launches() * 2:  # the second time they are remembered
                before = len(launched)
                with counted() as counts:
                    triple[(1,)](*given, **constants)
                assert len(counts.of("kernel")) == 1
                chosen = triple.run(*given, grid=(1,), warmup=True, **constants)
                if any(compiled is not chosen for compiled in launched[before:]):
                    wrong.append(f"{given[1:]}, {constants}")
    finally:
        Variant.launch = launch  # type: ignore[method-assign]
    assert len(launched) >= len(CONSTANTS) * len(launches())
    return len(set(map(id, launched))), wrong


def test_the_variant_is_the_one_that_triton_would_choose(gpu_cluster: Cluster) -> None:
    for number, wrong in gpu_cluster.run(variants):
        assert number > 20
        assert not wrong, "\n".join(wrong)
