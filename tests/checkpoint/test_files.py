"""Damaged, truncated and foreign files are named, on every rank; nothing in them is run."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorProperties

from fusedrec_torchrec.checkpoint import verify as verify_module
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.manifest import read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from fusedrec_torchrec.checkpoint.verify import verify, verify_on_all_ranks
from fusedrec_torchrec.cli.main import main
from tests.case import Case, Table, sharded
from tests.checkpoint.models import case_of, trained
from tests.checkpoint.test_round_trips import train_and_save
from tests.cluster import Cluster


@pytest.fixture(scope="module")
def saved(cluster_2: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "it"
    cluster_2.run(train_and_save, "fused_row_wise", 2, str(folder), {})
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def errors(folder: str, verify: bool) -> str:
    case = case_of("fused_row_wise", 2)
    model, optimizer = trained(case, steps=1)
    before = {k: v.local_shards()[0].tensor.clone() for k, v in model.state_dict().items()}
    try:
        load_checkpoint(folder, model, optimizer, verify=verify)
    except ValueError as error:
        if verify:  # and nothing was loaded
            for key, value in model.state_dict().items():
                assert torch.equal(value.local_shards()[0].tensor, before[key])
        return str(error)
    return "nothing was wrong"


def flip(path: Path, at: int = -1000) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DATA = "__1_0.distcp"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda p: flip(p / DATA), f"{DATA} is damaged: its SHA-256"),
    "truncated": (lambda p: truncate(p / DATA), f"{DATA} has .* bytes, must have"),
    "missing": (lambda p: (p / DATA).unlink(), f"{DATA} is missing"),
    "of another checkpoint": (
        lambda p: shutil.copy(p / "__0_0.distcp", p / DATA),
        f"{DATA} has .* bytes, must have|{DATA} is damaged",
    ),
    "metadata": (lambda p: truncate(p / ".metadata"), "metadata has .* bytes, must have"),
    "manifest": (lambda p: truncate(p / "manifest.json"), "manifest.json is damaged"),
    "manifest of something else": (
        lambda p: (p / "manifest.json").write_text("[]"),
        "manifest.json is not the manifest of a checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_on_every_rank(cluster_2: Cluster, copy: Path, damage: str) -> None:
    do, problem = DAMAGES[damage]
    do(copy)
    first, second = cluster_2.run(errors, str(copy), True)
    assert first == second
    with pytest.raises(ValueError, match=problem):
        raise ValueError(first)


@pytest.mark.parametrize("damage", ["truncated", "missing", "metadata"])
def test_without_checksums_damage_is_still_no_silent_load(
    cluster_2: Cluster, copy: Path, damage: str
) -> None:
    DAMAGES[damage][0](copy)
    (copy / "manifest.json").unlink()
    first, second = cluster_2.run(errors, str(copy), False)
    assert first == second != "nothing was wrong"


def test_a_whole_checkpoint_is_whole(cluster_2: Cluster, saved: Path) -> None:
    assert verify(saved) == []
    assert cluster_2.run(errors, str(saved), True) == ["nothing was wrong"] * 2
    manifest = read_manifest(saved)
    assert manifest is not None
    assert (manifest.step, manifest.world_size, manifest.plan) == (3, 2, "plan.yaml")
    assert set(manifest.files) == {p.name for p in saved.iterdir()} - {"manifest.json"}
    assert manifest.tables["d"].dtype == "float16" and manifest.tables["a"].rows == 50
    assert sorted(t for b in manifest.buckets["_dmp_wrapped_module.sparse"] for t in b) == [
        *("a", "b", "c", "d"),
    ]


def test_verify_names_all_that_is_wrong(copy: Path) -> None:
    flip(copy / DATA)
    (copy / "plan.yaml").unlink()
    problems = verify(copy)
    assert len(problems) == 2
    assert "it holds model.sparse.embedding_bags" in problems[0]
    assert problems[1] == "plan.yaml is missing"


def test_files_that_are_not_in_the_manifest(copy: Path) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    del data["files"][DATA]
    (copy / "manifest.json").write_text(json.dumps(data))
    assert verify(copy) == [f"{DATA} is not in the manifest"]


@pytest.mark.parametrize("field", ["files", "hot_rows"])
def test_a_manifest_names_files_of_its_checkpoint_only(
    cluster_2: Cluster, copy: Path, field: str
) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    about = {"bytes": 1, "sha256": ""}
    data |= {"files": {"../x": about}} if field == "files" else {"hot_rows": "/tmp/x"}
    (copy / "manifest.json").write_text(json.dumps(data))
    for error in cluster_2.run(errors, str(copy), True):
        assert "which is no file in its folder" in error
    data |= {"files": {DATA: {}}}
    (copy / "manifest.json").write_text(json.dumps(data))
    first, second = cluster_2.run(errors, str(copy), True)
    assert first == second and "manifest.json is damaged" in first


def test_metadata_names_files_of_its_checkpoint_only(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / DATA, tmp_path / "elsewhere")
    metadata = CheckpointReader(copy).metadata
    for info in metadata.storage_data.values():
        if info.relative_path == DATA:
            info.relative_path = str(tmp_path / "elsewhere")
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = CheckpointReader(copy)
    with pytest.raises(ValueError, match="which is no file in its folder"):
        _ = [reader.whole(name) for name in reader.tensors]


def test_a_damaged_tensor_on_one_rank_is_an_error_on_all(cluster_2: Cluster, copy: Path) -> None:
    """Without checksums; what describes a tensor in its file is nonsense."""
    content = (copy / DATA).read_bytes()
    (copy / DATA).write_bytes(content.replace(b"torch._utils", b"torch._utilz"))
    (copy / "manifest.json").unlink()
    first, second = cluster_2.run(errors, str(copy), False)
    assert first == second and f"{DATA} cannot be read" in first
    assert "weights_only=False" not in first


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/must_not_exist_fusedrec",)


class OldMember:
    """As some releases of Python 3.11 write a member of an enumeration."""

    def __init__(self, kind: object, name: str) -> None:
        self._state = (kind, name)

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self._state


def test_members_of_an_enumeration_and_no_other_attributes(copy: Path) -> None:
    metadata = CheckpointReader(copy).metadata
    for state in (_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), (Metadata, "__init__"):
        properties = (torch.float32, torch.strided, False, OldMember(*state), False)
        with mock.patch.object(TensorProperties, "__getstate__", lambda _, p=properties: p):
            (copy / ".metadata").write_bytes(pickle.dumps(metadata))
        if state[0] is Metadata:
            with pytest.raises(ValueError, match="it wants '__init__' of"):
                _ = CheckpointReader(copy).metadata
        else:
            about = next(iter(CheckpointReader(copy).tensors.values()))
            assert about.properties.memory_format is torch.channels_last


def test_nothing_in_a_file_is_run(copy: Path) -> None:
    target = Path("/tmp/must_not_exist_fusedrec")
    target.unlink(missing_ok=True)
    (copy / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"names (posix|os|nt)\.system, which no checkpoint needs"):
        _ = CheckpointReader(copy).metadata
    assert not target.exists()
    (copy / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="is not the metadata of a checkpoint"):
        _ = CheckpointReader(copy).metadata


def test_foreign_folders(cluster_2: Cluster, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("hello")
    for error in cluster_2.run(errors, str(tmp_path), True):
        assert "is no checkpoint of torch.distributed.checkpoint (.metadata is missing)" in error
    for error in cluster_2.run(errors, str(tmp_path / "nothing"), True):
        assert "is no checkpoint" in error


def of_another_model(folder: str, kind: str) -> str:
    changes = {"optimizer": "sgd"} if kind == "optimizer" else {}
    case = case_of("fused_row_wise", 2, **changes)
    model, optimizer = trained(case, steps=1)
    path = Path(folder)
    if kind == "optimizer":
        other = case_of("fused_row_wise", 2, optimizer="adagrad")
        model, optimizer = trained(other, steps=1)
    elif kind == "version":
        if dist.get_rank() == 0:
            data = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps({**data, "version": 9}))
        dist.barrier()
    try:
        load_checkpoint(folder, model, optimizer, verify=False)
    except ValueError as error:
        return str(error)
    return ""


def test_other_optimizers_and_versions(cluster_2: Cluster, copy: Path) -> None:
    for error in cluster_2.run(of_another_model, str(copy), "optimizer"):
        assert (
            "the optimizer of table 'a' here wants (50, 16): it was trained with another" in error
        )
    for error in cluster_2.run(of_another_model, str(copy), "version"):
        assert "manifest.json has version 9, this release reads version 1" in error


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_verify_reports_what_cannot_be_read_at_all(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (copy.parent / "run" / f"step_{step:08d}" for step in (20, 40))
    for folder in (first, last):
        shutil.copytree(copy, folder)
        (folder / "run.json").write_text("{}")
    with (last / name).open("r+b") as file:
        file.truncate(100)
    assert main(["checkpoint", "verify", str(last), "--quiet"]) == 1
    assert f"damaged; the one before it is {first}" in capsys.readouterr().out


def read_in_vain(folder: str) -> str:
    with mock.patch.object(verify_module, "checksum", side_effect=OSError("stale handle")):
        try:
            verify_on_all_ranks(Path(folder), required=True)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_what_cannot_be_read_is_not_called_damaged(cluster_2: Cluster, copy: Path) -> None:
    for text in cluster_2.run(read_in_vain, str(copy)):
        assert text.startswith("CannotReadError") and "stale handle" in text


def test_all_files_are_on_the_disk(cluster_1: Cluster, tmp_path: Path) -> None:
    (names,) = cluster_1.run(synced_files, str(tmp_path / "it"))
    assert {p.name for p in (tmp_path / "it").iterdir()} <= set(names)


def synced_files(folder: str) -> list[str]:
    seen, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    model = sharded(Case(tables=(Table("a", 50),), batch_sizes=(5,)))
    with mock.patch.object(os, "fsync", watched):
        save_checkpoint(folder, model, files={"run.json": "{}"})
    return [re.sub(r"manifest.partial", "manifest.json", n).removesuffix(".tmp") for n in seen]
