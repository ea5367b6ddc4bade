"""Rows in fewer bits: the bytes and the numbers of the codecs, to the last bit."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from triton.runtime import interpreter

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.codecs.wire import Wire, build
from fusedrec_torchrec.core.gpu import FORMATS
from tests.core.gpu.device import kernels_of

number_formats = kernels_of("number_formats")

KINDS = ("fp32", "fp16", "bf16", "int8", "fp16 scaled", "bf16 scaled")


def _fused(_: object, x: object, y: object, z: object) -> object:
    """Rounds once, as the device does; the interpreter rounds the product, too."""
    exact = x.data.astype(np.float64) * y.data + z.data  # type: ignore[attr-defined]
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)  # type: ignore


@pytest.fixture(autouse=True, scope="module")
def _fused_multiply_add() -> object:
    with mock.patch.object(interpreter.InterpreterBuilder, "create_fma", _fused):
        yield


def options_of(kind: str) -> CodecOptions:
    name, *scaled = kind.split()
    return CodecOptions(type=name, loss_scale=1024.0 if scaled else None)  # type: ignore[arg-type]


def check(
    kinds: list[str], dims: list[int], counts: list[list[int]], flat: torch.Tensor
) -> torch.Tensor:
    """Compares message and rows with those of the codecs; returns the rows."""
    codecs = [build(options_of(k), d, flat.device) for k, d in zip(kinds, dims, strict=True)]
    formats = [FORMATS.index(kind.split()[0]) for kind in kinds]
    scales = [codec.as_kernel[1] for codec in codecs if codec.as_kernel is not None]
    sizes = [n for row in counts for n in row]
    wire = Wire(codecs, dims)
    want, _ = wire.encode(flat, counts, True)
    got = number_formats.encode_rows(flat, sizes, dims, formats, scales)
    out, want_out = torch.full_like(flat, 7.0), torch.full_like(flat, 7.0)
    number_formats.decode_rows(want, sizes, dims, formats, scales, out)
    wire.decode(want, counts, want_out)
    if bool(flat.isfinite().all()):
        assert got.equal(want)
        assert out.view(torch.int32).equal(want_out.view(torch.int32))
    else:  # any NaN is as good as another
        own = torch.full_like(flat, 7.0)
        number_formats.decode_rows(got, sizes, dims, formats, scales, own)
        for each in (out, own):
            torch.testing.assert_close(each, want_out, rtol=0, atol=0, equal_nan=True)
    return out


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    ranks=st.integers(1, 3),
    exponent=st.sampled_from([-44.0, -38.0, -12.0, 0.0, 4.0, 30.0, 37.0]),
    bad=st.sampled_from([None, None, None, float("nan"), float("inf"), -float("inf")]),
    data=st.data(),
)
def test_bytes_and_numbers_are_those_of_the_codecs(
    kinds: list[str], ranks: int, exponent: float, bad: float | None, data: st.DataObject
) -> None:
    dims = [data.draw(st.sampled_from([4, 8, 12, 64, 100])) for _ in kinds]
    counts = [[data.draw(st.integers(0, 7)) for _ in kinds] for _ in range(ranks)]
    size = sum(n * dim for row in counts for n, dim in zip(row, dims, strict=True))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    spread = 10 ** (torch.rand(size, generator=generator, dtype=torch.float64) * 3 + exponent - 2)
    flat = (torch.randn(size, generator=generator).clamp(-3, 3) * spread).float()
    flat[torch.rand(size, generator=generator) < 0.1] = 0.0
    if bad is not None and size:
        flat[data.draw(st.integers(0, size - 1))] = bad
    check(kinds, dims, counts, flat)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0.0, 1.0, -3e-45, 3.4e38])
def test_rows_that_are_all_the_same(kind: str, number: float) -> None:
    check([kind], [8], [[3], [0], [2]], torch.full((40,), number))


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_one_program_has(kind: str) -> None:
    flat = torch.randn(700 * 64 + 9 * 12, generator=torch.Generator().manual_seed(1))
    check([kind, "fp16"], [64, 12], [[500, 4], [200, 5]], flat)


def test_wide_rows_and_no_rows() -> None:
    check(["int8", "bf16"], [2000, 4], [[2, 0]], torch.randn(4000))
    check(["int8", "fp16", "fp32"], [4, 4, 4], [[0, 0, 0], [0, 0, 0]], torch.empty(0))
    assert not number_formats.encode_rows(torch.empty(0), [0], [4], [0], [0.0]).numel()
