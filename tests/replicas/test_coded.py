"""Gradients that travel by a codec: the message, and what is left for the next one."""

import pytest
import torch

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.replicas.coded import CodedGradients, coded_gradients
from tests.replicas.kernels import places_of, replica_of

DCT = CodecOptions(type="dct", density=0.25)
CODECS = [DCT, CodecOptions(type="int8"), CodecOptions(type="bf16"), CodecOptions(type="fp16")]


def coded_of(options: CodecOptions) -> CodedGradients:
    """Two buckets of different widths."""
    return CodedGradients(options, [replica_of(6, dim=4), replica_of(5, dim=12)])


def gradients_of(counts: tuple[int, int], seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=random) for n, dim in zip(counts, (4, 12), strict=True)]


def sent(
    coded: CodedGradients, places: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What arrives of a message."""
    counts = [len(of_bucket) for of_bucket in places]
    message = torch.cat(coded.pack(places, gradients))
    assert message.dtype == torch.int32
    assert message.numel() == coded.words(counts)
    (arrived_places,), (arrived,), _ = coded.unpack([message], [counts])
    return list(arrived_places), arrived


@pytest.mark.parametrize("options", CODECS, ids=str)
@pytest.mark.parametrize("counts", [(3, 2), (1, 5), (0, 3), (2, 0), (0, 0)])
def test_what_arrives_and_what_is_left_are_the_gradients(
    options: CodecOptions, counts: tuple[int, int]
) -> None:
    """Sizes of messages follow from the numbers of places alone."""
    coded = coded_of(options)
    places = [places_of(4, 0, 5)[: counts[0]], places_of(1, 3, 0, 4, 2)[: counts[1]]]
    total = [torch.zeros(6, 4), torch.zeros(5, 12)]
    learned = [torch.zeros(6, 4), torch.zeros(5, 12)]
    for step in range(4):
        gradients = gradients_of(counts, step)
        arrived_places, arrived = sent(coded, places, gradients)
        for k in range(2):
            assert torch.equal(arrived_places[k], places[k])
            total[k].index_add_(0, places[k].long(), gradients[k])
            learned[k].index_add_(0, places[k].long(), arrived[k])
    for k in range(2):
        torch.testing.assert_close(learned[k] + coded.left[k], total[k], rtol=0, atol=1e-4)
        untouched = [p for p in range(len(total[k])) if p not in places[k].tolist()]
        assert not coded.left[k][untouched].any()
        assert bool(coded.left[k].any()) == bool(counts[k])


def test_what_is_left_travels_with_the_next_gradient_of_the_place() -> None:
    coded = CodedGradients(CodecOptions(type="bf16"), [replica_of(3)])
    coded.left[0][1] = 8.0
    coded.left[0][2] = 16.0
    _, (arrived,) = sent(coded, [places_of(1)], [torch.ones(1, 4)])
    assert arrived.tolist() == [[9.0] * 4]
    assert coded.left[0].tolist() == [[0.0] * 4, [0.0] * 4, [16.0] * 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_left_of_numbers_that_are_none(bad: float) -> None:
    coded = CodedGradients(CodecOptions(type="bf16"), [replica_of(2)])
    _, (arrived,) = sent(coded, [places_of(0)], [torch.full((1, 4), bad)])
    assert not arrived.isfinite().any()
    assert not coded.left[0].any()


def test_thresholds_are_taken_over() -> None:
    """Another object that loads the state packs the same message."""
    coded, other = coded_of(DCT), coded_of(DCT)
    places = [places_of(0, 1, 2, 3), places_of(0, 1, 2)]
    for step in range(3):
        coded.pack(places, gradients_of((4, 3), step))
    states = coded.thresholds()
    assert sorted(states) == ["0.threshold", "1.threshold"]
    other.load_thresholds([states])
    for name, state in other.thresholds().items():
        assert torch.equal(state, states[name])
    for own, left in zip(coded.left, other.left, strict=True):
        left.copy_(own)
    again = gradients_of((4, 3), 9)
    one, two = (torch.cat(each.pack(places, again)) for each in (coded, other))
    assert torch.equal(one, two)


def test_codecs_without_a_threshold_have_no_state() -> None:
    coded = coded_of(CodecOptions(type="int8"))
    assert coded.thresholds() == {}
    coded.load_thresholds([{}])


def test_exact_gradients_travel_as_they_are() -> None:
    replicas = [replica_of(2)]
    assert coded_gradients(None, replicas) is None
    assert coded_gradients(CodecOptions(type="fp32"), replicas) is None
    assert coded_gradients(CodecOptions(type="dct", density=1.0), replicas) is None
    assert coded_gradients(DCT, replicas) is not None


def test_clipping_is_refused() -> None:
    clipped = replica_of(2, gradient_clipping=True, max_gradient=1.0)
    with pytest.raises(ValueError, match="codec is dct and the optimizer clips gradients"):
        coded_gradients(DCT, [replica_of(2), clipped])
