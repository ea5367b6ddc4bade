"""Data files, links, manifests and plans of a checkpoint that somebody else made."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.convert import convert, plan_for
from fusedrec_torchrec.checkpoint.export import export_table
from fusedrec_torchrec.checkpoint.manifest import read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.training.run_state import read_run_state
from tests.hostile import (
    WEIGHT,
    list_files,
    metadata_of,
    name,
    text,
    unchanged,
    write_metadata,
)

DATA = "__0_0.distcp"
LR = "optimizer.param_groups.0.lr"


def test_the_checkpoint_itself_is_good(folder: Path, tmp_path: Path) -> None:
    """Read through the link of a folder, too."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    for path in (folder, link):
        assert verify(path) == []
        reader = CheckpointReader(path)
        assert reader.whole(WEIGHT).tolist() == torch.arange(24.0).view(6, 4).tolist()
        assert reader.whole("model.turned").tolist() == reader.whole(WEIGHT).t().tolist()
        assert reader.object(LR) == 0.1 and reader.object("optimizer.param_groups.0.x") == {1, 2}
        assert read_run_state(path).step == 3


# ---------------------------------------------------------------- what torch.save writes


def replace_data(folder: Path, wanted: str, content: bytes) -> None:
    """Puts other bytes in the place of a tensor or an object."""
    metadata = metadata_of(folder)
    info = next(i for index, i in metadata.storage_data.items() if index.fqn == wanted)
    end = (folder / DATA).stat().st_size
    with (folder / DATA).open("ab") as file:
        file.write(content)
    info.offset, info.length = end, len(content)
    write_metadata(folder, metadata)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for record, content in records.items():
            written.writestr(f"archive/{record}", content)
    return file.getvalue()


def tensor_pickle(
    elements: int, first: int, shape: tuple[int, ...], strides: tuple[int, ...], key: str = "0"
) -> bytes:
    """Describes a tensor of fp32 in the way torch does."""
    identity = [text("storage"), name("torch", "FloatStorage"), text(key), text("cpu")]
    numbers = [pickle.dumps(n, protocol=2)[2:-1] for n in (elements, first, shape, strides)]
    numbers = [n.replace(pickle.BINPUT + b"\0", b"") for n in numbers]
    return b"".join(
        [
            *(pickle.PROTO, b"\2", name("torch._utils", "_rebuild_tensor_v2"), pickle.MARK),
            *(pickle.MARK, *identity, numbers[0], pickle.TUPLE, pickle.BINPERSID),
            *(*numbers[1:], pickle.NEWFALSE),
            *(name("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE),
            *(pickle.TUPLE, pickle.REDUCE, pickle.STOP),
        ]
    )


NUMBERS = np.arange(24, dtype=np.float32).tobytes()
GOOD = tensor_pickle(24, 0, (6, 4), (4, 1))


def patched(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content and len(old) == len(new)
    return content.replace(old, new)


def larger_directory() -> bytes:
    """An archive that says that its directory has four gigabytes."""
    content = bytearray(archive({"data.pkl": GOOD, "data/0": NUMBERS}))
    end = content.rindex(b"PK\5\6")
    content[end + 12 : end + 16] = b"\xf0\xff\xff\xff"
    return bytes(content)


TENSORS: dict[str, tuple[bytes, str]] = {
    "a pickle": (pickle.dumps(torch.ones(6, 4)), "no archive of torch.save"),
    "nothing": (b"", "stored in 0 bytes|no archive of torch.save"),
    "an object": (saved([0.0] * 96), "it holds list, must hold a tensor"),
    "another shape": (saved(torch.ones(4, 6)), "another tensor than the metadata says"),
    "another type": (saved(torch.ones(6, 4, dtype=torch.int32)), "the metadata says"),
    "sparse": (saved(torch.ones(6, 4).to_sparse()), "which no checkpoint needs"),
    "quantised": (
        saved(torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8)),
        "which no checkpoint needs",
    ),
    "expanded": (saved(torch.ones(1, 4).expand(600, 4)), "storage of 4 elements"),
    "compressed": (
        archive({"data.pkl": GOOD, "data/0": NUMBERS}, zipfile.ZIP_DEFLATED),
        "is compressed",
    ),
    "no numbers": (archive({"data.pkl": GOOD, "x": NUMBERS}), "no record 'data/0'"),
    "no pickle": (archive({"x": GOOD, "data/0": NUMBERS}), "no record 'data.pkl'"),
    "fewer numbers": (
        archive({"data.pkl": GOOD, "data/0": NUMBERS[4:], "x": NUMBERS}),
        "another number of bytes",
    ),
    "another archive's": (
        archive({"data.pkl": tensor_pickle(24, 0, (6, 4), (4, 1), "../0"), "data/0": NUMBERS}),
        r"no record 'data/\.\./0'",
    ),
    "the end of the storage": (
        archive({"data.pkl": tensor_pickle(24, 1, (6, 4), (4, 1)), "data/0": NUMBERS}),
        "in a storage of 24 elements",
    ),
    "strides": (
        archive({"data.pkl": tensor_pickle(24, 0, (6, 4), (1 << 40, 1)), "data/0": NUMBERS}),
        "in a storage of 24 elements",
    ),
    "negative strides": (
        archive({"data.pkl": tensor_pickle(24, 0, (6, 4), (-4, 1)), "data/0": NUMBERS}),
        "no whole numbers",
    ),
    "fewer strides": (
        archive({"data.pkl": tensor_pickle(24, 0, (6, 4), (4,)), "data/0": NUMBERS}),
        "more strides than dimensions, or fewer",
    ),
    "a huge storage": (
        archive({"data.pkl": tensor_pickle(1 << 50, 0, (6, 4), (4, 1)), "data/0": NUMBERS}),
        "another number of bytes",
    ),
    "one number for all": (
        archive({"data.pkl": tensor_pickle(1, 0, (6, 4), (0, 0)), "data/0": NUMBERS[:4]}),
        "in a storage of 1 elements|stored in",
    ),
    "big-endian": (
        archive({"data.pkl": GOOD, "data/0": NUMBERS, "byteorder": b"big"}),
        "not little-endian",
    ),
    "two records in one": (
        patched(
            archive({"data.pkl": GOOD, "data/0": NUMBERS, "data/1": NUMBERS}), b"data/1", b"data/0"
        ),
        "overlaps another one",
    ),
    "a huge directory": (larger_directory(), "no archive of torch.save|not where it says"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_what_they_seem(folder: Path, kind: str) -> None:
    content, problem = TENSORS[kind]
    replace_data(folder, WEIGHT, content)
    (folder / "manifest.json").unlink()
    with unchanged(folder), pytest.raises(ValueError, match=problem) as caught:
        CheckpointReader(folder).whole(WEIGHT)
    assert DATA in str(caught.value) or ".metadata" in str(caught.value)
    assert verify(folder)


def test_tensors_that_are_unusual_but_good(folder: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    for value in (whole, whole.t().contiguous().t(), torch.cat([whole, whole])[3:9]):
        replace_data(folder, WEIGHT, saved(value))
        assert torch.equal(CheckpointReader(folder).whole(WEIGHT), value)


class Hostile:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


class Allowed:
    """A class that the process lets torch load."""


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def laughs(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value] * 10
    return value


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: Hostile(os.system, ("true",)), r"names (posix|os)\.system"),
    "eval": (lambda: Hostile(eval, ("1",)), "eval, which no checkpoint needs"),
    "a class": (Allowed, "Allowed, which no checkpoint needs"),
    "bytes without end": (lambda: Hostile(bytearray, (1 << 40,)), "bytearray, which no"),
    "deep": (lambda: nested(400), "nested too deeply|nests more than"),
    "laughs": (lambda: laughs(20), "too many objects"),
    "an array": (lambda: np.ones(3), "which no checkpoint needs"),
    "a device": (lambda: Hostile(torch.device, ("nowhere",)), "device|nowhere"),
    "a size": (lambda: Hostile(torch.Size, (5,)), "in a way that no checkpoint needs"),
    "a set of sets": (lambda: Hostile(set, ([[1]],)), "a key that is a list"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_that_are_not_plain_data(folder: Path, kind: str, tmp_path: Path) -> None:
    make, problem = OBJECTS[kind]
    replace_data(folder, LR, saved(make()))
    torch.serialization.add_safe_globals([Allowed, eval, bytearray])
    try:
        with unchanged(folder), pytest.raises(ValueError, match=problem) as caught:
            CheckpointReader(folder).object(LR)
    finally:
        torch.serialization.clear_safe_globals()
    assert DATA in str(caught.value) and repr(LR) in str(caught.value)
    contents = Contents(folder)
    with pytest.raises(ValueError, match=problem):  # it would be loaded by others
        convert(contents, tmp_path / "new", plan_for(contents, 1, "table_wise"))
    assert not (tmp_path / "new").exists()


def test_objects_of_plain_data(folder: Path) -> None:
    shared = torch.arange(6.0)
    value: dict[Any, Any] = {
        "number": -(1 << 70),
        "text": "é",
        3: [None, True, 0.5, b"bytes", 1j, {4, "x"}, torch.float16, torch.Size((1, 2))],
        ("a", 1): {"device": torch.device("cpu"), "views": (shared[2:], shared.view(2, 3))},
    }
    replace_data(folder, LR, saved(value))
    found = CheckpointReader(folder).object(LR)
    first, second = found["a", 1].pop("views")
    assert first.tolist() == [2, 3, 4, 5] and second.tolist() == [[0, 1, 2], [3, 4, 5]]
    del value["a", 1]["views"]
    assert found == value


# ---------------------------------------------------------------- links, pipes and names


FILES = [DATA, ".metadata", "manifest.json", "run.json", "hot_rows.npz"]


def read_all(folder: Path) -> None:
    """Whatever there is to read."""
    read_manifest(folder)
    read_run_state(folder)
    contents = Contents(folder)
    for tensor in contents.reader.tensors:
        contents.reader.whole(tensor)
    for thing in contents.reader.objects:
        contents.reader.object(thing)
    convert(contents, folder / "new", plan_for(contents, 1, "table_wise"))
    shutil.rmtree(folder / "new")


@pytest.mark.parametrize("file", FILES)
def test_links_lead_nowhere_else(folder: Path, tmp_path: Path, file: str) -> None:
    shutil.move(folder / file, tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    with unchanged(folder), pytest.raises(ValueError, match="is outside of the folder") as caught:
        read_all(folder)
    assert str(folder / file) in str(caught.value)
    assert any("outside of the folder" in problem for problem in verify(folder))


@pytest.mark.parametrize("file", FILES)
def test_links_within_the_folder_are_followed(folder: Path, file: str) -> None:
    shutil.move(folder / file, folder / "there")
    (folder / file).symlink_to("there")
    read_all(folder)


@pytest.mark.parametrize("file", FILES)
def test_pipes_are_not_waited_for(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ValueError, match="is no regular file"):
        read_all(folder)


def test_what_lies_beside_is_not_copied_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    contents = Contents(folder)
    with pytest.raises(ValueError, match=r"notes\.txt is a link to .* outside of the folder"):
        convert(contents, tmp_path / "new", plan_for(contents, 1, "table_wise"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "which is no file in its folder"),
        ({"files": {DATA: {"bytes": "1", "sha256": ""}}}, "must have bytes and sha256"),
        ({"files": {DATA: 3}}, r"files\.__0_0\.distcp is 3"),
        ({"plan": "../plan.yaml"}, "which is no file in its folder"),
        ({"hot_rows": "/etc/hot.npz"}, "which is no file in its folder"),
        ({"world_size": 1 << 40}, "world_size is 1099511627776"),
        ({"step": -1}, "step is -1"),
        ({"made_by": {"torch": "\x1b[31m"}}, "it must be printable"),
        ({"unknown": 1}, "unknown is unknown"),
        ({"tables": {"a": {"weight": 1}}}, "tables.a.weight is 1"),
        ({"version": [1]}, r"has version \[1\]"),
    ],
)
def test_every_field_of_a_manifest_is_checked(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**data, **changes}))
    with unchanged(folder), pytest.raises(ValueError, match=problem) as caught:
        read_manifest(folder)
    assert str(folder / "manifest.json") in str(caught.value)


@pytest.mark.parametrize("file", ["manifest.json", "run.json"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff", b"9" * 10_000, b"null", b'{"a": 1', b"[]", b'"x"']
)
def test_json_that_is_none(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    read = read_manifest if file == "manifest.json" else read_run_state
    with pytest.raises(ValueError, match=file):
        read(folder)


@pytest.mark.parametrize(
    "rates",
    [
        {"changes": [[0, 0]], "losses": []},  # with it, no batch would ever follow
        {"changes": [[5, 0.5]], "losses": []},
        {"changes": [], "losses": []},
        {"changes": 3, "losses": []},
        {"changes": [[0, "x"]], "losses": []},
        {"changes": [[0, 0.5]], "losses": ["x"]},
        {},
    ],
)
def test_rates_of_a_run_are_checked(folder: Path, rates: dict[str, Any]) -> None:
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**data, "rates": rates}))
    with pytest.raises(ValueError, match=r"run\.json is damaged: rates is"):
        read_run_state(folder)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ranks: 2", "ranks: 2\nhot_file: ../hot.npz\nhot_digest: x", "no file in its folder"),
        ("ranks: 2", "ranks: 2\nhot_file: plan.yaml\nhot_digest: x", "is no hot set"),
        ("ranks: 2", "ranks: 2\nhot_file: none.npz\nhot_digest: x", "does not exist"),
        ("ranks: 2", "ranks: 1000000000000", "ranks is 1000000000000"),
        ("rows_per_rank: 3 x 2", "shards: [[[0], [1]]]", "must have two offsets"),
        ("rows_per_rank: 3 x 2", "shards: [[[0, 0], [-1, 1]]]", "must have two offsets"),
    ],
)
def test_plans_are_checked(folder: Path, old: str, new: str, problem: str) -> None:
    path = folder / "plan.yaml"
    written = path.read_text()
    assert old in written
    path.write_text(written.replace(old, new))
    with unchanged(folder), pytest.raises(ValueError, match=problem):
        read_plan(path)


def test_plans_do_not_grow_when_they_are_used(folder: Path, tmp_path: Path) -> None:
    path = folder / "plan.yaml"
    path.write_text(path.read_text().replace("3 x 2", "'0 x 999999999999, 6'"))
    plan, _ = read_plan(path)
    with pytest.raises(ValueError, match=r"rows_per_rank has shards on more than"):
        convert(Contents(folder), tmp_path / "new", plan)


def test_pieces_are_not_allocated_before_files_are_seen(folder: Path, tmp_path: Path) -> None:
    """A table of a few rows and very many columns, of which there is nothing."""
    metadata = metadata_of(folder)
    about = metadata.state_dict_metadata[WEIGHT]
    about.size = torch.Size((6, 1 << 44))
    about.chunks[0].sizes = about.size
    info = metadata.storage_data[MetadataIndex(WEIGHT, torch.Size((0, 0)))]
    info.offset, info.length = (folder / DATA).stat().st_size, 1 << 50
    write_metadata(folder, metadata)
    (folder / "manifest.json").unlink()
    contents = Contents(folder)
    with pytest.raises(ValueError, match="is truncated"):
        contents.reader.whole(WEIGHT)
    with pytest.raises(ValueError, match="is truncated"):
        export_table(contents, contents.tables["a"], tmp_path, "safetensors")
    with pytest.raises(ValueError, match="is truncated"):
        convert(contents, tmp_path / "new", plan_for(contents, 1, "table_wise"))


def test_the_command_line_refuses_what_the_reader_refuses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checksums of a hostile file are easily made."""
    replace_data(folder, WEIGHT, TENSORS["the end of the storage"][0])
    list_files(folder)
    for action in (
        ["verify", str(folder)],
        ["export", str(folder), "--output", str(tmp_path / "out")],
        ["convert", str(folder), str(tmp_path / "new")],
    ):
        assert main(["checkpoint", *action, "--quiet"]) != 0
        printed = capsys.readouterr()
        assert "in a storage of 24 elements" in printed.out + printed.err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("out/*"))
