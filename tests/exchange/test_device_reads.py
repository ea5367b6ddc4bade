"""How often the host reads from the device, without one: fake CUDA tensors have no values to read.

Whatever asks for one fails, unless this test gives the answer; it notes who has asked.
"""

import os
import shutil
import subprocess
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.native.library import COMPILERS, FLAGS, LIBRARIES
from fusedrec_torchrec.exchange.buckets import BucketedTables, group_into_buckets
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.output_dist import FusedOutputDist
from tests.exchange.tables import sharded_tables
from tests.warm.forks import CONTEXT

SOURCE = Path(__file__).with_name("no_guard.cpp")
RANKS, BATCH = 2, 3
IDS = [4, 5]  # of the two features
READS = [
    "torchrec/sparse/jagged_tensor.py",  # ids per feature
    "fusedrec_torchrec/exchange/messages.py",  # headers
]


class Reads(TorchFunctionMode):
    """Answers ``tolist``, in order; nobody may ask for single numbers.

    It notes the files that bring numbers from the device to the host, each with a wait for it.
    """

    NUMBERS = ("item", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    COPIES = ("cpu", "to", "copy_")

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self.answers = answers
        self.files: list[str] = []

    def numbers_of(self, tensor: FakeTensor) -> list[int]:
        """Returns the next answer: what ``tolist`` of a fake tensor does from now on."""
        assert self.answers, f"tolist reads from the device once more:\n{_stack()}"
        answer = self.answers.pop(0)
        assert tensor.shape == (len(answer),), f"{tuple(tensor.shape)} numbers:\n{_stack()}"
        if tensor.device.type == "cuda":
            self.files.append(_file())
        return answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NUMBERS and isinstance(args[0], FakeTensor):
            raise AssertionError(f"{name} reads from the device once more:\n{_stack()}")
        # There is no memory to be pinned, either.
        others = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        result = func(*args, **others)
        if name in self.COPIES and not result.is_cuda:
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda:
                self.files.append(_file())
        return result


def _file() -> str:
    for frame, _ in traceback.walk_stack(None):
        for library in ("fusedrec_torchrec", "torchrec"):
            name = frame.f_code.co_filename
            if f"/{library}/" in name:
                return library + name.rpartition(f"/{library}")[2]
    return "elsewhere"


def _stack() -> str:
    return "".join(traceback.format_stack()[-8:-2])


class NoStream:
    """A stream and an event that do nothing: torch without CUDA has none."""

    def record(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def library(folder: Path) -> Path:
    """Compiles what lets torch without CUDA index CUDA tensors."""
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    torch_folder = Path(torch.__file__).parent
    built = folder / "no_guard.so"
    command = [compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += ["-isystem", str(torch_folder / "include"), str(SOURCE)]
    command += [f"-L{torch_folder / 'lib'}", *LIBRARIES, "-o", str(built)]
    subprocess.run(command, check=True, timeout=250)
    return built


def files_that_read(guard: Path, once_more: bool) -> list[str]:
    """Runs ids and rows of a batch through both dists; in a process of its own."""
    torch.ops.load_library(str(guard))
    os.environ["FUSEDREC_TRITON"] = "0"
    cuda: Any = torch.cuda
    cuda.current_stream = cuda.Event = lambda *_: NoStream()
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    header = [0, 64, 0, 3, 2]  # status, wanted capacity, overflow, rows of each bucket
    headers = header * RANKS + [3, 2] * RANKS + [5] * RANKS
    reads = Reads([IDS, headers][-len(READS) :])
    fake_tensor: Any = FakeTensor
    fake_tensor.tolist = lambda tensor: reads.numbers_of(tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), reads:
        step(once_more)
    assert not reads.answers
    return reads.files


def step(once_more: bool) -> None:
    starts = [0, 500, 1000]
    specs: list[dict[str, object]] = [{"name": "a", "dim": 8}, {"name": "b", "dim": 4}]
    device, group = torch.device("cuda:0"), dist.group.WORLD
    assert group is not None
    tables = BucketedTables(group_into_buckets(sharded_tables(specs, [starts, starts])))
    layout = ExchangeLayout(tables, device)
    input_dist = FusedInputDist(group, layout, ExchangeOptions(), None)
    input_dist.exchange.capacity.update(64)
    features = KeyedJaggedTensor(
        keys=["f_a", "f_b"],
        values=torch.empty(sum(IDS), dtype=torch.int64, device=device),
        lengths=torch.empty(2 * BATCH, dtype=torch.int32, device=device),
    )
    received = input_dist(features).wait().wait()
    assert [tuple(asked.rows_R.shape) for asked in received.asked()] == [(6,), (4,)]
    if once_more:
        received.segments[0].sum().item()
    rows = torch.empty(6 * 8 + 4 * 4, device=device)
    FusedOutputDist(group, [8, 4])(rows, received.context).wait()


def run(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as executor:
        return executor.submit(function, *args).result()


def test_the_host_reads_from_the_device_where_it_must_and_nowhere_else(tmp_path: Path) -> None:
    guard = library(tmp_path)
    assert run(files_that_read, guard, False) == READS
    with pytest.raises(AssertionError, match="item reads from the device once more"):
        run(files_that_read, guard, True)
