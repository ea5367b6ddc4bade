"""Kernels implement the operators that C++ defines, not others of the same names."""

import pytest
import torch

from fusedrec_torchrec.core import gpu, native


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", sorted(gpu.SCHEMAS.keys() - set(gpu.ONLY_HERE)))
def test_schemas_are_those_of_the_cpp_operators(name: str) -> None:
    own = torch._C.parse_schema(f"fusedrec::{name}{gpu.SCHEMAS[name]}")
    assert str(getattr(torch.ops.fusedrec, name).default._schema) == str(own)
