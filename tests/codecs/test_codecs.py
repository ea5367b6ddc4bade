"""Each codec: what arrives, how far it may be off, and how many bytes it takes."""

from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.codecs.codec import Codec, Entries
from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.codecs.wire import Wire, build, build_backward
from fusedrec_torchrec.core import native

CPU = torch.device("cpu")


def codec_of(dim: int, **given: Any) -> Codec:
    return build(CodecOptions(**given), dim, CPU)


def tau_of(codec: DctCodec) -> float:
    assert codec.threshold.tau is not None
    return float(codec.threshold.tau)


def there_and_back(
    codec: Codec, rows: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, Entries | None, Entries | None]:
    streams, sent = codec.encode(rows, counts, True)
    sizes = codec.sizes(counts)
    assert [each.numel() for each in streams] == [sum(each) for each in sizes]
    assert all(each.dtype == torch.uint8 for each in streams)
    out = torch.full_like(rows, 7.0)
    return out, sent, codec.decode(streams, counts, out)


def rows_of(count: int, dim: int, seed: int, exponent: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (exponent + torch.rand(count, 1, generator=g) * 2)
    return torch.randn(count, dim, generator=g) * magnitude


def bound(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """Returns how far numbers may be off, as docs/compression.md says."""
    if kind == "bf16":
        return rows.abs() * 2.0**-8
    if kind == "fp16":  # of numbers that are much smaller than the largest, the last digits
        return rows.abs() * 2.0**-11 + 2.0**-38 * rows.abs().max()
    reach = rows.max(1, keepdim=True).values - rows.min(1, keepdim=True).values
    roundings = 2.0**-20 * rows.abs().amax(1, keepdim=True)
    return (reach / 255 / 2 + roundings).expand_as(rows)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["fp16", "bf16", "int8"]),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    dim=st.sampled_from([4, 12, 64]),
    exponent=st.sampled_from([-12.0, -6.0, 0.0, 6.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_numbers_are_off_by_no_more_than_the_bound(
    kind: str, counts: list[int], dim: int, exponent: float, seed: int
) -> None:
    rows = rows_of(sum(counts), dim, seed, exponent)
    out, _, _ = there_and_back(codec_of(dim, type=kind), rows, counts)
    if rows.numel():
        assert bool(((out - rows).abs() <= bound(kind, rows)).all())


def test_fp16_without_a_scale_would_lose_small_gradients() -> None:
    rows = torch.full((3, 4), 3e-9)
    out, _, _ = there_and_back(codec_of(4, type="fp16"), rows, [3])
    assert torch.allclose(out, rows, rtol=1e-3, atol=0)
    unscaled, _, _ = there_and_back(codec_of(4, type="fp16", loss_scale=1.0), rows, [3])
    assert not unscaled.any()
    scaled, _, _ = there_and_back(codec_of(4, type="fp16", loss_scale=2.0**20), rows, [3])
    assert torch.allclose(scaled, rows, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "dct"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_still_seen(kind: str, bad: float) -> None:
    rows = rows_of(6, 8, 0, 0.0)
    rows[4, 3] = bad
    more: Any = {"density": 0.1} if kind == "dct" else {}
    out, _, _ = there_and_back(codec_of(8, type=kind, **more), rows, [3, 3])
    assert not torch.isfinite(out[4]).all()


def test_bytes_of_a_row() -> None:
    counts, sent = [3, 5], 8 * 64
    sizes = {
        kind: sum(map(sum, codec_of(64, type=kind).sizes(counts)))
        for kind in ("fp32", "fp16", "bf16", "int8")
    }
    scales = 4 * len(counts)
    assert sizes["fp32"] == 4 * sent
    assert sizes["bf16"] == 2 * sent
    assert sizes["fp16"] == 2 * sent + scales
    assert sizes["int8"] == sent + 8 * 8 + scales


@pytest.mark.parametrize(("dim", "density", "indexed"), [(64, 0.05, True), (64, 0.5, False)])
def test_places_are_written_in_the_shorter_way(dim: int, density: float, indexed: bool) -> None:
    codec = codec_of(dim, type="dct", density=density)
    assert isinstance(codec, DctCodec)
    room = codec.room(100)
    assert density * 6400 <= room <= density * 6400 * 1.07 + 1
    index, mask = 100 + room, 100 * dim // 8
    assert (index < mask) == indexed
    assert sum(map(sum, codec.sizes([100]))) == 4 * room + min(index, mask)


@pytest.mark.parametrize("use_native", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    dim=st.sampled_from([4, 12, 64, 260]),
    density=st.sampled_from([0.01, 0.1, 0.5, 0.97]),
    seed=st.integers(0, 1000),
    values=st.sampled_from(["fp32", "bf16", "fp16"]),
    relative=st.booleans(),
)
def test_the_largest_entries_travel_and_nothing_else(
    use_native: bool,
    counts: list[int],
    dim: int,
    density: float,
    seed: int,
    values: Any,
    relative: bool,
) -> None:
    if use_native and not native.available():
        pytest.skip("needs a C++ compiler")
    with mock.patch.object(native, "available_on", return_value=use_native):
        check_largest(counts, dim, density, seed, values, relative)


def check_largest(
    counts: list[int], dim: int, density: float, seed: int, values: Any, relative: bool
) -> None:
    rows = rows_of(sum(counts), dim, seed, 0.0)
    codec = codec_of(dim, type="dct", density=density, values=values, relative=relative)
    assert isinstance(codec, DctCodec)
    out, sent, received = there_and_back(codec, rows, counts)
    assert sent is not None
    assert received is not None
    assert torch.equal(sent.positions_E, received.positions_E)
    travelled = torch.zeros(rows.numel() + 1, dtype=torch.bool)
    travelled[sent.positions_E] = True
    travelled = travelled[:-1].view_as(rows)
    assert not out[~travelled].any()
    if values == "fp32":
        assert torch.equal(out[travelled], rows[travelled])
    else:
        assert torch.allclose(out[travelled], rows[travelled], rtol=2.0**-8, atol=1e-9)
    for start, count in zip(accumulate(counts, initial=0), counts, strict=False):
        of_rank = slice(start, start + count)
        sizes = rows[of_rank].abs()
        if relative and count:
            sizes = sizes / sizes.amax(1, keepdim=True)
        kept, left = sizes[travelled[of_rank]], sizes[~travelled[of_rank]]
        assert kept.numel() <= codec.room(count)
        if kept.numel() and left.numel():
            assert kept.min() >= left.max()


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    dim=st.sampled_from([4, 12, 260]),
    density=st.sampled_from([0.05, 0.4]),
    seed=st.integers(0, 1000),
    nan=st.booleans(),
)
def test_both_ways_of_finding_them_send_the_same_bytes(
    counts: list[int], dim: int, density: float, seed: int, nan: bool
) -> None:
    rows = rows_of(sum(counts), dim, seed, 0.0)
    if nan and rows.numel():
        rows.view(-1)[seed % rows.numel()] = torch.nan
    sent = []
    for use_native in (False, True):
        with mock.patch.object(native, "available_on", return_value=use_native):
            sent.append(codec_of(dim, type="dct", density=density).encode(rows, counts, True)[0])
    for one, other in zip(*sent, strict=True):
        assert torch.equal(one, other)


def test_a_message_with_too_many_entries_renews_the_threshold() -> None:
    codec = codec_of(16, type="dct", density=0.1, every=1000, relative=False)
    assert isinstance(codec, DctCodec)
    rows = rows_of(200, 16, 0, 0.0)
    there_and_back(codec, rows, [100, 100])
    first = tau_of(codec)
    there_and_back(codec, rows * 10, [100, 100])  # does not fit
    assert tau_of(codec) == first
    there_and_back(codec, rows * 10, [100, 100])
    assert tau_of(codec) == pytest.approx(10 * first, rel=1e-6)


def test_the_threshold_is_renewed_every_so_many_steps_of_training() -> None:
    codec = codec_of(16, type="dct", density=0.5, every=3, relative=False)
    assert isinstance(codec, DctCodec)
    rows = rows_of(64, 16, 0, 0.0)
    taus = []
    for step in range(7):
        codec.encode(rows / (1 + step / 100), [64], True)
        codec.encode(rows * 0.001, [64], False)  # an evaluation changes nothing
        taus.append(tau_of(codec))
    assert taus[0] == taus[1] == taus[2]
    assert taus[3] == taus[4] == taus[5] == pytest.approx(taus[0] / 1.03)
    assert taus[6] == pytest.approx(taus[0] / 1.06)


def test_a_message_that_is_nearly_empty_renews_the_threshold() -> None:
    codec = codec_of(16, type="dct", density=0.1, every=1000, relative=False)
    assert isinstance(codec, DctCodec)
    rows = rows_of(200, 16, 0, 0.0)
    there_and_back(codec, rows, [100, 100])
    first = tau_of(codec)
    there_and_back(codec, rows / 10, [100, 100])
    there_and_back(codec, rows / 10, [100, 100])
    assert tau_of(codec) == pytest.approx(first / 10, rel=1e-6)


def test_rows_of_zeros_can_be_trained() -> None:
    """Gradients come back for entries that travelled, zeros or not."""
    rows = rows_of(1000, 16, 0, 0.0)
    rows[:100] = 0
    _, sent, _ = there_and_back(codec_of(16, type="dct", density=0.25), rows, [1000])
    assert sent is not None
    entries = sent.positions_E[sent.positions_E < rows.numel()]
    travelled = torch.bincount(entries // 16, minlength=1000)
    assert bool((travelled[:100] > 0).all())


def test_relative_thresholds_leave_no_row_out() -> None:
    rows = rows_of(50, 16, 0, 0.0) * torch.logspace(-6, 0, 50)[:, None]
    seen = {}
    for relative in (False, True):
        codec = codec_of(16, type="dct", density=0.2, relative=relative)
        out, _, _ = there_and_back(codec, rows, [50])
        seen[relative] = int(out.any(1).sum())
    assert seen[True] == 50 and seen[False] < 30


def test_everything_is_exactly_what_it_was_at_density_1() -> None:
    rows = rows_of(20, 8, 0, 0.0)
    codec = codec_of(8, type="dct", density=1.0)
    out, _, _ = there_and_back(codec, rows, [5, 15])
    assert torch.equal(out, rows)
    assert sum(map(sum, codec.sizes([5, 15]))) == rows.numel() * 4


@pytest.mark.parametrize("backward", ["fp32", "bf16", "fp16"])
def test_gradients_of_the_entries_that_travelled_come_back(backward: Any) -> None:
    counts, dim = [7, 0, 12], 16
    forward = codec_of(dim, type="dct", density=0.2)
    codec = build_backward(CodecOptions(type=backward), forward, dim, CPU)
    rows = rows_of(sum(counts), dim, 1, 0.0)
    _, sent, received = there_and_back(forward, rows, counts)
    gradients = rows_of(sum(counts), dim, 2, -6.0)
    streams, _ = codec.encode(gradients, counts, True, received)
    sizes = codec.sizes(counts)
    assert [each.numel() for each in streams] == [sum(each) for each in sizes]
    out = torch.full_like(gradients, 7.0)
    codec.decode(streams, counts, out, sent)
    travelled = torch.zeros(rows.numel() + 1, dtype=torch.bool)
    assert sent is not None
    travelled[sent.positions_E] = True
    travelled = travelled[:-1].view_as(rows)
    assert not out[~travelled].any()
    assert torch.allclose(out[travelled], gradients[travelled], rtol=2.0**-8, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(
        st.sampled_from(["fp32", "fp16", "bf16", "int8", "dct"]), min_size=1, max_size=4
    ),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_buckets_with_codecs_of_their_own_share_a_buffer(
    kinds: list[Any], ranks: int, seed: int
) -> None:
    """Bytes are cut for ranks as an all-to-all would; each bucket gets what its codec gives."""
    dims = [4 * (k + 1) for k in range(len(kinds))]
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (ranks, len(kinds)), generator=g).tolist()
    codecs = [codec_of(dim, type=kind) for kind, dim in zip(kinds, dims, strict=True)]
    wire = Wire(codecs, dims)
    flat = torch.randn(
        sum(n * d for row in counts for n, d in zip(row, dims, strict=True)), generator=g
    )
    encoded, sent = wire.encode(flat, counts, True)
    assert encoded.numel() == sum(wire.sizes(counts))
    out = torch.full_like(flat, 7.0)
    received = wire.decode(encoded, counts, out)
    assert [each is None for each in sent] == [kind != "dct" for kind in kinds]
    at = 0
    for row in counts:
        for k, (n, dim) in enumerate(zip(row, dims, strict=True)):
            want, got = (t[at : at + n * dim].view(-1, dim) for t in (flat, out))
            at += n * dim
            if kinds[k] == "fp32":
                assert torch.equal(got, want)
            elif kinds[k] == "dct":
                assert bool(((got == want) | (got == 0)).all())
            elif n:
                scale = flat.abs().max()
                assert bool(((got - want).abs() <= bound(kinds[k], want) + 2.0**-30 * scale).all())
    for one, other in zip(sent, received, strict=True):
        assert one is None or (
            other is not None and torch.equal(one.positions_E, other.positions_E)
        )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "fp8"}, "type is 'fp8': it should be 'fp32', 'fp16', 'bf16', 'int8' or 'dct'"),
        ({"type": "dct", "density": 0.0}, "density is 0.0: it should be greater than 0 and less"),
        ({"type": "dct", "density": 1.5}, "density is 1.5: it should be less than or equal to 1"),
        ({"type": "dct", "every": 0}, "every is 0: it should be greater than or equal to 1"),
        (
            {"type": "dct", "values": "int8"},
            "values is 'int8': it should be 'fp32', 'fp16' or 'bf16'",
        ),
        ({"type": "bf16", "density": 0.5}, "density is 0.5 with type bf16, must be left out"),
        ({"type": "int8", "loss_scale": 2.0}, "loss_scale is 2.0 with type int8, must be left out"),
        ({"type": "fp16", "loss_scale": 0.0}, "loss_scale is 0.0: it should be greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CodecOptions(**given)
