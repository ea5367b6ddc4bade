"""What a kernel was launched with, as far as it decides on how the kernel is compiled."""

import importlib
from ast import literal_eval
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["LAUNCHES", "Launch", "recorded_launches"]

LAUNCHES = Path(__file__).parent / "launches.txt"
"""All launches of ``make test-cuda``; tests/emulated_cuda/launches.py has written it."""


@dataclass(frozen=True)
class Launch:
    """One variant of a kernel.

    Attributes:
        kernel: the kernel's module in ``core/gpu``, and its name.
        warps: of a block.
        arguments: the name of each, and its type, followed by ``:16`` if it is a multiple of 16, or
            its value, if it is a constant.
    """

    PACKAGE: ClassVar[str] = "fusedrec_torchrec.core.gpu."

    kernel: str
    warps: int
    arguments: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.arguments]
        return " ".join([self.kernel, f"warps={self.warps}", *words])

    @classmethod
    def of(cls, line: str) -> "Launch":
        """Reads a line that ``str`` has written."""
        kernel, warps, *words = line.split()
        arguments = tuple((name, value) for name, _, value in (w.partition("=") for w in words))
        return cls(kernel, int(warps.removeprefix("warps=")), arguments)

    def source(self) -> Any:
        """Returns what Triton compiles."""
        from triton.compiler import ASTSource

        module, _, name = self.kernel.rpartition(".")
        function = getattr(importlib.import_module(self.PACKAGE + module), name)
        signature, constants, attributes = {}, {}, {}
        for i, (argument, value) in enumerate(self.arguments):
            kind, _, multiple = value.partition(":")
            is_type = kind[0] == "*" or kind[0].islower()
            signature[argument] = kind if is_type else "constexpr"
            if not is_type:
                constants[(i,)] = literal_eval(value)
            elif multiple:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(function, signature, constants, attributes)


def recorded_launches() -> list[Launch]:
    """Returns the launches of all kernels on the emulated GPU, each once."""
    return [Launch.of(line) for line in LAUNCHES.read_text().splitlines()]
