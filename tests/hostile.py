"""Files as somebody with bad intentions would write them, and what they must not change."""

import builtins
import collections
import copyreg
import gc
import pathlib
import pickle
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict_saver import save

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint import inert_pickle, manifest, reader, safe_metadata
from fusedrec_torchrec.checkpoint.manifest import Manifest, TableEntry
from fusedrec_torchrec.checkpoint.verify import checksum
from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.sharding.plan_file import PlanFile, TablePlan, write_plan
from fusedrec_torchrec.training.run_state import RunState

WEIGHT = "model.sparse.embedding_bags.a.weight"
SEEN = (
    *(builtins, collections, copyreg, pathlib, pickle, shutil, sys, zipfile),
    *(torch.serialization, torch.Size, torch.Tensor, torch.storage.UntypedStorage),
    *(pathlib.PurePath, pathlib.PurePosixPath, pathlib.Path, pathlib.PosixPath),
    *(metadata, filesystem, inert_pickle, manifest, reader, safe_metadata),
    *(metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata),
    *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.BytesStorageMetadata),
    *(metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
    *(inert_pickle.Call, inert_pickle.Name, inert_pickle.Pairs, collections.OrderedDict),
)
OPENED: list[Path] = []
HOOKED: list[bool] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and HOOKED and HOOKED[-1] and isinstance(arguments[0], str | Path):
        OPENED.append(Path(arguments[0]))


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """What happens here changes no attribute, and opens no file outside of the folder.

    Attributes that were changed are put back, for the other tests.
    """
    if not HOOKED:
        sys.addaudithook(_watch)
    before = [(owner, dict(vars(owner))) for owner in SEEN]
    HOOKED.append(True)
    OPENED.clear()
    try:
        yield
    finally:
        HOOKED[-1] = False
        changed = []
        for owner, was in before:
            for name in {*vars(owner), *was}:
                if vars(owner).get(name) is not was.get(name) and not name.startswith("__"):
                    changed.append(f"{owner.__name__}.{name}")
                    if name in was:
                        setattr(owner, name, was[name])
                    else:
                        delattr(owner, name)
        code = (".py", ".pyc", ".so")
        outside = [p for p in OPENED if p.suffix not in code and folder not in p.resolve().parents]
        assert gc.isenabled()
        assert not changed, changed
        assert not outside, outside


def small_checkpoint(folder: Path) -> Path:
    """A checkpoint with a table, its state, other data, a plan, hot rows and a run's state."""
    whole = torch.arange(24.0).view(6, 4)
    state = {
        "model": {"sparse.embedding_bags.a.weight": whole, "turned": whole.t()},
        "optimizer": {
            "state": {"sparse.embedding_bags.a.weight": {"a.momentum1": torch.ones(6)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a"], "x": {1, 2}}],
        },
    }
    folder.mkdir(parents=True)
    save(state, checkpoint_id=folder)
    hot = HotSet({"a": 6}, {"a": np.array([1, 4])})
    hot.save(folder / "hot_rows.npz")
    table = TablePlan(rows=6, columns=4, sharding="fused_row_wise", rows_per_rank="3 x 2")
    write_plan(folder / "plan.yaml", PlanFile(ranks=2, tables={"a": table}))
    run = RunState(3, [[1.0]], {"a": 1}, {}, 2, {"changes": [(0, 0.5)], "losses": [0.1]})
    write_json(folder / "run.json", asdict(run))
    list_files(folder)
    return folder


def list_files(folder: Path) -> None:
    """Writes the manifest, with the checksums of all files as they are now."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {path.name: checksum(path) for path in sorted(folder.iterdir())}
    tables = {"a": TableEntry(WEIGHT, 6, 4, "float32", "fused_row_wise", hot_rows=2)}
    Manifest(
        tables,
        step=3,
        world_size=2,
        plan="plan.yaml",
        hot_rows="hot_rows.npz",
        files=files,
    ).write(folder)


def metadata_of(folder: Path) -> Any:
    """The metadata as Python's own unpickler has it; of a checkpoint that we have written."""
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def set_attribute(of: bytes, attribute: str, value: bytes) -> bytes:
    """Opcodes that set an attribute of whatever ``of`` puts on the stack."""
    slots = pickle.EMPTY_DICT + text(attribute) + value + pickle.SETITEM
    return of + pickle.NONE + slots + pickle.TUPLE2 + pickle.BUILD


def with_prelude(prelude: bytes, pickled: bytes) -> bytes:
    """A pickle that does something first."""
    return pickled[:2] + prelude + pickle.POP + pickled[2:]
