"""Kernels implement the operators that C++ defines, not others of the same names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusedrec_torchrec
from fusedrec_torchrec.core import gpu, native

PACKAGE = Path(fusedrec_torchrec.__file__).parent


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", sorted(gpu.SCHEMAS.keys() - set(gpu.ONLY_HERE)))
def test_schemas_are_those_of_the_cpp_operators(name: str) -> None:
    own = torch._C.parse_schema(f"fusedrec::{name}{gpu.SCHEMAS[name]}")
    assert str(getattr(torch.ops.fusedrec, name).default._schema) == str(own)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yields the place, the operator's name and the call, for all calls by name in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                owner, _, name = ast.unparse(node.func).rpartition(".")
                if owner == "torch.ops.fusedrec":
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name, node


def test_operators_are_called_with_the_arguments_that_they_have() -> None:
    """Some of these calls nobody makes without a GPU."""
    called = set()
    for place, name, call in calls():
        if name not in gpu.SCHEMAS or any(isinstance(a, ast.Starred) for a in call.args):
            continue
        called.add(name)
        arguments = torch._C.parse_schema(f"fusedrec::{name}{gpu.SCHEMAS[name]}").arguments
        names = [argument.name for argument in arguments]
        given = names[: len(call.args)] + [str(keyword.arg) for keyword in call.keywords]
        assert sorted(given) == sorted(names) and len(call.args) <= len(names), f"{place}: {name}"
    assert len(called) > 20
