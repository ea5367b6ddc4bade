"""Looks at what is installed: versions, operators, kernels, GPUs and how they reach each other."""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.distributed as dist

from fusedrec_torchrec.core import gpu, native
from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.doctor.findings import Finding, failed, good, guarded, skipped

__all__ = ["LINES", "installation"]

# Versions that go together, as docs/install.md has them: torch, torchrec, FBGEMM.
LINES = (("2.13", "1.8", "1.8"), ("2.14", "1.9", "1.9"))
PYTHON = "3.11"
LOOKUP = "split_embedding_codegen_lookup_rowwise_adagrad_function"
SMALLEST_CAPABILITY = (8, 0)


def installation(device: Device) -> Iterator[Finding]:
    """Yields what there is to say about an installation; a check that raises has failed."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("versions", lambda: _versions(device)),
        ("FBGEMM operators", lambda: _fbgemm(device)),
        ("C++ operators", _native),
    ]
    for name, check in checks:
        yield guarded(name, check)
    on_cuda: list[tuple[str, Callable[[], Finding]]] = [
        ("CUDA", _cuda),
        ("GPUs", _gpus),
        ("peer access", _peers),
        ("Triton kernels", _triton),
        ("NCCL", _nccl),
    ]
    for name, check in on_cuda:
        yield skipped(name, "--device is cpu") if device == "cpu" else guarded(name, check)


def _versions(device: Device) -> Finding:
    fbgemm = "fbgemm-gpu" if device == "cuda" else "fbgemm-gpu-cpu"
    numbers = {name: _version(name) for name in ("torch", "torchrec", fbgemm)}
    text = ", ".join(f"{name} {number}" for name, number in numbers.items())
    text += f", Python {platform.python_version()}"
    line = tuple(".".join(number.split(".")[:2]) for number in numbers.values())
    allowed = " or ".join("/".join(versions) for versions in LINES)
    if line not in LINES:
        return failed("versions", f"{text}; must be {allowed}")
    if not platform.python_version().startswith(f"{PYTHON}."):
        return failed("versions", f"{text}; Python must be {PYTHON}")
    return good("versions", text)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _fbgemm(device: Device) -> Finding:
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 (loads operators)

    name = f"{LOOKUP}_cpu" if device == "cpu" else LOOKUP
    if not hasattr(torch.ops.fbgemm, name):
        return failed("FBGEMM operators", f"torch.ops.fbgemm has no {name}: is it the other build?")
    return good("FBGEMM operators", f"torch.ops.fbgemm has {name}")


def _native() -> Finding:
    operators = native.operators()
    if operators.origin == "none":
        return skipped("C++ operators", f"there are none: {operators.explanation}")
    return good("C++ operators", operators.origin)


def _cuda() -> Finding:
    if torch.version.cuda is None:
        return failed("CUDA", "torch is built without CUDA")
    if not torch.cuda.is_available():
        return failed("CUDA", f"torch is built for CUDA {torch.version.cuda}, but finds no device")
    numbers = torch.arange(1000, device="cuda:0")
    total = int(numbers.sum())
    if total != 499500:
        return failed("CUDA", f"the sum of 0 to 999 on the GPU is {total}, must be 499500")
    return good("CUDA", f"CUDA {torch.version.cuda}; the GPU adds up numbers")


def _gpus() -> Finding:
    described, small = [], []
    for number in range(torch.cuda.device_count()):
        gpu_ = torch.cuda.get_device_properties(number)
        described.append(
            f"{gpu_.name} ({gpu_.total_memory / 1e9:.0f} GB, sm_{gpu_.major}{gpu_.minor})"
        )
        if (gpu_.major, gpu_.minor) < SMALLEST_CAPABILITY:
            small.append(number)
    text = "; ".join(described)
    if small or not described:
        return failed("GPUs", f"{text or 'none'}; kernels are compiled for sm_80 and newer")
    return good("GPUs", f"{len(described)}: {text}")


def _peers() -> Finding:
    count = torch.cuda.device_count()
    if count < 2:
        return skipped("peer access", "there is one GPU only")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if without:  # slower, but not wrong
        text = f"{len(without)} of {len(pairs)} pairs have none and go through the host: "
        return good("peer access", text + ", ".join(without[:8]))
    return good("peer access", f"all {len(pairs)} pairs")


def _triton(device: str = "cuda:0") -> Finding:
    name = "Triton kernels"
    if find_spec("triton") is None:
        return skipped(name, "Triton is not installed; torch's own operators take more launches")
    if not gpu.available():
        return skipped(name, "turned off: FUSEDREC_TRITON=0 or deterministic algorithms")
    lengths = torch.tensor([1, 2, 3, 0], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 1, 3, 6, 6], dtype=torch.int32, device=device)
    # Six ids, of two features that have two samples each.
    fits = not bool(torch.ops.fusedrec.bad_lengths(lengths, offsets, 6, [2, 2], [3, 3]))
    noticed = bool(torch.ops.fusedrec.bad_lengths(lengths, offsets, 6, [2, 2], [3, 4]))
    if not (fits and noticed):
        return failed(name, f"bad_lengths says {not fits} for good ones, {noticed} for bad ones")
    return good(name, f"Triton {_version('triton')}; one compiles, and computes what it should")


def _nccl() -> Finding:
    if not dist.is_nccl_available():
        return failed("NCCL", "torch is built without it")
    return good("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
