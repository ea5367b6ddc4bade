"""Where our kernels are launched, and how often they are compiled."""

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated
from tests.parity import run_and_check, train_step
from tests.sharding.modules.test_owner_pooling import MIX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

TABLES = (Table("a", 500, dim=8, pooling="mean"), Table("b", 330, dim=16), Table("c", 70, dim=8))
CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "weights": {"weighted": True, "tables": tuple(Table(t.name, t.rows, t.dim) for t in TABLES)},
    "owners that pool": {"tables": MIX},
    "sequences": {"tables": tuple(Table(t.name, t.rows) for t in TABLES), "kind": "ec"},
    "hot rows": {
        "tables": tuple(dataclasses.replace(t, hot=tuple(range(0, t.rows, 7))) for t in TABLES),
        "hot_options": fr.HotOptions(),
    },
}


def ours(counts: Any) -> list[tuple[str, int]]:
    """The kernels of Triton that were launched, and the devices: names of C++ are mangled."""
    launched = ((event.detail, event.device) for event in counts.of("kernel"))
    return [(name, where) for name, where in launched if name[0] == "_" and name[:2] != "_Z"]


def train_where_another_device_is_current(case: Case) -> list[tuple[str, int]]:
    torch.cuda.set_device(0)
    try:
        with counted() as counts:
            run_and_check(case)
    finally:
        torch.cuda.set_device(dist.get_rank())
    return ours(counts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_launched_where_their_tensors_are(gpu_cluster: Cluster, name: str) -> None:
    """Also on ranks that have not called ``torch.cuda.set_device``."""
    case = Case(**{"tables": TABLES, "batch_sizes": (7, 5), "device": "cuda", **CASES[name]})
    launches = gpu_cluster.run(train_where_another_device_is_current, case)
    for rank, launched in enumerate(launches):
        assert len({kernel for kernel, _ in launched}) > 5
        assert {device for _, device in launched} == {rank}


# Of both ranks: one sample, multiples of 16 and others.
SIZES = ((7, 5), (1, 1), (16, 48), (33, 1), (64, 96), (2, 17), (31, 32))
INT8 = fr.Codecs(forward=fr.CodecOptions(type="int8"), backward=fr.CodecOptions(type="fp16"))
DCT = fr.Codecs(forward=fr.CodecOptions(type="dct"))
TRAINED: dict[str, dict[str, Any]] = {
    **CASES,
    "variable batches": {"vbe": True},
    "sequences, variable batches": {**CASES["sequences"], "vbe": True},
    "2D gradients": {"grid": fr.GridOptions(sharding_group_size=1, sync="gradients")},
    "2D weights": {"grid": fr.GridOptions(sharding_group_size=1, sync="weights")},
    "int8": {"codecs": INT8},
    "dct": {"codecs": DCT},
}


def compiled_in_training(case: Case) -> tuple[set[str], list[str]]:
    """Returns what some steps of one size have compiled, and what all others have, in order."""
    from triton import knobs

    from fusedrec_torchrec.core import gpu
    from fusedrec_torchrec.core.gpu.kernel import Kernel

    modules = [module for module in vars(gpu).values() if isinstance(module, ModuleType)]
    for function in [f for module in modules for f in vars(module).values()]:
        if isinstance(function, Kernel):
            function.variants.clear()  # as in a new process; files of them are still there
            function.device_caches.clear()
    compiled: list[str] = []

    def note(fn: Any, repr: str, **_: Any) -> None:
        compiled.append(f"{fn.name}: {repr}")

    model: Any = sharded(case)
    knobs.runtime.jit_post_compile_hook = note
    try:
        for step, sizes in enumerate([SIZES[0]] * 3 + [*SIZES] * 2):
            if step == 3:
                first, compiled = {text.split(":")[0] for text in compiled}, []
            train_step(dataclasses.replace(case, batch_sizes=sizes), model, step)
            if case.grid is not None:
                model.sync()
    finally:
        knobs.runtime.jit_post_compile_hook = None
    return first, compiled


@pytest.mark.parametrize("name", TRAINED)
def test_batches_of_all_sizes_are_trained_on_with_the_same_kernels(
    gpu_cluster: Cluster, name: str
) -> None:
    """A kernel that is compiled in the midst of training takes seconds, and others wait."""
    given: dict[str, Any] = {"tables": TABLES, "device": "cuda", **TRAINED[name]}
    # Bags of one length: ids of a bag that are taken at a time are a constant of the kernels.
    case = Case(batch_sizes=SIZES[0], lengths=(2,), **given)
    for first, others in gpu_cluster.run(compiled_in_training, case):
        assert len(first) > 5
        assert not others, "\n".join(others)
