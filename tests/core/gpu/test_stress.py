"""Very many ids at once, again and again, against ``torch.unique``: on real GPUs programs race.

In the interpreter there are few ids: programs run one after another there.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from fusedrec_torchrec.core.gpu import bags, row_gradients, row_numbers
from fusedrec_torchrec.core.gpu.segments import FEW, PIECE
from tests.core.gpu.device import DEVICE, IS_INTERPRETED

IDS, TIMES = (3_000, 1) if IS_INTERPRETED else (1_000_000, 20)
ROWS, OWNERS, DIM = 40_000, 4, 8


def zipf(generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(IDS, generator=generator, dtype=torch.float64)
    return (ROWS**uniform).long() - 1


def all_equal(_: torch.Generator) -> torch.Tensor:
    return torch.full((IDS,), 4711)


def two_rows(generator: torch.Generator) -> torch.Tensor:
    """Returns neighbouring keys, which are of neighbouring parts."""
    return ROWS // 2 - torch.randint(2, (IDS,), generator=generator)


def distinct(generator: torch.Generator) -> torch.Tensor:
    """Returns keys as far as there are rows."""
    return torch.randperm(max(IDS, ROWS), generator=generator)[:IDS] % ROWS


KINDS: list[Callable[[torch.Generator], torch.Tensor]] = [zipf, all_equal, two_rows, distinct]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_dtype", [torch.int32, torch.int64])
def test_rows_and_their_gradients(
    kind: Callable[[torch.Generator], torch.Tensor], key_dtype: torch.dtype
) -> None:
    """Numbers rows, and sums up gradients by them; whole numbers, whose sums are exact."""
    offsets = torch.arange(IDS + 1, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(OWNERS, device=DEVICE)[None] * (ROWS // OWNERS)
    part_starts = torch.arange(OWNERS + 1, device=DEVICE) * (ROWS // OWNERS)
    table = (torch.tensor([ROWS], device=DEVICE), None, starts, torch.zeros_like(starts))
    slots = torch.tensor([[DIM, 0, 0]], device=DEVICE)
    gradient = (torch.arange(IDS * DIM, device=DEVICE) % 5).float().view(IDS, DIM)
    for seed in range(TIMES):
        ids = kind(torch.Generator().manual_seed(seed)).to(DEVICE)
        unique, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        keys, rows, counts_P, bad, ranks, segments, cursors = row_numbers.number_batch_rows(
            ids, offsets, IDS, *table, part_starts.to(key_dtype), None
        )
        found = unique.numel()
        assert not bool(bad) and int(counts_P.sum()) == found
        own = keys[:found].long()
        order = own.argsort()
        assert torch.equal(own[order], unique)
        assert torch.equal(own[rows.long()], ids)
        owners = torch.searchsorted(part_starts, own, right=True) - 1
        assert torch.equal(owners, owners.sort().values)
        assert torch.equal(torch.bincount(owners, minlength=OWNERS), counts_P)
        # Ids of a row are numbered from zero on.
        assert torch.equal(segments[:found, 1].long()[order], counts)
        by_row = (rows.long() * IDS + ranks).sort().values
        sizes = segments[:found, 1].long()
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        assert torch.equal(by_row % IDS, torch.arange(IDS, device=DEVICE) - first)
        is_long = counts > FEW
        assert cursors.tolist() == [
            int(counts[~is_long].sum()),
            int((-(-counts[is_long] // PIECE)).sum()),
        ]
        out = torch.full((found * DIM,), 7.0, device=DEVICE)
        row_gradients.slot_row_sums(
            gradient, None, [DIM], slots, rows, offsets, None, ranks, segments, cursors,
            IDS, IDS, found, 0.5, out,
        )  # fmt: skip
        want = torch.zeros(found, DIM, dtype=torch.float64, device=DEVICE)
        want.index_add_(0, inverse, gradient.double() / 2)
        if bool((want < 2**23).all()):
            assert torch.equal(out.view(-1, DIM)[order].double(), want)
        else:
            torch.testing.assert_close(out.view(-1, DIM)[order].double(), want)


@pytest.mark.parametrize("kind", KINDS)
def test_distinct_bags(kind: Callable[[torch.Generator], torch.Tensor]) -> None:
    """Bags of two ids, the second of which tells little."""
    count = IDS // 2
    starts = torch.arange(0, 2 * count + 1, 2, dtype=torch.int32, device=DEVICE)
    # One slot, one shard of one owner: cells are bags.
    places = torch.tensor([count, 0, 0, 1, 0, count], device=DEVICE)
    zero, rows = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([ROWS])
    for seed in range(TIMES):
        first = kind(torch.Generator().manual_seed(seed))[:count]
        ids = torch.stack([first, first % 3], 1).to(DEVICE)
        unique, inverse = ids.unique(dim=0, return_inverse=True)
        counts, cells, _, sums, bad = bags.ask_bags(
            ids.flatten(), starts, None, places, count, zero, rows.to(DEVICE), None,
            zero + 1, torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), 1, 1,
        )  # fmt: skip
        assert not bool(bad) and counts.tolist() == [[len(unique)], [2 * len(unique)]]
        # Every bag shows the unit of its kind, and every kind has one.
        unit_of_kind = torch.full((len(unique),), -1, device=DEVICE).scatter_(
            0, inverse, cells.long()
        )
        assert torch.equal(unit_of_kind[inverse], cells.long())
        assert torch.equal(unit_of_kind.sort().values, torch.arange(len(unique), device=DEVICE))
        assert int(sums[-1]) == (len(unique) << 32) + 2 * len(unique)
