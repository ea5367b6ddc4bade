"""How often the host waits for the device, without one: fake CUDA tensors have no values to read.

A batch goes forward through everything that the fused tables of a module do with it: checks, input
dist, lookup, output dist.  Our kernels and FBGEMM's lookup are known by the shapes of what they
return, and the headers that the host reads are given by the test.  Whatever else asks for a number
fails; who has waited is noted.
"""

import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import gpu
from fusedrec_torchrec.core.native.library import COMPILERS, FLAGS, LIBRARIES
from fusedrec_torchrec.exchange.buckets import BucketedTables, group_into_buckets, slot_names
from fusedrec_torchrec.exchange.features import CanonicalFeatures
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.outgoing_batch import BatchNotes
from fusedrec_torchrec.exchange.output_dist import FusedOutputDist
from tests.exchange.tables import sharded_tables
from tests.warm.forks import CONTEXT

SOURCE = Path(__file__).with_name("no_guard.cpp")
RANKS, BATCH, CAPACITY = 2, 3, 64
IDS = [4, 5]  # of the two features
ROWS = [3, 2]  # of the two tables, that this rank asks of each rank, and each rank of this one
HEADER = [0, CAPACITY, 0, *ROWS]  # status, wanted capacity, overflow, rows of each bucket
HEADERS = HEADER * RANKS + ROWS * RANKS + [sum(ROWS)] * RANKS
OF_HEADERS = "fusedrec_torchrec/exchange/messages.py"
OF_COUNTS = "torchrec/sparse/jagged_tensor.py"  # ids of each feature
TRANSFER = "fusedrec_torchrec/core/transfer.py"  # who waits is whoever calls it


class NoPinnedMemory(TorchFunctionMode):
    """There is no memory to be pinned."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **given)


class Reads(TorchFunctionMode):
    """Answers ``tolist``, in order; nobody may ask for single numbers.

    It notes the files that have the host wait for the device: for a stream or an event, or for
    numbers that are not sent to pinned memory without waiting.
    """

    NUMBERS = ("item", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    COPIES = ("cpu", "to", "copy_")

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self.answers = answers
        self.files: list[str] = []

    def waits(self) -> None:
        self.files.append(_file())

    def numbers_of(self, tensor: FakeTensor) -> list[int]:
        """Returns the next answer: what ``tolist`` of a fake tensor does from now on."""
        assert self.answers, f"tolist reads from the device once more:\n{_stack()}"
        answer = self.answers.pop(0)
        assert tensor.shape == (len(answer),), f"{tuple(tensor.shape)} numbers:\n{_stack()}"
        if tensor.device.type == "cuda":
            self.waits()
        return answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NUMBERS and isinstance(args[0], FakeTensor):
            raise AssertionError(f"{name} reads from the device once more:\n{_stack()}")
        given = kwargs or {}
        result = func(*args, **given)
        if name in self.COPIES and not result.is_cuda and not given.get("non_blocking"):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda:
                self.waits()
        return result


def _file() -> str:
    for frame, _ in traceback.walk_stack(None):
        for library in ("fusedrec_torchrec", "torchrec"):
            name = frame.f_code.co_filename
            if f"/{library}/" in name:
                file = library + name.rpartition(f"/{library}")[2]
                if file != TRANSFER:
                    return file
                break
    return "elsewhere"


def _stack() -> str:
    return "".join(traceback.format_stack()[-8:-2])


class NoStream:
    """A stream and an event, which torch without CUDA does not have: waiting for it is noted.

    Numbers that were sent to the host without waiting have come when it has waited for others.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> "NoStream":
        return self

    def wait_event(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return bool(self._reads.files)

    def synchronize(self) -> None:
        self._reads.waits()


class OnHost:
    """A tensor on the host, which has values: here all tensors are fake, wherever they are."""

    def __init__(self, values: list[bool]) -> None:
        self._values = values

    def __getitem__(self, own: slice) -> "OnHost":
        return OnHost(self._values[own])

    def any(self) -> bool:
        return any(self._values)

    def tolist(self) -> list[bool]:
        return self._values

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self._values, device=device)


# ---------------------------------------------------------------- shapes of what kernels return


def bad_lengths(lengths: torch.Tensor, *_: Any) -> torch.Tensor:
    return lengths.new_empty((), dtype=torch.bool)


def number_batch_rows(ids: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    part_starts, n = others[6], ids.numel()
    rows_N, ranks_N = (ids.new_empty(n, dtype=torch.int32) for _ in range(2))
    return (
        part_starts.new_empty(n),
        rows_N,
        part_starts.new_empty(part_starts.numel() - 1, dtype=torch.int64),
        ids.new_empty((), dtype=torch.bool),
        ranks_N,
        rows_N.new_empty(n, 2),
        rows_N.new_empty(2),
    )


def collect_headers(
    messages: torch.Tensor,
    header: int,
    counts: torch.Tensor,
    statuses: torch.Tensor,
    bag_buckets: int,
    words_per_id: int,
) -> torch.Tensor:
    ranks, units = messages.size(0), counts[: counts.size(0) - bag_buckets].numel()
    return messages.new_empty(ranks * header + units + ranks + statuses.numel())


def unpack(
    messages: torch.Tensor, header: int, sizes: Sequence[int], segments: int
) -> list[torch.Tensor]:
    totals = [sum(sizes[k::segments]) for k in range(segments)]
    return [messages.new_empty(total) for total in totals]


def row_addresses(like: torch.Tensor, counts: Sequence[int], dims: Any) -> torch.Tensor:
    return like.new_empty(sum(counts), dtype=torch.int64)


def take_slots(
    ids: torch.Tensor,
    weights: Any,
    offsets: torch.Tensor,
    places: Any,
    bags: int,
    room: int,
    refused: Any,
) -> tuple[torch.Tensor, ...]:
    lengths = ids.new_empty(bags, dtype=torch.int32)
    weighted = ids.new_empty(0 if weights is None else room, dtype=torch.float32)
    return ids.new_empty(room), weighted, lengths, lengths.new_empty(bags + 1)


def writes(*_: Any) -> None:
    """An operator that returns nothing: it writes to tensors that there are."""


SHAPES: dict[str, Callable[..., Any]] = {
    "bad_lengths": bad_lengths,
    "number_batch_rows": number_batch_rows,
    "pack_rows": writes,
    "take_slots": take_slots,
    "write_headers": writes,
    "collect_headers": collect_headers,
    "unpack": unpack,
    "row_addresses": row_addresses,
    "slot_bag_sums": writes,
    "bag_sums": writes,
}


def look_up(
    table: SplitTableBatchedEmbeddingBagsCodegen,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Stands in for FBGEMM's lookup: a row for each bag."""
    assert indices.is_cuda and offsets.is_cuda
    rows = torch.empty(offsets.numel() - 1, table.max_D, device=indices.device)
    return rows.requires_grad_()


# ---------------------------------------------------------------- a step


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that lets torch without CUDA index CUDA tensors."""
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    torch_folder = Path(torch.__file__).parent
    built = tmp_path_factory.mktemp("guard") / "no_guard.so"
    command = [compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += ["-isystem", str(torch_folder / "include"), str(SOURCE)]
    command += [f"-L{torch_folder / 'lib'}", *LIBRARIES, "-o", str(built)]
    subprocess.run(command, check=True, timeout=250)
    return built


def files_that_wait(
    guard: Path, answers: list[list[int]], kernels: bool, **step: bool
) -> list[str]:
    """Brings a batch forward; in a process of its own."""
    torch.ops.load_library(str(guard))
    os.environ["FUSEDREC_TRITON"] = str(int(kernels))
    assert gpu.available() == kernels
    for name, shapes in SHAPES.items() if kernels else ():
        torch.library.register_fake(f"fusedrec::{name}", shapes)
    reads = Reads(answers)
    cuda: Any = torch.cuda
    cuda.current_stream = cuda.Event = lambda *_: NoStream(reads)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    fake_tensor: Any = FakeTensor
    fake_tensor.tolist = lambda tensor: reads.numbers_of(tensor)
    table: Any = SplitTableBatchedEmbeddingBagsCodegen
    table.forward = look_up
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with FakeTensorMode(allow_non_fake_inputs=True), NoPinnedMemory():
        forward(reads, **step)
    assert not reads.answers
    return reads.files


def forward(
    reads: Reads,
    pooled: bool,
    in_order: bool = True,
    once_more: bool = False,
) -> torch.Tensor:
    """Makes tables, and brings a batch from the requester to the owners and back."""
    dims = [8, 4] if pooled else [8, 8]
    starts = [0, 500, 1000]
    # Sequences have one dimension; tables of different types still are two buckets.
    specs: list[dict[str, object]] = [
        {"name": name, "dim": dim, "lr": 0.1 * (i + 1)}
        for i, (name, dim) in enumerate(zip("ab", dims, strict=True))
    ]
    device, group = torch.device("cuda:0"), dist.group.WORLD
    assert group is not None
    buckets = group_into_buckets(sharded_tables(specs, [starts, starts], "cuda:0"))
    tables = BucketedTables(buckets)
    names = [feature for feature, _ in slot_names(tables.tables)]
    canonical = CanonicalFeatures(
        names,
        known=set(names),
        refuse_extra=True,
        weighted=False,
        needs_weights=False,
        beside_stock=False,
        device=device,
        counted=False,
        any_order=False,
    )
    layout = ExchangeLayout(tables, device)
    lookup = FusedLookup(rank=0, buckets=buckets, pg=group, device=device)
    means: Any = OnHost([True, False]) if pooled else None
    input_dist = FusedInputDist(group, layout, ExchangeOptions(), means)
    input_dist.exchange.capacity.update(CAPACITY)
    output_dist = FusedOutputDist(group, dims)
    features = KeyedJaggedTensor(
        keys=names if in_order else names[::-1],
        values=torch.empty(sum(IDS), dtype=torch.int64, device=device),
        lengths=torch.empty(2 * BATCH, dtype=torch.int32, device=device),
    )
    with reads:
        batch, told = canonical(features)
        with input_dist.noting(BatchNotes(training=True, reports=told.reports)):
            sent = input_dist(batch)
        received = sent.wait().wait()
        assert [tuple(asked.rows_R.shape) for asked in received.asked()] == [(6,), (4,)]
        received.context.count_features()
        if once_more:
            received.segments[0].sum().item()
        rows = lookup(received)
        output = output_dist(rows, received.context).wait()
    assert output.is_cuda and output.requires_grad
    assert output.shape == ((BATCH, sum(dims)) if pooled else (sum(IDS), dims[0]))
    return output


def run(function: Any, *args: Any, **kwargs: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as executor:
        return executor.submit(function, *args, **kwargs).result()


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "in another order"])
def test_bags_are_pooled_with_one_wait_of_the_host(guard: Path, in_order: bool) -> None:
    waits = run(files_that_wait, guard, [HEADERS], True, pooled=True, in_order=in_order)
    assert waits == [OF_HEADERS]


@needs_triton
def test_sequences_come_with_one_wait_of_the_host(guard: Path) -> None:
    """How many ids each feature has is sent to the host, and has come when headers have."""
    starts = [0, IDS[0], sum(IDS)]
    waits = run(files_that_wait, guard, [HEADERS, starts], True, pooled=False)
    assert waits == [OF_HEADERS]


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_without_kernels_there_is_one_more(guard: Path, pooled: bool) -> None:
    waits = run(files_that_wait, guard, [IDS, [0], HEADERS], False, pooled=pooled)
    assert waits == [OF_COUNTS, OF_HEADERS]


@needs_triton
def test_a_number_that_is_read_from_the_device_is_noticed(guard: Path) -> None:
    with pytest.raises(AssertionError, match="item reads from the device once more"):
        run(files_that_wait, guard, [HEADERS], True, pooled=True, once_more=True)
