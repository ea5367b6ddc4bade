"""``fusedrec version`` shows what is installed, for bug reports."""

import argparse
import os
import platform
from importlib import metadata
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.core.terminal import print_table

__all__ = ["add_command"]

PACKAGES = (
    *("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict", "torchmetrics"),
    *("numpy", "pyarrow", "pydantic", "tensorboard", "matplotlib", "rich"),
)
EXAMPLES = {
    "fusedrec version": "Prints the version of this package.",
    "fusedrec version --verbose": "Adds those of the stack, devices, backends and operators.",
    "fusedrec version --verbose --json": "Prints the same for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "version",
        purpose="Shows the version of this package, and with --verbose what it stands on: versions "
        "of the stack, CUDA devices, backends of torch.distributed, and which operators are in "
        "use and why.  `fusedrec doctor` also tries whether all of it works.",
        examples=EXAMPLES,
        read_on="docs/install.md",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="versions of the stack, devices and backends"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the version, and with ``--verbose`` those of the stack and what it can do."""
    own = _version("fusedrec-torchrec")
    about: dict[str, Any] = {"version": own}
    if arguments.verbose:
        about |= {
            "python": platform.python_version(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "packages": {name: _version(name) for name in PACKAGES},
            "capabilities": _capabilities(),
        }
    if arguments.json:
        print_json(about)
        return
    print(f"fusedrec-torchrec {own}")
    if arguments.verbose:
        rows = [(key, about[key]) for key in ("python", "system", "processors")]
        print_table("versions", ("", ""), [*rows, *about["packages"].items()])
        print_table("capabilities", ("", ""), list(about["capabilities"].items()))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _capabilities() -> dict[str, str]:
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
    return {
        "backends": ", ".join(name for name, there in backends.items() if there) or "none",
        "CUDA": f"{torch.version.cuda or 'not built in'}",
        "CUDA devices": ", ".join(devices) or "none",
        "FBGEMM operators on CPU": "yes" if hasattr(torch.ops.fbgemm, operator) else "no",
        "C++ operators": str(native.operators()),
        "fused kernels on CPU": ", ".join(kernels_of("cpu")),
        "fused kernels on CUDA": ", ".join(kernels_of("cuda")),
    }
