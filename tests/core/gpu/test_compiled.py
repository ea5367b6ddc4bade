"""All kernels compile for A100 and H100, and need no more registers than there are."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.core.gpu.compiled import Compiled


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_without_spills() -> None:
    """In a process of its own: kernels of this one are for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.core.gpu.compiled", "--json"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kernels = [Compiled(**values) for values in json.loads(told.stdout.splitlines()[-1])]
    assert len(kernels) >= 2 * 19
    assert {one.architecture for one in kernels} == {80, 90}
    for one in kernels:
        assert one.spilled == 0, one
        # A rank has one program of this one, and what counts is how many warps it has.
        assert one.occupancy >= 0.4 or one.kernel.startswith("arrange"), one
