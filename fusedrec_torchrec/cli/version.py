"""``fusedrec version`` shows what is installed, for bug reports."""

import argparse
import os
import platform
from importlib import metadata
from typing import Any

from fusedrec_torchrec.core.terminal import print_table

__all__ = ["add_command"]

PACKAGES = (
    *("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict", "torchmetrics"),
    *("numpy", "pyarrow", "pydantic", "tensorboard", "matplotlib", "rich"),
)


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser("version", help="show versions and capabilities")
    parser.add_argument(
        "--verbose", action="store_true", help="versions of the stack, devices and backends"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the version, and with ``--verbose`` those of the stack and what it can do."""
    print(f"fusedrec-torchrec {_version('fusedrec-torchrec')}")
    if not arguments.verbose:
        return
    rows = [("python", platform.python_version()), ("system", platform.platform())]
    rows.append(("processors", str(os.cpu_count())))
    rows += [(name, _version(name)) for name in PACKAGES]
    print_table("versions", ("", ""), rows)
    print_table("capabilities", ("", ""), _capabilities())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _capabilities() -> list[tuple[str, str]]:
    import torch
    import torch.distributed as dist

    from fusedrec_torchrec.core import native
    from fusedrec_torchrec.exchange.buckets import kernels_of
    from fusedrec_torchrec.exchange.lookup import FusedLookup  # noqa: F401 (loads FBGEMM's operators)

    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    operator = "split_embedding_codegen_lookup_rowwise_adagrad_function_cpu"
    return [
        ("backends", ", ".join(name for name, there in backends.items() if there) or "none"),
        ("CUDA", f"{torch.version.cuda or 'not built in'}"),
        ("CUDA devices", ", ".join(devices) or "none"),
        ("FBGEMM operators on CPU", "yes" if hasattr(torch.ops.fbgemm, operator) else "no"),
        ("C++ operators", str(native.operators())),
        ("fused kernels on CPU", ", ".join(kernels_of("cpu"))),
        ("fused kernels on CUDA", ", ".join(kernels_of("cuda"))),
    ]
