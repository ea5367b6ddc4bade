"""Describes the machine that figures were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fusedrec_torchrec.core import native

__all__ = ["describe_machine"]

PACKAGES = ("fusedrec-torchrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def describe_machine() -> dict[str, object]:
    """Returns processor, memory, system and versions; no names of hosts, users or paths."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _first_field("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "native_operators": native.available(),
        "malloc": {"LD_PRELOAD": "set"} if os.environ.get("LD_PRELOAD") else {},
    }


def _first_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
