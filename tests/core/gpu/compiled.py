"""Compiles all launches of kernels without a GPU: registers, stack and shared memory of each.

    python -m tests.core.gpu.compiled            a table of all kernels, for docs/gpu.md
    python -m tests.core.gpu.compiled --json     one line for each launch

What is spilled goes to the stack, so a kernel without a stack spills nothing.  It needs ptxas and
cuobjdump, which come with Triton.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.core.gpu.launch import Launch, recorded_launches

__all__ = ["ARCHITECTURES", "Compiled", "compile_all", "most_aligned"]

ARCHITECTURES = (80, 90)  # A100 and H100
# What an SM has, the same for both: registers, threads, and blocks at a time.
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
SHARED_KIB = {80: 164, 90: 228}
WARP = 32


@dataclass(frozen=True)
class Compiled:
    """One launch for one architecture.

    Attributes:
        launch: what was launched.
        architecture: compute capability, in tenths.
        registers: of a thread.
        stack: bytes of a thread.
        shared: bytes of shared memory of a block.
        warps: of a block.
    """

    launch: str
    architecture: int
    registers: int
    stack: int
    shared: int
    warps: int

    @property
    def kernel(self) -> str:
        """Module and name of the kernel."""
        return self.launch.split()[0]

    @property
    def occupancy(self) -> float:
        """Threads that an SM can have at a time, of all that it has room for."""
        threads = self.warps * WARP
        registers = -(-self.registers // 8) * 8 * threads
        shared = SHARED_KIB[self.architecture] * 1024 // max(self.shared + 1024, 1)
        blocks = min(REGISTERS // registers, THREADS // threads, BLOCKS, shared)
        return blocks * threads / THREADS


def most_aligned(launches: Iterable[Launch]) -> list[Launch]:
    """Returns, of launches that differ in multiples of 16 only, the one with the most of them."""
    best: dict[str, Launch] = {}
    for launch in sorted(launches, key=lambda launch: str(launch).count(":16")):
        best[str(launch).replace(":16", "")] = launch
    return list(best.values())


def compile_all(launches: Iterable[Launch]) -> list[Compiled]:
    """Compiles launches for all architectures."""
    return [
        _compiled(launch, architecture) for launch in launches for architecture in ARCHITECTURES
    ]


def _compiled(launch: Launch, architecture: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", architecture, WARP)
    made = triton.compile(launch.source(), target=target, options={"num_warps": launch.warps})
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return Compiled(
        str(launch),
        architecture,
        _number(r"REG:(\d+)", told),
        _number(r"STACK:(\d+)", told),
        made.metadata.shared,
        made.metadata.num_warps,
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1])


def table(results: list[Compiled]) -> str:
    """Returns the results as a table in Markdown: of each kernel, those of its worst launch."""
    by_kernel: dict[str, list[Compiled]] = defaultdict(list)
    for one in results:
        by_kernel[one.kernel].append(one)
    lines = ["| kernel | variants | registers, sm_80 | sm_90 | stack | shared memory | occupancy |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for kernel, own in sorted(by_kernel.items()):
        a100, h100 = (
            max(one.registers for one in own if one.architecture == architecture)
            for architecture in ARCHITECTURES
        )
        lines.append(
            f"| {kernel.replace('._', '.')} | {len(own) // len(ARCHITECTURES)} | {a100} | {h100} | "
            f"{max(one.stack for one in own)} B | {max(one.shared for one in own)} B | "
            f"{min(one.occupancy for one in own):.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--fewer", action="store_true", help="one of those that differ in alignment"
    )
    given = parser.parse_args()
    launches = recorded_launches()
    results = compile_all(most_aligned(launches) if given.fewer else launches)
    print(json.dumps([asdict(one) for one in results]) if given.json else table(results))


if __name__ == "__main__":
    main()
